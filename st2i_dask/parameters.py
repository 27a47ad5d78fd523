"""A workflow's parameters: what may be submitted, and what is refused before anything is spent.

Two kinds:

* *static* parameters (steps, size, batch) may steer Python loops. They are bound when the workflow
  is composed; each combination has its own DAG.
* *data* parameters (prompt, seed, images, scales) stay symbolic: one DAG serves every value.

Without a marker, `int`, `bool` and `Literal[...]` parameters are static, everything else is data,
and `seed` is data. `Static[int]` and `Data[int]` say it explicitly; `Maybe[str | None]` is data whose
None is static: the workflow may ask whether it `is None`. A `seed` without annotation is an int, and a
`prompt: str` without rules is a `Prompt()`. Rules go into `Annotated`:

    def flux(prompt: Annotated[str, Prompt(max_chars=2000)],
             num_steps: Annotated[int, Range(1, 1000)] = 4): ...
"""

from __future__ import annotations

import difflib
import inspect
import operator
import types
import typing
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from enum import Enum
from typing import Annotated, Any, Literal, TypeVar, Union, get_args, get_origin

import cloudpickle

from .errors import ComposeError, ParameterError
from .quoting import quoted
from .rules import NOTHING, Carrier, Prompt, Range, Rule

T = TypeVar("T")


class Kind(Enum):
    STATIC = "static"
    DATA = "data"
    MAYBE = "data or none"


Static = Annotated[T, Kind.STATIC]
Data = Annotated[T, Kind.DATA]
Maybe = Annotated[T, Kind.MAYBE]


# torch.Generator.manual_seed takes exactly these.
SEED_RANGE = Range(-(2**63), 2**64 - 1)

# What `request`, `submit` and `map` take themselves.
RESERVED = frozenset({"self", "client", "prompts", "tenant", "previews"})

# Values that always pickle.
_PLAIN = (str, int, float, bool, types.NoneType)


@dataclass(frozen=True)
class Parameter:
    """One declared parameter of a workflow."""

    name: str
    kind: Kind
    annotation: Any  # a type, a union or Literal; inspect.Parameter.empty when not declared
    default: Any  # inspect.Parameter.empty when required
    rules: tuple[Rule, ...] = ()

    @property
    def required(self) -> bool:
        return self.default is inspect.Parameter.empty

    def check(self, value: Any) -> Any:
        """The value to use (ints and floats normalised), or ParameterError for its type."""
        value = self._check_type(value)
        if self.name == "seed" and type(value) is int:
            SEED_RANGE.check(self.name, value)
        if self.kind is not Kind.STATIC and type(value) not in _PLAIN and not self._carriers:
            self._check_sendable(value)
        return value

    @property
    def _carriers(self) -> list[Carrier]:
        return [rule for rule in self.rules if isinstance(rule, Carrier)]

    def carried(self, value: Any, values: Mapping[str, Any]) -> Any:
        """The form in which a value that every rule allows goes to workers."""
        if value is not None:
            for rule in self._carriers:
                value = rule.carry(self.name, value, values)
        return value

    def _check_sendable(self, value: Any) -> None:
        try:
            cloudpickle.dumps(value, protocol=5, buffer_callback=lambda buffer: None)
        except Exception as error:
            raise ParameterError(
                f"{self.name}={quoted(value)} cannot be sent to workers: {error}; pass plain "
                "values (numbers, strings, arrays, images) and open files or connections there"
            ) from error

    def check_rules(self, value: Any, values: Mapping[str, Any]) -> None:
        """ParameterError if a rule refuses the value; `values` are all parameters by name."""
        if value is None and self.required and self.annotation is Any and self.rules:
            wanted = " and ".join(rule.describe() for rule in self.rules)
            raise ParameterError(f"{self.name}=None, wanted {wanted}")
        if value is not None:
            for rule in self.rules:
                try:
                    rule.check(self.name, value, values)
                except TypeError:  # a rule about numbers, a parameter of any type
                    raise ParameterError(
                        f"{self.name}={quoted(value)} has type {type(value).__name__}, "
                        f"wanted {rule.describe()}"
                    ) from None

    def _check_type(self, value: Any) -> Any:
        if self.annotation is inspect.Parameter.empty or self.annotation is Any:
            return value
        choices = _alternatives(self.annotation)
        for choice in choices:
            ok, converted = _fits(choice, value)
            if ok:
                return converted
        wanted = " or ".join(map(_type_name, choices))
        raise ParameterError(
            f"{self.name}={quoted(value)} has type {type(value).__name__}, wanted {wanted}"
        )

    def describe(self) -> str:
        """One line for `st2i workflows`: type, default, rules."""
        parts = [" | ".join(map(_type_name, _alternatives(self.annotation)))]
        if not self.required:
            parts.append(f"default {self.default!r}")
        parts += [rule.describe() for rule in self.rules]
        return ", ".join(parts)


def declared(function: Callable[..., Any], owner: str) -> tuple[Parameter, ...]:
    """The parameters of an orchestrator function. ComposeError for *args, **kwargs or bad defaults."""
    try:
        hints = typing.get_type_hints(function, include_extras=True)
    except NameError as error:
        raise ComposeError(
            f"workflow {owner!r}: an annotation cannot be resolved ({error}); "
            "use types that are visible where the function is defined"
        ) from None
    found: list[Parameter] = []
    for parameter in inspect.signature(function).parameters.values():
        if parameter.kind not in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY):
            raise ComposeError(
                f"workflow {owner!r}: parameter {parameter.name!r} cannot be passed by its name; "
                "declare it without *, ** or /"
            )
        if parameter.name in RESERVED:
            raise ComposeError(
                f"workflow {owner!r}: parameter {parameter.name!r} has the name of an argument of "
                "submit or map; rename it"
            )
        annotation = hints.get(parameter.name, inspect.Parameter.empty)
        if parameter.name == "seed" and annotation is inspect.Parameter.empty:
            annotation = int if parameter.default is not None else int | None
        marks: tuple[Any, ...] = ()
        if get_origin(annotation) is Annotated:
            annotation, *rest = get_args(annotation)
            marks = tuple(rest)
        if any(get_origin(choice) is Annotated for choice in _alternatives(annotation)):
            raise ComposeError(
                f"workflow {owner!r}: the rules of parameter {parameter.name!r} are inside a "
                "union; put them around it: Annotated[int | None, Range(1, 4)]"
            )
        kinds = [mark for mark in marks if isinstance(mark, Kind)]
        rules: tuple[Rule, ...] = tuple(mark for mark in marks if hasattr(mark, "check"))
        if parameter.name == "prompt" and annotation is str and not rules:
            rules = (Prompt(),)
        found.append(
            Parameter(
                parameter.name,
                kinds[0] if kinds else _default_kind(parameter.name, annotation),
                annotation,
                parameter.default,
                rules,
            )
        )
    return tuple(_with_checked_default(made, owner) for made in found)


def _with_checked_default(made: Parameter, owner: str) -> Parameter:
    if made.required or made.default is None:
        return made
    try:
        default = made.check(made.default)
        made.check_rules(default, NOTHING)
    except ParameterError as error:
        raise ComposeError(f"workflow {owner!r}: the default is refused: {error}") from None
    return replace(made, default=default)


def bind(
    parameters: Iterable[Parameter], values: Mapping[str, Any], owner: str
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Checked values, split into (static, data), defaults filled in. ParameterError otherwise."""
    parameters = tuple(parameters)
    names = [parameter.name for parameter in parameters]
    for name in values:
        if name == "previews":  # of any workflow, and of one request
            raise ParameterError(
                f"workflow {owner!r}: previews are of single requests; ask for them where one is "
                "submitted: submit(client, ..., previews=2) for each prompt"
            )
        if name not in names:
            close = difflib.get_close_matches(name, names, n=1)
            hint = f"did you mean {close[0]!r}? " if close else ""
            raise ParameterError(
                f"workflow {owner!r} has no parameter {quoted(name)}; {hint}it takes: {', '.join(names)}"
            )
    bound: dict[str, Any] = {}
    try:
        for parameter in parameters:
            if parameter.name in values:
                bound[parameter.name] = parameter.check(values[parameter.name])
            elif parameter.required:
                raise ParameterError(
                    f"parameter {parameter.name!r} is missing; it takes: {', '.join(names)}"
                )
            else:
                bound[parameter.name] = parameter.default
        for parameter in parameters:
            parameter.check_rules(bound[parameter.name], bound)
        sent = {p.name: p.carried(bound[p.name], bound) for p in parameters}
    except ParameterError as error:
        raise ParameterError(f"workflow {owner!r}: {error}") from None
    static = {p.name: sent[p.name] for p in parameters if _is_static(p, sent[p.name])}
    return static, {name: value for name, value in sent.items() if name not in static}


def _is_static(parameter: Parameter, value: Any) -> bool:
    return parameter.kind is Kind.STATIC or (parameter.kind is Kind.MAYBE and value is None)


def _default_kind(name: str, annotation: Any) -> Kind:
    if name == "seed":
        return Kind.DATA
    kinds = _alternatives(annotation)
    if all(kind in (int, bool) or get_origin(kind) is Literal for kind in kinds):
        return Kind.STATIC
    return Kind.DATA


def _alternatives(annotation: Any) -> list[Any]:
    if get_origin(annotation) in (Union, types.UnionType):
        return [arg for arg in get_args(annotation) if arg is not types.NoneType] + (
            [None] if types.NoneType in get_args(annotation) else []
        )
    return [annotation]


def _fits(choice: Any, value: Any) -> tuple[bool, Any]:
    """Whether `value` is of type `choice`, and the plain value to carry."""
    if choice is None:
        return value is None, value
    if get_origin(choice) is Literal:
        # 1, 1.0 and True are equal, but only one of them is declared.
        return any(type(value) is type(arg) and value == arg for arg in get_args(choice)), value
    if choice in (int, float) and isinstance(value, bool):
        return False, value
    if choice is int:
        try:
            return True, operator.index(value)  # NumPy integers too, floats never
        except TypeError:
            return False, value
    if choice is float:
        try:
            return not isinstance(value, (str, bytes, bytearray)), float(value)
        except (TypeError, ValueError, OverflowError):
            return False, value
    plain = get_origin(choice) or choice
    return (isinstance(value, plain) if isinstance(plain, type) else True), value


def _type_name(choice: Any) -> str:
    if choice is inspect.Parameter.empty:
        return "any"
    if get_origin(choice) is Literal:
        return " | ".join(map(repr, get_args(choice)))
    return "None" if choice is None else getattr(choice, "__name__", str(choice))
