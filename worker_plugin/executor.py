"""Runs invocations on this worker's device."""

from __future__ import annotations

import logging
import re
import sys
import threading
import time
from collections.abc import Callable, Hashable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple

from st2i_dask.errors import LoadError, NotFiniteError, St2iError
from st2i_dask.image import finish
from st2i_dask.invocation import BoundTask
from st2i_dask.model_fn import ModelFn
from st2i_dask.outputs import TaskOutputs, is_tensor, map_values

from .lease import Lease
from .run_lease import RunLease
from .tensor_store import TensorStore
from .weights import WeightStore

logger = logging.getLogger(__name__)

# As torch words it: "Tried to allocate 2.00 GiB". Where it does not say, so many bytes.
_WANTED = re.compile(r"allocate ([\d.]+) ([KMG]?i?B)")
_UNITS = {"B": 1, "bytes": 1, "KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30}
_WANTED_DEFAULT = 1 << 30


class UnwantedError(Exception):
    """The task was cancelled before its model ran."""


class Seconds(NamedTuple):
    """Device seconds of one invocation."""

    load: float = 0.0
    compute: float = 0.0
    transfer: float = 0.0

    def plus(self, other: Seconds) -> Seconds:
        return Seconds(*(a + b for a, b in zip(self, other, strict=True)))


class Executor:
    """Models leased from the store of weights; what tasks hand on goes into the tensor store.

    device: a torch device name. Inputs that lie elsewhere (in an arena in host memory) are copied
    to it. Thread-safe; Dask calls it from its task threads.
    """

    def __init__(self, models: WeightStore, store: TensorStore):
        self.models = models
        self.device = models.device
        self.store = store
        # Task programs and kinds of outputs that have been seen to pickle; bounded by clearing.
        self._sendable: set[tuple[str, Hashable]] = set()
        self._lock = threading.Lock()
        self._users = 0
        #: Nothing new may run here; the models go when what runs has ended.
        self.closing = False

    @contextmanager
    def in_use(self) -> Iterator[bool]:
        """Whether one may run here; the models stay until the end of the body."""
        with self._lock:
            open_ = not self.closing
            self._users += open_
        try:
            yield open_
        finally:
            if open_:
                with self._lock:
                    self._users -= 1
                    last = self.closing and not self._users
                if last:
                    self.models.close()

    def close(self) -> None:
        """Give the models back: now, or in the thread of the last one who uses them."""
        with self._lock:
            last = not self.closing and not self._users
            self.closing = True
        if last:
            self.models.close()

    def run(
        self,
        task: BoundTask,
        request: str = "",
        bucket: str = "",
        together: Callable[..., Any] | None = None,
        wanted: Callable[[], bool] = lambda: True,
        kept: RunLease | None = None,
    ) -> tuple[Any, Seconds]:
        """The task's result (TaskOutputs, or the workflow's result) and what it took.

        request: which one the task belongs to. bucket: of the shapes that it computes. together: runs
        the model in a gang (`Leader.execute`). wanted: asked once the model is there, which may have
        taken long: UnwantedError if nobody waits for the result any more. kept: the lease of the calls
        before, which this one uses if it can and leaves to the next.
        """
        names = {"workflow": task.plan.workflow, "request": request, "bucket": bucket}
        leases = kept or RunLease(self.models)
        with leases.of(task.model_fn, **names) as lease:
            if not wanted():
                raise UnwantedError(f"{task.plan.label} was cancelled while its model was loaded")
            start = time.perf_counter()
            versions = _same_weights(task, lease.version)
            if together is not None:
                task.execute = partial(together, lease, task.execute)
            if self.device != "cpu":
                task.imports = self.on_device(task.imports)
                task.callbacks = {
                    ref: future.then(self.on_device) for ref, future in task.callbacks.items()
                }
            here, stalled = time.perf_counter(), lease.load_s
            with _no_grad():
                result = self._evaluated(task, lease)
            done, stalled = time.perf_counter(), lease.load_s - stalled
            if task.plan.result is not None:
                result = finish(map_values(result, is_tensor, self._to_client), task.about or {})
                self._check_sendable(task, TaskOutputs((result,)))
            else:
                kept = map_values(result, is_tensor, self.store.keep)
                spoilt = task.spoilt or (task.plan.label if _has_nan(kept) else None)
                result = TaskOutputs(kept, versions=versions, spoilt=spoilt)
                self.store.arena.heap.settle()
                self._check_sendable(task, result)
            transfer_s = here - start + time.perf_counter() - done
        if kept is None:
            leases.close()
        return result, Seconds(lease.charge(), done - here - stalled, transfer_s)

    @contextmanager
    def helping(self, model_fn: ModelFn, **names: str) -> Iterator[Lease]:
        """The model for a part in another worker's invocations, in this thread. names: see
        `WeightStore.lease`. LoadError also where the executor is closing."""
        with self.in_use() as may_run:
            if not may_run:
                raise LoadError("this worker is attached anew, or closes")
            with self.models.lease(model_fn, **names) as lease, _no_grad():
                yield lease

    def on_device(self, values: Any) -> Any:
        """The tree of values with its tensors on the device."""
        if self.device == "cpu":
            return values
        return map_values(values, is_tensor, self._to_device)

    def _evaluated(self, task: BoundTask, lease: Lease) -> Any:
        """The result. NotFiniteError, naming where it began, for one of the workflow with NaN in it."""
        try:
            result = self._evaluate(task, lease)
            if task.plan.result is not None and _has_nan(result):
                raise NotFiniteError(
                    f"workflow {task.plan.workflow!r}: the result of {task.plan.label} has NaN in it"
                )
            return result
        except NotFiniteError as error:
            began = f"; the first NaN came out of {task.spoilt or task.plan.label}"
            raise NotFiniteError(f"{error}{began}") from error
        except Exception as error:
            # A model's own error need not say whose it is: some have no message at all.
            if not isinstance(error, St2iError):
                error.add_note(f"raised in workflow {task.plan.workflow!r} by {task.plan.label}")
            raise

    def _evaluate(self, task: BoundTask, lease: Lease) -> Any:
        """Once more where the device ran out of memory and cached weights could make room, and where
        NaN comes out that may be a layer's that was not in memory."""
        whole = False
        try:
            result = task.evaluate(lease.components)
            if lease.held or not _has_nan(result):
                return result
            whole = self._hold_all(task, lease)
            if not whole:
                return result
        except Exception as error:
            whole = isinstance(error, NotFiniteError) and self._hold_all(task, lease)
            if not whole and not self._relieve(task, error):
                raise
        result = task.evaluate(lease.components)
        if whole and not _has_nan(result):
            self.models.keep_undivided(lease)
            logger.warning(
                "%s gave NaN with a part of its weights in memory, and none with all of them: from now "
                "on it runs so; to run in less, call modules, not their forward or their parameters",
                task.plan.label,
            )
        return result

    def _hold_all(self, task: BoundTask, lease: Lease) -> bool:
        """Whether it may run again, with all of its weights in memory."""
        # What was streamed may have been read already.
        return not task.has_streamed and self.models.hold_all(lease)

    def _relieve(self, task: BoundTask, error: Exception) -> bool:
        """Whether it may run again, as it was short of memory and weights have made room."""
        wanted = _out_of_memory(error)
        if wanted is None or task.has_streamed or not self.models.relieve(wanted):
            return False
        logger.warning("%s ran out of memory; weights went: %s", task.plan.label, error)
        return True

    def _check_sendable(self, task: BoundTask, outputs: TaskOutputs) -> None:
        """Once per task program and kinds of values: pickling is dear, and the same next time."""
        seen = task.digest, kinds(outputs.values)
        if seen not in self._sendable:
            outputs.check_sendable(f"workflow {task.plan.workflow!r}: {task.plan.label}")
            if len(self._sendable) > 10_000:
                self._sendable.clear()
            self._sendable.add(seen)

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


def _same_weights(task: BoundTask, version: str) -> Mapping[str, str]:
    """The weights that the request has used, these included. LoadError if it has used others of this
    model: its files were replaced meanwhile, and the image would be neither the old nor the new one."""
    if not version:
        return task.versions
    key = task.model_fn.model_key
    if task.versions.get(key, version) != version:
        raise changed_files(task.model_fn)
    return {**task.versions, key: version}


def changed_files(model_fn: ModelFn) -> LoadError:
    """The error of a request whose invocations have met different contents of one model."""
    return LoadError(
        f"the files of {model_fn!r} were changed while the request was running; submit it again. Files "
        "that are in use must not be overwritten: save others to another folder"
    )


def _has_nan(result: Any) -> bool:
    """Whether a floating-point tensor among the values has one."""
    found = False

    def look(tensor: Any) -> Any:
        nonlocal found
        if not found and tensor.is_floating_point():
            # A sum passes over the tensor once and makes none; infinite ones may also give NaN.
            # Those of one byte have no sum.
            suspect = tensor.element_size() == 1 or bool(tensor.sum().isnan())
            found = suspect and bool(tensor.isnan().any())
        return tensor

    map_values(result, is_tensor, look)
    return found


def _out_of_memory(error: Exception) -> int | None:
    """How many bytes an allocation on the device wanted; None for any other error."""
    torch = sys.modules.get("torch")
    if torch is None or not isinstance(error, torch.OutOfMemoryError):
        return None
    found = _WANTED.search(str(error))
    return int(float(found[1]) * _UNITS[found[2]]) if found else _WANTED_DEFAULT


def _no_grad() -> Any:
    """torch.no_grad() if this process has torch at all: models without it do not pay its import."""
    from contextlib import nullcontext

    torch = sys.modules.get("torch")
    return torch.no_grad() if torch is not None else nullcontext()
