"""When an idle executor had better not load: another that has the model will be free in a moment.

An invocation whose model would take L seconds to load on the best idle executor is held back while

    soonest + ready * own / holders  <  L / PATIENCE

soonest: seconds until a busy executor is expected to be done and to have the model; ready: invocations
that are ready for this model, `own` seconds each; holders: executors that have it. Others are chosen in
its place; only where all that are eligible are held back does an executor idle beside ready work.

Without this the executor that happens to be free takes whatever is next, also what it must load for
seconds, while the one that has the model is done in a fraction of one; and it evicts for it what the next
one will look for. Whoever is held back is held back for L seconds at most, whatever was expected: a model
that nobody got on with for so long is loaded once more.
"""

from __future__ import annotations

import math

from .candidates import Candidate
from .cost_model import CostModel
from .placement import Placement
from .requests import RequestBook, State

#: What is gained must be that many times what is waited for: others may take the executor first.
PATIENCE = 10.0


class Patience:
    """Which ready invocations wait for an executor that has their model. Constant memory per model."""

    def __init__(self, placement: Placement, costs: CostModel, book: RequestBook) -> None:
        self._placement, self._costs, self._book = placement, costs, book
        # By model: the first one that was held back and has not been dispatched since, and until when.
        self._held: dict[str, tuple[str, float]] = {}

    def holds(self, candidate: Candidate, now: float) -> bool:
        """Whether it should rather wait than be placed now. Starts its time if it had none."""
        key = candidate.cost_key
        model, load_s = key.model, self._costs.load_s(key)
        gain_s = load_s * self._placement.least_missing(model)
        if not gain_s or not self._costs.is_load_measured(key):
            return False
        soonest_s, holders = self._placement.soonest(model, load_s, now)
        if soonest_s == math.inf:
            return False
        queue_s = self._book.ready_of[model] * self._costs.own_s(key) / holders
        if (soonest_s + queue_s) * PATIENCE >= gain_s:
            return False
        first, until = self._held.get(model, ("", 0.0))
        if self._book.state(first) is not State.READY:
            until = now + gain_s
            self._held[model] = candidate.key, until
        return now < until

    def until(self, models: list[str]) -> float:
        """When one of these is held back no longer, whatever happens; all of them are held back."""
        return min(self._held[model][1] for model in models)

    def forget(self) -> None:
        """Nothing is ready any more."""
        self._held.clear()

    def _check(self) -> None:
        assert all(math.isfinite(until) for _, until in self._held.values())
        if not self._book.ready:
            return
        for model, (key, _) in self._held.items():
            invocation = self._book.invocations.get(key)
            assert invocation is None or invocation.candidate.model == model
