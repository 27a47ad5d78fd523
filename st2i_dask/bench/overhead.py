"""Overhead: a whole request, from submit to image, against one call of the Diffusers pipeline itself.

FLUX.1's real classes with random weights, about 50 ms a step on one thread. Both run in the same worker
process, in turns: the request as its chain of tasks, timed at the client; the pipeline as one plain
Dask task, of which only the call itself is timed. Same prompt, seed and steps; the images are compared.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
from distributed import Client

import st2i_dask as st2i
from scheduler_plugin.settings import Settings
from st2i_dask.catalogue import tiny

STEPS = 28
ROUNDS = 7
LAYERS = (2, 3)
HEADS = 16  # of width 16
SIDE = 64  # pixels; 256 tokens
TEXT_TOKENS = 64
#: Steps run as one task with the default settings.
AT_ONCE = Settings().steps_per_task

_PROMPT = "a red circle on a white background"
_pipelines: dict[str, Any] = {}


def run(
    steps: int = STEPS,
    rounds: int = ROUNDS,
    layers: tuple[int, int] = LAYERS,
    heads: int = HEADS,
    side: int = SIDE,
) -> dict[str, float]:
    """`ratio` of medians, `ours_s` and `diffusers_s` per image, `step_ms` of the pipeline.

    Also `one_step_ratio`: the request with every step a task of its own, as while others wait.
    """
    ours: dict[int, list[float]] = {1: [], AT_ONCE: []}
    theirs: list[float] = []
    with (
        tempfile.TemporaryDirectory() as folder,
        st2i.local_cluster(1, dashboard_address=None) as cluster,
        Client(cluster) as client,
    ):
        path = str(Path(folder) / "bench")
        tiny.flux(layers=layers, heads=heads).save_pretrained(path, safe_serialization=True)
        st2i.attach(client, device="cpu")
        workflow = st2i.load(
            path,
            name="bench-overhead",
            height=side,
            width=side,
            num_steps=steps,
            max_sequence_length=TEXT_TOKENS,
        )
        for number in range(rounds + 1):
            seconds, expected = client.submit(
                call, path, number, steps, side, pure=False, key=f"pipeline-{number}"
            ).result()
            for at_once in ours:
                st2i.settings(client, steps_per_task=at_once)
                start = time.perf_counter()
                image = workflow.submit(client, prompt=_PROMPT, seed=number).result(timeout=300)
                if number:  # the first round loads the models
                    ours[at_once].append(time.perf_counter() - start)
                assert np.array_equal(np.asarray(image), expected), "the images differ"
            if number:
                theirs.append(seconds)
    return figures({n: statistics.median(s) for n, s in ours.items()}, theirs, steps)


def figures(ours: dict[int, float], theirs: list[float], steps: int) -> dict[str, float]:
    """The figures that `run` returns, from seconds per image."""
    diffusers_s = statistics.median(theirs)
    return {
        "ratio": round(ours[AT_ONCE] / diffusers_s, 4),
        "one_step_ratio": round(ours[1] / diffusers_s, 4),
        "ours_s": round(ours[AT_ONCE], 4),
        "diffusers_s": round(diffusers_s, 4),
        "step_ms": round(1e3 * diffusers_s / steps, 1),
    }


def call(path: str, seed: int, steps: int, side: int) -> tuple[float, Any]:
    """In the worker: seconds of one call of the pipeline, and its image as an array."""
    import torch
    from diffusers import FluxPipeline

    if path not in _pipelines:
        _pipelines[path] = FluxPipeline.from_pretrained(path, torch_dtype=torch.float32)
        _pipelines[path].set_progress_bar_config(disable=True)
    generator = torch.Generator("cpu").manual_seed(seed)
    start = time.perf_counter()
    image = _pipelines[path](
        _PROMPT,
        height=side,
        width=side,
        num_inference_steps=steps,
        max_sequence_length=TEXT_TOKENS,
        generator=generator,
    ).images[0]
    return time.perf_counter() - start, np.asarray(image)
