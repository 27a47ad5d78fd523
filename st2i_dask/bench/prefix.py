"""Prefix: how much of loading the first layers in memory hide, against pipelining without them.

A transformer with random weights whose layers take longer to load than to compute, one denoising step a
run. As many of its first layers as Eq. 2 gives, from measured seconds per layer, are in memory when a run
begins; then half of them (half in seconds to load, and whole layers); then none; then all; and without
pipelining, where all is loaded before anything computes.

On a CPU a layer that computes with all of its weights computes about as long as copying them takes. Of
HiDream's layers, a mixture of experts, a token needs a part. Keys beginning with `h800_`: FLUX's
transformer, 64 tokens, its copies throttled until loading takes 3.2 times as long as computing, as for
FLUX.1's on an H800 (section 5.1 of the paper). There, as on a device with a copy engine, copying takes
little from computing. Without throttling, two cores share one memory: what computes waits for nothing and
is still slower than alone, which is part of `prefix_s`. `stall_hidden_fraction` leaves that out.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from bisect import bisect_left
from collections.abc import Sequence
from contextlib import closing
from itertools import accumulate
from pathlib import Path
from typing import Any

from ._experts import Experts
from ._transformers import Model, Shape, Transformer, nbytes, one_thread, read, save, step

ROUNDS = 11
#: Runs that measure the layers: the first of them load from cold memory.
WARM = 8
#: Seconds to load over seconds to compute, section 5.1.
H800_RATIO = 3.2

#: So many tokens that a layer takes longer to compute than to read.
H800 = Shape(layers=(1, 11), tokens=64)

_BUCKET = "1"


def run(
    rounds: int = ROUNDS,
    shape: Model = Experts(),  # noqa: B008
    h800: Model = H800,
) -> dict[str, float]:
    """Medians over `rounds`, and what follows from them; see `figures`."""
    with tempfile.TemporaryDirectory() as folder, one_thread():
        paths = Path(folder) / "model", Path(folder) / "h800"
        save(paths[0], 0, shape)
        found = _measured(paths[0], shape, rounds, None)
        save(paths[1], 0, h800)
        throttled = _measured(paths[1], h800, rounds, H800_RATIO * _compute_s(paths[1], h800))
    return {**found, **{f"h800_{key}": value for key, value in throttled.items()}}


def figures(
    seconds: dict[str, float],
    stalled: dict[str, float],
    cpu: dict[str, float],
    copying_s: float,
    prefix_layers: int,
) -> dict[str, float]:
    """From seconds per run, of it stalled for loads, and of CPU time of the thread that computes;
    copying_s: of CPU time to copy in all layers.

    `hidden_fraction`: the share of what loading adds to a pipelined run that the prefix hides;
    `half_hidden_fraction`: that half of it hides; `stall_hidden_fraction`: the share of the stalls.
    `vs_full`: a run with the prefix over one of a model in memory; `cpu_vs_full`: the same in CPU time
    of the thread that computes, which other processes of the machine change less. `copy_over_compute`:
    CPU time to copy all layers over that to compute them.
    """
    exposed = seconds["prefix0"] - seconds["full"]
    return {
        "hidden_fraction": round((seconds["prefix0"] - seconds["prefix"]) / exposed, 3),
        "vs_full": round(seconds["prefix"] / seconds["full"], 3),
        "half_hidden_fraction": round((seconds["prefix0"] - seconds["half"]) / exposed, 3),
        "stall_hidden_fraction": round(1 - stalled["prefix"] / stalled["prefix0"], 3),
        "cpu_vs_full": round(cpu["prefix"] / cpu["full"], 3),
        "copy_over_compute": round(copying_s / cpu["full"], 3),
        "prefix_layers": prefix_layers,
        **{f"{name}_s": round(value, 4) for name, value in seconds.items()},
    }


def half_of(load_s: Sequence[float], prefix: int) -> int:
    """The fewest first layers that take at least half as long to load as all `prefix` do."""
    loaded = [0.0, *accumulate(load_s[:prefix])]
    return bisect_left(loaded, loaded[-1] / 2)


def _compute_s(path: Path, shape: Model) -> float:
    """Seconds of one run that has everything in memory."""
    model, given, times = read(path), shape.inputs(0), []
    for _ in range(5):
        start = time.perf_counter()
        step(model, given)
        times.append(time.perf_counter() - start)
    return statistics.median(times)


def _measured(path: Path, shape: Model, rounds: int, load_s: float | None) -> dict[str, float]:
    """load_s: how long copying the whole model is to take at least; None: as long as it takes."""
    import torch

    given = shape.inputs(0)
    model = read(path)
    wanted, size = step(model, given), nbytes(model)
    del model
    bandwidth = size / load_s if load_s is not None else None
    times: dict[str, list[float]] = {}
    stalls: dict[str, list[float]] = {}
    cpu: dict[str, list[float]] = {}
    copying: list[float] = []
    with (
        closing(_Worker(path, 2 * size, "elastic", bandwidth)) as elastic,
        closing(_Worker(path, 2 * size, "mcache", bandwidth)) as whole,
    ):
        for _ in range(WARM):
            elastic.trim(0)
            elastic.run(given)
        order_load_s, prefix = elastic.profile()
        kept = {"prefix0": 0, "prefix": prefix, "half": half_of(order_load_s, prefix)}
        for number in range(rounds + 1):
            for name, layers in {**kept, "full": None, "no_pipeline": 0}.items():
                worker = whole if name == "no_pipeline" else elastic
                worker.run(given)  # loads all of it
                if layers is not None:
                    worker.trim(layers)
                start, mine, both = time.perf_counter(), time.thread_time(), time.process_time()
                output, stalled_s = worker.run(given)
                if number:
                    times.setdefault(name, []).append(time.perf_counter() - start)
                    stalls.setdefault(name, []).append(stalled_s)
                    cpu.setdefault(name, []).append(time.thread_time() - mine)
                    if name == "prefix0":  # it needs all layers: none is copied in after its end
                        copying.append(time.process_time() - both - cpu[name][-1])
                assert torch.equal(output, wanted), f"{name} gave something else"
    copying_s = statistics.median(copying)
    return figures(_medians(times), _medians(stalls), _medians(cpu), copying_s, prefix)


def _medians(found: dict[str, list[float]]) -> dict[str, float]:
    return {name: statistics.median(values) for name, values in found.items()}


class _Worker:
    """A worker's weights in one of its modes, and one model."""

    def __init__(self, path: Path, memory: int, mode: Any, bandwidth: float | None):
        from worker_plugin.weights import WeightStore

        self.store = WeightStore(memory=memory, mode=mode, bandwidth=bandwidth)
        self.function = Transformer(str(path))

    def run(self, given: dict[str, Any]) -> tuple[Any, float]:
        """What the step gives, and the seconds that it stalled for loads."""
        with self.store.lease(self.function, workflow="w", request="r", bucket=_BUCKET) as lease:
            output = self.function.execute(lease.components, given=given)["velocity"]
        return output, lease.load_s

    def trim(self, layers: int) -> None:
        """Leave only so many first layers in memory."""
        self.store.trim(self.function, layers)

    def profile(self) -> tuple[list[float], int]:
        """Seconds to load the layers in order of execution, and how many of them hide the rest."""
        with self.store.lease(self.function, workflow="w", request="r", bucket=_BUCKET) as lease:
            (weights,) = lease.skeleton.weights
        key = self.store.residency.key(weights, _BUCKET)
        profile, prefix = self.store.profiles.get(key), self.store.profiles.prefix(key)
        assert profile is not None, "runs have not measured every layer"
        assert prefix is not None
        return [profile.load_s[layer] for layer in profile.order], prefix

    def close(self) -> None:
        self.store.close()
