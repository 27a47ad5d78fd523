"""A number learned from measurements that lie now and then: the median of the recent ones."""

from __future__ import annotations

import math
from bisect import bisect_left, insort
from collections.abc import Sequence


class RobustSeconds:
    """Median of the last `WINDOW` measurements, published only when it moved noticeably.

    The first measurement counts only until there is another: first runs include compilation, page
    faults and cold caches. Stragglers are outvoted. `value` moves in jumps of at least `STEP` of
    itself and `FLOOR_S` seconds, so that whoever derives something from it need not follow every
    tremor.
    """

    WINDOW = 15
    STEP = 0.02
    FLOOR_S = 0.0005

    __slots__ = ("_ordered", "_recent", "count", "value")

    def __init__(self, recent: Sequence[float] = (), count: int = 0) -> None:
        self._recent = list(recent)[-self.WINDOW :]
        self._ordered = sorted(self._recent)
        self.count = max(count, len(self._recent))
        self.value = self._median() if self._recent else 0.0

    def observe(self, seconds: float) -> bool:
        """Learn one measurement, seconds. True when `value` moved."""
        recent, ordered = self._recent, self._ordered
        if self.count == 1:
            recent.clear()
            ordered.clear()
        self.count += 1
        recent.append(seconds)
        insort(ordered, seconds)
        if len(recent) > self.WINDOW:
            del ordered[bisect_left(ordered, recent.pop(0))]
        median = self._median()
        if self.count > 1 and abs(median - self.value) <= max(self.STEP * self.value, self.FLOOR_S):
            return False
        moved = self.count == 1 or median != self.value
        self.value = median
        return moved

    def recent(self) -> list[float]:
        return list(self._recent)

    def _median(self) -> float:
        ordered = self._ordered
        middle, odd = divmod(len(ordered), 2)
        return ordered[middle] if odd else (ordered[middle - 1] + ordered[middle]) / 2

    def _check(self) -> None:
        assert len(self._recent) <= min(self.WINDOW, self.count)
        assert self._ordered == sorted(self._recent)
        assert all(0 <= seconds < math.inf for seconds in self._recent)
        assert 0 <= self.value < math.inf
