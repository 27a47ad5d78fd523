"""What executors in virtual time run: real costs, requests, and what became of each dispatch."""

from __future__ import annotations

import random
from dataclasses import dataclass, field

from scheduler_plugin.instructions import Dispatch
from scheduler_plugin.outline import CostKey, Outline


@dataclass
class Truth:
    """Real seconds. `noise` (0 to 1): runs deviate by up to this factor, up or down."""

    compute: dict[str, float] = field(default_factory=dict)  # by model
    load: dict[str, float] = field(default_factory=dict)  # by model, from scratch
    transfer: float = 0.0
    noise: float = 0.0
    held: int = 1000  # models an executor can hold
    warm: tuple[str, ...] = ()  # models resident when an executor joins
    shared: float = 0.8  # part of compute that a gang divides among its executors

    def compute_s(self, key: CostKey, rng: random.Random, group: int = 1) -> float:
        factor = (1.0 + self.noise * rng.random()) ** rng.choice((-1, 1)) if self.noise else 1.0
        return self.compute[key.model] * self.of_gang(group) * factor

    def of_gang(self, group: int) -> float:
        """Seconds of each of so many executors, for every second of one alone."""
        return 1.0 - self.shared + self.shared / group


@dataclass
class Ran:
    """One dispatch and what became of it. Estimates and `used`: device seconds of all its executors."""

    tenant: str
    request: str
    position: int
    executor: str
    dispatched: float
    estimates: list[float]
    weight: float
    steps: int
    ended: float = -1.0
    used: float = 0.0
    outcome: str = ""
    members: tuple[str, ...] = ()

    @property
    def error(self) -> float:
        """Largest error of its estimate while in flight, vTime seconds."""
        return max(abs(self.used - e) for e in self.estimates) / self.weight


@dataclass
class Job:
    """A request: submitted, finished or not."""

    name: str
    tenant: str
    outline: Outline
    submitted: float
    steps: dict[int, int]
    finished: float | None = None
    closed: bool = False


@dataclass
class Run:
    """One dispatch that is under way. Seconds of the leader; share: of its model that must be loaded."""

    decision: Dispatch
    record: Ran
    load_s: float
    transfer_s: float
    step_s: float
    share: float
    done: int = 0
    yielding: bool = False
    cancelled: bool = False
    gone: bool = False
    unblocked: bool = False
    # Members: None while it holds them, then the seconds from the dispatch until they left.
    held: dict[str, float | None] = field(default_factory=dict)

    def device_s(self, seconds: float) -> float:
        """Counted for every executor it holds, and for those it has lost until then."""
        return seconds + sum(
            seconds if served is None else min(seconds, served) for served in self.held.values()
        )
