"""Recording a composition: which ModelFns and glue were called, with which values."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from .errors import ComposeError
from .symbol import LaterRef, Outputs, ParamRef, Ref, Symbol

if TYPE_CHECKING:
    from .model_fn import ModelFn


@dataclass
class InvocationNode:
    """One ModelFn call."""

    index: int
    label: str
    model_fn: ModelFn
    inputs: dict[str, Any]  # trees of constants and leaves


@dataclass
class GlueNode:
    """One call of a glue function."""

    index: int
    label: str
    function: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    outputs: int | None


Node = InvocationNode | GlueNode


class LaterSymbol(Symbol):
    """A symbol that may be used before it is bound: see `later`."""

    __slots__ = ()

    def bind(self, value: Any) -> None:
        """Say what the value is. Once."""
        assert isinstance(self._leaf, LaterRef)
        self._trace.bind_later(self._leaf.number, value)


@dataclass
class Trace:
    """What one composition recorded, in calling order."""

    workflow: str
    nodes: list[Node] = field(default_factory=list)
    later_values: list[Any] = field(default_factory=list)
    _counts: dict[str, int] = field(default_factory=dict)

    UNBOUND = object()

    def _label(self, name: str) -> str:
        count = self._counts[name] = self._counts.get(name, 0) + 1
        return f"{name}#{count}"

    def parameter(self, name: str) -> Symbol:
        return Symbol(self, ParamRef(name), f"parameter {name!r}")

    def later(self, name: str) -> LaterSymbol:
        self.later_values.append(self.UNBOUND)
        return LaterSymbol(self, LaterRef(len(self.later_values) - 1), f"later {name!r}")

    def bind_later(self, number: int, value: Any) -> None:
        if self.later_values[number] is not self.UNBOUND:
            raise ComposeError(f"workflow {self.workflow!r}: a later() value is bound twice")
        self.later_values[number] = self.lower(value, "later().bind")

    def add_invocation(
        self, model_fn: ModelFn, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Symbol | Outputs:
        label = self._label(model_fn.name)
        declared = model_fn.inputs
        known = f"it declares: {', '.join(declared) or 'no inputs'}"
        if len(args) > len(declared):
            raise ComposeError(
                f"workflow {self.workflow!r}: {label} got {len(args)} positional inputs; {known}"
            )
        given = dict(zip(declared, args, strict=False))
        for name, value in kwargs.items():
            if name not in declared:
                raise ComposeError(
                    f"workflow {self.workflow!r}: {label} has no input {name!r}; {known}"
                )
            if name in given:
                raise ComposeError(
                    f"workflow {self.workflow!r}: {label} got input {name!r} twice; pass it once"
                )
            given[name] = value
        missing = [n for n, spec in declared.items() if n not in given and not spec.optional]
        if missing:
            raise ComposeError(
                f"workflow {self.workflow!r}: {label} misses input {missing[0]!r}; pass it, or "
                f"declare it optional; {known}"
            )
        node = InvocationNode(
            len(self.nodes),
            label,
            model_fn,
            {name: self.lower(value, label) for name, value in given.items()},
        )
        self.nodes.append(node)
        symbols = {
            name: Symbol(self, Ref(node.index, name), f"{label}.{name}")
            for name in model_fn.outputs
        }
        if len(symbols) == 1:
            return next(iter(symbols.values()))
        return Outputs(f"workflow {self.workflow!r}: {label}", symbols)

    def add_glue(
        self,
        function: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        outputs: int | None,
    ) -> Symbol | tuple[Symbol, ...]:
        label = self._label(getattr(function, "__name__", "glue"))
        try:
            inspect.signature(function).bind(*args, **kwargs)
        except TypeError as error:
            raise ComposeError(
                f"workflow {self.workflow!r}: glue {label} cannot be called like this: {error}; "
                f"it takes {inspect.signature(function)}"
            ) from None
        except ValueError:  # a builtin that does not tell
            pass
        node = GlueNode(
            len(self.nodes),
            label,
            function,
            tuple(self.lower(value, label) for value in args),
            {name: self.lower(value, label) for name, value in kwargs.items()},
            outputs,
        )
        self.nodes.append(node)
        if outputs is None:
            return Symbol(self, Ref(node.index), label)
        return tuple(Symbol(self, Ref(node.index, i), f"{label}[{i}]") for i in range(outputs))

    def lower(self, value: Any, label: str) -> Any:
        """The argument tree with symbols replaced by their leaves."""
        if isinstance(value, Symbol):
            if value._trace is not self:
                raise ComposeError(
                    f"workflow {self.workflow!r}: {label} uses {value._label} of workflow "
                    f"{value._trace.workflow!r}, outside the composition that made it; pass it "
                    "through parameters or call the other workflow inside this one"
                )
            return value._leaf
        if isinstance(value, Outputs):
            raise ComposeError(
                f"{value._label} has several outputs; pass one of them to {label}: "
                f"{', '.join(value._symbols)}"
            )
        if type(value) in (list, tuple):
            return type(value)(self.lower(item, label) for item in value)
        if type(value) is dict:
            return {key: self.lower(item, label) for key, item in value.items()}
        return value


_current: ContextVar[Trace | None] = ContextVar("st2i_trace", default=None)


def current_trace() -> Trace | None:
    """The composition in progress in this thread, if any."""
    return _current.get()


@contextmanager
def tracing(trace: Trace) -> Iterator[Trace]:
    token = _current.set(trace)
    try:
        yield trace
    finally:
        _current.reset(token)


def later(name: str = "value") -> LaterSymbol:
    """A symbolic value that is used first and bound afterwards, with `.bind(value)`.

    Lets a workflow name a consumer before its producer; the order of execution follows from inputs
    and outputs alone.
    """
    trace = _current.get()
    if trace is None:
        raise ComposeError("st2i.later() was called outside a workflow")
    return trace.later(name)
