"""Which task runs which glue: every invocation becomes one task with its glue fused in.

Rules, for a glue call G and the invocations A(G) that it needs, directly or not:

* If one of A(G) comes after all the others, G runs in its task, right after it: its inputs are
  there, and its result leaves the task in place of the model's raw output.
* Otherwise (it needs no model, or joins parallel ones) G runs in the tasks that consume it, just
  before their model. A task does not repeat what an earlier task on its path has already computed.
* What joins parallel models for the result alone runs in the last of them, which then waits for
  the others.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from .dag import Dag, arguments, leaves
from .symbol import ParamRef, Ref
from .trace import InvocationNode


@dataclass(frozen=True)
class TaskProgram:
    """What one task does: nodes to evaluate in order, what comes in and what goes out."""

    position: int  # among the workflow's invocations, in topological order
    node: int  # the invocation's index in Dag.nodes
    nodes: tuple[int, ...]  # glue and the invocation, in order of evaluation
    parameters: tuple[str, ...]  # data parameters it reads
    dependencies: tuple[int, ...]  # positions of the tasks whose exports it reads or waits for
    imports: tuple[tuple[int, Ref], ...]  # (index into dependencies, value)
    exports: tuple[Ref, ...]  # values that other tasks read, in the order of the task's output


@dataclass(frozen=True)
class Program:
    """All tasks of a DAG; the last one gives the result."""

    tasks: tuple[TaskProgram, ...]
    result_position: int

    def _check(self) -> None:
        for position, task in enumerate(self.tasks):
            assert task.position == position
            assert task.node in task.nodes
            assert all(dependency != position for dependency in task.dependencies)
            for source, ref in task.imports:
                assert ref in self.tasks[task.dependencies[source]].exports


def fuse(dag: Dag) -> Program:
    """Assign every node of the DAG to tasks."""
    return _Fusion(dag).program()


class _Fusion:
    def __init__(self, dag: Dag):
        self.dag = dag
        self.invocations = [n.index for n in dag.nodes if isinstance(n, InvocationNode)]
        # needs[i]: bit set of the invocations that node i needs, itself included.
        self.needs: list[int] = []
        for node in dag.nodes:
            bits = 0
            for leaf in leaves(arguments(node)):
                if isinstance(leaf, Ref):
                    bits |= self.needs[leaf.node]
            if isinstance(node, InvocationNode):
                bits |= 1 << node.index
            self.needs.append(bits)
        self.tasks = {index: _Draft() for index in self.invocations}
        self.placed: dict[int, list[int]] = {index: [index] for index in self.invocations}

    def program(self) -> Program:
        for index in self.invocations:
            for leaf in leaves(arguments(self.dag.nodes[index])):
                self.require(leaf, index)
        last = self._result_task()
        self.require(self.dag.result, last)
        position = {index: number for number, index in enumerate(self.invocations)}
        tasks = tuple(self._finish(index, position) for index in self.invocations)
        program = Program(tasks, position[last])
        program._check()
        return program

    def require(self, leaf: Any, task: int) -> None:
        """Make the value of `leaf` available in `task`, by import or by running its glue there."""
        # A stack of our own: a chain of glue may be longer than Python's.
        wanted = [(leaf, task)]
        while wanted:
            wanted += reversed(self._require_one(*wanted.pop()))

    def _require_one(self, leaf: Any, task: int) -> list[tuple[Any, int]]:
        """What else is required then: the arguments of glue that this has placed."""
        draft = self.tasks[task]
        if isinstance(leaf, ParamRef):
            draft.parameters.add(leaf.name)
            return []
        assert isinstance(leaf, Ref)
        places = self.placed.get(leaf.node, [])
        if task in places:
            return []
        # An earlier task on the path to this one that already has it.
        source = next((place for place in places if self.needs[task] >> place & 1), None)
        more: list[tuple[Any, int]] = []
        if source is None:
            home = self._home(leaf.node)
            if home is None or home == task:
                return self._place(leaf.node, task)
            more = self._place(leaf.node, home)
            source = home
        draft.imports.setdefault(leaf, source)
        exports = self.tasks[source].exports
        if leaf not in exports:
            exports.append(leaf)
        return more

    def _place(self, node: int, task: int) -> list[tuple[Any, int]]:
        self.placed.setdefault(node, []).append(task)
        self.tasks[task].glue.append(node)
        return [(leaf, task) for leaf in leaves(arguments(self.dag.nodes[node]))]

    def _home(self, node: int) -> int | None:
        """The invocation that comes after all the others that `node` needs."""
        bits = self.needs[node]
        if not bits:
            return None
        latest = bits.bit_length() - 1  # indices are topological
        return latest if self.needs[latest] & bits == bits else None

    def _result_task(self) -> int:
        bits = self.needs[self.dag.result.node]
        last: int = bits.bit_length() - 1
        self.needs[last] |= bits
        return last

    def _finish(self, index: int, position: dict[int, int]) -> TaskProgram:
        draft = self.tasks[index]
        sources = sorted(set(draft.imports.values()))
        return TaskProgram(
            position[index],
            index,
            tuple(sorted([index, *draft.glue])),
            tuple(sorted(draft.parameters)),
            tuple(position[source] for source in sources),
            tuple((sources.index(source), ref) for ref, source in draft.imports.items()),
            tuple(draft.exports),
        )


class _Draft:
    def __init__(self) -> None:
        self.glue: list[int] = []
        self.parameters: set[str] = set()
        self.imports: dict[Ref, int] = {}
        self.exports: list[Ref] = []
