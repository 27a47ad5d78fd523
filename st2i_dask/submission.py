"""Sending requests to the cluster.

In the event loop of an asynchronous client the functions that ask the cluster first give awaitables.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import dask

from .async_client import awaitable
from .errors import LimitError
from .request import ANNOTATION, Request, RequestGraph
from .trace_context import current_context

if TYPE_CHECKING:
    from distributed import Client, Future

    from .previews import PreviewTask


@dataclass(frozen=True)
class ShownPreview:
    """A preview on its way to a client. export: where it is in its task's outputs."""

    future: Future
    export: int


@awaitable
def submit_request(
    client: Client, request: Request, previews: Sequence[PreviewTask] = ()
) -> Future:
    """Submit a request; the future of one with previews holds theirs."""
    future, *others = submit_requests(client, [request], [preview.key for preview in previews])
    if previews:
        future.st2i_previews = tuple(
            ShownPreview(other, preview.export)
            for other, preview in zip(others, previews, strict=True)
        )
        client.loop.add_callback(_release_with, future._state, others)
    return future


def previews_of(future: Future) -> Sequence[ShownPreview]:
    """The previews of a request that was submitted with some, in order."""
    found: Sequence[ShownPreview] = getattr(future, "st2i_previews", ())
    return found


async def _release_with(state: Any, previews: Sequence[Future]) -> None:
    """When the request is cancelled or nobody holds it any more, nobody wants its previews either.

    It waits for the future's state: holding the future itself would keep the request.
    """
    await state.wait()
    if state.status == "cancelled":
        for preview in previews:
            preview.release()


@awaitable
def submit_requests(
    client: Client, requests: Sequence[Request], also: Sequence[str] = ()
) -> list[Future]:
    """Submit the graphs in one message; futures in order. Attaches the client if needed.

    also: as for `send`. LimitError at once when a tenant would be over its cap; nothing is submitted then.
    """
    admit(client, (request.tenant for request in requests))
    return send(client, requests, also)


def admit(client: Client, tenants: Iterable[str]) -> None:
    """Attach the client if needed. LimitError when one of so many new requests of a tenant would be over
    its cap. Waits for the cluster."""
    from .cluster import attach
    from .operate import refusals

    attach(client)
    refused = refusals(client, Counter(tenants))
    if refused:
        raise LimitError("; ".join(refused.values()))


def send(client: Client, requests: Sequence[Request], also: Sequence[str] = ()) -> list[Future]:
    """Submit the graphs in one message, unasked; for a client of any kind whose cluster is attached.

    also: keys of other tasks whose futures are wanted; these come after those of the requests.
    """
    tasks = RequestGraph()
    annotations: dict[str, dict[str, Any]] = {}
    context = current_context()
    for number, request in enumerate(requests):
        tasks.update(request.tasks)
        # Dask keeps no order within a message: the first request goes first because it says so.
        for key, annotation in request.annotations.items():
            annotations[key] = {**annotation, "number": number}
            if context and annotation["position"] == 0:
                annotations[key]["trace"] = context
    # The scheduler calls an annotation's value with each key.
    with dask.annotate(**{ANNOTATION: annotations.get}):
        futures: list[Future] = client.get(tasks, [*(r.key for r in requests), *also], sync=False)
    for future, request in zip(futures, requests, strict=False):
        future.st2i_steps = len(request.tasks)
    return futures


def steps_of(future: Future) -> int | None:
    """Steps of a request, all together; None where its future was not made by submitting it."""
    found: int | None = getattr(future, "st2i_steps", None)
    return found
