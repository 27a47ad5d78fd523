"""Previews: pictures of a workflow's latents between its steps, made as it makes its result.

A workflow that repeats a step and then makes a picture of what the last step gave (decoder and glue) is
composed with the same again after earlier steps. Nothing else changes: the result is the same bit for bit.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from .dag import arguments, leaves, substitute
from .errors import ComposeError, ParameterError
from .glue import glue
from .plan import unpack
from .quoting import quoted
from .request import Request
from .symbol import Ref, Symbol
from .trace import GlueNode, InvocationNode, Node, Trace, current_trace
from .workflow import Workflow

#: Previews of one image at most: each costs a run of what makes a picture of latents.
MOST = 20


@dataclass(frozen=True)
class Preview:
    """A picture on its way. number: from 0, in the order of steps."""

    number: int
    image: Any


@dataclass(frozen=True)
class PreviewTask:
    """The task of a request that makes a preview: its key, and where the preview is in its outputs."""

    key: str
    export: int


def previewed(workflow: Workflow, count: int, **values: Any) -> Workflow:
    """The workflow with so many previews, or fewer where it has not so many steps.

    values: its parameters, which decide how many steps there are. ParameterError for a wrong count,
    ComposeError when no step is repeated.
    """
    if type(count) is not int or not 1 <= count <= MOST:
        raise ParameterError(
            f"previews={quoted(count)}; ask for 1 to {MOST} of them, or 0 for none"
        )
    version = workflow.bind(**values)[0].version
    made = _previewed(workflow, count, version)
    made.bind(**values)  # composes
    return made


def preview_tasks(workflow: Workflow, request: Request, **values: Any) -> list[PreviewTask]:
    """Of a request of a previewed workflow: the tasks of its previews, in order."""
    composed = workflow.bind(**values)[0]
    keys = list(request.tasks)
    found: dict[str, PreviewTask] = {}
    for position, packed in enumerate(composed.packed):
        _, plan = unpack(packed)
        for node in plan.nodes:
            ref = Ref(node.index)
            if node.label.startswith(f"{_NAME}#") and ref in plan.program.exports:
                found[node.label] = PreviewTask(keys[position], plan.program.exports.index(ref))
    return [found[label] for label in sorted(found, key=lambda label: int(label.split("#")[1]))]


@functools.lru_cache(maxsize=64)
def _previewed(workflow: Workflow, count: int, version: str) -> Workflow:
    function: Callable[..., Any] = workflow.function

    @functools.wraps(function)
    def with_previews(*args: Any, **kwargs: Any) -> Any:
        result = function(*args, **kwargs)
        trace = current_trace()
        assert trace is not None
        found = _intermediate(trace, result, workflow.name)
        steps = len(found) + 1
        wanted = {round((n + 1) * steps / (count + 1)) - 1 for n in range(count)}
        chosen = sorted(step for step in wanted if 0 <= step < len(found))
        previews = [
            st2i_preview(number, _again(trace, result, found[step]))
            for number, step in enumerate(chosen)
        ]
        return beside(result, previews)

    return Workflow(with_previews, workflow.name, version)


@glue
def st2i_preview(number: int, image: Any) -> Preview:
    """What a client is shown meanwhile."""
    return Preview(number, image)


_NAME = "st2i_preview"


@glue
def beside(result: Any, previews: list[Any]) -> Any:
    """The result; the previews are made before."""
    return result


@dataclass(frozen=True)
class _Cut:
    """Where the loop ends, `end`, and what an earlier turn gave in its place."""

    end: Ref
    earlier: int


def _intermediate(trace: Trace, result: Any, name: str) -> list[_Cut]:
    """What the turns of the loop before the last one gave, in order. ComposeError without a loop."""
    root = trace.lower(result, "the returned value")
    seen: set[int] = set()
    waiting = [root]
    while waiting:
        ref = waiting.pop(0)
        if not isinstance(ref, Ref) or ref.node in seen:
            continue
        seen.add(ref.node)
        node = trace.nodes[ref.node]
        before = _ancestors(trace, ref.node)
        turns = [i for i in sorted(before) if _kind(trace.nodes[i]) == _kind(node)]
        # Each after all the ones before it: else they are no turns of one loop.
        if turns and all(set(turns[:n]) <= _ancestors(trace, turn) for n, turn in enumerate(turns)):
            return [_Cut(ref, turn) for turn in turns]
        waiting += leaves(arguments(node))
    raise ComposeError(
        f"workflow {name!r} repeats no step before its picture, so there is nothing to show "
        "meanwhile; ask for no previews, or for more steps"
    )


def _kind(node: Node) -> Any:
    if isinstance(node, GlueNode):
        return node.function
    return node.model_fn.model_key, node.model_fn.name, type(node.model_fn)


def _ancestors(trace: Trace, index: int) -> set[int]:
    found: set[int] = set()
    waiting = [index]
    while waiting:
        for leaf in leaves(arguments(trace.nodes[waiting.pop()])):
            if isinstance(leaf, Ref) and leaf.node not in found:
                found.add(leaf.node)
                waiting.append(leaf.node)
    return found


def _again(trace: Trace, result: Any, cut: _Cut) -> Symbol:
    """What makes the result of the loop's end, once more, of what an earlier turn gave."""
    root = trace.lower(result, "the returned value")
    end = cut.end.node
    copies = {end: cut.earlier}

    def moved(leaf: Any) -> Any:
        return Ref(copies[leaf.node], leaf.output) if _is_in(leaf, copies) else leaf

    for index in sorted(_ancestors(trace, root.node) | {root.node}):
        node = trace.nodes[index]
        if index in copies or not any(_is_in(leaf, copies) for leaf in leaves(arguments(node))):
            continue
        label = trace._label(node.label.partition("#")[0])
        copy: Node
        if isinstance(node, InvocationNode):
            inputs = {name: substitute(tree, moved) for name, tree in node.inputs.items()}
            copy = replace(node, index=len(trace.nodes), label=label, inputs=inputs)
        else:
            args = tuple(substitute(tree, moved) for tree in node.args)
            kwargs = {name: substitute(tree, moved) for name, tree in node.kwargs.items()}
            copy = replace(node, index=len(trace.nodes), label=label, args=args, kwargs=kwargs)
        trace.nodes.append(copy)
        copies[index] = copy.index
    return Symbol(trace, moved(root), "a preview")


def _is_in(leaf: Any, copies: dict[int, int]) -> bool:
    return isinstance(leaf, Ref) and leaf.node in copies
