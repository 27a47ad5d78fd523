"""Runs invocations on this worker's device, with models kept in a cache."""

from __future__ import annotations

import sys
import time
from collections.abc import Hashable, Mapping
from typing import Any, NamedTuple

import numpy as np

from st2i_dask.errors import LoadError
from st2i_dask.image import finish
from st2i_dask.invocation import BoundTask
from st2i_dask.outputs import TaskOutputs, is_tensor, map_values

from .model_cache import ModelCache
from .tensor_store import TensorStore


class Seconds(NamedTuple):
    """Device seconds of one invocation."""

    load: float = 0.0
    compute: float = 0.0
    transfer: float = 0.0


class CacheExecutor:
    """Whole models in an LRU cache; what tasks hand on goes into the tensor store.

    device: a torch device name. Inputs that lie elsewhere (in an arena in host memory) are copied
    to it. Thread-safe; Dask calls it from its task threads.
    """

    def __init__(self, models: ModelCache, device: str, store: TensorStore):
        self.models = models
        self.device = device
        self.store = store
        # Task programs and kinds of outputs that have been seen to pickle; bounded by clearing.
        self._sendable: set[tuple[str, Hashable]] = set()

    def run(self, task: BoundTask) -> tuple[Any, Seconds]:
        """The task's result (TaskOutputs, or the workflow's result) and what it took."""
        load_s = 0.0
        model_fn = task.model_fn

        def place(components: Mapping[str, Any]) -> None:
            nonlocal load_s
            start = time.perf_counter()
            self._place(components)
            load_s += time.perf_counter() - start

        def load() -> Mapping[str, Any]:
            nonlocal load_s
            start = time.perf_counter()
            try:
                components = model_fn.load_model(model_fn.model_path)
                if not isinstance(components, Mapping):
                    raise LoadError(
                        f"{model_fn.name}.load_model returned {type(components).__name__}; "
                        "return a dict of components by name"
                    )
                return components
            finally:
                load_s = time.perf_counter() - start

        with self.models.lease(model_fn.model_key, load, nbytes, place) as components:
            start = time.perf_counter()
            if self.device != "cpu":
                task.imports = map_values(task.imports, is_tensor, self._to_device)
                task.callbacks = {
                    ref: future.then(lambda value: map_values(value, is_tensor, self._to_device))
                    for ref, future in task.callbacks.items()
                }
            here = time.perf_counter()
            with _no_grad():
                result = task.evaluate(components)
            done = time.perf_counter()
            if task.plan.result is not None:
                result = finish(map_values(result, is_tensor, self._to_client), task.about or {})
                self._check_sendable(task, TaskOutputs((result,)))
            else:
                result = TaskOutputs(map_values(result, is_tensor, self.store.keep))
                self.store.arena.heap.settle()
                self._check_sendable(task, result)
            transfer_s = here - start + time.perf_counter() - done
        return result, Seconds(load_s, done - here, transfer_s)

    def _check_sendable(self, task: BoundTask, outputs: TaskOutputs) -> None:
        """Once per task program and kinds of values: pickling is dear, and the same next time."""
        seen = task.digest, kinds(outputs.values)
        if seen not in self._sendable:
            outputs.check_sendable(f"workflow {task.plan.workflow!r}: {task.plan.label}")
            if len(self._sendable) > 10_000:
                self._sendable.clear()
            self._sendable.add(seen)

    def _place(self, components: Mapping[str, Any]) -> None:
        """Move modules, pipelines and bare tensors to the device, in place where they can be."""
        if self.device == "cpu":
            return
        for name, value in components.items():
            if is_tensor(value):
                components[name] = self._to_device(value)  # type: ignore[index]
            elif hasattr(value, "to") and (
                hasattr(value, "parameters") or hasattr(value, "components")
            ):
                value.to(self.device)

    def _to_device(self, tensor: Any) -> Any:
        return tensor.to(self.device)

    def _to_client(self, tensor: Any) -> Any:
        """In memory of its own: a client holds a result as long as it likes, not an arena's block.

        Dask carries tensors as NumPy arrays, which know no bfloat16: float32 holds it exactly.
        """
        tensor = tensor.detach().to("cpu")
        if str(tensor.dtype) == "torch.bfloat16":
            return tensor.float()
        return tensor.clone() if self.store.holds(tensor) else tensor


def kinds(value: Any) -> Hashable:
    """The types in a tree of tuples, lists and dicts. Equal ones pickle alike."""
    if type(value) in (list, tuple):
        return type(value), frozenset(map(kinds, value))
    if type(value) is dict:
        return dict, frozenset(map(kinds, value.values()))
    return type(value)


def nbytes(components: Mapping[str, Any]) -> int:
    """Bytes of all tensors of modules, pipelines and bare tensors or arrays; shared ones once."""
    storages: dict[int, int] = {}
    for value in components.values():
        for part in getattr(value, "components", {}).values() or [value]:
            for tensor in _tensors(part):
                storage = tensor.untyped_storage()
                storages[storage.data_ptr()] = storage.nbytes()
            if isinstance(part, np.ndarray):
                storages[part.ctypes.data] = part.nbytes
    return sum(storages.values())


def _tensors(part: Any) -> list[Any]:
    if is_tensor(part):
        return [part]
    if hasattr(part, "parameters") and hasattr(part, "buffers"):
        return [*part.parameters(), *part.buffers()]
    return []


def _no_grad() -> Any:
    """torch.no_grad() if this process has torch at all: models without it do not pay its import."""
    from contextlib import nullcontext

    torch = sys.modules.get("torch")
    return torch.no_grad() if torch is not None else nullcontext()
