"""One point of an experiment: a system, a workload, a load. Many of them, on all cores."""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from typing import TypeVar

from . import generate, h800
from .cluster import Cluster
from .profiles import Profile
from .systems import System
from .workload import EXECUTORS, setting

Asked = TypeVar("Asked")
Found = TypeVar("Found")

#: Multiples of the solo latency that attainment is asked for at.
SLO_SCALES = (1.5, 2.0, 3.0, 4.0, 6.0, 8.0, 12.0, 16.0, 24.0)
DEFAULT_SLO = 3.0
#: Share of a run at its start that does not count: memory fills.
WARM_UP = 0.15


@dataclass(frozen=True)
class Point:
    """What is run. rate, cv_scale: as the paper scales them. seconds: of arrivals."""

    system: System
    setting: str
    rate: float = 1.0
    executors: int = EXECUTORS
    cv_scale: float = 1.0
    seconds: float = 240.0
    seed: int = 1
    profile: Profile = h800.PROFILE

    def at(self, **changes: object) -> Point:
        return replace(self, **changes)  # type: ignore[arg-type]


@dataclass(frozen=True)
class Outcome:
    """What came out. attained: by SLO scale. accelerated: runs that hardly waited for a load."""

    point: Point
    attained: dict[float, float]
    p50_s: float
    p99_s: float
    memory_share: float
    accelerated: float
    busy: float
    loaded_gb_per_request: float
    dispatches: int
    cpu_s: float

    @property
    def attainment(self) -> float:
        """At the default SLO scale."""
        return self.attained[DEFAULT_SLO]


def measure(point: Point) -> Outcome:
    """Simulate it."""
    workload = setting(point.setting, point.seed, point.profile)
    arrivals = generate.evaluation(
        workload, workload.rate(point.rate), point.seconds, point.seed, point.cv_scale
    )
    cluster = Cluster(point.system, workload, point.executors, seed=point.seed)
    report = cluster.run(arrivals)
    solo_s = {t: w.device_s(point.profile) for t, w in workload.workflows.items()}
    since = WARM_UP * point.seconds
    return Outcome(
        point,
        {scale: report.attainment(solo_s, scale, since) for scale in SLO_SCALES},
        report.latency_s(0.5),
        report.latency_s(0.99),
        report.memory_share,
        report.accelerated,
        report.busy,
        report.loaded_bytes / 1e9 / max(1, report.arrived),
        report.dispatches,
        report.cpu_s,
    )


def spread(
    work: Callable[[Asked], Found], asked: Iterable[Asked], processes: int | None = None
) -> list[Found]:
    """`work` of each, in order, in several processes unless there is one core or one to do."""
    todo: Sequence[Asked] = list(asked)
    processes = min(len(todo), processes or os.cpu_count() or 1)
    if processes < 2:
        return [work(one) for one in todo]
    with ProcessPoolExecutor(processes, multiprocessing.get_context("spawn")) as pool:
        return list(pool.map(work, todo))
