"""What a simulation found."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple


class Finished(NamedTuple):
    """A request that is done. device_s: seconds of devices that it used, loads and pulls included."""

    request: str
    tenant: str
    arrived: float
    finished: float
    device_s: float

    @property
    def latency_s(self) -> float:
        return self.finished - self.arrived


class Ran(NamedTuple):
    """One task."""

    tenant: str
    request: str
    position: int
    executor: str
    started: float
    ended: float
    device_s: float


@dataclass
class Report:
    """Seconds are virtual but for `cpu_s`, of the core that simulated. service: device seconds by tenant, as the ledger has it.
    control_s: that executors waited from a decision to the start of what was decided."""

    system: str
    executors: int
    memory_bytes: int
    arrived: int = 0
    unfinished: int = 0
    finished: list[Finished] = field(default_factory=list)
    runs: list[Ran] = field(default_factory=list)
    service: dict[str, float] = field(default_factory=dict)
    seconds: float = 0.0
    device_s: float = 0.0
    stalled_s: float = 0.0
    transfer_s: float = 0.0
    control_s: float = 0.0
    dispatches: int = 0
    invocations: int = 0
    events: int = 0
    runs_whole: int = 0
    runs_hidden: int = 0
    loaded_bytes: int = 0
    weight_byte_s: float = 0.0
    cpu_s: float = 0.0

    def attainment(
        self, solo_s: Mapping[str, float], slo_scale: float, since: float = 0.0
    ) -> float:
        """Share of the requests that finished within that multiple of their tenant's solo latency; of
        those that arrived from `since` on. What has not finished has missed it."""
        asked = sum(f.arrived >= since for f in self.finished) + self.unfinished
        good = sum(
            f.latency_s <= slo_scale * solo_s[f.tenant] for f in self.finished if f.arrived >= since
        )
        return good / asked if asked else 1.0

    def latency_s(self, share: float) -> float:
        """Latency that this share of the finished requests stayed within, seconds."""
        if not self.finished:
            return float("inf")
        ordered = sorted(f.latency_s for f in self.finished)
        return ordered[min(len(ordered) - 1, int(share * len(ordered)))]

    @property
    def memory_share(self) -> float:
        """Average share of device memory that holds weights."""
        whole = self.executors * self.memory_bytes * self.seconds
        return self.weight_byte_s / whole if whole else 0.0

    @property
    def accelerated(self) -> float:
        """Share of runs that found enough of their model there to wait for less than a tenth of their
        compute."""
        return (self.runs_whole + self.runs_hidden) / max(1, self.dispatches)

    @property
    def busy(self) -> float:
        """Share of the executors' seconds that was charged to somebody."""
        return self.device_s / (self.executors * self.seconds) if self.seconds else 0.0
