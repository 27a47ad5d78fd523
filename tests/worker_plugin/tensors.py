"""Workflows whose tasks hand on real tensors, and clusters whose freed arena blocks are poisoned."""

from __future__ import annotations

import gc
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any
from unittest.mock import patch

import dask
import torch
from distributed import Client

import st2i_dask as st2i
from worker_plugin.host_heap import HostHeap
from worker_plugin.plugin import ServingPlugin

TIMEOUT = 90
ROWS = 256  # of 1024 float32: 1 MiB


class Noise(st2i.ModelFn):
    """(rows, 1024) float32 from a seed."""

    def setup_io(self):
        self.add_input("seed")
        self.add_input("rows")
        self.add_input("seconds")
        self.add_output("x")

    def execute(self, model_components, seed, rows, seconds):
        time.sleep(seconds)
        return {"x": noise(seed, rows)}


class Mix(st2i.ModelFn):
    """A value that depends on every bit of both inputs."""

    def setup_io(self):
        self.add_input("a")
        self.add_input("b")
        self.add_input("seconds")
        self.add_output("x")

    def execute(self, model_components, a, b, seconds):
        time.sleep(seconds)
        return {"x": mix(a, b)}


class Fails(st2i.ModelFn):
    def setup_io(self):
        self.add_input("x")
        self.add_output("never")

    def execute(self, model_components, x):
        y = x + 1  # in the frame that the traceback keeps
        raise ZeroDivisionError(f"a model that fails on {tuple(y.shape)}")


class Result(st2i.ModelFn):
    def setup_io(self):
        self.add_input("x")
        self.add_output("array")

    def execute(self, model_components, x):
        return {"array": x.numpy().copy()}


class Streamed(st2i.ModelFn):
    """Hands on x, x + 1, ... one by one."""

    def setup_io(self):
        self.add_input("x")
        self.add_input("items")
        self.add_input("seconds")
        self.add_output("samples")
        self.add_output("times")

    def execute(self, model_components, x, items, seconds):
        samples, times = st2i.stream("samples", items), [time.time()]
        for number in range(items):
            time.sleep(seconds)
            times.append(time.time())
            samples.append(x + number)
        return {"samples": samples.items, "times": times}


class Reader(st2i.ModelFn):
    """Reads its callback input item by item."""

    def setup_io(self):
        self.add_input("x")
        self.add_input("samples", callback=True)
        self.add_output("read")
        self.add_output("times")

    def execute(self, model_components, x, samples):
        times = []
        for number in range(len(samples)):
            x = mix(x, samples[number])
            times.append(time.time())
        return {"read": x, "times": times}


@st2i.glue
def both(times, more):
    return [*times, more]


class Timed(st2i.ModelFn):
    def setup_io(self):
        self.add_input("x")
        self.add_input("times")
        self.add_output("result")

    def execute(self, model_components, x, times):
        return {"result": (x.numpy().copy(), times)}


def noise(seed, rows=ROWS):
    return torch.randn(rows, 1024, generator=torch.Generator().manual_seed(seed))


def mix(a, b):
    return torch.sin(a * 3 + b)


@st2i.workflow(name="tensors-fork", replace=True)
def fork(seed: int, rows: int = ROWS, steps: st2i.Static[int] = 2, seconds: float = 0.0):
    """Two tensors made beside each other and mixed, `steps` times."""
    x = Noise()(seed, rows, seconds)
    for _ in range(steps):
        a, b = Mix(name="MixA")(x, x, seconds), Mix(name="MixB")(x, 1.0, seconds)
        x = Mix()(a, b, 0.0)
    return Result()(x)


@st2i.workflow(name="tensors-fails", replace=True)
def fails(seed: int, rows: int = ROWS):
    return Result()(Fails()(Noise()(seed, rows, 0.0)))


def forked(seed, rows=ROWS, steps=2):
    x = noise(seed, rows)
    for _ in range(steps):
        x = mix(mix(x, x), mix(x, 1.0))
    return x.numpy()


@st2i.workflow(name="tensors-streamed", replace=True)
def streamed(
    seed: int, items: int = 4, seconds: float = 0.05, rows: int = ROWS, steps: st2i.Static[int] = 2
):
    x, times = Noise()(seed, rows, 0.0), []
    for _ in range(steps):
        made = Streamed()(x, items, seconds)
        result = Reader()(x, made.samples)
        x, times = result.read, both(times, result.times)
    return Timed()(x, times)


def read_in_order(seed, items=4, rows=ROWS, steps=2):
    x = noise(seed, rows)
    for _ in range(steps):
        y = x
        for number in range(items):
            y = mix(y, x + number)
        x = y
    return x.numpy()


class Poisoned(ServingPlugin):
    """Freed blocks are overwritten: whoever reads one reads nonsense."""

    async def setup(self, worker):
        with patch("worker_plugin.heaps.HostHeap", partial(HostHeap, poison=True)):
            await super().setup(worker)


@contextmanager
def cluster(n_workers: int = 2, arena_bytes: int = 256 << 20, **options: Any) -> Iterator[Client]:
    # LocalCluster gives up a worker that is down again 15 s after it was lost.
    config = {
        "distributed.scheduler.validate": True,
        "distributed.deploy.lost-worker-timeout": "1h",
    }
    with (
        dask.config.set(config),
        st2i.local_cluster(n_workers, dashboard_address=":0", **options) as made,
        Client(made) as client,
    ):
        st2i.attach(client)
        plugin = Poisoned(
            memory_bytes=None,
            arena_bytes=arena_bytes,
            allocator="best_fit",
            nvshmem=False,
            weights="elastic",
            host_bytes=None,
            load_bandwidth=None,
            device="cpu",
            expected=version("st2i_dask"),
        )
        plugin.idempotent = False
        client.register_plugin(plugin)
        yield client


def used(client: Client) -> dict[str, int]:
    """Bytes of every worker's arena, once nothing new is freed any more."""
    deadline = time.monotonic() + 20
    while True:
        client.run(gc.collect)
        found = {a: w["arena"]["used"] for a, w in st2i.data_plane(client).items()}
        if not any(found.values()) or time.monotonic() > deadline:
            return found
        time.sleep(0.1)


def moved(client: Client, transport: str) -> int:
    """Bytes that came this way to the workers that there are."""
    return sum(w["transports"][transport]["bytes"] for w in st2i.data_plane(client).values())


def arena_files(pid: int) -> int:
    """Open files and mappings of arenas in a process."""
    found = 0
    for name in os.listdir(f"/proc/{pid}/fd"):
        try:
            found += "st2i-arena" in os.readlink(f"/proc/{pid}/fd/{name}")
        except OSError:
            continue
    maps = Path(f"/proc/{pid}/maps").read_text().splitlines()
    return found + sum("st2i-arena" in line for line in maps)
