"""Sending requests to the cluster."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import dask

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


def submit_previewed(client: Client, request: Request, previews: Sequence[PreviewTask]) -> Future:
    """Submit a request of a previewed workflow; its future holds those of its previews."""
    future, *others = submit_requests(client, [request], [preview.key for preview in previews])
    future.st2i_previews = tuple(
        ShownPreview(other, preview.export) for other, preview in zip(others, previews, strict=True)
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


def submit_requests(
    client: Client, requests: Sequence[Request], also: Sequence[str] = ()
) -> list[Future]:
    """Submit the graphs in one message; futures in order. Attaches the client if needed.

    also: as for `send`. LimitError at once when a tenant would be over its cap; nothing is submitted then.
    """
    from .cluster import attach
    from .operate import refusals

    attach(client)
    refused = refusals(client, Counter(request.tenant for request in requests))
    if refused:
        raise LimitError("; ".join(refused.values()))
    return send(client, requests, also)


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
    return futures
