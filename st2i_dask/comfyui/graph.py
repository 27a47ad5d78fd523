"""Reading an API-format export: nodes by id, each with a class and inputs that are values or links."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..errors import LoadError
from ..quoting import quoted

#: Nodes that end a workflow.
OUTPUTS = frozenset({"SaveImage", "PreviewImage"})


@dataclass(frozen=True)
class Link:
    """The output of another node: its id, and the output's number."""

    node: str
    output: int


@dataclass(frozen=True)
class Node:
    id: str
    kind: str
    inputs: Mapping[str, Any]  # values and Links

    def __str__(self) -> str:
        return f"{self.kind} (node {self.id})"


@dataclass(frozen=True)
class Graph:
    """The nodes that the output needs. Links are whole and make no circle."""

    nodes: Mapping[str, Node]
    output: Node


def read_graph(source: str | Path | Mapping[str, Any]) -> Graph:
    """Read and check an export. LoadError saying what is wrong with it."""
    is_file = isinstance(source, (str, os.PathLike))
    where = repr(str(source)) if is_file else "the workflow"
    value: Any = _read(Path(source)) if is_file else source  # type: ignore[arg-type]
    if isinstance(value, Mapping) and isinstance(value.get("nodes"), list):
        raise LoadError(
            f"{where} is ComfyUI's file for its editor; export it with Workflow > Export (API) "
            "(in older versions: Save (API Format))"
        )
    if not isinstance(value, Mapping) or not value or not all(map(_is_node, value.values())):
        raise LoadError(
            f"{where} is no API-format workflow: that is a JSON object of nodes, each with "
            "class_type and inputs"
        )
    nodes = {
        str(key): Node(
            str(key),
            item["class_type"],
            {name: _input(given) for name, given in item["inputs"].items()},
        )
        for key, item in value.items()
    }
    ends = [node for node in nodes.values() if node.kind in OUTPUTS]
    if len(ends) != 1:
        found = ", ".join(map(str, ends)) or "none"
        raise LoadError(
            f"{where} must have one output, one of {', '.join(sorted(OUTPUTS))}; it has: {found}"
        )
    return Graph(_needed(nodes, ends[0], where), ends[0])


def _read(path: Path) -> Any:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise LoadError(f"{quoted(str(path))} cannot be read ({error.strerror})") from error
    except (ValueError, RecursionError) as error:
        raise LoadError(f"{str(path)!r} is not JSON ({error}); export it again") from error


def _is_node(value: Any) -> bool:
    return (
        isinstance(value, Mapping)
        and isinstance(value.get("class_type"), str)
        and isinstance(value.get("inputs"), Mapping)
    )


def _input(value: Any) -> Any:
    match value:
        case [str() | int() as node, int() as output] if not isinstance(node, bool):
            return Link(str(node), output)
    return value


def _needed(nodes: Mapping[str, Node], output: Node, where: str) -> dict[str, Node]:
    needed: dict[str, Node] = {}
    open_nodes: set[str] = set()

    # Depth first, without recursion: a file may chain thousands.
    stack: list[tuple[Node, bool]] = [(output, False)]
    while stack:
        node, done = stack.pop()
        if done:
            open_nodes.discard(node.id)
            needed[node.id] = node
            continue
        if node.id in needed:
            continue
        if node.id in open_nodes:
            raise LoadError(f"{where}: {node} needs its own output; export the workflow again")
        open_nodes.add(node.id)
        stack.append((node, True))
        for name, value in node.inputs.items():
            if isinstance(value, Link):
                if value.node not in nodes:
                    raise LoadError(
                        f"{where}: {node} takes {name!r} from node {value.node}, which is not there; "
                        "export the workflow again"
                    )
                if value.node in open_nodes:
                    raise LoadError(
                        f"{where}: {node} needs its own output; export the workflow again"
                    )
                stack.append((nodes[value.node], False))
    return needed
