"""What became of requests and of their runs, for those who only watch: metrics, logs, traces, displays.

The policy is told events; here they are put together once, into one record per request and per run. A
*run* is one dispatch of an invocation: it ends done, failed, lost (the invocation runs again) or
cancelled (nobody wanted it any more; over when its executor is free again). A request is over when its
last position has a result, at its first failure, or when nobody wants it any more.

Pure: times are those of the events. Memory: open requests and what runs.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal

from . import events as ev
from .instructions import Dispatch, Estimate
from .outline import Outline, Step

logger = logging.getLogger(__name__)

RunOutcome = Literal["done", "failed", "lost", "cancelled"]
RequestOutcome = Literal["done", "failed", "cancelled"]


@dataclass(slots=True, eq=False)
class RequestRecord:
    """One request. Times: seconds of the policy's clock. started: its first dispatch. load_s, compute_s,
    transfer_s: device seconds of its runs that are over. ready: by position, since when it waits."""

    name: str
    tenant: str
    outline: Outline
    submitted: float
    stimulus_id: str
    started: float | None = None
    over: float | None = None
    outcome: RequestOutcome | None = None
    load_s: float = 0.0
    compute_s: float = 0.0
    transfer_s: float = 0.0
    ready: dict[int, float] = field(default_factory=dict)
    #: What ended it, as Dask names it.
    over_stimulus_id: str = ""


@dataclass(slots=True, eq=False)
class RunRecord:
    """One run. Times as above; ready: since when its invocation had waited. decided_s: seconds that the
    decision took. members: executors that it holds beside its own. used: device seconds of its own
    executor; None where nobody measured them."""

    key: str
    request: RequestRecord
    position: int
    executor: str
    steps: int
    estimate: Estimate
    ready: float
    started: float
    decided_s: float
    stimulus_id: str
    members: tuple[str, ...] = ()
    over: float | None = None
    outcome: RunOutcome | None = None
    used: ev.Measured | None = None
    over_stimulus_id: str = ""

    @property
    def step(self) -> Step:
        """ModelFn, model and bucket."""
        return self.request.outline.steps[self.position]


class Watcher:
    """What the journal tells, in the order in which it happens. Leave out what is of no interest.

    Called on the event loop between decisions: be quick. One that raises is told nothing more.
    """

    def submitted(self, request: RequestRecord) -> None:
        """The policy has taken it in."""

    def refused(self, tenant: str, requests: int, why: str, now: float, stimulus_id: str) -> None:
        """So many requests of the tenant would be over its cap."""

    def dispatched(self, run: RunRecord) -> None:
        """It is on its way to its executor."""

    def yielding(self, run: RunRecord) -> None:
        """It was asked to hand back after its current step."""

    def run_over(self, run: RunRecord) -> None:
        """It has ended, see `outcome`."""

    def result_lost(self, request: RequestRecord, key: str, now: float, stimulus_id: str) -> None:
        """A result is gone with its executor and still wanted."""

    def request_over(self, request: RequestRecord) -> None:
        """It has ended, see `outcome`. Told once; runs of it may end later."""


class Journal:
    """Driven by whoever drives the policy, after the policy has taken the event in. One thread."""

    def __init__(self) -> None:
        self.watchers: tuple[Watcher, ...] = ()
        self._told: dict[
            str, list[tuple[Watcher, Callable[..., None]]]
        ] = {}  # by method, who has it
        self._requests: dict[str, RequestRecord] = {}
        self._runs: dict[str, RunRecord] = {}  # by key
        self._draining: dict[str, RunRecord] = {}  # by executor
        self._reactions: dict[type, Callable[[Any], None]] = {
            ev.RequestSubmitted: self._submitted,
            ev.RequestClosed: self._closed,
            ev.InvocationReady: self._ready,
            ev.Completed: self._completed,
            ev.Failed: self._failed,
            ev.Lost: self._lost,
            ev.Cancelled: self._cancelled,
            ev.Drained: self._drained,
            ev.ExecutorIdle: self._drained,
            ev.ExecutorLeft: self._left,
            ev.ResultLost: self._result_lost,
        }

    def watch(self, watcher: Watcher) -> None:
        """Tell it what happens from now on."""
        self._set((*self.watchers, watcher))

    def unwatch(self, watcher: Watcher) -> None:
        self._set(tuple(w for w in self.watchers if w is not watcher))

    def _set(self, watchers: tuple[Watcher, ...]) -> None:
        self.watchers = watchers
        self._told = {
            what: [
                (watcher, getattr(watcher, what))
                for watcher in watchers
                if getattr(type(watcher), what) is not method
            ]
            for what, method in vars(Watcher).items()
            if callable(method) and not what.startswith("_")
        }

    # What happened

    def happened(self, event: ev.Event) -> None:
        """The policy has taken this event in."""
        react = self._reactions.get(type(event))
        if react is not None:
            react(event)

    def dispatched(
        self, decision: Dispatch, now: float, decided_s: float = 0.0, stimulus_id: str = ""
    ) -> None:
        """The policy has committed this decision, which took so many seconds."""
        request = self._requests.get(decision.request)
        if request is None:
            return  # submitted before the journal began
        if request.started is None:
            request.started = now
        run = RunRecord(
            decision.key,
            request,
            decision.position,
            decision.executor,
            decision.steps,
            decision.estimate,
            request.ready.pop(decision.position, now),
            now,
            decided_s,
            stimulus_id,
            decision.members,
        )
        self._runs[run.key] = run
        self._tell("dispatched", run)

    def computed(self, request: str, position: int, now: float, stimulus_id: str = "") -> None:
        """An earlier run had computed that position's result: it needs no run of its own."""
        record = self._requests.get(request)
        if record is not None:
            self._has_result(record, position, now, stimulus_id)

    def yielding(self, key: str) -> None:
        """A run was asked to hand back early."""
        run = self._runs.get(key)
        if run is not None:
            self._tell("yielding", run)

    def refused(
        self, tenant: str, requests: int, why: str, now: float, stimulus_id: str = ""
    ) -> None:
        """Requests over the tenant's cap."""
        self._tell("refused", tenant, requests, why, now, stimulus_id)

    # Events

    def _submitted(self, event: ev.RequestSubmitted) -> None:
        request = RequestRecord(
            event.request, event.tenant, event.outline, event.now, event.stimulus_id
        )
        self._requests[event.request] = request
        self._tell("submitted", request)

    def _closed(self, event: ev.RequestClosed) -> None:
        request = self._requests.pop(event.request, None)
        if request is None:
            return
        for run in [run for run in self._runs.values() if run.request is request]:
            self._drain(run, event)
        self._request_over(request, "cancelled", event.now, event.stimulus_id)

    def _ready(self, event: ev.InvocationReady) -> None:
        request = self._requests.get(event.request)
        if request is not None:
            request.ready[event.position] = event.now

    def _completed(self, event: ev.Completed) -> None:
        run = self._runs.pop(event.key, None)
        if run is None:
            return
        run.steps = event.steps
        self._run_over(run, "done", event.used, event)
        if event.finished:
            self._has_result(run.request, run.position, event.now, event.stimulus_id)

    def _failed(self, event: ev.Failed) -> None:
        run = self._runs.pop(event.key, None)
        if run is not None:
            self._run_over(run, "failed", event.used, event)
            self._request_over(run.request, "failed", event.now, event.stimulus_id)

    def _lost(self, event: ev.Lost) -> None:
        run = self._runs.pop(event.key, None)
        if run is not None:
            self._run_over(run, "lost", event.used, event)

    def _cancelled(self, event: ev.Cancelled) -> None:
        run = self._runs.get(event.key)
        if run is None:
            return
        if event.stopped:
            del self._runs[event.key]
            self._run_over(run, "cancelled", None, event)
        else:
            self._drain(run, event)

    def _drain(self, run: RunRecord, event: ev.Event) -> None:
        """Nobody wants it, and its thread cannot be stopped."""
        del self._runs[run.key]
        self._draining[run.executor] = run

    def _drained(self, event: ev.Drained | ev.ExecutorIdle) -> None:
        run = self._draining.pop(event.executor, None)
        if run is not None:
            used = event.used if isinstance(event, ev.Drained) else None
            self._run_over(run, "cancelled", used, event)

    def _left(self, event: ev.ExecutorLeft) -> None:
        for run in [run for run in self._runs.values() if run.executor == event.executor]:
            del self._runs[run.key]
            self._run_over(run, "lost", None, event)
        draining = self._draining.pop(event.executor, None)
        if draining is not None:
            self._run_over(draining, "cancelled", None, event)

    def _result_lost(self, event: ev.ResultLost) -> None:
        request = self._requests.get(event.request)
        if request is not None:
            self._tell("result_lost", request, event.key, event.now, event.stimulus_id)

    # Ends

    def _run_over(
        self, run: RunRecord, outcome: RunOutcome, used: ev.Measured | None, event: ev.Event
    ) -> None:
        run.over, run.outcome, run.used = event.now, outcome, used
        run.over_stimulus_id = event.stimulus_id
        if used is not None:
            request = run.request
            request.load_s += used.load_s
            request.compute_s += used.compute_s
            request.transfer_s += used.transfer_s
        self._tell("run_over", run)

    def _has_result(
        self, request: RequestRecord, position: int, now: float, stimulus_id: str
    ) -> None:
        # Positions are topological and every one is needed: the last gives the request's result.
        if position == len(request.outline) - 1:
            self._request_over(request, "done", now, stimulus_id)

    def _request_over(
        self, request: RequestRecord, outcome: RequestOutcome, now: float, stimulus_id: str
    ) -> None:
        if request.outcome is None:
            request.over, request.outcome, request.over_stimulus_id = now, outcome, stimulus_id
            self._tell("request_over", request)

    def _tell(self, what: str, *args: Any) -> None:
        for watcher, method in self._told.get(what, ()):
            try:
                method(*args)
            except Exception:
                self.unwatch(watcher)
                logger.exception("%s is told nothing more: it failed", type(watcher).__name__)

    def _check(self) -> None:
        for key, run in self._runs.items():
            assert run.key == key
            assert run.outcome is None
            assert run.request.name in self._requests
        for executor, run in self._draining.items():
            assert run.executor == executor
            assert run.outcome is None
        for name, request in self._requests.items():
            assert request.name == name
            assert (request.over is None) == (request.outcome is None)
