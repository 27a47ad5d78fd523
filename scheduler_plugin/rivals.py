"""Other policies behind the same interface, for comparison: same candidates, other choice.

    fifo  requests in the order of their submission (what stock Dask's priorities amount to)
    sjf   shortest job first: the request with the fewest estimated device seconds
    vtc   virtual token counter (Sheng et al., OSDI'24) counting operations instead of tokens

Each is as good as it can be: same readiness, placement, gates and learned costs as the fair queue.
"""

from __future__ import annotations

from collections.abc import Collection

from st2i_dask.errors import PolicyError

from .backlog import Backlog, Rank
from .candidates import Candidate, Chooser, Outlook, WeightOf
from .fair_queue import FairQueue
from .outline import Outline


class _Grouped:
    """Candidates in groups, each in order of submission, then position."""

    def __init__(self, outlook: Outlook, slack_s: float) -> None:
        self._outlook = outlook
        self._groups: dict[object, Backlog] = {}
        self._where: dict[str, object] = {}

    def _group_of(self, candidate: Candidate) -> object:
        raise NotImplementedError

    def __len__(self) -> int:
        return len(self._where)

    def __contains__(self, key: object) -> bool:
        return key in self._where

    def add(self, candidate: Candidate, vtime_s: float) -> None:
        group = self._group_of(candidate)
        self._where[candidate.key] = group
        backlog = self._groups.get(group)
        if backlog is None:
            backlog = self._groups[group] = Backlog()
        backlog.push(_by_submission(candidate), candidate)

    def discard(self, key: str) -> None:
        group = self._where.pop(key)
        backlog = self._groups[group]
        backlog.remove(key)
        if not backlog:
            del self._groups[group]

    def dispatched(self, candidate: Candidate) -> None:
        """Nothing is charged."""

    def set_vtime(self, tenant: str, vtime_s: float) -> None:
        """vTime plays no part here."""

    def tenant_left(self, tenant: str) -> None:
        """Nothing is kept of a tenant."""

    def refresh_outline(self, outline: Outline) -> None:
        """Estimates are asked for at every decision."""

    def refresh_models(self, models: Collection[str] | None) -> None:
        """Load plays no part here."""

    def outline_left(self, outline: Outline) -> None:
        """Nothing is kept of an outline."""

    def set_slack(self, slack_s: float) -> None:
        """There is no slack here."""

    def set_weights(self, weight: WeightOf) -> None:
        """There are no weights here."""

    def _check(self) -> None:
        assert sum(map(len, self._groups.values())) == len(self._where)
        for group, backlog in self._groups.items():
            backlog._check()
            assert backlog
            assert self._where[backlog.first().key] == group


class Fifo(_Grouped):
    """Requests in the order of their submission."""

    def _group_of(self, candidate: Candidate) -> object:
        return None

    def choose(self, now: float, without: Collection[str] = ()) -> Candidate | None:
        first = self._groups[None].first() if self._groups else None
        return first if first is not None and first.model not in without else None


class ShortestJobFirst(_Grouped):
    """The request that is estimated to need the fewest device seconds in all; then the oldest."""

    def _group_of(self, candidate: Candidate) -> object:
        return candidate.outline

    def choose(self, now: float, without: Collection[str] = ()) -> Candidate | None:
        best: tuple[float, Rank] | None = None
        chosen = None
        for outline, backlog in self._groups.items():
            assert isinstance(outline, Outline)
            if backlog.first().model in without:
                continue
            rank = (self._outlook.whole_s(outline), backlog.first_rank())
            if best is None or rank < best:
                best, chosen = rank, backlog
        return chosen.first() if chosen is not None else None


class StepCounter(_Grouped):
    """VTC by steps: the tenant with the smallest count of dispatched operations / weight.

    A tenant that becomes active is lifted to the smallest count among the active ones (to the one
    that left last if there are none). Within a tenant: order of submission.
    """

    def __init__(self, outlook: Outlook, slack_s: float) -> None:
        super().__init__(outlook, slack_s)
        self._counts: dict[str, float] = {}
        self._active: set[str] = set()
        self._left_at = 0.0
        self._weight: WeightOf = _equal_weight

    def _group_of(self, candidate: Candidate) -> object:
        return candidate.tenant

    def set_weights(self, weight: WeightOf) -> None:
        self._weight = weight

    def add(self, candidate: Candidate, vtime_s: float) -> None:
        tenant = candidate.tenant
        if tenant not in self._active:
            floor = min((self._counts[t] for t in self._active), default=self._left_at)
            self._counts[tenant] = max(self._counts.get(tenant, 0.0), floor)
            self._active.add(tenant)
        super().add(candidate, vtime_s)

    def dispatched(self, candidate: Candidate) -> None:
        self._counts[candidate.tenant] += 1.0 / self._weight(candidate.tenant)

    def tenant_left(self, tenant: str) -> None:
        if tenant in self._active:
            self._active.remove(tenant)
            self._left_at = self._counts[tenant]

    def choose(self, now: float, without: Collection[str] = ()) -> Candidate | None:
        groups = self._groups
        tenants = [t for t, backlog in groups.items() if backlog.first().model not in without]
        if not tenants:
            return None
        first = min(tenants, key=lambda t: (self._counts[str(t)], groups[t].first_rank()))
        return groups[first].first()

    def _check(self) -> None:
        super()._check()
        assert set(self._groups) <= self._active <= set(self._counts)


CHOOSERS: dict[str, type[Chooser]] = {
    "fair": FairQueue,
    "fifo": Fifo,
    "sjf": ShortestJobFirst,
    "vtc": StepCounter,
}


def chooser(name: str) -> type[Chooser]:
    """The chooser of this name, for `FairPolicy(chooser=...)`. PolicyError lists the names."""
    found = CHOOSERS.get(name)
    if found is None:
        raise PolicyError(f"no policy is called {name!r}; there are {', '.join(sorted(CHOOSERS))}")
    return found


def _by_submission(candidate: Candidate) -> Rank:
    return (float(candidate.order), float(candidate.position))


def _equal_weight(tenant: str) -> float:
    return 1.0
