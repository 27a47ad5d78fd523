"""A component call as an invocation: a Dask task like those of composed workflows.

Tensors of some size are keys of their own, on the worker where the glue has made them; the same one in
later calls (embeddings in every step) is the same key and stays where it was pulled to. Everything else
is in the task.
"""

from __future__ import annotations

import functools
import hashlib
import pickle
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import cloudpickle
from dask._task_spec import Task, TaskRef

from ..fusion import TaskProgram
from ..invocation import run_invocation
from ..outputs import TaskOutputs
from ..plan import Execution, Packed, PackedTask, TaskPlan
from ..symbol import ParamRef, Ref
from .component import Component, described
from .shell import PipelineSource, Shell
from .travel import take_apart

#: Smaller tensors travel in the task, bytes.
SMALL = 16 * 1024


@dataclass(frozen=True)
class ComponentCall:
    """What the orchestrator asks for. tensors: all of the arguments', in the order of the form."""

    model_fn: Component
    path: str
    method: str
    form: bytes
    tensors: tuple[Any, ...]

    @property
    def label(self) -> str:
        return described(self.model_fn.component, self.path, self.method)

    @property
    def bucket(self) -> str:
        """What decides its cost: the shapes of its arguments."""
        return " ".join("x".join(map(str, tensor.shape)) for tensor in self.tensors)

    def large(self) -> list[Any]:
        """The tensors that travel by themselves."""
        return [tensor for tensor in self.tensors if _is_large(tensor)]

    def task(self, key: str, workflow: str, keys: Sequence[str]) -> Task:
        """keys: of the large tensors, in order."""
        sources, small, large = [], [], 0
        for tensor in self.tensors:
            if _is_large(tensor):
                sources.append((True, large))
                large += 1
            else:
                sources.append((False, len(small)))
                small.append(tensor)
        content = self.path, self.method, self.form, sources, TaskOutputs(tuple(small))
        packed = PackedTask(
            _packed_fn(self.model_fn), _packed_plan(workflow, self.label, len(keys))
        )
        parameters = {"call": pickle.dumps(content, protocol=5)}
        return Task(key, run_invocation, packed, parameters, None, (), *map(TaskRef, keys))

    def annotation(self, key: str, tenant: str, workflow: str) -> dict[str, Any]:
        """As `request.build_request` writes it: a call is a request of one position."""
        return {
            "tenant": tenant,
            "request": key,
            "workflow": workflow,
            "position": 0,
            "fn": self.label,
            "model": self.model_fn.model_key,
            "bucket": self.bucket,
            "callbacks": (),
        }


def asked(
    shell: Shell,
    source: PipelineSource,
    component: str,
    path: str,
    method: str,
    casts: tuple[str, ...],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> ComponentCall:
    """What a hollow component of that shell was called with, as a call. OutputError if it cannot travel."""
    key = component, casts
    if key not in shell.functions:
        options: dict[str, Any] = {"dtype": source.dtype} if source.dtype else {}
        if casts:
            options["casts"] = list(casts)
        parts = shell.parts[component]
        shell.functions[key] = Component(source.source, component, parts, **options)
    what = f"what {described(component, path, method)} is called with"
    form, tensors = take_apart((args, kwargs), what)
    return ComponentCall(shell.functions[key], path, method, form, tuple(tensors))


def _is_large(tensor: Any) -> bool:
    return bool(tensor.numel() * tensor.element_size() >= SMALL)


@functools.lru_cache(maxsize=256)
def _packed_fn(model_fn: Component) -> Packed:
    return _packed(model_fn)


@functools.lru_cache(maxsize=1024)
def _packed_plan(workflow: str, label: str, count: int) -> Packed:
    """The plan of a call with so many large tensors. Node 0 is the call, those after it its inputs."""
    imports = tuple((number, Ref(1 + number)) for number in range(count))
    exports = (Ref(0, "form"), Ref(0, "made"))
    program = TaskProgram(0, 0, (0,), ("call",), tuple(range(count)), imports, exports)
    inputs = {"call": ParamRef("call"), "tensors": [ref for _, ref in imports]}
    return _packed(
        TaskPlan(
            workflow,
            label,
            program,
            (Execution(0, label, inputs),),
            tuple((number, 0, ref) for number, ref in imports),
            (),
            None,
        )
    )


def _packed(value: Component | TaskPlan) -> Packed:
    data = cloudpickle.dumps(value)
    return Packed(hashlib.sha256(data).hexdigest()[:16], data)
