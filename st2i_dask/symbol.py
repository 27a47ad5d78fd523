"""Symbolic values: what a workflow function handles while it is being composed.

A workflow runs once per combination of static parameters, with a `Trace` recording what is called.
ModelFns, glue and data parameters appear in it as `Symbol`s. A symbol has no value yet, so
everything that would need one is refused here, with the cure.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, NoReturn

from .errors import ComposeError

if TYPE_CHECKING:
    from .trace import Trace


@dataclass(frozen=True)
class ParamRef:
    """The value of a data parameter."""

    name: str


@dataclass(frozen=True)
class Ref:
    """One value made by a node: an output name of a ModelFn, an index of glue, or None: all of it."""

    node: int
    output: str | int | None = None


@dataclass(frozen=True)
class LaterRef:
    """A value that is bound after its first use."""

    number: int


Leaf = ParamRef | Ref | LaterRef


class Symbol:
    """A value that will exist when the workflow runs. Pass it on; do not look inside."""

    __slots__ = ("_label", "_leaf", "_trace")

    def __init__(self, trace: Trace, leaf: Leaf, label: str):
        self._trace = trace
        self._leaf = leaf
        self._label = label

    def __repr__(self) -> str:
        return f"<symbolic {self._label}>"

    def __reduce__(self) -> NoReturn:
        raise ComposeError(
            f"symbolic value {self._label} of workflow {self._trace.workflow!r} was used outside "
            "its workflow; only what the workflow returns leaves it"
        )

    def _refuse(self, what: str) -> NoReturn:
        raise ComposeError(
            f"workflow {self._trace.workflow!r}: {what} needs the value of {self._label}, which "
            "does not exist while composing; do it in a @st2i.glue function, or, if it is a "
            "parameter that steers the workflow, declare it st2i.Static[...]"
        )

    def __bool__(self) -> NoReturn:
        self._refuse("Python control flow (if, while, and, or, not)")

    def __iter__(self) -> NoReturn:
        self._refuse("iteration or unpacking (for glue: @st2i.glue(outputs=n))")

    def __len__(self) -> NoReturn:
        self._refuse("len()")

    def __index__(self) -> NoReturn:
        self._refuse("range() or indexing")

    def __int__(self) -> NoReturn:
        self._refuse("int()")

    def __float__(self) -> NoReturn:
        self._refuse("float()")

    def __complex__(self) -> NoReturn:
        self._refuse("complex()")

    def __str__(self) -> NoReturn:
        # A prompt would be made of it without a word.
        self._refuse("str() (repr() shows what it is)")

    def __fspath__(self) -> NoReturn:
        self._refuse("a path")

    def __format__(self, spec: str) -> NoReturn:
        self._refuse("string formatting")

    def __eq__(self, other: object) -> NoReturn:
        self._refuse("a comparison")

    def __contains__(self, item: object) -> NoReturn:
        self._refuse("'in'")

    def __hash__(self) -> int:
        return id(self)

    def __getattr__(self, name: str) -> Symbol:
        if name.startswith("__"):  # protocol probes of libraries
            raise AttributeError(name)
        if isinstance(self._leaf, Ref) and self._leaf.output == name:
            return self  # the only output, by its name
        self._refuse(f"attribute .{name}")

    def _operator(self, *_: object) -> NoReturn:
        self._refuse("an operator")

    def __call__(self, *_: object, **__: object) -> NoReturn:
        self._refuse("a call")

    def __array__(self, *_: object, **__: object) -> NoReturn:
        self._refuse("an array")

    __lt__ = __le__ = __gt__ = __ge__ = _operator
    __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = _operator
    __truediv__ = __rtruediv__ = __floordiv__ = __rfloordiv__ = __mod__ = __rmod__ = _operator
    __divmod__ = __rdivmod__ = __pow__ = __rpow__ = __matmul__ = __rmatmul__ = _operator
    __and__ = __rand__ = __or__ = __ror__ = __xor__ = __rxor__ = _operator
    __lshift__ = __rlshift__ = __rshift__ = __rrshift__ = _operator
    __neg__ = __pos__ = __abs__ = __invert__ = __round__ = _operator
    __getitem__ = __setitem__ = __delitem__ = _operator


class Outputs:
    """The outputs of an invocation with several: by attribute, by name, or unpacked in order."""

    def __init__(self, label: str, symbols: Mapping[str, Symbol]):
        self._label = label
        self._symbols = dict(symbols)

    def __getitem__(self, name: str) -> Symbol:
        try:
            return self._symbols[name]
        except KeyError:
            raise ComposeError(
                f"{self._label} declares no output {name!r}; it declares: "
                f"{', '.join(self._symbols)}"
            ) from None

    def __getattr__(self, name: str) -> Symbol:
        if name.startswith("_"):
            raise AttributeError(name)
        return self[name]

    def __iter__(self) -> Iterator[Symbol]:
        return iter(self._symbols.values())

    def __bool__(self) -> NoReturn:
        raise ComposeError(
            f"{self._label}: Python control flow needs its outputs, which do not exist while "
            "composing; do it in a @st2i.glue function"
        )
