"""A plan: a composed workflow as workers receive it.

The client pickles it once; every task of every request carries the same bytes, so a task can run on
any worker, also after a loss, without asking anybody. The scheduler passes the bytes on unopened: it
never imports user code. Workers keep the plans they have opened.
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
from .fusion import Program
from .trace import InvocationNode, Node


@dataclass(frozen=True)
class Plan:
    """Nodes and programs of one composed workflow."""

    workflow: str
    nodes: tuple[Node, ...]
    result: Any  # Ref
    program: Program

    def invocation(self, position: int) -> InvocationNode:
        node = self.nodes[self.program.tasks[position].node]
        assert isinstance(node, InvocationNode)
        return node


@dataclass(frozen=True)
class PackedPlan:
    """A plan as bytes. `digest` identifies it (hex, 16 characters)."""

    digest: str
    data: bytes


def pack(dag: Dag, program: Program) -> PackedPlan:
    """Pickle once. ComposeError names the node whose constants or code cannot be pickled."""
    plan = Plan(dag.workflow, dag.nodes, dag.result, program)
    try:
        data = cloudpickle.dumps(plan)
    except Exception as error:
        raise ComposeError(_blame(dag, error)) from error
    return PackedPlan(hashlib.sha256(data).hexdigest()[:16], data)


def _blame(dag: Dag, error: Exception) -> str:
    for node in dag.nodes:
        try:
            cloudpickle.dumps(node)
        except Exception as inner:
            return (
                f"workflow {dag.workflow!r}: {node.label} cannot be sent to workers: {inner}; "
                "pass plain values (numbers, strings, arrays) and open files, locks or "
                "connections in load_model or inside the glue function"
            )
    return f"workflow {dag.workflow!r} cannot be sent to workers: {error}"


# Opened plans of this process, most recent last. Small: a plan holds no weights.
_OPENED: OrderedDict[str, Plan] = OrderedDict()
_OPENED_LIMIT = 256
_OPENED_LOCK = threading.Lock()


def unpack(packed: PackedPlan) -> Plan:
    """The plan, opened at most once per process while it stays among the recent ones. Any thread."""
    with _OPENED_LOCK:
        known = _OPENED.get(packed.digest)
        if known is not None:
            _OPENED.move_to_end(packed.digest)
            return known
    try:
        plan: Plan = pickle.loads(packed.data)
    except ImportError as error:
        raise LoadError(
            f"this worker cannot import what the workflow is made of: {error}; install the module "
            "on every worker, or send it with client.upload_file(...)"
        ) from error
    with _OPENED_LOCK:
        _OPENED[packed.digest] = plan
        while len(_OPENED) > _OPENED_LIMIT:
            _OPENED.popitem(last=False)
    return plan
