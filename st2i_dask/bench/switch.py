"""Switching models: seconds per request where five models take turns in a third of their memory.

Five FLUX transformers with random weights, one denoising step a request, round robin: the least
recently used model is always the one that is wanted next. On a CPU "device memory" is private memory
into which weights are copied from mapped files; every way has a third of what all of them take:

* ours: prefixes stay, the rest is loaded behind the compute; `pipelined_s`: no prefix stays;
* NoCache, WCache, MCache: settings of the same worker that keep nothing, whole workflows, whole models;
* Diffusers' group offloading and accelerate's CPU offload, which keep nothing on the device.

The last two also as they are on a CPU, where nothing has to be copied: `*_in_place_s`. That says what
their hooks cost, and is no way to run a model on a device.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from ._offloading import cpu_offload, group_offload
from ._transformers import Shape, Transformer, nbytes, one_thread, read, save, step

MODELS = 5
#: Memory, in models.
BUDGET = MODELS / 3
ROUNDS = 5
#: Rounds before that: ours measures each model's layers on its first three runs.
WARM = 4

#: Modes of the worker, by the name of their figure.
MODES = {
    "ours": "elastic",
    "pipelined": "pipelined",
    "nocache": "nocache",
    "wcache": "wcache",
    "mcache": "mcache",
}
OFFLOADING: dict[str, Callable[[Any], None]] = {
    "group_offload": group_offload,
    "cpu_offload": cpu_offload,
    "group_offload_in_place": lambda model: group_offload(model, copies=False),
    "cpu_offload_in_place": lambda model: cpu_offload(model, copies=False),
}
#: What ours is compared with.
OTHERS = ("nocache", "wcache", "mcache", "group_offload", "cpu_offload")

#: One way to run model number so-and-so for request number so-and-so.
Way = Callable[[int, int, dict[str, Any]], Any]


def run(
    rounds: int = ROUNDS,
    warm: int = WARM,
    shape: Shape = Shape(),  # noqa: B008
    ways: Sequence[str] = (*MODES, *OFFLOADING),
) -> dict[str, float]:
    """Median seconds per request of each way, `NAME_s`; all give the same outputs.

    With all ways also `best_other_s`, the least of `OTHERS`, and `ratio`, ours to it.
    """
    import torch

    with tempfile.TemporaryDirectory() as folder, one_thread(), ExitStack() as stack:
        paths = [Path(folder) / f"model{number}" for number in range(MODELS)]
        for number, path in enumerate(paths):
            save(path, number, shape)
        given = shape.inputs(0)
        models = [read(path) for path in paths]
        wanted = [step(model, given) for model in models]
        memory = int(BUDGET * nbytes(models[0]))
        del models
        running = {name: _way(name, paths, memory, stack) for name in ways}
        times: dict[str, list[float]] = {name: [] for name in ways}
        for number in range(warm + rounds):
            # A round of one way touches all models: no way finds in the processor's caches what
            # another has just used.
            for name, way in running.items():
                for model in range(MODELS):
                    start = time.perf_counter()
                    output = way(model, number, given)
                    if number >= warm:
                        times[name].append(time.perf_counter() - start)
                    assert torch.equal(output, wanted[model]), f"{name} gave something else"
    return figures({name: statistics.median(found) for name, found in times.items()})


def figures(seconds: dict[str, float]) -> dict[str, float]:
    """The figures that `run` returns, from seconds per request."""
    found = {f"{name}_s": round(value, 4) for name, value in seconds.items()}
    if {"ours", *OTHERS} <= set(seconds):
        best = min(seconds[name] for name in OTHERS)
        found["best_other_s"] = round(best, 4)
        found["ratio"] = round(seconds["ours"] / best, 3)
    return found


def _way(name: str, paths: list[Path], memory: int, stack: ExitStack) -> Way:
    if name in OFFLOADING:
        models = [read(path) for path in paths]
        for model in models:
            OFFLOADING[name](model)
        return lambda number, _, given: step(models[number], given)
    return _store(name, paths, memory, stack)


def _store(name: str, paths: list[Path], memory: int, stack: ExitStack) -> Way:
    """A worker's weights in one of its modes. Each model is a workflow of its own."""
    from worker_plugin.weights import WeightStore

    store = WeightStore(memory=memory, mode=MODES[name])  # type: ignore[arg-type]
    stack.callback(store.close)
    functions = [Transformer(str(path)) for path in paths]

    def request(number: int, round_: int, given: dict[str, Any]) -> Any:
        with store.lease(
            functions[number], workflow=f"w{number}", request=f"r{round_}-{number}", bucket="1"
        ) as lease:
            return functions[number].execute(lease.components, given=given)["velocity"]

    return request
