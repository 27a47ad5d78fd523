"""The two-layer choice (paper section 6, Algorithm 1).

Layer 1 keeps the tenants with ready work whose vTime is within the slack of the smallest among them.
Layer 2 takes, of their lane heads, the one with the highest

    score = w' - r' - e'

w: seconds since its request was submitted, r: remaining critical path of its request, e: execution on the best idle executor,
load and transfer included; each divided by its largest value among the candidates of this round (0
when that is 0). Ties go to the longest waiting, then to the smallest key.

Waiting is counted from the submission of the request, not from when the invocation became ready.
Counted the second way, first steps that queue for long always beat later steps that have just become
ready: every request is begun, none is finished, and a larger slack misses more deadlines.
"""

from __future__ import annotations

import math
from collections.abc import Collection

import numpy as np

from st2i_dask.errors import PolicyError

from .candidates import Candidate, Outlook, WeightOf
from .lanes import Lanes

#: Up to that many lanes a plain loop is faster than NumPy.
FEW = 32


class FairQueue:
    """Ready invocations, and which of them is next. A decision costs O(lanes), in NumPy where they
    are not few, whatever number is queued; adding and removing O(log of the lane)."""

    def __init__(self, outlook: Outlook, slack_s: float) -> None:
        lanes = self._lanes = Lanes(outlook)
        self.set_vtime, self.outline_left = lanes.set_vtime, lanes.forget_outline
        self.refresh_outline, self.refresh_models = lanes.refresh_outline, lanes.refresh_models
        self.set_slack(slack_s)

    def set_slack(self, slack_s: float) -> None:
        if not 0.0 <= slack_s < math.inf:
            raise PolicyError(f"slack is {slack_s!r} s; give a finite number >= 0")
        self._slack_s = slack_s

    def set_weights(self, weight: WeightOf) -> None:
        """Weights are already in the vTimes."""

    def add(self, candidate: Candidate, vtime_s: float) -> None:
        if candidate.key in self._lanes:
            raise PolicyError(f"{candidate.key!r} is already queued; discard it first")
        self._lanes.add(candidate, vtime_s)

    def discard(self, key: str) -> None:
        if key not in self._lanes:
            raise PolicyError(f"{key!r} is not queued; discard an invocation once")
        self._lanes.discard(key)

    def dispatched(self, candidate: Candidate) -> None:
        """The ledger charges; the queue learns of it through `set_vtime`."""

    def tenant_left(self, tenant: str) -> None:
        """Nothing is kept of a tenant without lanes."""

    def __len__(self) -> int:
        return self._lanes.queued

    def __contains__(self, key: object) -> bool:
        return key in self._lanes

    @property
    def lanes(self) -> int:
        """Number of lanes, which is what a decision costs."""
        return len(self._lanes)

    def choose(self, now: float, without: Collection[str] = ()) -> Candidate | None:
        lanes = len(self._lanes)
        if lanes > FEW:
            return self._choose_of_many(now, without)
        return self._choose_of_few(now, without) if lanes else None

    def _choose_of_few(self, now: float, without: Collection[str] = ()) -> Candidate | None:
        """The same choice as `_choose_of_many`, bit for bit, without NumPy's cost per call."""
        lanes = self._lanes.rows
        limit = min([lane.vtime_s for lane in lanes]) + self._slack_s
        lanes = [lane for lane in lanes if lane.vtime_s <= limit]
        if without:
            lanes = [lane for lane in lanes if lane.kind.cost.key.model not in without]
            if not lanes:
                return None
        if len(lanes) == 1:
            return lanes[0].waiting.first()
        waits = [now - lane.since for lane in lanes]
        paths = [lane.kind.path_s for lane in lanes]
        runs = [lane.kind.cost.run_s for lane in lanes]
        longest, furthest, dearest = _unit(max(waits)), _unit(max(paths)), _unit(max(runs))
        scores = [
            wait / longest - path / furthest - run / dearest
            for wait, path, run in zip(waits, paths, runs, strict=True)
        ]
        best = max(scores)
        if scores.count(best) == 1:
            return lanes[scores.index(best)].waiting.first()
        ties = [at for at, score in enumerate(scores) if score == best]
        most = max([waits[at] for at in ties])
        return min([lanes[at].waiting.first() for at in ties if waits[at] == most], key=_key)

    def _choose_of_many(self, now: float, without: Collection[str] = ()) -> Candidate | None:
        lanes = self._lanes
        since, vtime, path, run = lanes.columns()
        largest = np.maximum.reduce
        eligible = vtime <= np.minimum.reduce(vtime) + self._slack_s
        for model in without:
            lanes.leave_out(model, eligible)
        rows = None
        if not eligible.all():
            rows = eligible.nonzero()[0]
            if not len(rows):
                return None
            if len(rows) == 1:
                return self._head(int(rows[0]))
            since, path, run = since.take(rows), path.take(rows), run.take(rows)
        waited = now - since
        score = waited / _unit(largest(waited))
        score -= path / _unit(largest(path))
        score -= run / _unit(largest(run))
        best = int(score.argmax())
        tied = score == score[best]
        if np.count_nonzero(tied) == 1:
            return self._head(best if rows is None else int(rows[best]))
        ties = tied.nonzero()[0]
        of_ties = waited.take(ties)
        ties = ties[of_ties == largest(of_ties)]
        if rows is not None:
            ties = rows.take(ties)
        return min(map(self._head, ties.tolist()), key=_key)

    def _head(self, row: int) -> Candidate:
        return self._lanes.rows[row].waiting.first()

    def _check(self) -> None:
        self._lanes._check()


def _key(candidate: Candidate) -> str:
    return candidate.key


def _unit(largest: float) -> float:
    """What values are divided by so that their largest becomes 1; so that all become 0 when it is 0."""
    return largest if largest > 0.0 else math.inf
