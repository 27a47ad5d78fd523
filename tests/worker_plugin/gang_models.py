"""A ModelFn that gangs share the rows of, and that does in the middle what a test says."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import torch

import st2i_dask as st2i
from st2i_dask.gang import running_gang

from .tensors import mix, noise

ROUNDS = 6


class Shared(st2i.ModelFn):
    """Each round mixes x with itself upside down; executors compute their rows.

    trouble: (what, rank, round, marker): once, where no file `marker` is yet, the executor of that rank
    does it: "kill" itself, "raise", or "sleep" for 1.5 s.
    """

    gang = 3

    def setup_io(self):
        self.add_input("x")
        self.add_input("seconds")
        self.add_input("trouble")
        self.add_output("mixed")
        self.add_output("size")

    def execute(self, model_components, x, seconds, trouble):
        gang = running_gang()
        rank, size = (gang.rank, gang.size) if gang is not None else (0, 1)
        rows = slice(len(x) * rank // size, len(x) * (rank + 1) // size)
        for number in range(ROUNDS):
            time.sleep(seconds / size)
            part = mix(x[rows], x.flip(0)[rows])
            if trouble is not None and trouble[1:3] == (rank, number) and size > 1:
                _make(*trouble)
            if gang is None:
                x = part
            else:
                gang.publish(part)
                x = torch.cat(gang.collect())
        return {"mixed": x, "size": size}


def _make(what, rank, number, marker):
    if Path(marker).exists():
        return
    Path(marker).touch()
    if what == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    if what == "sleep":
        time.sleep(1.5)
    if what == "raise":
        raise ZeroDivisionError("in the middle")


class Start(st2i.ModelFn):
    def setup_io(self):
        self.add_input("seed")
        self.add_output("x")

    def execute(self, model_components, seed):
        return {"x": noise(seed)}


class End(st2i.ModelFn):
    def setup_io(self):
        self.add_input("x")
        self.add_input("sizes")
        self.add_output("result")

    def execute(self, model_components, x, sizes):
        return {"result": (x.numpy().copy(), sizes)}


@st2i.glue
def noted(sizes, size):
    return [*sizes, size]


@st2i.workflow(name="gang-shared", replace=True)
def shared(seed: int, steps: int = 4, seconds: float = 0.0, trouble=None):
    """(x, executors that ran each step)"""
    x, sizes = Start()(seed), []
    for _ in range(steps):
        made = Shared()(x, seconds, trouble)
        x, sizes = made.mixed, noted(sizes, made.size)
    return End()(x, sizes)


def alone(seed, steps=4):
    x = noise(seed)
    for _ in range(steps * ROUNDS):
        x = mix(x, x.flip(0))
    return x.numpy()
