"""Fingerprints of code and of composed workflows: equal in every process that has the same code."""

from __future__ import annotations

import hashlib
import inspect
import types
from typing import Any

from .dag import Dag
from .trace import InvocationNode


def of_class(cls: type, root: type = object) -> str:
    """Digest (16 hex digits) of the code of a class and its bases below `root`.

    An edited notebook class is another model, and the same class in two processes is the same one.
    Line numbers do not count.
    """
    digest = hashlib.sha256()
    for base in cls.__mro__:
        if base is object or base in root.__mro__:
            continue
        for name, value in sorted(vars(base).items()):
            function = getattr(value, "__func__", value)
            if isinstance(function, types.FunctionType):
                digest.update(name.encode())
                _add_code(digest, function.__code__)
    return digest.hexdigest()[:16]


def of_dag(dag: Dag) -> str:
    """Digest (16 hex digits) of what a composed workflow does: code, models, constants, wiring."""
    digest = hashlib.sha256()
    for node in dag.nodes:
        digest.update(node.label.encode())
        if isinstance(node, InvocationNode):
            digest.update(node.model_fn.model_key.encode())
            digest.update(_plain(node.inputs).encode())
        else:
            function = inspect.unwrap(node.function)
            digest.update(f"{function.__module__}.{function.__qualname__}".encode())
            if isinstance(function, types.FunctionType):
                _add_code(digest, function.__code__)
            digest.update(_plain((node.args, node.kwargs)).encode())
    digest.update(repr(dag.result).encode())
    return digest.hexdigest()[:16]


def _add_code(digest: Any, code: types.CodeType) -> None:
    digest.update(code.co_code)
    digest.update(repr((code.co_names, code.co_varnames)).encode())
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            _add_code(digest, constant)
        elif isinstance(constant, frozenset):
            digest.update(repr(sorted(map(repr, constant))).encode())
        else:
            digest.update(repr(constant).encode())


def _plain(value: Any) -> str:
    """A representation without memory addresses."""
    if type(value) is dict:
        return "{" + ",".join(f"{k!r}:{_plain(v)}" for k, v in value.items()) + "}"
    if type(value) in (list, tuple):
        return "(" + ",".join(map(_plain, value)) + ")"
    text = repr(value)
    return type(value).__qualname__ if " at 0x" in text else text
