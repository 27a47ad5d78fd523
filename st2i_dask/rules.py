"""Rules: limits on a parameter's value, checked at submit and shown by `st2i workflows`.

They go into `Annotated`: `num_steps: Annotated[int, Range(1, 1000)] = 4`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Protocol, runtime_checkable

from .errors import ParameterError
from .quoting import quoted

NOTHING: Mapping[str, Any] = MappingProxyType({})


class Rule(Protocol):
    """A limit on a parameter's value. `check` raises ParameterError naming `name`.

    values: all parameters of the request by name, for rules that depend on another one.
    """

    def check(self, name: str, value: Any, values: Mapping[str, Any]) -> None: ...

    def describe(self) -> str: ...


@runtime_checkable
class Carrier(Rule, Protocol):
    """A rule that also says in what form an allowed value goes to workers (an image as an array)."""

    def carry(self, name: str, value: Any, values: Mapping[str, Any]) -> Any:
        """The form that is sent: plain and picklable. Called after every `check` has passed."""
        ...


@dataclass(frozen=True)
class Range:
    """Inclusive numeric limits."""

    minimum: float
    maximum: float

    def check(self, name: str, value: Any, values: Mapping[str, Any] = NOTHING) -> None:
        # Written so that NaN fails: every comparison with it is false.
        if not self.minimum <= value <= self.maximum:
            raise ParameterError(
                f"{name}={quoted(value)} is out of range; allowed: {self.describe()}"
            )

    def describe(self) -> str:
        return f"{_number(self.minimum)} to {_number(self.maximum)}"


@dataclass(frozen=True)
class Multiple:
    """A size in pixels: a multiple of `of` between `minimum` and `maximum`, both included."""

    of: int
    minimum: int
    maximum: int

    def check(self, name: str, value: Any, values: Mapping[str, Any] = NOTHING) -> None:
        if value % self.of or not self.minimum <= value <= self.maximum:
            lowest = -(-self.minimum // self.of) * self.of
            highest = self.maximum // self.of * self.of
            nearest = min(max((value + self.of // 2) // self.of * self.of, lowest), highest)
            raise ParameterError(
                f"{name}={quoted(value)} is not an allowed size; allowed: multiples of {self.of} from "
                f"{self.minimum} to {self.maximum}; nearest: {nearest}"
            )

    def describe(self) -> str:
        return f"multiple of {self.of}, {self.minimum} to {self.maximum}"


@dataclass(frozen=True)
class OneOf:
    """A closed list of values."""

    values: tuple[Any, ...]

    def check(self, name: str, value: Any, values: Mapping[str, Any] = NOTHING) -> None:
        if value not in self.values:
            raise ParameterError(f"{name}={quoted(value)} is not one of {list(self.values)}")

    def describe(self) -> str:
        return "one of " + ", ".join(map(str, self.values))


@dataclass(frozen=True)
class Prompt:
    """Text that must say something. `count`, if given, is the model's own measure of length.

    may_be_empty: of a text that may say nothing, as a negative prompt does.
    max_chars: limit in characters, checked first (it bounds the cost of tokenising).
    max_tokens, count: limit in tokens (or the name of the parameter that holds it) and the function
    that counts them; a longer prompt would be cut off silently by the pipeline, so it is refused.
    """

    max_chars: int = 10_000
    max_tokens: int | str | None = None
    count: Callable[[str], int] | None = None
    may_be_empty: bool = False

    def check(self, name: str, value: Any, values: Mapping[str, Any] = NOTHING) -> None:
        if not isinstance(value, str):
            raise ParameterError(f"{name}={quoted(value)} is not text; give a string")
        if not self.may_be_empty and not value.strip():
            raise ParameterError(f"{name}={quoted(value)} is empty; say what the picture shows")
        if len(value) > self.max_chars:
            raise ParameterError(
                f"{name} is too long: {len(value)} characters, limit {self.max_chars}; shorten it"
            )
        try:
            value.encode()
        except UnicodeEncodeError as error:
            raise ParameterError(
                f"{name} holds {value[error.start]!r} at position {error.start}, half of a "
                "surrogate pair and no character; decode the text again or remove it"
            ) from None
        if self.max_tokens is not None and self.count is not None:
            tokens = self.count(value)
            limit: Any = self.max_tokens
            if isinstance(limit, str):
                limit = values.get(limit)
            if limit is not None and tokens > limit:
                raise ParameterError(
                    f"{name} is too long: {tokens} tokens, limit {limit}; shorten it, "
                    f"the model would not see its end: ...{value[-40:]!r}"
                )

    def describe(self) -> str:
        if self.max_tokens is None:
            return f"{self.max_chars} characters"
        return f"at most {self.max_tokens} tokens"


def _number(value: float) -> str:
    """Whole numbers with every digit: a limit must not be rounded."""
    return str(value) if isinstance(value, int) else f"{value:g}"
