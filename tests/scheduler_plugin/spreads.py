"""How far apart two tenants' service may be, and how far it was: the bound, from what was charged."""

from __future__ import annotations

from dataclasses import dataclass

from .virtual_cluster import Ran, VirtualCluster


@dataclass
class Spread:
    """Worst case over all intervals in which two tenants were both eligible-backlogged."""

    pair: tuple[str, str] = ("", "")
    difference: float = 0.0
    error: float = 0.0
    gap: float = 0.0  # |v_f - v_g| when the interval began
    excess: float = -1e9  # above 0: the bound is broken
    intervals: int = 0
    indebted: int = 0  # intervals that began with more than slack + L_max + errors between the two


@dataclass
class _Interval:
    gap: float
    doubt: float  # error of estimates in flight, or settled at this very time, when it began
    low: float
    high: float
    error: float


def spreads(cluster: VirtualCluster, slack_s: float) -> Spread:
    """|W_f - W_g| over every interval and pair, with measured charges, against the bound

        U + max(U, gap) + 2 error,   U = slack + L_max

    `gap` is what was between the two vTimes when the interval began. Why this holds: let
    X = v_f - v_g, D = W_f - W_g, and e what the estimates in flight exceed the measured charges by,
    f's less g's, so |e| <= error. As nobody is lifted within an interval, D - e_0 + X_0 = X - e. D grows
    only when f is dispatched, before which X <= slack and after which X <= U. So D stays within
    U + error of e_0 - X_0, or between that and its 0 of the beginning: the range of D is at most
    U + error + max(U + error, gap + error).

    `gap` exceeds U only where one of them owes: it came back so, or what was charged when it ended was
    not what had been estimated at its dispatch. It repays first. Else this is the paper's 2 U.
    """
    unit = slack_s + cluster.largest()
    served: dict[str, float] = {}
    error: dict[str, float] = {}
    ready: dict[str, bool] = {}
    vtimes: dict[str, float] = {}
    just_settled: dict[str, tuple[float, float]] = {}  # tenant -> (when, error of those runs)
    intervals: dict[tuple[str, str], _Interval] = {}
    worst = Spread()

    def close(pair: tuple[str, str]) -> None:
        it = intervals.pop(pair)
        worst.intervals += 1
        worst.indebted += it.gap > unit + it.doubt + 1e-6
        excess = it.high - it.low - unit - max(unit, it.gap) - 2 * it.error
        if excess > worst.excess:
            worst.pair, worst.difference, worst.excess = pair, it.high - it.low, excess
            worst.error, worst.gap = it.error, it.gap

    def doubt(tenant: str, now: float) -> float:
        when, settled = just_settled.get(tenant, (-1.0, 0.0))
        return error[tenant] + (settled if when == now else 0.0)

    def look(tenant: str, now: float) -> None:
        for other in served:
            if other == tenant:
                continue
            pair = (min(tenant, other), max(tenant, other))
            if not (ready.get(tenant, False) and ready.get(other, False)):
                if pair in intervals:
                    close(pair)
                continue
            difference = served[pair[0]] - served[pair[1]]
            err = error[pair[0]] + error[pair[1]]
            it = intervals.get(pair)
            if it is None:
                gap = abs(vtimes[pair[0]] - vtimes[pair[1]])
                doubts = doubt(pair[0], now) + doubt(pair[1], now)
                intervals[pair] = _Interval(gap, doubts, difference, difference, err)
            else:
                it.low, it.high = min(it.low, difference), max(it.high, difference)
                it.error = max(it.error, err)

    for what, now, value in cluster.trace:
        if what == "ready":
            tenant, flag, vtimes = value  # type: ignore[misc]
            served.setdefault(tenant, 0.0)
            error.setdefault(tenant, 0.0)
            ready[tenant] = flag
        else:
            assert isinstance(value, Ran)
            tenant = value.tenant
            if what == "dispatch":
                served[tenant] += value.used / value.weight
                error[tenant] += value.error
            else:
                error[tenant] -= value.error
                when, settled = just_settled.get(tenant, (-1.0, 0.0))
                just_settled[tenant] = (now, value.error + (settled if when == now else 0.0))
        look(tenant, now)
    for pair in list(intervals):
        close(pair)
    return worst
