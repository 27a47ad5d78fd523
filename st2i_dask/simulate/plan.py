"""How many executors a workload needs: the smallest number that attains a target, and the curve."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from ..errors import ParameterError
from .cluster import Cluster
from .systems import OURS, System
from .tasks import Arrival
from .workload import Workload

MOST = 1024


@dataclass(frozen=True)
class Size:
    """What that many executors of that memory attain."""

    executors: int
    memory_bytes: int
    attainment: float
    p99_s: float
    busy: float


@dataclass(frozen=True)
class Plan:
    """needed: the fewest executors that reach the target; None: not even `MOST` do."""

    memory_bytes: int
    needed: int | None
    curve: tuple[Size, ...]


def plan(
    workload: Workload,
    arrivals: Sequence[Arrival],
    *,
    slo_scale: float,
    target: float,
    memories: Sequence[int] = (),
    system: System = OURS,
    note: Callable[[Size], None] = lambda size: None,
) -> list[Plan]:
    """One for each memory size, the profile's own if none is given. Doubles, then halves the gap."""
    if not 0 < target <= 1:
        raise ParameterError(f"target is {target!r}; give a share above 0 and up to 1, such as 0.9")
    if not slo_scale > 1:
        raise ParameterError(f"slo is {slo_scale!r}; give a multiple of the solo latency above 1")
    if not arrivals:
        raise ParameterError("the trace has no request of a tenant of the workload")
    found = []
    for memory in memories or (workload.profile.memory_bytes,):
        load = workload.on(workload.profile.with_memory(memory))
        sizes: dict[int, Size] = {}

        def reaches(executors: int, load: Workload = load, sizes: dict[int, Size] = sizes) -> bool:
            if executors not in sizes:
                sizes[executors] = measured(load, arrivals, executors, slo_scale, system)
                note(sizes[executors])
            return sizes[executors].attainment >= target

        low, high = 0, 1
        while high <= MOST and not reaches(high):
            low, high = high, 2 * high
        while high <= MOST and high - low > 1:
            middle = (low + high) // 2
            low, high = (low, middle) if reaches(middle) else (middle, high)
        needed = high if high <= MOST else None
        found.append(Plan(memory, needed, tuple(size for _, size in sorted(sizes.items()))))
    return found


def measured(
    workload: Workload,
    arrivals: Sequence[Arrival],
    executors: int,
    slo_scale: float,
    system: System = OURS,
) -> Size:
    """Simulate it."""
    report = Cluster(system, workload, executors).run(arrivals)
    solo_s = {t: w.device_s(workload.profile) for t, w in workload.workflows.items()}
    attained = report.attainment(solo_s, slo_scale)
    memory = workload.profile.memory_bytes
    return Size(executors, memory, attained, report.latency_s(0.99), report.busy)
