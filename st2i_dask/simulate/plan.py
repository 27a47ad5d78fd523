"""How many executors a workload needs: the smallest number that attains a target, and the curve."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from ..errors import ParameterError
from .cluster import Cluster
from .systems import OURS, System
from .tasks import Arrival
from .workload import Workload

MOST = 1024


@dataclass(frozen=True)
class Size:
    """What that many executors of that memory attain. missed: requests beyond their deadline, by
    workflow."""

    executors: int
    memory_bytes: int
    attainment: float
    p99_s: float
    busy: float
    missed: Mapping[str, int]


@dataclass(frozen=True)
class Plan:
    """needed: the fewest executors that reach the target; None: not even `MOST` do. By workflow:
    alone_s, the latency that deadlines are multiples of, and cold_s, that of one that finds nothing
    loaded."""

    memory_bytes: int
    needed: int | None
    curve: tuple[Size, ...]
    alone_s: Mapping[str, float]
    cold_s: Mapping[str, float]

    @property
    def best(self) -> Size:
        """The smallest one that attains most."""
        return max(self.curve, key=lambda size: (size.attainment, -size.executors))


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
    solo_s = alone(workload, system)  # the same deadlines, whatever the memory
    found = []
    for memory in memories or (workload.profile.memory_bytes,):
        load = workload.on(workload.profile.with_memory(memory))
        sizes: dict[int, Size] = {}

        def reaches(executors: int, load: Workload = load, sizes: dict[int, Size] = sizes) -> bool:
            if executors not in sizes:
                size = measured(load, arrivals, executors, slo_scale, system, solo_s)
                sizes[executors] = size
                note(size)
            return sizes[executors].attainment >= target

        low, high = 0, 1
        while high <= MOST and not reaches(high):
            low, high = high, 2 * high
        while high <= MOST and high - low > 1:
            middle = (low + high) // 2
            low, high = (low, middle) if reaches(middle) else (middle, high)
        needed = high if high <= MOST else None
        curve = tuple(size for _, size in sorted(sizes.items()))
        names = {tenant: workflow.name for tenant, workflow in workload.workflows.items()}
        alone_s = {names[tenant]: one for tenant, one in solo_s.items()}
        cold_s = {names[tenant]: one for tenant, one in _cold(load, system).items()}
        found.append(Plan(memory, needed, curve, alone_s, cold_s))
    return found


def measured(
    workload: Workload,
    arrivals: Sequence[Arrival],
    executors: int,
    slo_scale: float,
    system: System = OURS,
    solo_s: Mapping[str, float] | None = None,
) -> Size:
    """Simulate it. solo_s: what `alone` gave, where it is known."""
    profile = workload.profile
    report = Cluster(system, workload, executors).run(arrivals)
    solo_s = alone(workload, system) if solo_s is None else solo_s
    # What a request takes beside the cluster is part of its latency, and of the deadline.
    inside_s = {tenant: one - profile.request_s / slo_scale for tenant, one in solo_s.items()}
    attained = report.attainment(inside_s, slo_scale)
    p99_s = report.latency_s(0.99) + profile.request_s
    missed = Counter(workload.workflows[arrival.tenant].name for arrival in arrivals)
    missed.subtract(
        workload.workflows[f.tenant].name
        for f in report.finished
        if f.latency_s <= slo_scale * inside_s[f.tenant]
    )
    return Size(executors, profile.memory_bytes, attained, p99_s, report.busy, dict(+missed))


def alone(workload: Workload, system: System = OURS) -> dict[str, float]:
    """By tenant, seconds of a request that is alone on two executors and finds its models loaded, as far
    as they fit."""
    return _latencies(workload, system, 2)


def _cold(workload: Workload, system: System) -> dict[str, float]:
    """By tenant, seconds of a request that is alone on two executors and finds nothing loaded."""
    return _latencies(workload, system, 1)


def _latencies(workload: Workload, system: System, requests: int) -> dict[str, float]:
    """By tenant, of the last of so many requests that do not meet."""
    found = {}
    for tenant, workflow in workload.workflows.items():
        single = Workload(workload.name, workload.profile, {tenant: workflow}, {tenant: 1.0})
        far = 1e6  # the one before is over, and has loaded
        report = Cluster(system, single, 2).run([Arrival(n * far, tenant) for n in range(requests)])
        found[tenant] = report.finished[-1].latency_s + workload.profile.request_s
    return found
