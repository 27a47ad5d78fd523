"""What the journal tells, counted for the metrics page. Pure; a count only ever grows.

Counting is a few additions per event. What a page shows of it is worked out when somebody asks.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Sequence
from itertools import accumulate

from st2i_dask.metrics_page import label

from .journal import RequestRecord, RunRecord, Watcher

#: Most workflows with a histogram of their own; the others share one.
WORKFLOWS = 50
#: Their label. No tenant can be called so, see `st2i_dask.tenants`.
OTHER = "(other)"

#: Upper bounds, seconds.
DECISION_S = (1e-5, 2.5e-5, 5e-5, 1e-4, 2.5e-4, 5e-4, 1e-3, 2.5e-3, 1e-2, 1e-1)
WAIT_S = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600)
LATENCY_S = (0.1, 0.25, 0.5, 1, 2.5, 5, 10, 20, 30, 60, 120, 300, 600, 1800)

#: What is counted per tenant, in this order.
RUNS = ("done", "failed", "lost", "cancelled")
REQUESTS = ("done", "failed", "cancelled")
NAMES = (
    *("submitted", "refused", "dispatches", "yields", "lost_results"),
    *(f"runs_{outcome}" for outcome in RUNS),
    *(f"requests_{outcome}" for outcome in REQUESTS),
)
_AT = {name: number for number, name in enumerate(NAMES)}
_RUN_AT = {outcome: _AT[f"runs_{outcome}"] for outcome in RUNS}
_REQUEST_AT = {outcome: _AT[f"requests_{outcome}"] for outcome in REQUESTS}
_SUBMITTED, _REFUSED, _DISPATCHES, _YIELDS, _LOST_RESULTS = range(5)


class Histogram:
    """Counts of seconds by bucket."""

    def __init__(self, bounds: Sequence[float]) -> None:
        self._bounds = tuple(bounds)
        self._counts = [0] * (len(self._bounds) + 1)
        self.sum = 0.0

    def observe(self, seconds: float) -> None:
        self._counts[bisect_left(self._bounds, seconds)] += 1
        self.sum += seconds

    def buckets(self) -> Iterator[tuple[str, int]]:
        """(upper bound, observations up to it), as Prometheus writes them."""
        names = [*(repr(float(bound)) for bound in self._bounds), "+Inf"]
        return zip(names, accumulate(self._counts), strict=True)

    def _check(self) -> None:
        assert len(self._counts) == len(self._bounds) + 1
        assert min(self._counts) >= 0
        assert list(self._bounds) == sorted(set(self._bounds))


class Counts(Watcher):
    """tenants: by tenant, counts in the order of NAMES. all: of every tenant together."""

    def __init__(self) -> None:
        self.tenants: dict[str, list[int]] = {}
        self.all = [0] * len(NAMES)
        self.decision = Histogram(DECISION_S)
        self.wait = Histogram(WAIT_S)
        self.latency: dict[str, Histogram] = {}  # by label of the workflow

    def submitted(self, request: RequestRecord) -> None:
        self._add(request.tenant, _SUBMITTED)

    def refused(self, tenant: str, requests: int, why: str, now: float, stimulus_id: str) -> None:
        self._add(tenant, _REFUSED, requests)

    def dispatched(self, run: RunRecord) -> None:
        self._add(run.request.tenant, _DISPATCHES)
        self.decision.observe(run.decided_s)
        self.wait.observe(run.started - run.ready)

    def yielding(self, run: RunRecord) -> None:
        self._add(run.request.tenant, _YIELDS)

    def run_over(self, run: RunRecord) -> None:
        assert run.outcome is not None
        self._add(run.request.tenant, _RUN_AT[run.outcome])

    def result_lost(self, request: RequestRecord, key: str, now: float, stimulus_id: str) -> None:
        self._add(request.tenant, _LOST_RESULTS)

    def request_over(self, request: RequestRecord) -> None:
        assert request.outcome is not None
        assert request.over is not None
        self._add(request.tenant, _REQUEST_AT[request.outcome])
        if request.outcome == "done":
            workflow = label(request.outline.workflow)
            latency = self.latency.get(workflow)
            if latency is None:
                name = workflow if len(self.latency) < WORKFLOWS else OTHER
                latency = self.latency.setdefault(name, Histogram(LATENCY_S))
            latency.observe(request.over - request.submitted)

    def _add(self, tenant: str, which: int, count: int = 1) -> None:
        counts = self.tenants.get(tenant)
        if counts is None:
            counts = self.tenants[tenant] = [0] * len(NAMES)
        counts[which] += count
        self.all[which] += count

    def _check(self) -> None:
        assert len(self.latency) <= WORKFLOWS + 1
        for which in range(len(NAMES)):
            assert self.all[which] == sum(counts[which] for counts in self.tenants.values())
        assert self.all[_DISPATCHES] >= sum(self.all[at] for at in _RUN_AT.values())
        for histogram in (self.decision, self.wait, *self.latency.values()):
            histogram._check()
