"""What the policy is told. Every event carries `now`, seconds of one monotonic clock.

The policy never reads a clock. Events are checked when they are made: a nonsensical number is
refused before it can reach any state; they are not changed afterwards. `stimulus_id` is the cause as
Dask names it, for logs.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, TypeVar, dataclass_transform

from st2i_dask.errors import PolicyError
from st2i_dask.tenants import check_tenant

from .outline import Outline
from .settings import Settings

if TYPE_CHECKING:
    from .cost_model import CostModel

_Class = TypeVar("_Class")
_ENDLESS = math.inf


@dataclass_transform(frozen_default=True, field_specifiers=(field,))
def fact(cls: type[_Class]) -> type[_Class]:
    """A dataclass that is frozen for the type checker only: at run time a frozen one takes four times
    as long to make, and an event is made for everything that happens."""
    return dataclass(slots=True)(cls)


def check_seconds(what: str, value: object) -> None:
    """PolicyError unless `value` is a finite number of seconds >= 0."""
    if type(value) is float and 0.0 <= value < _ENDLESS:
        return
    if type(value) is not int or value < 0:
        raise PolicyError(f"{what} is {value!r} s; give a finite number of seconds >= 0")


def check_bytes(what: str, value: object) -> None:
    """PolicyError unless `value` is a whole number of bytes >= 0."""
    if type(value) is not int or value < 0:
        raise PolicyError(f"{what} is {value!r} bytes; give a whole number >= 0")


def check_missing(missing: Mapping[str, float]) -> None:
    """PolicyError unless every share of a model that still has to be loaded is in [0, 1]."""
    for model, share in missing.items():
        if not 0.0 <= share <= 1.0:
            raise PolicyError(
                f"missing share of model {model!r} is {share!r}; allowed: 0 (resident) to 1 (absent)"
            )


@fact
class Measured:
    """Device seconds that an invocation really used, kept apart by what they were spent on."""

    load_s: float = 0.0
    compute_s: float = 0.0
    transfer_s: float = 0.0

    def __post_init__(self) -> None:
        check_seconds("measured load", self.load_s)
        check_seconds("measured compute", self.compute_s)
        check_seconds("measured transfer", self.transfer_s)

    @property
    def total_s(self) -> float:
        """What a tenant is charged: load + compute + transfer (paper section 6)."""
        return self.load_s + self.compute_s + self.transfer_s


@fact
class Event:
    """Something happened at `now` (seconds)."""

    now: float
    stimulus_id: str = field(default="", kw_only=True)

    def __post_init__(self) -> None:
        check_seconds("event time now", self.now)


@fact
class ExecutorJoined(Event):
    """A worker is there, idle, with `free_bytes` of device memory and these models.

    `missing` maps a model to the share of it that still has to be loaded (0 = all resident);
    models not named are absent.
    """

    executor: str
    free_bytes: int = 0
    missing: Mapping[str, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        check_seconds("event time now", self.now)
        check_bytes("free device memory", self.free_bytes)
        check_missing(self.missing)


@fact
class ExecutorLeft(Event):
    """A worker is gone. Whatever ran there is lost: no separate `Lost` is needed."""

    executor: str


@fact
class ExecutorBusy(Event):
    """Something that is no ModelFn (a plain Dask task) took the executor."""

    executor: str


@fact
class ExecutorIdle(Event):
    """Nothing that is no ModelFn runs there any more; also ends a cancelled run there."""

    executor: str


@fact
class ResidencyReported(Event):
    """What is resident on an executor now; replaces what was known."""

    executor: str
    missing: Mapping[str, float]
    free_bytes: int

    def __post_init__(self) -> None:
        check_seconds("event time now", self.now)
        check_bytes("free device memory", self.free_bytes)
        check_missing(self.missing)


@fact
class RequestSubmitted(Event):
    """A tenant asks for one run of a workflow. Refused over the tenant's cap."""

    request: str
    tenant: str
    outline: Outline

    def __post_init__(self) -> None:
        check_seconds("event time now", self.now)
        check_tenant(self.tenant)


@fact
class RequestClosed(Event):
    """Nobody wants the request any more (result fetched, failed or cancelled): forget it.

    What is queued is dropped; what runs is cancelled (see `Cancelled`).
    """

    request: str


@fact
class InvocationReady(Event):
    """All ordinary inputs of the invocation exist.

    `input_bytes` is their size, `input_at` how many of these bytes each executor already holds.
    `steps`: how many consecutive denoising steps it can run as one task, at least 1.
    """

    key: str
    request: str
    position: int
    input_bytes: int = 0
    input_at: Mapping[str, int] = field(default_factory=dict)
    steps: int = 1

    def __post_init__(self) -> None:
        check_seconds("event time now", self.now)
        check_bytes("input size", self.input_bytes)
        if type(self.steps) is not int or self.steps < 1:
            raise PolicyError(f"{self.key}: steps is {self.steps!r}; give a whole number >= 1")


@fact
class InvocationUnready(Event):
    """A queued invocation cannot run after all: one of its inputs was lost."""

    key: str


@fact
class Completed(Event):
    """The invocation ran. `missing` and `free_bytes` report residency if the worker sent it.

    `steps`: how many denoising steps it did. `finished` False: it handed back early (yield) and
    will become ready again for the rest. `members`: how many of its gang took part, None: all.
    """

    key: str
    used: Measured
    missing: Mapping[str, float] | None = None
    free_bytes: int | None = None
    steps: int = 1
    finished: bool = True
    members: int | None = None

    def __post_init__(self) -> None:
        check_seconds("event time now", self.now)
        if self.missing is not None:
            check_missing(self.missing)
        if self.free_bytes is not None:
            check_bytes("free device memory", self.free_bytes)
        if self.members is not None and (type(self.members) is not int or self.members < 0):
            raise PolicyError(f"{self.key}: members is {self.members!r}; give a whole number >= 0")
        if type(self.steps) is not int or self.steps < 1:
            raise PolicyError(f"{self.key}: steps is {self.steps!r}; give a whole number >= 1")


@fact
class Failed(Event):
    """The invocation raised: it and everything downstream will not run. `used` None: elapsed."""

    key: str
    used: Measured | None = None


@fact
class Lost(Event):
    """A running invocation came back without a result (rescheduled): it will be ready again."""

    key: str
    used: Measured | None = None


@fact
class Cancelled(Event):
    """Nobody wants this invocation any more.

    A running thread cannot be stopped: unless `stopped`, its executor stays occupied and its
    tenant charged until `Drained`, `ExecutorIdle` or `ExecutorLeft` ends it.
    """

    key: str
    stopped: bool = False


@fact
class Drained(Event):
    """The cancelled invocation on this executor has really ended. `used` None: elapsed time."""

    executor: str
    used: Measured | None = None


@fact
class Skipped(Event):
    """These positions need no run: their results exist, or another task computed them."""

    request: str
    positions: tuple[int, ...]


@fact
class ResultLost(Event):
    """The result at this position is gone with its executor, and still wanted."""

    key: str
    request: str
    position: int


@fact
class SettingsChanged(Event):
    """The operator changed settings; they hold from the next decision on."""

    settings: Settings


@fact
class CostsReplaced(Event):
    """The operator put costs that were learned elsewhere in the place of those learned here."""

    costs: CostModel
