"""The fair scheduling policy: the one object that the Dask plugin and the simulator drive.

    policy.handle(event)      what happened      -> what running tasks must be told
    policy.peek(now)          the next decision, or None: nothing ready, or no executor idle
    policy.commit(decision, now)                 carry it out: charge, occupy the executor
    policy.yields(now)        after a round: multi-step tasks that must hand back early

It owns the state and keeps it consistent; which invocation is next is asked of a chooser (the fair
queue, or a rival for comparison). No clock, no I/O: `now` comes with every call, one monotonic clock.
An illegal event raises PolicyError and changes nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from st2i_dask.errors import PolicyError

from . import events as ev
from .candidates import Candidate, Chooser
from .charging import Charging
from .cost_model import CostModel
from .critical_path import CriticalPaths
from .fair_queue import FairQueue
from .fleet import Fleet
from .gangs import members
from .instructions import Dispatch, Instruction, Producer, RaiseYield
from .ledger import VTimeLedger
from .lifecycle import Lifecycle
from .patience import Patience
from .placement import Placement
from .reactions import Reactions
from .requests import Invocation, RequestBook, Run, State
from .settings import Settings

#: Models that a decision passes over for others at most; the next is dispatched whatever it must load.
MOST_HELD = 4


@dataclass(frozen=True, slots=True)
class TenantRow:
    """One line of the tenants table. Requests `queued` have not started, `running` have."""

    tenant: str
    vtime_s: float
    weight: float
    queued: int
    running: int
    share: float
    service_s: float


class _Outlook:
    """Estimates, as the chooser asks for them."""

    def __init__(self, costs: CostModel, paths: CriticalPaths, placement: Placement) -> None:
        self.path_s = paths.path_s
        self.whole_s = paths.whole_s
        self.own_s = costs.own_s
        self.load_s = costs.load_s
        self.missing = placement.least_missing


class FairPolicy:
    """See the head of this file. Not thread-safe: drive it from one thread (the event loop)."""

    def __init__(
        self,
        settings: Settings | None = None,
        *,
        costs: CostModel | None = None,
        chooser: Callable[[Any, float], Chooser] = FairQueue,
    ) -> None:
        settings = settings or Settings()
        self.costs = costs or CostModel()
        paths = CriticalPaths(self.costs)
        self._placement = Placement()
        self._fleet = Fleet(self._placement)
        self._charging = Charging(settings, self.costs, paths, self._fleet)
        self._chooser = chooser(_Outlook(self.costs, paths, self._placement), settings.slack_s)
        self._chooser.set_weights(self.ledger.weight)
        self._charging.chooser = self._chooser
        self._book = RequestBook()
        self._lifecycle = Lifecycle(self._book, self._fleet, self._charging)
        self._reactions = Reactions(self._lifecycle, paths, settings)
        self._patience = Patience(self._placement, self.costs, self._book)
        self._paths = paths
        self._now = 0.0
        #: When to ask for a decision again at the latest, s: the last answer was that what is ready had
        #: better wait for an executor that has its model. None: it was another answer.
        self.waits_until: float | None = None

    def handle(self, event: ev.Event) -> list[Instruction]:
        """Take in an event. What running tasks must be told at once, usually nothing."""
        if event.now != self._now:
            self._tick(event.now)
        return self._reactions.handle(event)

    # Questions

    @property
    def settings(self) -> Settings:
        return self._reactions.settings

    @property
    def ledger(self) -> VTimeLedger:
        return self._charging.ledger

    @property
    def queued(self) -> int:
        """Invocations that are ready and wait for an executor."""
        return self._book.ready

    @property
    def idle_executors(self) -> int:
        return self._placement.idle

    def is_idle(self, executor: str) -> bool:
        return self._placement.is_idle(executor)

    def idle_names(self) -> list[str]:
        """The idle executors."""
        return self._placement.idle_names()

    def state(self, key: str) -> State | None:
        """Where a task stands; None when it belongs to no open request."""
        return self._book.state(key)

    def is_over(self, request: str, position: int) -> bool:
        """Whether nothing is expected of that position any more: it has run, or will not."""
        found = self._book.requests.get(request)
        return found is not None and found.states[position] in (State.DONE, State.DEAD)

    def has_request(self, request: str) -> bool:
        return request in self._book.requests

    def refusal(self, tenant: str, requests: int = 1) -> str | None:
        """Why that many more requests of this tenant would be refused now; None: they would not."""
        return self._reactions.refusal(tenant, requests)

    def group_size(self, key: str, seconds: float, served: int | None) -> float:
        """Device seconds of all executors that a running task holds per second of its first one, which
        was used for `seconds`; served: how many members took part, if that is known."""
        invocation = self._book.invocations.get(key)
        if invocation is None or invocation.run is None or not seconds:
            return 1.0
        return invocation.run.device_s(seconds, served) / seconds

    def yield_wanted(self, executor: str) -> bool:
        """Whether the multi-step task running there was asked to hand back."""
        running = self._fleet.running.get(executor)
        return running is not None and running.run is not None and running.run.yielding

    def tenants(self, now: float) -> list[TenantRow]:
        """Every tenant ever seen, by name."""
        shares = self._charging.recent.shares(now)
        rows = []
        for tenant, total in sorted(self.ledger.totals().items()):
            standing = self._book.standing(tenant)
            rows.append(
                TenantRow(
                    tenant,
                    total.vtime_s,
                    self.ledger.weight(tenant),
                    standing.waiting,
                    standing.started,
                    shares.get(tenant, 0.0),
                    total.service_s,
                )
            )
        return rows

    # Decisions

    def peek(self, now: float) -> Dispatch | None:
        """The next decision. Changes nothing that another event or decision depends on. None: nothing is
        ready, no executor is idle, or what is ready had better wait (see `waits_until`)."""
        if now != self._now:
            self._tick(now)
        self.waits_until = None
        placement = self._placement
        if not self._book.ready:
            self._patience.forget()
            return None
        if not placement.idle:
            return None
        self._chooser.refresh_models(placement.take_moved())
        candidate = self._choose(now)
        if candidate is None:
            return None
        invocation = self._book.invocations[candidate.key]
        cost_key = candidate.cost_key
        producers = self._producers(invocation)
        place = placement.place(
            cost_key.model,
            self.costs.load_s(cost_key),
            invocation.input_bytes,
            invocation.input_at,
            self.settings.bandwidth,
            apart_from=[producer.executor for producer in producers],
            lets_in=self._lets_in(invocation),
        )
        assert place is not None, "the executor of a running producer is idle"
        steps = 1 if invocation.steps == 1 else self._steps(invocation)
        gang = members(invocation, place, placement, self.costs, self._book.ready)
        missing = place.missing
        for member in gang:
            missing = max(missing, placement.missing_on(member, cost_key.model))
        return Dispatch(
            candidate.key,
            place.executor,
            candidate.tenant,
            candidate.request,
            candidate.position,
            self._charging.estimate(cost_key, missing, place.pull_bytes, steps, 1 + len(gang)),
            steps,
            producers,
            gang,
        )

    def _choose(self, now: float) -> Candidate | None:
        """The next one that is not held back."""
        chooser, patience = self._chooser, self._patience
        candidate = chooser.choose(now)
        assert candidate is not None, "ready invocations, but the chooser has none"
        held: list[str] = []
        while patience.holds(candidate, now):
            held.append(candidate.model)
            found = chooser.choose(now, held)
            if found is None:
                self.waits_until = patience.until(held)
                return None
            candidate = found
            if len(held) == MOST_HELD:
                break
        return candidate

    def commit(self, decision: Dispatch, now: float) -> None:
        """Carry out what `peek` said. PolicyError if it is no longer possible."""
        if now != self._now:
            self._tick(now)
        invocation = self._book.invocation(decision.key)
        request, position = invocation.request, invocation.position
        if request.states[position] is not State.READY:
            raise self._book.illegal(request, position, State.RUNNING)
        placement, executor = self._placement, decision.executor
        group = (executor, *decision.members)
        if len(set(filter(placement.is_idle, group))) < len(group):
            raise PolicyError(f"executors {sorted(group)} are not idle; ask for a decision again")
        candidate = invocation.candidate
        model = candidate.model
        missing = slowest = placement.missing_on(executor, model)
        for member in decision.members:
            slowest = max(slowest, placement.missing_on(member, model))
        pull_bytes = max(0, invocation.input_bytes - invocation.input_at.get(executor, 0))
        total_s = decision.estimate.total_s
        unit_s = total_s - decision.estimate.compute_s * (1 - 1 / decision.steps)
        run = Run(
            decision,
            -1,
            now,
            missing,
            slowest,
            pull_bytes,
            unit_s,
            total_s,
            candidate,
            group,
        )
        self._lifecycle.start(invocation, run)

    def next_decision(self, now: float) -> Dispatch | None:
        """`peek` and `commit` in one."""
        decision = self.peek(now)
        if decision is not None:
            self.commit(decision, now)
        return decision

    def yields(self, now: float) -> list[RaiseYield]:
        """Multi-step tasks to interrupt: no executor is idle and another tenant waits, or anybody for
        what a gang holds beside its first executor.

        Ask after every round of decisions; each task is named once. Its charge is cut at once to
        what it has used and the step it is in.
        """
        if now != self._now:
            self._tick(now)
        if not self._fleet.multi_step or self._placement.idle:
            return []
        found = []
        ready = self._book.ready
        for key, invocation in self._fleet.multi_step.items():
            run = invocation.run
            assert run is not None
            if run.yielding:
                continue
            own = 0 if run.members else invocation.request.standing.ready
            if ready > own:
                run.yielding = True
                self._charging.cut(invocation, now)
                found.append(RaiseYield(key, run.dispatch.executor))
        return found

    def _steps(self, invocation: Invocation) -> int:
        """Steps to run as one task: more than one only when nobody else would wait for them."""
        others = self._book.ready - invocation.request.standing.ready
        if others > self._placement.idle - 1:
            return 1
        return min(invocation.steps, self.settings.steps_per_task)

    def _lets_in(self, invocation: Invocation) -> list[tuple[str, float]]:
        """Model and seconds to load of the callback consumers that wait for its dispatch."""
        request = invocation.request
        found = []
        for position in request.outline.consumers[invocation.position]:
            if request.states[position] is State.GATED:
                key = request.outline.cost_keys[position]
                found.append((key.model, self.costs.load_s(key)))
        return found

    def _producers(self, invocation: Invocation) -> tuple[Producer, ...]:
        request = invocation.request
        found = []
        for position in request.outline.steps[invocation.position].callback_deps:
            producer = request.invocations.get(position)
            if producer is not None and producer.run is not None:
                found.append(Producer(position, producer.key, producer.run.dispatch.executor))
        return tuple(found)

    def _tick(self, now: float) -> None:
        if now < self._now:
            raise PolicyError(
                f"now is {now!r} s, after {self._now!r} s; use one monotonic clock for all events"
            )
        self._now = now

    def _check(self) -> None:
        self._lifecycle._check()
        self._patience._check()
        assert len(self._paths) == len({r.outline for r in self._book.requests.values()})
