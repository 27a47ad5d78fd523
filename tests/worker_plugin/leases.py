"""Models that are leased from a store of weights: how tests make, use and damage them."""

from __future__ import annotations

import os
import shutil
import threading
import time
from collections import Counter

import torch

from .models import (
    Even,
    Model,
    outputs,
)

WAIT = 20.0
NO_LIMIT = 1 << 30
LAYER = 64 * 64 * 4  # bytes, of class Even


class Loads:
    """What loads of `Slow` models do and have done. Not in the class: its attributes are part of a
    model's identity."""

    def __init__(self):
        self.of, self.failures = Counter(), Counter()
        self.now = self.most = 0
        self.loading, self.go_on = threading.Event(), threading.Event()
        self.go_on.set()


loads = Loads()


class Slow(Model):
    """Its loads are counted, wait for `go_on`, and fail as often as `failures` says."""

    def load_model(self, model_path):
        tag = self.options["tag"]
        loads.now += 1
        loads.most = max(loads.most, loads.now)
        loads.of[tag] += 1
        loads.loading.set()
        try:
            assert loads.go_on.wait(WAIT)
            time.sleep(0.01)
            if loads.of[tag] <= loads.failures[tag]:
                raise OSError("no such folder")
            return {"name": tag, "model": Even(2, 8)}
        finally:
            loads.now -= 1


def reference(model):
    """What it gives when its file is read anew."""
    return run(model.load_model(model.model_path)["model"])


def give(lease):
    return run(lease.components["model"])


def run(module):
    width = module.blocks[0].weight.shape[0]
    return outputs(module, "even", {"x": torch.linspace(-1, 1, width).expand(2, width)})


def use(store, model, **names):
    with store.lease(model, **names) as lease:
        return give(lease)


def hold(store, model):
    with store.lease(model) as lease:
        return lease.components["name"]


def row(store, model):
    return next(r for r in store.models() if r["model"] == repr(model))


def damage(path, how):
    if how == "truncated":
        os.truncate(path, os.path.getsize(path) // 2)
    elif how == "truncated to nothing":
        os.truncate(path, 0)
    elif how == "overwritten":
        with open(path, "r+b") as file:
            file.seek(-8, os.SEEK_END)
            file.write(b"\1" * 8)
        os.utime(path, ns=(0, 0))
    elif how == "replaced":
        shutil.copy(path, f"{path}.new")
        os.replace(f"{path}.new", path)
    elif how == "deleted":
        os.unlink(path)
