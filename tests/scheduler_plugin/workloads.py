"""VTC's suites by name (Sheng et al., OSDI'24, section 5.2), in device seconds.

The original sends token requests to one server that serves about two such requests a second; here a
request is a chain of invocations that take 1 device second in all, for executors of two device
seconds a second. Rates (requests per second), phases and shares are the original's.
"""

from __future__ import annotations

import random
from dataclasses import dataclass

from scheduler_plugin.outline import Outline, chain

from .virtual_cluster import Truth, VirtualCluster

EXECUTORS = 2

#: One request of one device second; a quarter of it for the short ones.
REQUEST = chain("r", [("Text", "text", "1"), ("Step", "step", "1"), ("Step", "step", "1")])
SHORT = chain("s", [("Text", "tiny", "1"), ("Step", "short", "1")])
COMPUTE = {"text": 0.2, "step": 0.4, "tiny": 0.05, "short": 0.2}


@dataclass(frozen=True)
class Arrival:
    at: float
    tenant: str
    outline: Outline = REQUEST


def uniform(tenant, rate, start, stop, offset=0.0, on_off=0.0):
    """Evenly spaced; with `on_off` only in even periods of that many seconds."""
    found = []
    at = start + offset / rate
    while at < stop:
        if not on_off or int(at // on_off) % 2 == 0:
            found.append(Arrival(at, tenant))
        at += 1.0 / rate
    return found


def overload(s):
    return uniform("a", 1.5, 0, s) + uniform("b", 3.0, 0, s)


def proportional(s):
    return uniform("a", 0.25, 0, s) + uniform("b", 0.5, 0, s) + uniform("c", 1.5, 0, s)


def on_off_less(s):
    return uniform("a", 0.5, 0, s, on_off=s / 6) + uniform("b", 2.0, 0, s)


def on_off_overload(s):
    return uniform("a", 2.0, 0, s, on_off=s / 6) + uniform("b", 3.0, 0, s)


def poisson_short_long(s):
    rng = random.Random(42)
    found, at = [], 0.0
    while (at := at + rng.expovariate(9.5)) < s:
        if rng.random() < 8.0 / 9.5:
            found.append(Arrival(at, "short", SHORT))
        else:
            found.append(Arrival(at, "long"))
    return found


def increase(s):
    found, at = uniform("a", 0.5, 0, s), 0.0
    while (at := at + 1.0 / (0.2 + (4.0 - 0.2) * at / s)) < s:
        found.append(Arrival(at, "b"))
    return found


def dist_shift(s):
    third = s / 3
    return (
        uniform("a", 0.5, 0, third, on_off=s / 9)
        + uniform("b", 2.0, 0, third)
        + uniform("a", 2.0, third, 2 * third)
        + uniform("b", 2.0, third, 2 * third)
        + uniform("a", 0.5, 2 * third, s)
        + uniform("b", 1.5, 2 * third, s)
    )


def overload_multi(s):
    rates = [0.4, 0.4, 0.4, 0.6, 0.6, 0.6, 0.6, 0.6]
    return [x for n, rate in enumerate(rates) for x in uniform(f"t{n}", rate, 0, s, offset=n / 8)]


WEIGHTS = {"t0": 1.0, "t1": 2.0, "t2": 3.0, "t3": 4.0}


def overload_weighted(s):
    return [x for t in WEIGHTS for x in uniform(t, 1.5, 0, s)]


SUITES = {
    "overload": overload,
    "proportional": proportional,
    "on_off_less": on_off_less,
    "on_off_overload": on_off_overload,
    "poisson_short_long": poisson_short_long,
    "increase": increase,
    "dist_shift": dist_shift,
    "overload-multi": overload_multi,
    "overload-weighted": overload_weighted,
}


def play(policy, arrivals, *, executors=EXECUTORS, noise=0.3, until=None, check_every=0, seed=1):
    """The arrivals on a virtual cluster; how it went."""
    cluster = VirtualCluster(
        policy,
        executors,
        Truth(compute=COMPUTE, noise=noise, transfer=0.005),
        check_every=check_every,
        seed=seed,
    )
    for arrival in arrivals:
        cluster.submit(arrival.at, arrival.tenant, arrival.outline)
    if until is None:
        cluster.run()
    else:
        cluster.run(until=until)
    return cluster
