"""Share of the last minute: whose device seconds they were."""

from __future__ import annotations

from collections import deque

WINDOW_S = 60
_BIN_S = 1.0


class RecentUse:
    """Device seconds per tenant over the last minute, in bins of a second. Memory: tenants x 60."""

    def __init__(self) -> None:
        self._bins: deque[tuple[int, dict[str, float]]] = deque()

    def add(self, now: float, tenant: str, seconds: float) -> None:
        """A run ended that used this many device seconds."""
        number = int(now / _BIN_S)
        if not self._bins or self._bins[-1][0] < number:
            self._forget(now)
            self._bins.append((number, {}))
        used = self._bins[-1][1]
        used[tenant] = used.get(tenant, 0.0) + seconds

    def shares(self, now: float) -> dict[str, float]:
        """Each tenant's part of what was used, 0 to 1; empty when nothing was."""
        self._forget(now)
        used: dict[str, float] = {}
        for _, per_tenant in self._bins:
            for tenant, seconds in per_tenant.items():
                used[tenant] = used.get(tenant, 0.0) + seconds
        total = sum(used.values())
        return {tenant: seconds / total for tenant, seconds in used.items()} if total else {}

    def _forget(self, now: float) -> None:
        oldest = int(now / _BIN_S) - WINDOW_S
        while self._bins and self._bins[0][0] <= oldest:
            self._bins.popleft()

    def _check(self) -> None:
        numbers = [number for number, _ in self._bins]
        assert numbers == sorted(set(numbers))
        assert len(numbers) <= WINDOW_S + 1
