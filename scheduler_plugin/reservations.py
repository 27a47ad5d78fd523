"""Places in the queue that clients were promised and whose requests are still on their way. Pure."""

from __future__ import annotations

from collections import deque

#: A client that asked and died does not hold its places for longer, seconds.
EXPIRES_S = 30.0


class Reservations:
    """Promised requests by tenant, the oldest first."""

    def __init__(self) -> None:
        self._promised: dict[str, deque[float]] = {}  # when each expires

    def count(self, tenant: str, now: float) -> int:
        """Requests of the tenant that are on their way."""
        promised = self._promised.get(tenant)
        if promised is None:
            return 0
        while promised and promised[0] <= now:
            promised.popleft()
        if not promised:
            del self._promised[tenant]
        return len(promised)

    def promise(self, tenant: str, requests: int, now: float) -> None:
        self._promised.setdefault(tenant, deque()).extend([now + EXPIRES_S] * requests)

    def arrived(self, tenant: str) -> None:
        """One of them is there (or one that nobody asked for)."""
        promised = self._promised.get(tenant)
        if promised:
            promised.popleft()
            if not promised:
                del self._promised[tenant]

    def _check(self) -> None:
        assert all(self._promised.values())
        assert all(list(p) == sorted(p) for p in self._promised.values())
