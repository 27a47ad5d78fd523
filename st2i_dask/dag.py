"""The DAG of a workflow: what depends on what, from declared inputs and outputs alone."""

from __future__ import annotations

import graphlib
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from .errors import ComposeError
from .symbol import LaterRef, ParamRef, Ref, Symbol
from .trace import GlueNode, InvocationNode, Node, Trace


@dataclass(frozen=True)
class Dag:
    """The nodes that the result needs, in topological order, and the result itself.

    Node indices are positions in `nodes`; every `Ref` points to an earlier node.
    """

    workflow: str
    nodes: tuple[Node, ...]
    result: Any  # Ref

    def _check(self) -> None:
        for node in self.nodes:
            assert self.nodes[node.index] is node
            for leaf in leaves(arguments(node)):
                assert not isinstance(leaf, LaterRef)
                assert not isinstance(leaf, Ref) or leaf.node < node.index


def arguments(node: Node) -> tuple[Any, ...]:
    """The argument trees of a node."""
    if isinstance(node, InvocationNode):
        return tuple(node.inputs.values())
    return (*node.args, *node.kwargs.values())


def leaves(tree: Any) -> Iterator[ParamRef | Ref | LaterRef]:
    """The leaves of an argument tree, left to right."""
    if isinstance(tree, (ParamRef, Ref, LaterRef)):
        yield tree
    elif type(tree) in (list, tuple):
        for item in tree:
            yield from leaves(item)
    elif type(tree) is dict:
        for item in tree.values():
            yield from leaves(item)


def substitute(tree: Any, mapping: Any) -> Any:
    """The tree with `mapping(leaf)` in place of every leaf."""
    if isinstance(tree, (ParamRef, Ref, LaterRef)):
        return mapping(tree)
    if type(tree) in (list, tuple):
        return type(tree)(substitute(item, mapping) for item in tree)
    if type(tree) is dict:
        return {key: substitute(item, mapping) for key, item in tree.items()}
    return tree


def build(trace: Trace, result: Any) -> Dag:
    """The DAG of one composition. ComposeError: unbound values, a cycle, nothing to run."""
    workflow = trace.workflow
    if isinstance(result, Symbol):
        root = trace.lower(result, "the returned value")
    else:
        raise ComposeError(
            f"workflow {workflow!r} returns {type(result).__name__}; return one symbolic value "
            "(join several with a @st2i.glue function)"
        )
    resolve = _LaterResolver(trace)
    root = resolve(root)
    if not isinstance(root, Ref):
        raise ComposeError(
            f"workflow {workflow!r} returns its own parameter or a constant; "
            "return what a ModelFn or glue function gives"
        )
    nodes = [_with_arguments(node, resolve) for node in trace.nodes]
    order = _topological(workflow, nodes, root.node)
    position = {old: new for new, old in enumerate(order)}

    def renumber(leaf: Any) -> Any:
        return Ref(position[leaf.node], leaf.output) if isinstance(leaf, Ref) else leaf

    final = tuple(
        replace(_with_arguments(nodes[old], renumber), index=new) for new, old in enumerate(order)
    )
    if not any(isinstance(node, InvocationNode) for node in final):
        raise ComposeError(
            f"workflow {workflow!r}: its result needs no ModelFn, so there is nothing to schedule; "
            "call at least one"
        )
    dag = Dag(workflow, final, renumber(root))
    dag._check()
    return dag


class _LaterResolver:
    """Replaces later() leaves by what they were bound to."""

    def __init__(self, trace: Trace):
        self.trace = trace
        self.active: list[int] = []

    def __call__(self, leaf: Any) -> Any:
        if not isinstance(leaf, LaterRef):
            return leaf
        if leaf.number in self.active:
            raise ComposeError(
                f"workflow {self.trace.workflow!r}: later() values are bound to each other in a "
                "cycle; bind each to something a ModelFn or glue function gives"
            )
        value = self.trace.later_values[leaf.number]
        if value is Trace.UNBOUND:
            raise ComposeError(
                f"workflow {self.trace.workflow!r}: a later() value is used but never bound; "
                "call .bind(value) before returning"
            )
        self.active.append(leaf.number)
        try:
            return substitute(value, self)
        finally:
            self.active.pop()


def _with_arguments(node: Node, mapping: Any) -> Node:
    if isinstance(node, InvocationNode):
        return replace(
            node, inputs={name: substitute(tree, mapping) for name, tree in node.inputs.items()}
        )
    assert isinstance(node, GlueNode)
    return replace(
        node,
        args=tuple(substitute(tree, mapping) for tree in node.args),
        kwargs={name: substitute(tree, mapping) for name, tree in node.kwargs.items()},
    )


def _topological(workflow: str, nodes: list[Node], root: int) -> list[int]:
    """Old indices of the nodes that `root` needs, each after what it depends on."""
    dependencies: dict[int, list[int]] = {}
    stack = [root]
    while stack:
        index = stack.pop()
        if index in dependencies:
            continue
        found = {leaf.node for leaf in leaves(arguments(nodes[index])) if isinstance(leaf, Ref)}
        dependencies[index] = sorted(found)
        stack.extend(found)
    sorter = graphlib.TopologicalSorter(dependencies)
    try:
        sorter.prepare()
    except graphlib.CycleError as error:
        cycle = " -> ".join(nodes[index].label for index in reversed(error.args[1]))
        raise ComposeError(
            f"workflow {workflow!r}: its inputs form a cycle: {cycle}; a value cannot depend on "
            "itself, unroll the loop over steps"
        ) from None
    order: list[int] = []
    while sorter.is_active():
        ready = sorted(sorter.get_ready())
        order.extend(ready)
        sorter.done(*ready)
    return order
