"""SLO attainment, live on two workers: ours against monolithic functions with MCache, WCache and NoCache.

Six workflows (see `_slo_workflows`: real Diffusers models in the proportions of the paper's setting 1) that
take twice the memory of a worker, a tenant for each, with the popularity of a production trace. One trace
for all: the generator's, with the bursts of four busy hours in less than a minute. One memory, one arena, one limit of
copies, by which the example transformer loads in 3.2 of its invocations, as in the paper. One deadline per
workflow: 3 times its latency alone, with everything loaded, as one function. Every system is warm when the
trace begins: each workflow has run on both workers.

    ours     model functions; weights="elastic", the fair queue, all as by default
    mcache   a workflow is one function; single models are cached and shared, least recently used out
    wcache   a workflow is one function; its models are cached together and are its own
    nocache  a workflow is one function; no weights stay on the device between requests

So they are also in `simulate.systems`: same placement (by what is loaded), learned costs, no process to
start, no module to build, first come first served. `mcache_sjf` is MCache with shortest job first. The rate
is `LOAD` of what two workers compute, from the latencies alone: there MCache falls below 90 %. Nothing is
tuned for one system. All give the same pixels, bit for bit; that is checked for every request.

The systems run one after the other, for four to five minutes in all. What else the machine does decides with
them: between two tasks of ours lies a message to the scheduler and back, 3 ms on idle cores.
"""

from __future__ import annotations

import hashlib
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from distributed import Client

import st2i_dask as st2i
from scheduler_plugin.plugin import SCHEDULER_PLUGIN, ServingSchedulerPlugin
from scheduler_plugin.rivals import chooser
from st2i_dask.simulate import generate, h800
from st2i_dask.simulate.live import attainment, play
from st2i_dask.simulate.tasks import Arrival
from st2i_dask.simulate.workflows import diffusion
from st2i_dask.simulate.workload import Workload, drawn

from ._slo_workflows import EXAMPLE, KINDS, TIME, Kind, model_functions, save, whole

WORKERS = 2
SECONDS = 42.0
#: Share of the workers' seconds that the requests compute for.
LOAD = 0.5
SLO = 3.0
SEED = 1
#: Tensors between tasks; weights lie here too.
ARENA_BYTES = 2 << 20
#: How long a step of the preparation may take, seconds: the first request imports everything.
LONGEST_S = 300.0


class System(NamedTuple):
    """How workflows are cut, the workers' `weights`, and who is next."""

    workflow: Callable[[Kind, Path], st2i.Workflow]
    weights: str
    order: str


SYSTEMS = {
    "ours": System(model_functions, "elastic", "fair"),
    "mcache": System(whole, "mcache", "fifo"),
    "wcache": System(whole, "wcache", "fifo"),
    "nocache": System(whole, "nocache", "fifo"),
    "mcache_sjf": System(whole, "mcache", "sjf"),
}


def run(
    seconds: float = SECONDS,
    load: float = LOAD,
    seed: int = SEED,
    names: Sequence[str] = tuple(SYSTEMS),
    kinds: Sequence[Kind] = KINDS,
) -> dict[str, Any]:
    """By system: attainment (0 to 1), p50_s, p99_s, device seconds that went into waiting for loads
    (load_s), compute_s and transfer_s, late_s (of the latest submit). Of the run: requests, rate (1/s), load,
    slo, seed, executors, alone_s, deadline_s and share by workflow, memory_bytes of a worker, model_bytes of
    all models, load_bandwidth (bytes/s).

    seconds: of the trace. names: of the systems. kinds: the workflows.
    """
    with tempfile.TemporaryDirectory() as where, _cache_in(where):
        folder = Path(where)
        save(folder)
        sizes = {path.name: _file_bytes(path) for path in folder.iterdir()}
        memory = sizes[EXAMPLE] * h800.PROFILE.weight_bytes // h800.MODELS[EXAMPLE].nbytes
        bandwidth = int(sizes[EXAMPLE] / (TIME * h800.PROFILE.model(EXAMPLE).load_s))
        with (
            st2i.local_cluster(WORKERS, dashboard_address=None) as cluster,
            Client(cluster, set_as_default=False) as client,
        ):
            _serve(client, SYSTEMS["mcache"], 2 * sum(sizes.values()), None)
            alone_s, pixels = _alone(client, {kind: whole(kind, folder) for kind in kinds})
            workload = _workload(kinds, seed)
            shares = {tenant.removeprefix("t-"): s for tenant, s in workload.shares.items()}
            rate = load * WORKERS / sum(shares[name] * alone_s[name] for name in shares)
            trace = generate.evaluation(workload, rate, seconds, seed)
            found = {}
            for name in names:
                system = SYSTEMS[name]
                _serve(client, system, memory, bandwidth)
                workflows = {kind.name: system.workflow(kind, folder) for kind in kinds}
                found[name] = _measured(client, workflows, trace, alone_s, pixels)
    return {
        **{key: {n: one[key] for n, one in found.items()} for key in next(iter(found.values()))},
        "requests": len(trace),
        "rate": round(rate, 3),
        "load": load,
        "slo": SLO,
        "seed": seed,
        "executors": WORKERS,
        "alone_s": _rounded(alone_s),
        "deadline_s": _rounded({name: SLO * one for name, one in alone_s.items()}),
        "share": _rounded(shares),
        "memory_bytes": memory,
        "model_bytes": sum(sizes.values()),
        "load_bandwidth": bandwidth,
    }


def _alone(
    client: Client, workflows: Mapping[Kind, st2i.Workflow]
) -> tuple[dict[str, float], dict[str, str]]:
    """By workflow, seconds of a request with everything loaded, and what it draws for seed 0."""
    alone_s, pixels = {}, {}
    for kind, workflow in workflows.items():
        _on_both(client, workflow)
        times = []
        for _ in range(3):
            start = time.perf_counter()
            image = workflow.submit(client, tenant="alone", seed=0).result(timeout=LONGEST_S)
            times.append(time.perf_counter() - start)
        alone_s[kind.name], pixels[kind.name] = statistics.median(times), _digest(image)
    return alone_s, pixels


def _workload(kinds: Sequence[Kind], seed: int) -> Workload:
    """Tenants are called as their workflows are, after "t-"."""
    workflows = [diffusion(k.name, [k.encoder], k.denoiser, k.steps, k.decoder) for k in kinds]
    return drawn("live", workflows, seed, h800.PROFILE)


def _serve(client: Client, system: System, memory: int, bandwidth: int | None) -> None:
    """From now on the cluster is that system: nothing learned, nothing loaded."""
    if SCHEDULER_PLUGIN in client.run_on_scheduler(_plugins):
        client.unregister_scheduler_plugin(SCHEDULER_PLUGIN)
    client.register_plugin(ServingSchedulerPlugin(chooser=chooser(system.order)))
    st2i.attach(
        client,
        memory_bytes=memory,
        arena_bytes=ARENA_BYTES,
        weights=system.weights,
        load_bandwidth=bandwidth,
        device="cpu",
    )


def _plugins(dask_scheduler: Any) -> list[str]:
    return list(dask_scheduler.plugins)


def _on_both(client: Client, workflow: st2i.Workflow) -> None:
    """One request on each idle worker: its models are known there, and what it costs."""
    both = [workflow.submit(client, tenant=f"warm-{n}", seed=0) for n in range(WORKERS)]
    for future in both:
        future.result(timeout=LONGEST_S)


def _measured(
    client: Client,
    workflows: Mapping[str, st2i.Workflow],
    trace: Sequence[Arrival],
    alone_s: Mapping[str, float],
    pixels: Mapping[str, str],
) -> dict[str, float]:
    for workflow in workflows.values():
        _on_both(client, workflow)
    names = [arrival.tenant.removeprefix("t-") for arrival in trace]
    before = _used(client)
    played = play(
        [arrival.at for arrival in trace],
        lambda number: workflows[names[number]].submit(client, tenant=names[number], seed=0),
    )
    after = _used(client)
    for name, image in zip(names, client.gather(list(played.futures)), strict=True):
        assert _digest(image) == pixels[name], f"{name} gave something else"
    deadline_s = [SLO * alone_s[name] for name in names]
    ordered = sorted(one for one in played.latency_s if one is not None)
    assert len(ordered) == len(trace), "a request failed"
    return {
        "attainment": round(attainment(played.latency_s, deadline_s), 4),
        "p50_s": round(ordered[len(ordered) // 2], 3),
        "p99_s": round(ordered[int(0.99 * len(ordered))], 3),
        **{key: round(after[key] - before[key], 3) for key in after},
        "late_s": round(played.late_s, 3),
    }


def _used(client: Client) -> dict[str, float]:
    """Seconds of both devices so far."""
    tenants = client.sync(client.scheduler.st2i_usage).values()
    return {
        f"{what}_s": sum(tenant[what] for tenant in tenants)
        for what in ("load", "compute", "transfer")
    }


def _digest(image: Any) -> str:
    return hashlib.sha256(image.numpy().tobytes()).hexdigest()


def _file_bytes(folder: Path) -> int:
    return sum(file.stat().st_size for file in folder.glob("*.safetensors"))


def _rounded(seconds: Mapping[str, float]) -> dict[str, float]:
    return {name: round(value, 3) for name, value in seconds.items()}


@contextmanager
def _cache_in(folder: str) -> Iterator[None]:
    """What workers that start meanwhile learn of models goes with the folder."""
    before = os.environ.get("ST2I_CACHE")
    os.environ["ST2I_CACHE"] = str(Path(folder) / "cache")
    try:
        yield
    finally:
        if before is None:
            del os.environ["ST2I_CACHE"]
        else:
            os.environ["ST2I_CACHE"] = before
