"""Sending requests to the cluster."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import dask

from .errors import LimitError
from .request import ANNOTATION, Request, RequestGraph
from .trace_context import current_context

if TYPE_CHECKING:
    from distributed import Client, Future


def submit_requests(client: Client, requests: Sequence[Request]) -> list[Future]:
    """Submit the graphs in one message; futures in order. Attaches the client if needed.

    LimitError at once when a tenant would be over its cap; nothing is submitted then.
    """
    from .cluster import attach
    from .operate import refusals

    attach(client)
    refused = refusals(client, Counter(request.tenant for request in requests))
    if refused:
        raise LimitError("; ".join(refused.values()))
    return send(client, requests)


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
