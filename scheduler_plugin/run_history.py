"""The runs of the last requests and how they ended, and what ModelFns have spent, for people who watch. Pure.

What is kept is bounded by count and by age, whichever comes first.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, field
from typing import NamedTuple

from .events import Measured
from .journal import RequestOutcome, RequestRecord, RunOutcome, RunRecord


class Ended(NamedTuple):
    """A run that is over. started: its dispatch. Seconds; load, compute, transfer: device seconds."""

    position: int
    fn: str
    executor: str
    started: float
    stopped: float
    load_s: float
    compute_s: float
    transfer_s: float
    steps: int
    outcome: RunOutcome


@dataclass
class RequestHistory:
    """One request's runs, in the order of their ends. left_out: runs beyond those kept. over, outcome:
    when it ended and how; None while it is open."""

    request: str
    tenant: str
    workflow: str
    positions: int
    submitted: float
    runs: list[Ended] = field(default_factory=list)
    left_out: int = 0
    over: float | None = None
    outcome: RequestOutcome | None = None

    @property
    def last(self) -> float:
        """When something of it ended last; before that, when it was submitted."""
        ends = [run.stopped for run in self.runs[-1:]]
        if self.over is not None:
            ends.append(self.over)
        return max(ends, default=self.submitted)


@dataclass
class Spent:
    """Of one ModelFn in one workflow, since the beginning. Seconds are device seconds."""

    runs: int = 0
    steps: int = 0
    load_s: float = 0.0
    compute_s: float = 0.0
    transfer_s: float = 0.0


#: Stands for the ModelFn and workflow of those beyond the limit of RunHistory, together.
OTHERS = ("others", "")


class RunHistory:
    """Runs by request, the request with the latest end last.

    requests, runs: most that are kept in all. per_request: most runs of one request. bare: most requests
    that ended without any run, so that thousands cancelled at once do not drive out those that ran.
    age_s: a request is forgotten so long after its last end. kinds: most pairs of ModelFn and workflow
    that totals are kept for. O(1) per run and per request.
    """

    def __init__(
        self,
        requests: int = 2_000,
        runs: int = 20_000,
        per_request: int = 500,
        bare: int = 200,
        age_s: float = 900.0,
        kinds: int = 500,
    ) -> None:
        self._limits = requests, runs, per_request
        self._bare: dict[
            str, None
        ] = {}  # in order; ended without a run; maybe forgotten, or with one since
        self._most_bare = bare
        self._age_s = age_s
        self._kinds = kinds
        self._requests: OrderedDict[str, RequestHistory] = OrderedDict()
        self._runs = 0
        self.spent: dict[tuple[str, str], Spent] = {}

    def ended(self, run: RunRecord) -> None:
        """A run is over. What nobody measured counts as no device seconds."""
        assert run.over is not None
        assert run.outcome is not None
        history = self._latest(run.request)
        used = run.used or Measured()
        ended = Ended(
            run.position,
            run.step.fn,
            run.executor,
            run.started,
            run.over,
            used.load_s,
            used.compute_s,
            used.transfer_s,
            run.steps,
            run.outcome,
        )
        if len(history.runs) == self._limits[2]:
            history.runs[-1] = ended
            history.left_out += 1
        else:
            history.runs.append(ended)
            self._runs += 1
        self._add(ended, history.workflow)
        self._keep_bounds(run.over)

    def request_over(self, request: RequestRecord) -> None:
        """A request is over, maybe without any run. Runs of it may end later."""
        assert request.over is not None
        history = self._latest(request)
        history.over, history.outcome = request.over, request.outcome
        if not history.runs:
            self._bare.pop(request.name, None)
            self._bare[request.name] = None
            if len(self._bare) > self._most_bare:
                oldest = next(iter(self._bare))
                del self._bare[oldest]
                if oldest in self._requests and not self._requests[oldest].runs:
                    del self._requests[oldest]
        self._keep_bounds(request.over)

    def _latest(self, request: RequestRecord) -> RequestHistory:
        """The request's history, new if need be, behind all others."""
        history = self._requests.pop(request.name, None)
        if history is None:
            outline = request.outline
            # Of one that was forgotten while it ran on, the end is known already.
            history = RequestHistory(
                request.name,
                request.tenant,
                outline.workflow,
                len(outline),
                request.submitted,
                over=request.over,
                outcome=request.outcome,
            )
        self._requests[request.name] = history
        return history

    def _keep_bounds(self, now: float) -> None:
        most_requests, most_runs, _ = self._limits
        while len(self._requests) > most_requests or self._runs > most_runs:
            self._drop_oldest()
        self.forget(now)

    def _add(self, run: Ended, workflow: str) -> None:
        kind = run.fn, workflow
        spent = self.spent.get(kind)
        if spent is None:
            if len(self.spent) >= self._kinds:
                kind = OTHERS
            spent = self.spent.setdefault(kind, Spent())
        spent.runs += 1
        spent.steps += run.steps
        spent.load_s += run.load_s
        spent.compute_s += run.compute_s
        spent.transfer_s += run.transfer_s

    def forget(self, now: float) -> None:
        """What is too old at `now`."""
        while self._requests:
            oldest = next(iter(self._requests.values()))
            if now - oldest.last <= self._age_s:
                return
            self._drop_oldest()

    def _drop_oldest(self) -> None:
        _, history = self._requests.popitem(last=False)
        self._runs -= len(history.runs)

    def __len__(self) -> int:
        return len(self._requests)

    def __contains__(self, request: object) -> bool:
        return request in self._requests

    def latest(self, count: int, containing: str = "") -> list[RequestHistory]:
        """At most so many requests whose tenant or name contains the text, latest end first."""
        found: list[RequestHistory] = []
        for history in reversed(self._requests.values()):
            if len(found) == count:
                break
            if containing in history.tenant or containing in history.request:
                found.append(history)
        return found

    def count(self, containing: str = "") -> int:
        """Requests that `latest` would find."""
        if not containing:
            return len(self._requests)
        return sum(
            containing in history.tenant or containing in history.request
            for history in self._requests.values()
        )

    def _check(self) -> None:
        most_requests, most_runs, most_of_one = self._limits
        assert len(self._requests) <= most_requests
        assert self._runs == sum(len(h.runs) for h in self._requests.values()) <= most_runs
        ends = [history.last for history in self._requests.values()]
        assert ends == sorted(ends)
        assert len(self.spent) <= self._kinds + 1
        assert len(self._bare) <= self._most_bare
        bare = {name for name, history in self._requests.items() if not history.runs}
        assert bare <= set(self._bare)
        for name, history in self._requests.items():
            assert history.request == name
            assert len(history.runs) <= most_of_one
            assert history.runs or history.over is not None
            assert (history.over is None) == (history.outcome is None)
            stops = [run.stopped for run in history.runs]
            assert stops == sorted(stops)
