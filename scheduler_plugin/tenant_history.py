"""vTime, queue and device seconds of tenants over the last minutes, for people who watch. Pure.

Sampled about once a second. What is kept is bounded in samples and in tenants: it does not depend on how
long the scheduler lives, nor on how many tenants it has seen.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from itertools import chain
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from .glance import TenantGlance

Floats = NDArray[np.float64]
Counts = NDArray[np.int64]


_NOBODY: Mapping[str, float] = {}


class Totals(NamedTuple):
    """All tenants at the time of a sample. omitted: active tenants without a column."""

    now: float
    active: int
    queued: int
    running: int
    omitted: int


class TenantHistory:
    """A ring of samples, a column per tenant.

    samples: how many are kept. tenants: most columns; a tenant keeps its column while it is active, and
    after that until the samples with it are gone or another one needs the column. Beyond that, tenants
    are counted in the totals only. Memory: samples x tenants x 32 bytes, taken as tenants come.
    """

    def __init__(self, samples: int = 300, tenants: int = 1024) -> None:
        assert samples > 1
        assert tenants > 0
        self._samples, self._limit = samples, tenants
        self._columns: dict[str, int] = {}
        self._free: list[int] = []
        self._number = 0  # samples taken so far
        self._width = 0
        self._times = np.full(samples, np.nan)
        self._least = np.full(samples, np.nan)
        self._all = np.zeros((samples, 4))  # see everybody
        # By column: number of the last sample in which its tenant was active, and first service.
        self._seen = np.empty(0, np.int64)
        self._began = np.empty(0)
        self._vtime = np.empty((samples, 0))
        self._service = np.empty((samples, 0))
        self._queued = np.empty((samples, 0), np.int64)
        self._running = np.empty((samples, 0), np.int64)
        self.totals = Totals(math.nan, 0, 0, 0, 0)

    def watched(self, active: Iterable[str]) -> list[str]:
        """Whose standing `sample` wants: those active now, and those that have a column."""
        return list(dict.fromkeys([*active, *self._columns]))

    def sample(
        self,
        now: float,
        tenants: Sequence[str],
        glances: Sequence[TenantGlance],
        worked: Mapping[str, float] = _NOBODY,
    ) -> None:
        """How these tenants stand at `now`. O(tenants); times must not go back.

        worked: device seconds of runs that ended since the last sample, by tenant: who came and went
        between two samples is kept too.
        """
        assert not self._number or now >= self.totals.now, "times go back"
        row = self._number % self._samples
        self._times[row] = now
        flat = chain.from_iterable(glances)  # numpy takes three times as long over tuples
        values = np.fromiter(flat, np.float64, 6 * len(tenants)).reshape(len(tenants), 6)
        active = values[:, 4] > 0
        columns = np.array([self._columns.get(tenant, -1) for tenant in tenants], np.intp)
        there = active | np.array([tenant in worked for tenant in tenants], np.bool_)
        for at in np.flatnonzero(there & (columns < 0)).tolist():
            before_s = values[at, 1] - worked.get(tenants[at], 0.0)
            column = self._new_column(tenants[at], before_s)
            columns[at] = -1 if column is None else column
        self._write(row, columns, values, there)
        vtime = values[:, 0]
        sums = values[there].sum(axis=0)
        self._all[row] = sums[2], sums[3], np.count_nonzero(there), sums[0]
        self._least[row] = _least(vtime[there])
        self.totals = Totals(
            now,
            int(np.count_nonzero(active)),
            int(sums[2]),
            int(sums[3]),
            int(np.count_nonzero(active & (columns < 0))),
        )
        self._number += 1
        self._forget()

    def _write(
        self, row: int, columns: NDArray[np.intp], values: Floats, active: NDArray[np.bool_]
    ) -> None:
        self._vtime[row] = np.nan
        self._queued[row] = self._running[row] = 0
        there = columns >= 0
        at, values, active = columns[there], values[there], active[there]
        self._vtime[row, at] = np.where(active, values[:, 0], np.nan)
        self._service[row, at] = values[:, 1]
        self._queued[row, at] = values[:, 2]
        self._running[row, at] = values[:, 3]
        self._seen[at[active]] = self._number

    def _new_column(self, tenant: str, service_s: float) -> int | None:
        if not self._free and self._width < self._limit:
            self._widen(min(self._limit, max(16, 2 * self._width)))
        if not self._free:
            longest_away = min(self._columns, key=lambda name: self._seen[self._columns[name]])
            if self._seen[self._columns[longest_away]] >= self._number - 1:
                return None
            self._drop(longest_away)
        column = self._free.pop()
        self._columns[tenant] = column
        self._vtime[:, column] = self._service[:, column] = np.nan
        self._queued[:, column] = self._running[:, column] = 0
        self._seen[column], self._began[column] = self._number, service_s
        return column

    def _widen(self, width: int) -> None:
        extra = width - self._width
        more = (self._samples, extra)
        self._vtime = np.concatenate([self._vtime, np.full(more, np.nan)], axis=1)
        self._service = np.concatenate([self._service, np.full(more, np.nan)], axis=1)
        self._queued = np.concatenate([self._queued, np.zeros(more, np.int64)], axis=1)
        self._running = np.concatenate([self._running, np.zeros(more, np.int64)], axis=1)
        self._seen = np.concatenate([self._seen, np.full(extra, self._number)])
        self._began = np.concatenate([self._began, np.zeros(extra)])
        self._free.extend(range(width - 1, self._width - 1, -1))
        self._width = width

    def _forget(self) -> None:
        """Tenants that no kept sample shows active."""
        oldest = self._number - self._samples
        if oldest > 0 and self._width and self._seen.min() < oldest:
            for tenant in [t for t, column in self._columns.items() if self._seen[column] < oldest]:
                self._drop(tenant)

    def _drop(self, tenant: str) -> None:
        self._free.append(self._columns.pop(tenant))

    # Questions

    def __len__(self) -> int:
        """Samples kept."""
        return min(self._number, self._samples)

    @property
    def tenants(self) -> list[str]:
        """Those with a column."""
        return list(self._columns)

    def _rows(self) -> NDArray[np.intp]:
        """Kept samples, oldest first."""
        kept = len(self)
        return np.arange(self._number - kept, self._number) % self._samples

    def times(self) -> Floats:
        return self._times[self._rows()]

    def least(self) -> Floats:
        """vTime of the least-served tenant by sample, of those that have one then, see `vtimes`: none is
        below it. nan where there is none."""
        return self._least[self._rows()]

    def vtimes(self, tenants: Sequence[str]) -> Floats:
        """[samples, tenants] seconds; nan where a tenant was not active, nor had been since the last."""
        return self._vtime[np.ix_(self._rows(), self._at(tenants))]

    def queued(self, tenants: Sequence[str]) -> Counts:
        """[samples, tenants] requests that had not started."""
        return self._queued[np.ix_(self._rows(), self._at(tenants))]

    def running(self, tenants: Sequence[str]) -> Counts:
        """[samples, tenants] requests that had started."""
        return self._running[np.ix_(self._rows(), self._at(tenants))]

    def everybody(self) -> Floats:
        """[samples, 4]: requests queued and running of all tenants, how many tenants have a vTime, and the
        sum of these."""
        return self._all[self._rows()]

    def latest(self) -> tuple[list[str], Floats, Counts, Counts]:
        """Tenants, and of each vTime (nan: not active), queued and running in the last sample."""
        names = self.tenants
        if not self._number or not names:
            return [], np.empty(0), np.empty(0, np.int64), np.empty(0, np.int64)
        row, at = (self._number - 1) % self._samples, self._at(names)
        return names, self._vtime[row, at], self._queued[row, at], self._running[row, at]

    def used(self, window_s: float = 60.0) -> tuple[list[str], Floats]:
        """Tenants, and the device seconds of each in the last `window_s` seconds: runs that ended."""
        names = self.tenants
        if not self._number or not names:
            return [], np.empty(0)
        rows, at = self._rows(), self._at(names)
        first = rows[int(np.searchsorted(self._times[rows], self.totals.now - window_s))]
        begins = self._service[first, at]
        begins = np.where(np.isnan(begins), self._began[at], begins)
        return names, self._service[rows[-1], at] - begins

    def _at(self, tenants: Sequence[str]) -> NDArray[np.intp]:
        return np.array([self._columns[tenant] for tenant in tenants], np.intp)

    def _check(self) -> None:
        assert len(self._seen) == len(self._began) == self._width
        assert len(self._columns) <= self._limit
        taken = list(self._columns.values())
        assert sorted([*taken, *self._free]) == list(range(self._width))
        assert self._width <= self._limit
        times = self.times()
        assert len(times) == len(self) <= self._samples
        assert bool(np.all(np.diff(times) >= 0))
        for array in (self._vtime, self._service, self._queued, self._running):
            assert array.shape == (self._samples, self._width)


def _least(vtimes: Floats) -> float:
    return float(vtimes.min()) if len(vtimes) else math.nan
