"""For the operator of a shared cluster: who has what, settings, learned costs.

An asynchronous client awaits these: `await st2i.tenants(client)`.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .async_client import awaitable
from .cluster import attach
from .errors import LoadError, PolicyError

if TYPE_CHECKING:
    from distributed import Client


@awaitable
def tenants(client: Client) -> list[dict[str, Any]]:
    """One row per tenant ever seen: tenant, vtime_s, weight, queued and running requests, share of
    the last minute's device seconds (0 to 1), service_s (device seconds in all)."""
    attach(client)
    rows: list[dict[str, Any]] = client.sync(client.scheduler.st2i_tenants)
    return rows


@awaitable
def settings(client: Client, **changes: Any) -> list[tuple[str, str, str]]:
    """Show the scheduler's settings, after applying `changes`: rows of (name, value, unit).

    Changes hold from the next decision on: slack_s (seconds of vTime), default_weight,
    weights={tenant: weight}, default_cap, caps={tenant: requests} (queued requests), steps_per_task,
    bandwidth (bytes/s). Weights and caps given here are added to those that hold; None takes a
    tenant's own away. PolicyError names the allowed range; nothing has changed then.
    """
    attach(client)
    answer = client.sync(client.scheduler.st2i_settings, changes=changes)
    if "error" in answer:
        raise PolicyError(answer["error"])
    return [tuple(row) for row in answer["rows"]]


@awaitable
def data_plane(client: Client) -> dict[str, dict[str, Any]]:
    """By worker address, what its arena holds and which way tensors came to it.

    arena: kind, nbytes, used and peak (bytes of tensors), weights (bytes of cached layers), fallbacks and
    fallback_bytes (tensors that found no room).
    transports: by name (process, host, nvshmem, comm) the pulls and bytes since the worker began.
    """
    attach(client)
    answers = client.sync(client.scheduler.broadcast, msg={"op": "st2i_data_plane"})
    return {
        address: {
            "arena": answer["arena"],
            "transports": {
                name: {"pulls": pulls, "bytes": nbytes}
                for name, (pulls, nbytes) in answer["transports"].items()
            },
        }
        for address, answer in answers.items()
    }


@awaitable
def models(client: Client) -> list[dict[str, Any]]:
    """One row per worker and model that it has: worker, model, model_key, content (ids of its weights,
    alike where they are the same), layers, resident_layers, nbytes, resident_bytes, by_layer ("1" for each
    that is resident, else "0"), and since the model came there: runs, hits (runs that found all of it in
    memory), loads (layers copied in), load_s (seconds that took), stalled_s (seconds that runs waited for
    it)."""
    attach(client)
    answers = client.sync(client.scheduler.broadcast, msg={"op": "st2i_models"})
    return [{"worker": address, **row} for address, rows in answers.items() for row in rows]


@awaitable
def save_costs(client: Client, path: str | Path) -> int:
    """Save what the scheduler has learned about costs; returns the number of entries."""
    attach(client)
    text = client.sync(client.scheduler.st2i_costs)["costs"]
    path = Path(path)
    temporary = path.with_name(f".{path.name}.tmp")
    temporary.write_text(text)
    os.replace(temporary, path)
    return sum(len(rows) for rows in json.loads(text).values() if isinstance(rows, list))


@awaitable
def load_costs(client: Client, path: str | Path) -> None:
    """Give the scheduler costs that were saved before; they replace what it has learned.

    LoadError if the file cannot be read, PolicyError if it does not hold saved costs.
    """
    try:
        text = Path(path).read_text()
        json.loads(text)
    except (OSError, ValueError) as error:
        raise LoadError(
            f"costs cannot be read from {str(path)!r}: {error}; give a file that "
            "st2i.save_costs wrote"
        ) from error
    attach(client)
    answer = client.sync(client.scheduler.st2i_costs, replace=text)
    if "error" in answer:
        raise PolicyError(f"{str(path)!r}: {answer['error']}")


def refusals(client: Client, requests: Mapping[str, int]) -> dict[str, str]:
    """Why that many new requests of each tenant would be refused now; empty when none would. Waits."""
    answer: dict[str, str] = client.sync(client.scheduler.st2i_refusals, requests=dict(requests))
    return answer
