"""Looking at what travels between tasks, from a client."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from .outputs import TaskOutputs

if TYPE_CHECKING:
    from distributed import Future


def fetch(future: Future, timeout: float | None = None) -> Any:
    """A future's value in the client's memory, also that of an intermediate task.

    The values that a task hands on to later ones come as a tuple of tensors and plain objects; they
    stay in the workers' arenas unless somebody asks like this. Make the future before the request
    runs, and they are kept for it: `distributed.Future("T5Text@flux-001-<request>", client)`, where
    the request is the last part of its result's key. The result of a request is returned as it is.

    timeout: seconds to wait at most; TimeoutError then.
    """
    value = future.result(timeout=timeout)
    return value.values if isinstance(value, TaskOutputs) else value
