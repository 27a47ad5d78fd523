"""Chains of small models that an executor in this process runs."""

from __future__ import annotations

import time

import torch
from PIL import Image

import st2i_dask as st2i
from st2i_dask.dag import build
from st2i_dask.fusion import fuse
from st2i_dask.invocation import BoundTask
from st2i_dask.plan import pack
from st2i_dask.trace import Trace, tracing
from worker_plugin.arena import Arena
from worker_plugin.executor import Executor
from worker_plugin.host_heap import HostHeap
from worker_plugin.tensor_store import TensorStore
from worker_plugin.weights import WeightStore


class Linear(st2i.ModelFn):
    """x times a weight of torch; `kind` says how its load or result goes wrong."""

    def setup_io(self):
        self.add_input("x")
        self.add_output("y")

    def load_model(self, model_path):
        kind = self.options.get("kind")
        time.sleep(self.options.get("seconds", 0))
        if kind == "no dict":
            return [torch.nn.Linear(2, 2)]
        if kind == "load fails":
            raise OSError("no such folder")
        with torch.random.fork_rng():
            torch.manual_seed(0)
            return {"linear": torch.nn.Linear(2, 2, bias=False)}

    def execute(self, model_components, x):
        kind = self.options.get("kind")
        if kind == "missing output":
            return {}
        if kind == "undeclared output":
            return {"y": x, "z": x}
        if kind == "gradients":
            return {"y": torch.is_grad_enabled()}
        if kind == "unsendable":
            return {"y": (i for i in ())}
        if kind == "later unsendable":
            return {"y": x if x.sum() > 0 else [{"deep": (i for i in ())}]}
        if kind == "image":
            return {"y": Image.new("RGB", (4, 6), "red")}
        if kind == "raises":
            raise ZeroDivisionError("the model's own words")
        if kind == "bfloat16":
            return {"y": x.to(torch.bfloat16)}
        return {"y": model_components["linear"](x)}


#: Bytes.
ARENA = 1 << 20


def make_executor(memory):
    arena = Arena(HostHeap(ARENA))
    return Executor(WeightStore(memory=ARENA + memory, arena=arena, wait_s=1), TensorStore(arena))


def tasks(*models):
    """The packed tasks of a chain of models."""
    with tracing(Trace("portrait")) as trace:
        value = trace.parameter("x")
        for model in models:
            value = model(value)
        dag = build(trace, value)
    return pack(dag, fuse(dag))


def run_chain(executor, *models, x=None, about=None):
    """The last result and the seconds of every step."""
    x = torch.ones(1, 2) if x is None else x
    value, seconds = None, []
    packed = tasks(*models)
    for task in packed:
        last = task is packed[-1]
        dependencies = () if value is None else (value,)
        bound = BoundTask(task, {"x": x}, about if last else None, dependencies)
        value, spent = executor.run(bound)
        seconds.append(spent)
    return value, seconds
