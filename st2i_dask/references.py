"""What a function's code refers to by global name, followed through its own module.

Notebooks change globals under a function's feet: a re-run cell makes another class of the same name.
Only names of the same module are followed; what another module has does not change.
"""

from __future__ import annotations

import types
from collections.abc import Iterator
from typing import Any, NamedTuple

_MISSING = object()
_PLAIN = (str, int, float, complex, bytes, bool, types.NoneType, tuple, frozenset)


class Reference(NamedTuple):
    """A global name and what it stood for when it was looked up."""

    namespace: dict[str, Any]
    name: str
    value: Any

    def holds(self) -> bool:
        """Whether the name still stands for the same object, or an equal plain value."""
        now = self.namespace.get(self.name, _MISSING)
        if now is self.value:
            return True
        return isinstance(now, _PLAIN) and type(now) is type(self.value) and now == self.value


def references(root: Any) -> list[Reference]:
    """All of a function's or class's global names, and those of what they stand for."""
    found: dict[tuple[int, str], Reference] = {}
    seen: set[int] = set()
    stack = [root]
    while stack:
        for function in functions(stack.pop()):
            if id(function) in seen:
                continue
            seen.add(id(function))
            for reference in direct(function):
                found[id(reference.namespace), reference.name] = reference
                if followed(function, reference.value):
                    stack.append(reference.value)
    return list(found.values())


def direct(function: types.FunctionType) -> list[Reference]:
    """The global names in one function's own code, sorted."""
    namespace = function.__globals__
    return [
        Reference(namespace, name, namespace[name])
        for name in sorted(set(_names(function.__code__)))
        if name in namespace
    ]


def followed(function: types.FunctionType, value: Any) -> bool:
    """Whether `value` is code of the same module as `function`."""
    inner = getattr(value, "__wrapped__", value)
    is_code = isinstance(inner, (types.FunctionType, type))
    return is_code and inner.__module__ == function.__module__


def functions(value: Any) -> Iterator[types.FunctionType]:
    """The functions of a function (itself, and what it wraps) or of a class and its bases."""
    if isinstance(value, type):
        for base in value.__mro__:
            for member in vars(base).values():
                inner = getattr(member, "__func__", getattr(member, "fget", member))
                if isinstance(inner, types.FunctionType):
                    yield inner
        return
    while value is not None:
        if isinstance(value, types.FunctionType):
            yield value
        value = getattr(value, "__wrapped__", None)


def _names(code: types.CodeType) -> Iterator[str]:
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _names(constant)
