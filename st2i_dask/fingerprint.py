"""Fingerprints of code and of composed workflows: equal in every process that has the same code."""

from __future__ import annotations

import hashlib
import inspect
import pickle
import types
from functools import cached_property
from typing import Any

from .dag import Dag
from .references import direct, followed, functions
from .symbol import ParamRef, Ref
from .trace import InvocationNode

# Global values that count as part of the code that reads them.
_CONSTANTS = (str, int, float, complex, bytes, tuple, frozenset, types.NoneType)


def of_class(cls: type, root: type = object) -> str:
    """Digest (16 hex digits) of a class and its bases below `root`: code, constants, closures.

    An edited notebook class is another model, and the same class in two processes is the same one.
    Line numbers do not count. Global names are followed through the class's own module.
    """
    digest = hashlib.sha256()
    for base in cls.__mro__:
        if base is object or base in root.__mro__:
            continue
        for name, value in sorted(vars(base).items()):
            function = getattr(value, "__func__", value)
            if isinstance(function, types.FunctionType) or not name.startswith("__"):
                digest.update(name.encode())
                _add(digest, function, set())
    return digest.hexdigest()[:16]


def of_dag(dag: Dag) -> str:
    """Digest (16 hex digits) of what a composed workflow does: code, models, constants, wiring."""
    digest = hashlib.sha256()
    for node in dag.nodes:
        digest.update(node.label.encode())
        if isinstance(node, InvocationNode):
            digest.update(node.model_fn.model_key.encode())
            if node.model_fn.gang > 1:  # results may depend on how an invocation is split
                digest.update(f"gang {node.model_fn.gang}".encode())
            digest.update(_plain(node.inputs).encode())
        else:
            function = inspect.unwrap(node.function)
            digest.update(f"{function.__module__}.{function.__qualname__}".encode())
            if isinstance(function, types.FunctionType):
                _add(digest, function, set())
            digest.update(_plain((node.args, node.kwargs)).encode())
    digest.update(repr(dag.result).encode())
    return digest.hexdigest()[:16]


def _add(digest: Any, value: Any, seen: set[int]) -> None:
    """Add a function with what it closes over and its defaults, or another value."""
    if isinstance(value, types.FunctionType):
        if id(value) in seen:
            return
        seen.add(id(value))
        _add_code(digest, value.__code__)
        cells = [_content(cell) for cell in value.__closure__ or ()]
        for part in (*cells, value.__defaults__, value.__kwdefaults__):
            _add(digest, part, seen)
        for reference in direct(value):
            inner = (
                inspect.unwrap(reference.value) if callable(reference.value) else reference.value
            )
            if followed(value, inner):
                for function in functions(inner):
                    _add(digest, function, seen)
            elif isinstance(inner, _CONSTANTS) or hasattr(inner, "__array__"):
                _add(digest, inner, seen)
    elif isinstance(value, property):
        for part in (value.fget, value.fset, value.fdel):
            _add(digest, part, seen)
    elif isinstance(value, cached_property):
        _add(digest, value.func, seen)
    elif type(value) in (list, tuple):
        for part in value:
            _add(digest, part, seen)
    elif type(value) is dict:
        for key, part in value.items():
            digest.update(repr(key).encode())
            _add(digest, part, seen)
    elif isinstance(value, (set, frozenset)):
        digest.update(repr(sorted(map(repr, value))).encode())
    elif isinstance(value, type):
        digest.update(f"{value.__module__}.{value.__qualname__}".encode())
    else:
        digest.update(_bytes(value))


def _content(cell: types.CellType) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # not assigned yet
        return None


def _bytes(value: Any) -> bytes:
    if isinstance(value, (str, int, float, complex, bytes, types.NoneType)):
        return repr(value).encode("utf-8", "surrogatepass")
    try:
        return pickle.dumps(value, protocol=5)
    except Exception:  # locks, modules and the like: only their kind counts
        return type(value).__qualname__.encode()


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
    if isinstance(value, (str, int, float, complex, bytes, types.NoneType, Ref, ParamRef)):
        return repr(value)
    # Representations leave things out (the middle of an array) or name addresses.
    return hashlib.sha256(_bytes(value)).hexdigest()
