"""Which tenants get a label of their own on a metrics page: a bounded number, of any number of tenants.

Pure. The others are summed under `OTHER`. No series ever decreases, also as tenants change places: one
that gets a label starts there from 0, and what it counted before stays with the others; one that loses
its label leaves its counts to them. (A tenant that gets a label again starts from 0 again, as a counter
does after a restart.)
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Mapping, Sequence

from .metrics_counts import OTHER

#: Most tenants with a label of their own.
TENANTS = 100
#: Who wants a place must have been served so many times as much as who has it, and so much more.
_RATIO, _MORE_S = 2.0, 1.0

Row = list[float]


class TenantLabels:
    """limit: most labels beside `OTHER`."""

    def __init__(self, limit: int = TENANTS) -> None:
        self._limit = limit
        self._base: dict[str, Row] = {}  # of labelled tenants: counts that stay with the others
        self._other: Row = []

    def counters(
        self,
        served: Mapping[str, float],
        row: Callable[[str], Sequence[float]],
        total: Sequence[float],
    ) -> dict[str, Row]:
        """By label, what each has counted.

        served: device seconds of every tenant, by which places are given. row: a tenant's counts. total:
        of all tenants. Counts and total must never decrease from one call to the next.
        """
        self._choose(served, row)
        found: dict[str, Row] = {}
        rest = list(total)
        for tenant, base in self._base.items():
            own = [value - before for value, before in zip(row(tenant), base, strict=True)]
            found[tenant] = own
            rest = [left - value for left, value in zip(rest, own, strict=True)]
        # Differences of sums are off by rounding, and must not decrease either.
        before = self._other or [0.0] * len(rest)
        self._other = [max(left, last) for left, last in zip(rest, before, strict=True)]
        if len(served) > len(self._base):
            found[OTHER] = self._other
        return found

    @property
    def tenants(self) -> list[str]:
        """Those with a label."""
        return list(self._base)

    def _choose(self, served: Mapping[str, float], row: Callable[[str], Sequence[float]]) -> None:
        # Names come with requests: one who calls itself so all the same is one of them.
        wanting = (tenant for tenant in served if tenant not in self._base and tenant != OTHER)
        for tenant in heapq.nlargest(self._limit, wanting, key=served.__getitem__):
            if len(self._base) < self._limit:
                # Places have been free, so it is new, and nobody has counted it among the others.
                self._base[tenant] = [0.0] * len(row(tenant))
                continue
            least = min(self._base, key=lambda name: served.get(name, 0.0))
            if served[tenant] <= _RATIO * served.get(least, 0.0) + _MORE_S:
                return
            del self._base[least]
            self._base[tenant] = list(row(tenant))

    def _check(self) -> None:
        assert len(self._base) <= self._limit
        assert OTHER not in self._base
