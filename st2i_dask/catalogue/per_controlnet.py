"""Parameters that are lists with one value for each of several ControlNets."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ..errors import ParameterError
from ..glue import glue
from ..rules import NOTHING, Range


@dataclass(frozen=True)
class Scales:
    """Rule: one number for each ControlNet; one without a list is for all."""

    count: int
    minimum: float = -10
    maximum: float = 10

    def check(self, name: str, value: Any, values: Mapping[str, Any] = NOTHING) -> None:
        for number, scale in enumerate(_listed(name, value, self.count, self.describe())):
            where = f"{name}[{number}]" if _is_list(value) else name
            if isinstance(scale, (str, bytes, bool)) or not hasattr(scale, "__float__"):
                raise ParameterError(
                    f"{where}={scale!r} has type {type(scale).__name__}, wanted {self.describe()}"
                )
            Range(self.minimum, self.maximum).check(where, float(scale))

    def carry(self, name: str, value: Any, values: Mapping[str, Any]) -> list[float]:
        return [float(scale) for scale in _listed(name, value, self.count, self.describe())]

    def describe(self) -> str:
        return f"a list of {self.count} numbers, {self.minimum:g} to {self.maximum:g}"


@dataclass(frozen=True)
class Bounds(Scales):
    """Rule: after which share of the steps each ControlNet begins or ends, one number or a list."""

    minimum: float = 0
    maximum: float = 1

    def carry(self, name: str, value: Any, values: Mapping[str, Any]) -> Any:
        made = tuple(super().carry(name, value, values))
        return made if _is_list(value) else made[0]


def windows(start: Any, end: Any, count: int) -> list[tuple[float, float]]:
    """Of each ControlNet, from what `Bounds` carried: the shares of the steps where it begins and ends."""
    first, last = (v if isinstance(v, tuple) else (v,) * count for v in (start, end))
    return list(zip(first, last, strict=True))


def is_inside(window: tuple[float, float], step: int, num_steps: int) -> bool:
    """As the pipelines compare, which scale by zero what is outside. step: 0 is the first one taken."""
    return not (step / num_steps < window[0] or (step + 1) / num_steps > window[1])


@dataclass(frozen=True)
class Modes:
    """Rule: what each ControlNet is given a picture of, by number; None for one without modes.

    limits: how many modes each has.
    """

    limits: tuple[int | None, ...]

    def check(self, name: str, value: Any, values: Mapping[str, Any] = NOTHING) -> None:
        if not _is_list(value) or len(value) != len(self.limits):
            raise ParameterError(f"{name}={value!r} is not what is wanted: {self.describe()}")
        for number, (mode, limit) in enumerate(zip(value, self.limits, strict=True)):
            where = f"{name}[{number}]"
            if not limit:
                if mode is not None:
                    raise ParameterError(
                        f"{where}={mode!r}, but that ControlNet has no modes; give None"
                    )
            elif type(mode) is not int:
                raise ParameterError(
                    f"{where}={mode!r} has type {type(mode).__name__}, wanted int, 0 to {limit - 1}"
                )
            else:
                Range(0, limit - 1).check(where, mode)

    def describe(self) -> str:
        wanted = (f"0 to {limit - 1}" if limit else "None" for limit in self.limits)
        return f"a list of {', '.join(wanted)}"


@glue
def nth(values: list[Any], number: int) -> Any:
    """One ControlNet's value."""
    return values[number]


def _is_list(value: Any) -> bool:
    return isinstance(value, (list, tuple))


def _listed(name: str, value: Any, count: int, wanted: str) -> list[Any]:
    if not _is_list(value):
        return [value] * count
    if len(value) != count:
        raise ParameterError(f"{name} holds {len(value)} values, wanted {wanted}")
    return list(value)
