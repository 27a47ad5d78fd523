"""What an operator can set, with units and ranges. Immutable: a change is a new object.

>>> Settings(slack_s=2.0).with_changes(weights={"studio": 3.0}).weight("studio")
3.0
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from types import MappingProxyType
from typing import Any, NamedTuple

from st2i_dask.errors import PolicyError
from st2i_dask.tenants import check_tenant


class Row(NamedTuple):
    """One line of the settings table."""

    name: str
    value: str
    unit: str


@dataclass(frozen=True)
class Settings:
    """Operator settings of the fair scheduler; PolicyError on a value outside its range.

    slack_s: how far a tenant may be ahead of the least-served one and still be chosen, vTime s.
    default_weight, weights: a tenant's share is proportional to its weight.
    default_cap, caps: most requests of one tenant that wait without having started; None: no cap.
    steps_per_task: most denoising steps run as one task while no other tenant waits; one that comes
        waits for the step that runs, and a worker that dies loses the steps of its task.
    bandwidth: bytes per second assumed for a pull of which nothing was measured yet.
    """

    slack_s: float = 1.0
    default_weight: float = 1.0
    weights: Mapping[str, float] = field(default_factory=dict)
    default_cap: int | None = None
    caps: Mapping[str, int] = field(default_factory=dict)
    steps_per_task: int = 32
    bandwidth: float = 4e9

    def __post_init__(self) -> None:
        _check_number("slack_s", self.slack_s, low=0.0, open_low=False, unit="s")
        _check_number("default_weight", self.default_weight, low=0.0, open_low=True, unit="")
        _check_number("bandwidth", self.bandwidth, low=0.0, open_low=True, unit="bytes/s")
        for tenant, weight in self.weights.items():
            check_tenant(tenant)
            _check_number(f"weight of {tenant}", weight, low=0.0, open_low=True, unit="")
        if self.default_cap is not None:
            _check_count("default_cap", self.default_cap)
        for tenant, cap in self.caps.items():
            check_tenant(tenant)
            _check_count(f"cap of {tenant}", cap)
        _check_count("steps_per_task", self.steps_per_task)
        object.__setattr__(self, "weights", MappingProxyType(dict(self.weights)))
        object.__setattr__(self, "caps", MappingProxyType(dict(self.caps)))

    def __reduce__(self) -> tuple[Any, ...]:
        values = {f.name: getattr(self, f.name) for f in fields(self)}
        values["weights"], values["caps"] = dict(self.weights), dict(self.caps)
        return _restore, (values,)

    def weight(self, tenant: str) -> float:
        return self.weights.get(tenant, self.default_weight)

    def cap(self, tenant: str) -> int | None:
        """Most waiting requests of the tenant; None: no cap."""
        return self.caps.get(tenant, self.default_cap)

    def with_changes(self, **changes: Any) -> Settings:
        """A copy with some fields replaced. PolicyError names an unknown field."""
        known = [f.name for f in fields(self)]
        for name in changes:
            if name not in known:
                raise PolicyError(f"no setting is called {name!r}; there are {', '.join(known)}")
        return replace(self, **changes)

    def rows(self) -> list[Row]:
        """Every setting as (name, value, unit), for printing."""
        cap = "none" if self.default_cap is None else str(self.default_cap)
        return [
            Row("slack_s", f"{self.slack_s:g}", "s of vTime"),
            Row("default_weight", f"{self.default_weight:g}", "share"),
            *(Row(f"weight {t}", f"{w:g}", "share") for t, w in sorted(self.weights.items())),
            Row("default_cap", cap, "queued requests per tenant"),
            *(Row(f"cap {t}", str(c), "queued requests") for t, c in sorted(self.caps.items())),
            Row("steps_per_task", str(self.steps_per_task), "denoising steps"),
            Row("bandwidth", f"{self.bandwidth:g}", "bytes/s"),
        ]


def _restore(values: dict[str, Any]) -> Settings:
    return Settings(**values)


def _check_number(name: str, value: object, *, low: float, open_low: bool, unit: str) -> None:
    number = type(value) in (int, float)
    if (
        not number
        or not math.isfinite(value)  # type: ignore[arg-type]
        or value < low  # type: ignore[operator]
        or (open_low and value == low)
    ):
        allowed = f"{'above' if open_low else 'at least'} {low:g}{' ' + unit if unit else ''}"
        raise PolicyError(f"{name} is {value!r}; give a finite number {allowed}")


def _check_count(name: str, value: object) -> None:
    if type(value) is not int or value < 1:
        raise PolicyError(f"{name} is {value!r}; give a whole number of at least 1")
