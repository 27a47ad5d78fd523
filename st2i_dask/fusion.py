"""Which task runs which glue: every invocation becomes one task with its glue fused in.

Rules, for a glue call G and the invocations A(G) that it needs, directly or not:

* If one of A(G) comes after all the others, G runs in its task, right after it: its inputs are
  there, and its result leaves the task in place of the model's raw output.
* Otherwise (it needs no model, or joins parallel ones) G runs in the tasks that consume it, just
  before their model. A task does not repeat what an earlier task on its path has already computed.
* What joins parallel models for the result alone runs in the last of them, which then waits for
  the others.
* A callback input is no dependency: its consumer starts when the producer has been dispatched. The
  first task that depends on the consumer depends on the producer too, so that the producer stays
  wanted until the consumer is done. Without such a task (the consumer gives the result), and where
  the consumer depends on the producer anyway, the input is an ordinary one.
"""

from __future__ import annotations

from collections.abc import Iterable
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
    callbacks: tuple[int, ...] = ()  # positions of the producers of its callback inputs
    callback_imports: tuple[tuple[int, Ref], ...] = ()  # (index into callbacks, value)
    gang: int = 1  # the most executors that its model can use at once


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
            assert not set(task.callbacks) & {*task.dependencies, position}
            for source, ref in task.callback_imports:
                assert ref in self.tasks[task.callbacks[source]].exports


def fuse(dag: Dag) -> Program:
    """Assign every node of the DAG to tasks."""
    return _Fusion(dag).program()


class _Fusion:
    def __init__(self, dag: Dag, serial: frozenset[int] = frozenset()):
        self.dag = dag
        # Invocations whose callback inputs are ordinary ones.
        self.serial = serial
        self.invocations = [n.index for n in dag.nodes if isinstance(n, InvocationNode)]
        # Per invocation: its callback leaves that are no dependencies, and where each is made.
        self.callbacks: dict[int, dict[Ref, int]] = {}
        # after[i]: bit set of the invocations that are complete when node i has run, itself included.
        self.after: list[int] = []
        for node in dag.nodes:
            if isinstance(node, InvocationNode):
                self.after.append(self._after_invocation(node, node.index in serial))
            else:
                self.after.append(self._after_leaves(leaves(arguments(node))))
        self.producers = {source for made in self.callbacks.values() for source in made.values()}
        self.tasks = {index: _Draft() for index in self.invocations}
        self.placed: dict[int, list[int]] = {index: [index] for index in self.invocations}

    def _after_leaves(self, refs: Iterable[Any]) -> int:
        bits = 0
        for leaf in refs:
            if isinstance(leaf, Ref):
                bits |= self.after[leaf.node]
        return bits

    def _after_invocation(self, node: InvocationNode, serial: bool) -> int:
        possible = {
            name: tree
            for name, tree in node.inputs.items()
            if isinstance(tree, Ref) and node.model_fn.inputs[name].callback and not serial
        }
        bits = 0
        for name, tree in node.inputs.items():
            if name not in possible:
                bits |= self._after_leaves(leaves(tree))
        # Whoever depends on a consumer comes after its producers as well.
        for consumer, made in self.callbacks.items():
            if bits >> consumer & 1:
                for source in made.values():
                    bits |= self.after[source]
        found: dict[Ref, int] = {}
        for leaf in possible.values():
            made_by_model = isinstance(self.dag.nodes[leaf.node], InvocationNode)
            home = leaf.node if made_by_model else self._home(leaf.node)
            if home is None or bits >> home & 1:
                bits |= self.after[leaf.node]
            else:
                found[leaf] = home
        if found:
            self.callbacks[node.index] = found
        return bits | 1 << node.index

    def program(self) -> Program:
        result_bits = self.after[self.dag.result.node]
        last = result_bits.bit_length() - 1
        if last in self.callbacks:
            # Nobody depends on the result's task: its producers must be dependencies of its own.
            return _Fusion(self.dag, self.serial | {last}).program()
        for index in self.invocations:
            callbacks = self.callbacks.get(index, {})
            for leaf in leaves(arguments(self.dag.nodes[index])):
                if leaf in callbacks:
                    self._export_callback(leaf, index, callbacks[leaf])
                else:
                    self.require(leaf, index)
        self.after[last] |= result_bits
        self.require(self.dag.result, last)
        depended_on = {i for draft in self.tasks.values() for i in draft.imports.values()}
        if unkept := self.callbacks.keys() - depended_on:
            # Their values are callback inputs themselves: no task would keep their producers.
            return _Fusion(self.dag, self.serial | unkept).program()
        self._keep_producers()
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
        if task in places or leaf in draft.imports:
            return []
        # An earlier task on the path to this one that already has it; rather not a producer of
        # callback inputs: all that it hands on would travel with the value.
        earlier = [place for place in places if self.after[task] >> place & 1]
        source = min(earlier, key=lambda place: place in self.producers, default=None)
        more: list[tuple[Any, int]] = []
        if source is None:
            home = self._home(leaf.node)
            if home is None or home == task:
                return self._place(leaf.node, task)
            more = self._place(leaf.node, home)
            source = home
        draft.imports.setdefault(leaf, source)
        self._export(leaf, source)
        return more

    def _export(self, leaf: Ref, source: int) -> None:
        exports = self.tasks[source].exports
        if leaf not in exports:
            exports.append(leaf)

    def _export_callback(self, leaf: Ref, task: int, source: int) -> None:
        if source not in self.placed.get(leaf.node, []):
            self.require(leaf, source)
        self._export(leaf, source)
        self.tasks[task].callbacks[leaf] = source

    def _keep_producers(self) -> None:
        for consumer, made in self.callbacks.items():
            keeper = next(
                index
                for index in self.invocations
                if consumer in self.tasks[index].imports.values()
            )
            self.tasks[keeper].waits_for.update(made.values())

    def _place(self, node: int, task: int) -> list[tuple[Any, int]]:
        self.placed.setdefault(node, []).append(task)
        self.tasks[task].glue.append(node)
        return [(leaf, task) for leaf in leaves(arguments(self.dag.nodes[node]))]

    def _home(self, node: int) -> int | None:
        """The invocation that comes after all the others that `node` needs."""
        bits = self.after[node]
        if not bits:
            return None
        latest = bits.bit_length() - 1  # indices are topological
        return latest if self.after[latest] & bits == bits else None

    def _finish(self, index: int, position: dict[int, int]) -> TaskProgram:
        draft = self.tasks[index]
        sources = sorted({*draft.imports.values(), *draft.waits_for})
        producers = sorted(set(draft.callbacks.values()))
        invocation = self.dag.nodes[index]
        assert isinstance(invocation, InvocationNode)
        return TaskProgram(
            position[index],
            index,
            tuple(sorted([index, *draft.glue])),
            tuple(sorted(draft.parameters)),
            tuple(position[source] for source in sources),
            tuple((sources.index(source), ref) for ref, source in draft.imports.items()),
            tuple(draft.exports),
            tuple(position[source] for source in producers),
            tuple((producers.index(source), ref) for ref, source in draft.callbacks.items()),
            invocation.model_fn.gang,
        )


class _Draft:
    def __init__(self) -> None:
        self.glue: list[int] = []
        self.parameters: set[str] = set()
        self.imports: dict[Ref, int] = {}
        self.callbacks: dict[Ref, int] = {}
        self.waits_for: set[int] = set()
        self.exports: list[Ref] = []
