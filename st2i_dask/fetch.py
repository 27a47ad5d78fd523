"""Looking at what travels between the tasks of a request, from a client."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

from .errors import ParameterError
from .outputs import TaskOutputs
from .request import request_id

if TYPE_CHECKING:
    from distributed import Future

# Seconds that a request may be on its way to the scheduler, and between two questions.
_ARRIVAL_S, _AGAIN_S = 10.0, 0.01


def fetch(future: Future, position: int | None = None, timeout: float | None = None) -> Any:
    """A request's result or, with `position`, what that invocation hands on to later ones.

    Intermediate values stay in the workers' arenas unless somebody asks like this. They come as a
    tuple of tensors and plain objects, in host memory, and are computed again if they were let go.

    position: the number in the task's key, as the Dask dashboard shows it ("T5Text@flux-001-...").
    timeout: seconds to wait at most; TimeoutError then. ParameterError if there is no such
    invocation, if nobody holds the request any more, and in the event loop of an asynchronous client.
    """
    if future.client.asynchronous:
        raise ParameterError(
            "fetch would stop the event loop of an asynchronous client; write "
            "`await asyncio.to_thread(st2i.fetch, future)`"
        )
    if position is not None:
        future = _invocation(future, position)
    value = future.result(timeout=timeout)
    return value.values if isinstance(value, TaskOutputs) else value


def _invocation(future: Future, position: int) -> Future:
    """The future of another task of the same request; from now on its value is kept."""
    client, request = future.client, request_id(future.key)
    asked = {"position": position, "request": request, "result": future.key}
    deadline = time.monotonic() + _ARRIVAL_S
    known, key = client.run_on_scheduler(_key_at, **asked)
    # The question may overtake the request itself, which goes another way.
    while not known and future.status == "pending" and time.monotonic() < deadline:
        time.sleep(_AGAIN_S)
        known, key = client.run_on_scheduler(_key_at, **asked)
    if key is None:
        raise ParameterError(
            f"request {request!r} has no invocation at position {position!r}, or is unknown to the "
            "scheduler; keep its future, and take the number from a key on the dashboard"
        )
    (wanted,) = client.get({}, [key], sync=False)
    return wanted


def _key_at(
    dask_scheduler: Any, position: Any, request: str, result: str
) -> tuple[bool, str | None]:
    """Whether the scheduler knows the request, and the key of its task at that position."""
    known = result in dask_scheduler.tasks
    if type(position) is not int:
        return known, None
    ending = f"-{position:03d}-{request}"
    return known, next((key for key in dask_scheduler.tasks if str(key).endswith(ending)), None)
