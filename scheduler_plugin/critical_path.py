"""Remaining critical path of a request: seconds from a position to the end of its workflow.

    path(p) = max( own(p) + max path(successors of p),  max path(callback consumers of p) )

own is compute and transfer (load is added by whoever knows the executor). A callback consumer may
run beside its producer, so its path starts with the producer and not after it.
"""

from __future__ import annotations

from .cost_model import CostModel
from .outline import CostKey, Outline


class CriticalPaths:
    """Paths of all outlines in use, computed once each and again only when a cost has moved.

    Outlines are counted: `hold` per open request, `release` when it closes. Asking is a look-up.
    """

    def __init__(self, costs: CostModel) -> None:
        self._costs = costs
        self._held: dict[Outline, int] = {}
        self._same: dict[Outline, Outline] = {}
        self._paths: dict[Outline, list[float]] = {}
        self._users: dict[CostKey, dict[Outline, None]] = {}  # in order of arrival

    def hold(self, outline: Outline) -> Outline:
        """One more request uses it. The one object that stands for all equal outlines."""
        outline = self._same.setdefault(outline, outline)
        count = self._held.get(outline, 0)
        self._held[outline] = count + 1
        if not count:
            for key in outline.cost_keys:
                self._users.setdefault(key, {})[outline] = None
        return outline

    def release(self, outline: Outline) -> bool:
        """One request less uses it. True when that was the last one."""
        count = self._held[outline] - 1
        if count:
            self._held[outline] = count
            return False
        del self._held[outline]
        del self._same[outline]
        self._paths.pop(outline, None)
        for key in set(outline.cost_keys):
            users = self._users[key]
            del users[outline]
            if not users:
                del self._users[key]
        return True

    def path_s(self, outline: Outline, position: int) -> float:
        """Seconds from the start of this position to the end of the request."""
        path = self._paths.get(outline)
        if path is None:
            path = self._compute(outline)
            if outline in self._held:
                self._paths[outline] = path
        return path[position]

    def whole_s(self, outline: Outline) -> float:
        """Device seconds of all positions together: the size of the job."""
        return sum(map(self._costs.own_s, outline.cost_keys))

    def cost_moved(self, key: CostKey) -> list[Outline]:
        """The outlines whose paths changed: those that use the cost, or guess from costs."""
        touched = dict(self._users.get(key, ()))
        for other, users in self._users.items():
            if not self._costs.is_measured(other):
                touched.update(users)
        for outline in touched:
            self._paths.pop(outline, None)
        return list(touched)

    def all_moved(self) -> list[Outline]:
        """The outlines in use, whose paths are computed again."""
        self._paths.clear()
        return list(self._held)

    def _compute(self, outline: Outline) -> list[float]:
        path = [0.0] * len(outline)
        for position in range(len(outline) - 1, -1, -1):
            after = max((path[s] for s in outline.successors[position]), default=0.0)
            beside = max((path[c] for c in outline.consumers[position]), default=0.0)
            path[position] = max(self._costs.own_s(outline.cost_keys[position]) + after, beside)
        return path

    def __len__(self) -> int:
        """Number of outlines held."""
        return len(self._held)

    def _check(self) -> None:
        assert all(count > 0 for count in self._held.values())
        assert set(self._same) == set(self._held)
        assert set(self._paths) <= set(self._held)
        used = {(key, outline) for outline in self._held for key in outline.cost_keys}
        assert used == {(key, outline) for key, users in self._users.items() for outline in users}
        for outline, path in self._paths.items():
            assert path == self._compute(outline), "a path is out of date"
