"""A profile of live workers, from a few requests that have the cluster for themselves.

What is measured: seconds of compute of each ModelFn, model and shape bucket, per step; bytes of weights
and seconds to load them, as the workers count them; bytes of results; what lies between one task and the
next, and round the whole request; pulls between two workers.
"""

from __future__ import annotations

import hashlib
import statistics
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

from .. import operate
from ..cluster import attach
from ..errors import AttachError
from ..request import Request
from ..submission import submit_requests
from .live import alone_s
from .measured import Measured
from .meter import METER, Done, Meter, done
from .profiles import Model, Profile
from .pulls import pulls
from .workflows import Position, Workflow

if TYPE_CHECKING:
    from distributed import Client, Future

TENANT = "st2i-profile"
#: Requests of each workflow that count, after one that loads.
RUNS = 5


class Alone(NamedTuple):
    """A workflow's requests, one after the other, and how long each took at the client, seconds."""

    requests: Sequence[Request]
    latency_s: Sequence[float]


def profile(
    client: Client,
    requests: Mapping[str, Callable[[int], Request]],
    *,
    runs: int = RUNS,
    note: Callable[[str], None] = lambda text: None,
) -> Measured:
    """Run `runs` + 1 requests of each workflow for tenant `TENANT` and measure them.

    requests: by the workflow's name, what makes request number so-and-so; of a composed workflow.
    Blocks. AttachError: the cluster has no workers. Also raises what `live.alone_s` does. `note` is told
    latencies, and what makes the figures doubtful.
    """
    attach(client)
    if not client.nthreads():
        raise AttachError("the cluster has no workers to profile; start some")
    busy = [r["tenant"] for r in operate.tenants(client) if r["running"] or r["queued"]]
    if busy:
        note(
            f"tenant {busy[0]!r} has requests on this cluster: what is measured waits for them too"
        )
    alone: dict[str, Alone] = {}
    client.register_plugin(Meter(TENANT))
    try:
        for name, make in requests.items():
            made = [make(number) for number in range(1 + runs)]
            latency_s = [alone_s(partial(_submit, client, request), name) for request in made]
            alone[name] = Alone(made, latency_s)
            note(f"{name}: {statistics.median(alone[name].latency_s[1:]):.3f} s alone")
        tasks = client.run_on_scheduler(done)
        device = _device(client)  # before there are other tensors than the workflows'
        link = pulls(client, TENANT)
    finally:
        client.unregister_scheduler_plugin(METER)
    found: dict[str, dict[int, Done]] = defaultdict(dict)
    for task in tasks:
        found[task.request][task.position] = task
    weights = _Weights(operate.models(client))
    return _put_together(alone, found, weights, device, link)


def _submit(client: Client, request: Request) -> Future:
    return submit_requests(client, [request])[0]


def _put_together(
    alone: Mapping[str, Alone],
    found: Mapping[str, Mapping[int, Done]],
    weights: _Weights,
    device: tuple[str, int, int],
    link: tuple[float, float],
) -> Measured:
    seconds: dict[str, list[float]] = defaultdict(list)
    by_name: dict[str, Done] = {}
    workflows, hops, besides = {}, [], []
    for name, runs in alone.items():
        positions: tuple[Position, ...] = ()
        for request, latency_s in zip(runs.requests[1:], runs.latency_s[1:], strict=True):
            tasks = found[_id(request)]
            graph = _graph(request)
            positions = tuple(_position(at, graph, tasks) for at in range(len(graph)))
            for at, position in enumerate(positions):
                task = by_name[position.model] = _task_of(at, tasks)
                seconds[position.model].append(task.step_s)
            between, span_s = _between(graph, tasks)
            hops += between
            besides.append(latency_s - span_s)
        workflows[name] = Workflow(name, positions)
    hop_s = max(0.0, statistics.median(hops)) if hops else 0.0
    models = {
        name: weights.model(task, statistics.median(seconds[name]))
        for name, task in sorted(by_name.items())
    }
    kind, memory, tensors = device
    known = Profile(
        models,
        kind,
        memory,
        activation_bytes=0,
        link_latency_s=link[0],
        link_bandwidth=link[1],
        hop_s=hop_s,
        tensor_bytes=tensors,
        request_s=max(0.0, statistics.median(besides) - hop_s),
    )
    return Measured(known, workflows)


class _Node(NamedTuple):
    """deps, callback_deps: positions."""

    label: str
    deps: tuple[int, ...]
    callback_deps: tuple[int, ...]


def _graph(request: Request) -> list[_Node]:
    """By position."""
    at = {key: note["position"] for key, note in request.annotations.items()}
    nodes = {}
    for key, task in request.tasks.items():
        callbacks = tuple(request.annotations[key]["callbacks"])
        deps = tuple(sorted(at[dep] for dep in task.dependencies if at[dep] not in callbacks))
        nodes[at[key]] = _Node(key.rpartition("-")[0].rpartition("-")[0], deps, callbacks)
    return [nodes[position] for position in range(len(nodes))]


def _id(request: Request) -> str:
    return str(request.annotations[request.key]["request"])


def _position(at: int, graph: Sequence[_Node], tasks: Mapping[int, Done]) -> Position:
    task = _task_of(at, tasks)
    node = graph[at]
    name = f"{node.label} {task.bucket}".strip()
    return Position(task.fn, (name,), node.deps, node.callback_deps, task.nbytes[at])


def _task_of(at: int, tasks: Mapping[int, Done]) -> Done:
    """The task in which that position ran: its own, or one before it."""
    task = next((t for t in tasks.values() if at in t.nbytes), None)
    if task is None:
        raise AttachError(
            f"the scheduler has not told how position {at} of a request went; was it attached anew "
            "meanwhile? Profile again"
        )
    return task


def _between(graph: Sequence[_Node], tasks: Mapping[int, Done]) -> tuple[list[float], float]:
    """Seconds between each task and those that it needs, device and pulls left out; and from the first
    one's beginning to the last one's end."""
    hops = []
    for at, task in tasks.items():
        before = [_task_of(dep, tasks).stopped for dep in graph[at].deps]
        if before and not graph[at].callback_deps:
            hops.append(task.stopped - max(before) - task.device_s - task.pull_s)
    began = min(t.stopped - t.device_s for at, t in tasks.items() if not graph[at].deps)
    return hops, max(t.stopped for t in tasks.values()) - began


class _Weights:
    """The workers' rows of models, by model_key."""

    def __init__(self, rows: Sequence[Mapping[str, Any]]) -> None:
        self._rows: dict[str, list[Mapping[str, Any]]] = defaultdict(list)
        for row in rows:
            self._rows[row["model_key"]].append(row)

    def model(self, task: Done, compute_s: float) -> Model:
        """load_s: mean of a layer's copies, times its layers. A model that was never copied in is none
        that loads: one byte."""
        rows = [row for row in self._rows[task.model] if row["loads"]]
        if not rows:
            return Model(1, 0.0, compute_s, 1)
        load_s = statistics.median(row["load_s"] / row["loads"] * row["layers"] for row in rows)
        content = hashlib.sha256(" ".join(sorted(rows[0]["content"])).encode()).hexdigest()[:8]
        return Model(rows[0]["nbytes"], load_s, compute_s, rows[0]["layers"], f"weights {content}")


def _device(client: Client) -> tuple[str, int, int]:
    """What the workers run on, the smallest worker's budget, and the most bytes of tensors in one arena."""
    facts = client.run(_facts).values()
    tensors = max(row["arena"]["peak"] for row in operate.data_plane(client).values())
    device, memory = min(facts, key=lambda found: found[1])
    return device, memory, min(tensors, memory - 1)


def _facts(dask_worker: Any) -> tuple[str, int]:
    from st2i_dask.invocation import WORKER_PLUGIN
    from worker_plugin.residency import device_kind

    store = dask_worker.plugins[WORKER_PLUGIN].executor.models
    return device_kind(store.device), store.memory
