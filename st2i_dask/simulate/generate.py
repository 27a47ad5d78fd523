"""Arrivals with the shape of a production trace, from a seed.

Measured in Alibaba's cluster-trace-v2026-GenAI (26,823 image requests, 23 days): the rate changes by
day (coefficient of variation 0.72), by hour (three times the mean at night) and within an hour (0.35
from ten minutes to ten minutes); round noon nobody comes, for three to thirteen hours, 7.5 on average.
Within ten minutes arrivals are a Poisson process (coefficient of variation 0.92 to 1.0). From all this
the gaps between arrivals vary with 12.
"""

from __future__ import annotations

import math
import random
from collections.abc import Mapping, Sequence

from ..errors import ParameterError
from .tasks import Arrival
from .workload import Workload

#: Rate by hour of the day, the mean being 1.
HOURS = (
    *(3.43, 0.98, 1.05, 1.08, 0.60, 0.32, 0.30, 0.23, 0.11, 0.04, 0.03, 0.01),
    *(0.01, 0.01, 0.01, 0.04, 0.57, 2.10, 2.48, 0.56, 0.98, 2.97, 2.97, 3.16),
)
DAY_CV = 0.72
#: Nobody comes round that hour; hours of it, mean and deviation.
QUIET_HOUR, QUIET_HOURS, QUIET_DEVIATION = 12.5, 7.5, 2.7
WINDOW_CV = 0.35
#: Ten-minute windows of four busy hours: their rate's coefficient of variation.
BUSY_CV = 0.55
BUSY_WINDOWS = 24
#: Share of requests with an adapter, and shares of the most popular checkpoints, see `workload`.
ADAPTER_SHARE = 0.17
RATE = 0.8 / 60


def evaluation(
    workload: Workload, rate: float, seconds: float, seed: int, cv_scale: float = 1.0
) -> list[Arrival]:
    """Four busy hours, compressed into `seconds`: 24 windows whose rate varies with 0.55, arrivals in
    each a Gamma process. rate: mean requests per second. cv_scale: multiplies the coefficient of
    variation of the gaps within windows, 1 being Poisson."""
    _positive(rate=rate, seconds=seconds, cv_scale=cv_scale)
    chance = random.Random(seed)
    rates = [_lognormal(chance, BUSY_CV) for _ in range(BUSY_WINDOWS)]
    mean = sum(rates) / len(rates)
    each = seconds / BUSY_WINDOWS
    found: list[float] = []
    for number, factor in enumerate(rates):
        found += gamma(chance, number * each, each, rate * factor / mean, cv_scale)
    return _owned(chance, sorted(found), workload.shares)


def production(
    days: float,
    seed: int,
    *,
    rate: float = RATE,
    shares: Mapping[str, float],
) -> list[Arrival]:
    """Whole days. rate: mean requests per second."""
    _positive(days=days, rate=rate)
    chance = random.Random(seed)
    found: list[float] = []
    window = 600.0
    level: list[float] = []
    quiet: list[float] = []
    for number in range(math.ceil(days * 144)):
        day, hour = divmod(number // 6, 24)
        if day == len(level):
            level.append(_lognormal(chance, DAY_CV))
            quiet.append(min(14.0, max(3.0, chance.gauss(QUIET_HOURS, QUIET_DEVIATION))))
        if abs(number % 144 / 6 - QUIET_HOUR) < quiet[day] / 2:
            continue
        factor = level[day] * HOURS[hour] * _lognormal(chance, WINDOW_CV)
        found += gamma(chance, number * window, window, rate * factor, 1.0)
    return _owned(chance, [at for at in found if at < days * 86400], shares)


def gamma(
    chance: random.Random, start: float, seconds: float, rate: float, cv: float
) -> list[float]:
    """Arrivals of a Gamma process: gaps of mean 1 / rate and this coefficient of variation."""
    shape = 1 / cv**2
    scale = 1 / (rate * shape) if rate else math.inf
    found: list[float] = []
    # The first gap has begun before the window.
    at = start - chance.random() * chance.gammavariate(shape, scale) if rate else math.inf
    while at < start + seconds:
        if at >= start:
            found.append(at)
        at += chance.gammavariate(shape, scale)
    return found


def _lognormal(chance: random.Random, cv: float) -> float:
    """Of mean 1."""
    sigma = math.sqrt(math.log(1 + cv * cv))
    return chance.lognormvariate(-sigma * sigma / 2, sigma)


def _owned(
    chance: random.Random, times: Sequence[float], shares: Mapping[str, float]
) -> list[Arrival]:
    tenants = list(shares)
    owners = chance.choices(tenants, [shares[t] for t in tenants], k=len(times))
    return [Arrival(at, owner) for at, owner in zip(times, owners, strict=True)]


def _positive(**values: float) -> None:
    for name, value in values.items():
        if not 0 < value < math.inf:
            raise ParameterError(f"{name} is {value!r}; give a finite number above 0")
