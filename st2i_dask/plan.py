"""Plans: a composed workflow as workers receive it, one small piece per task.

The client pickles each piece once; a task carries its own piece and its ModelFn as bytes, so it can
run on any worker, also after a loss, without asking anybody. The scheduler passes the bytes on
unopened: it never imports user code. Workers keep the pieces they have opened.
"""

from __future__ import annotations

import hashlib
import pickle
import threading
from collections import OrderedDict
from dataclasses import dataclass
from typing import Any

import cloudpickle

from .dag import Dag
from .errors import ComposeError, LoadError
from .fusion import Program, TaskProgram
from .model_fn import ModelFn
from .symbol import Ref
from .trace import GlueNode, InvocationNode, Node


@dataclass(frozen=True)
class Execution:
    """The task's invocation as a node. Its ModelFn travels beside the plan."""

    index: int
    label: str
    inputs: dict[str, Any]  # trees of constants and leaves


@dataclass(frozen=True)
class TaskPlan:
    """What one task evaluates: the nodes of its program, in order, and where its inputs come from."""

    workflow: str
    label: str  # of the invocation, for messages
    program: TaskProgram
    nodes: tuple[GlueNode | Execution, ...]
    imports: tuple[tuple[int, int, Ref], ...]  # (index of the dependency, its export, value)
    callbacks: tuple[tuple[int, int, Ref], ...]  # (index of the producer, its export, value)
    result: Ref | None  # the workflow's result, for the task that gives it


@dataclass(frozen=True)
class Packed:
    """A pickled object. `digest` identifies it (hex, 16 characters)."""

    digest: str
    data: bytes


@dataclass(frozen=True)
class PackedTask:
    """One task's ModelFn and TaskPlan. Tasks of one model share the ModelFn's bytes."""

    model_fn: Packed
    plan: Packed


def pack(dag: Dag, program: Program) -> tuple[PackedTask, ...]:
    """One PackedTask per position. ComposeError names what cannot be pickled."""
    model_fns: dict[int, Packed] = {}
    packed = []
    for task in program.tasks:
        invocation = dag.nodes[task.node]
        assert isinstance(invocation, InvocationNode)
        model_fn = invocation.model_fn
        if id(model_fn) not in model_fns:
            model_fns[id(model_fn)] = _dumps(model_fn, dag, model_fn.name)
        plan = TaskPlan(
            dag.workflow,
            invocation.label,
            task,
            tuple(_planned(dag.nodes[index]) for index in task.nodes),
            tuple(
                (source, program.tasks[task.dependencies[source]].exports.index(ref), ref)
                for source, ref in task.imports
            ),
            tuple(
                (source, program.tasks[task.callbacks[source]].exports.index(ref), ref)
                for source, ref in task.callback_imports
            ),
            dag.result if task.position == program.result_position else None,
        )
        packed.append(PackedTask(model_fns[id(model_fn)], _dumps(plan, dag, invocation.label)))
    return tuple(packed)


def _planned(node: Node) -> GlueNode | Execution:
    if isinstance(node, InvocationNode):
        return Execution(node.index, node.label, node.inputs)
    return node


def _dumps(value: ModelFn | TaskPlan, dag: Dag, label: str) -> Packed:
    try:
        data = cloudpickle.dumps(value)
    except Exception as error:
        if isinstance(value, TaskPlan):
            label = next((n.label for n in value.nodes if not _pickles(n)), label)
        raise ComposeError(
            f"workflow {dag.workflow!r}: {label} cannot be sent to workers: {error}; pass plain "
            "values (numbers, strings, arrays), and open files, locks or connections in "
            "load_model or inside the glue function"
        ) from error
    return Packed(hashlib.sha256(data).hexdigest()[:16], data)


def _pickles(value: Any) -> bool:
    try:
        cloudpickle.dumps(value)
    except Exception:
        return False
    return True


class _Opened:
    """Unpickled objects of this process by digest, the least recently used out first."""

    def __init__(self, limit: int):
        self._limit = limit
        self._values: OrderedDict[str, Any] = OrderedDict()
        self._lock = threading.Lock()

    def get(self, packed: Packed) -> Any:
        with self._lock:
            if packed.digest in self._values:
                self._values.move_to_end(packed.digest)
                return self._values[packed.digest]
        try:
            value = pickle.loads(packed.data)
        except Exception as error:  # missing modules, or older ones that lack a name
            raise LoadError(
                f"this worker cannot make what the workflow is made of: {error}; install the same "
                "modules on every worker, or send them with client.upload_file(...)"
            ) from error
        with self._lock:
            # Another thread may have been first: one object per digest.
            value = self._values.setdefault(packed.digest, value)
            while len(self._values) > self._limit:
                self._values.popitem(last=False)
        return value


# A piece holds no weights, some kilobytes at most: these limits are a few megabytes.
_model_fns = _Opened(1_000)
_plans = _Opened(4_000)


def unpack(packed: PackedTask) -> tuple[ModelFn, TaskPlan]:
    """The ModelFn and plan, opened at most once per process while recent. Any thread."""
    return _model_fns.get(packed.model_fn), _plans.get(packed.plan)
