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
from functools import singledispatchmethod
from typing import Any

from st2i_dask.errors import PolicyError

from . import events as ev
from .candidates import Candidate, Chooser
from .cost_model import CostModel
from .critical_path import CriticalPaths
from .fair_queue import FairQueue
from .instructions import Dispatch, Estimate, Instruction, Producer, RaiseYield, Unblock
from .ledger import VTimeLedger
from .outline import CostKey
from .placement import Placement
from .recent import RecentUse
from .requests import Invocation, Request, RequestBook, Run, State
from .settings import Settings


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
        self._costs = costs
        self._placement = placement

    def load_s(self, cost_key: CostKey) -> float:
        return self._costs.load_s(cost_key) * self._placement.least_missing(cost_key.model)


class FairPolicy:
    """See the head of this file. Not thread-safe: drive it from one thread (the event loop)."""

    def __init__(
        self,
        settings: Settings | None = None,
        *,
        costs: CostModel | None = None,
        chooser: Callable[[Any, float], Chooser] = FairQueue,
    ) -> None:
        self.settings = settings or Settings()
        self.costs = costs or CostModel()
        self.ledger = VTimeLedger()
        self.ledger.set_weights(self.settings.weights, self.settings.default_weight)
        self._paths = CriticalPaths(self.costs)
        self._placement = Placement()
        self._chooser = chooser(
            _Outlook(self.costs, self._paths, self._placement), self.settings.slack_s
        )
        self._chooser.set_weights(self.ledger.weight)
        self._book = RequestBook()
        self._recent = RecentUse()
        self._running: dict[str, Invocation] = {}  # by executor
        self._draining: dict[str, tuple[str, Run]] = {}  # by executor: tenant and cancelled run
        self._plain: set[str] = set()  # executors taken by tasks that are no ModelFns
        self._multi_step: dict[str, Invocation] = {}  # running, more than one step; by key
        self._now = 0.0

    # Questions

    @property
    def queued(self) -> int:
        """Invocations that are ready and wait for an executor."""
        return self._book.ready

    @property
    def idle_executors(self) -> int:
        return self._placement.idle

    def is_idle(self, executor: str) -> bool:
        return self._placement.is_idle(executor)

    def state(self, key: str) -> State | None:
        """Where a task stands; None when it belongs to no open request."""
        return self._book.state(key)

    def has_request(self, request: str) -> bool:
        return request in self._book.requests

    def refusal(self, tenant: str) -> str | None:
        """Why one more request of this tenant would be refused now; None when it would not."""
        cap = self.settings.cap(tenant)
        waiting = self._book.standing(tenant).waiting
        if cap is None or waiting < cap:
            return None
        return (
            f"tenant {tenant!r} has {waiting} queued requests, its limit is {cap}; "
            f"wait for some to start, cancel some, or ask the operator for a higher cap"
        )

    def yield_wanted(self, executor: str) -> bool:
        """Whether the multi-step task running there was asked to hand back."""
        running = self._running.get(executor)
        return running is not None and running.run is not None and running.run.yielding

    def tenants(self, now: float) -> list[TenantRow]:
        """Every tenant ever seen, by name."""
        shares = self._recent.shares(now)
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
        """The next decision. Changes nothing; None: nothing is ready or no executor is idle."""
        self._tick(now)
        placement = self._placement
        if not placement.idle or not self._book.ready:
            return None
        for model in placement.take_moved():
            self._chooser.refresh_model(model)
        candidate = self._chooser.choose(now)
        assert candidate is not None, "ready invocations, but the chooser has none"
        invocation = self._book.invocations[candidate.key]
        cost_key = candidate.cost_key
        load_s = self.costs.load_s(cost_key)
        producers = self._producers(invocation)
        place = placement.place(
            cost_key.model,
            load_s,
            invocation.input_bytes,
            invocation.input_at,
            self.settings.bandwidth,
        )
        assert place is not None
        steps = self._steps(invocation)
        return Dispatch(
            candidate.key,
            place.executor,
            candidate.tenant,
            candidate.request,
            candidate.position,
            self._estimate(cost_key, place.missing, place.pull_bytes, steps),
            steps,
            producers,
        )

    def commit(self, decision: Dispatch, now: float) -> None:
        """Carry out what `peek` said. PolicyError if it is no longer possible."""
        self._tick(now)
        invocation = self._book.invocation(decision.key)
        request, position = invocation.request, invocation.position
        if request.states[position] is not State.READY:
            raise self._book.illegal(request, position, State.RUNNING)
        executor = decision.executor
        if not self._placement.is_idle(executor):
            raise PolicyError(f"executor {executor!r} is not idle; ask for a decision again")
        candidate = invocation.candidate
        cost_key = candidate.cost_key
        self._chooser.dispatched(candidate)
        self._chooser.discard(decision.key)
        self._book.move(request, position, State.RUNNING)
        missing = self._placement.missing_on(executor, cost_key.model)
        pull_bytes = max(0, invocation.input_bytes - invocation.input_at.get(executor, 0))
        self._placement.set_idle(executor, False)
        estimate = decision.estimate
        unit_s = estimate.total_s
        if decision.steps > 1:
            unit_s -= estimate.compute_s * (1 - 1 / decision.steps)
            self._multi_step[decision.key] = invocation
        charge = self.ledger.charge(request.tenant, estimate.total_s, unit_s=unit_s)
        invocation.run = Run(decision, charge, now, missing, pull_bytes, unit_s, candidate)
        self._running[executor] = invocation
        self._vtime_moved(request.tenant)
        self._gates(request, position, now)

    def next_decision(self, now: float) -> Dispatch | None:
        """`peek` and `commit` in one."""
        decision = self.peek(now)
        if decision is not None:
            self.commit(decision, now)
        return decision

    def yields(self, now: float) -> list[RaiseYield]:
        """Multi-step tasks to interrupt: no executor is idle and another tenant waits.

        Ask after every round of decisions; each task is named once. Its charge is cut at once to
        what it has used and the step it is in.
        """
        self._tick(now)
        if not self._multi_step or self._placement.idle:
            return []
        found = []
        for key, invocation in self._multi_step.items():
            run = invocation.run
            assert run is not None
            tenant = invocation.request.tenant
            if not run.yielding and self._book.ready > self._book.standing(tenant).ready:
                run.yielding = True
                self._cut(invocation, now)
                found.append(RaiseYield(key, run.dispatch.executor))
        return found

    def _steps(self, invocation: Invocation) -> int:
        """Steps to run as one task: more than one only when nobody else would wait for them."""
        if invocation.steps == 1:
            return 1
        others = self._book.ready - self._book.standing(invocation.request.tenant).ready
        if others > self._placement.idle - 1:
            return 1
        return min(invocation.steps, self.settings.steps_per_task)

    def _estimate(self, key: CostKey, missing: float, pull_bytes: int, steps: int) -> Estimate:
        transfer_s = 0.0
        if pull_bytes:
            learned = self.costs.transfer_s(key)
            transfer_s = pull_bytes / self.settings.bandwidth if learned is None else learned
        load_s = self.costs.load_s(key) * missing if missing else 0.0
        return Estimate(load_s, self.costs.compute_s(key) * steps, transfer_s)

    def _producers(self, invocation: Invocation) -> tuple[Producer, ...]:
        request = invocation.request
        found = []
        for position in request.outline.steps[invocation.position].callback_deps:
            producer = request.invocations.get(position)
            if producer is not None and producer.run is not None:
                found.append(Producer(position, producer.key, producer.run.dispatch.executor))
        return tuple(found)

    # Events

    def handle(self, event: ev.Event) -> list[Instruction]:
        """Take in an event. What running tasks must be told at once, usually nothing."""
        self._tick(event.now)
        instructions: list[Instruction] = []
        self._handle(event, instructions)
        return instructions

    @singledispatchmethod
    def _handle(self, event: object, out: list[Instruction]) -> None:
        raise PolicyError(f"{event!r} is not an event; see scheduler_plugin/events.py for all")

    @_handle.register
    def _joined(self, event: ev.ExecutorJoined, out: list[Instruction]) -> None:
        self._placement.join(event.executor, event.missing, event.free_bytes)
        self._placement.set_idle(event.executor, True)

    @_handle.register
    def _left(self, event: ev.ExecutorLeft, out: list[Instruction]) -> None:
        self._known(event.executor)
        invocation = self._running.get(event.executor)
        if invocation is not None:
            self._end(invocation, None, State.BLOCKED, event, out)
        if event.executor in self._draining:
            self._end_draining(event.executor, None, event.now)
        self._plain.discard(event.executor)
        self._placement.leave(event.executor)

    @_handle.register
    def _busy(self, event: ev.ExecutorBusy, out: list[Instruction]) -> None:
        self._known(event.executor)
        self._plain.add(event.executor)
        self._placement.set_idle(event.executor, False)

    @_handle.register
    def _idle(self, event: ev.ExecutorIdle, out: list[Instruction]) -> None:
        self._known(event.executor)
        self._plain.discard(event.executor)
        if event.executor in self._draining:
            self._end_draining(event.executor, None, event.now)
        else:
            self._free(event.executor)

    @_handle.register
    def _residency(self, event: ev.ResidencyReported, out: list[Instruction]) -> None:
        self._known(event.executor)
        self._placement.report(event.executor, event.missing, event.free_bytes)

    @_handle.register
    def _submitted(self, event: ev.RequestSubmitted, out: list[Instruction]) -> None:
        if event.request in self._book.requests:
            raise PolicyError(
                f"request {event.request!r} is already open; give every request its own name"
            )
        why = self.refusal(event.tenant)
        if why is not None:
            raise PolicyError(f"request {event.request!r} refused: {why}")
        self._activate(event.tenant, event.now)
        outline = self._paths.hold(event.outline)
        self._book.submit(event.request, event.tenant, outline, event.now)

    @_handle.register
    def _closed(self, event: ev.RequestClosed, out: list[Instruction]) -> None:
        request = self._book.request(event.request)
        for invocation in list(request.invocations.values()):
            self._cancel(invocation, event, out, stopped=False)
        self._book.close(request)
        self._paths.release(request.outline)
        self._maybe_deactivate(request.tenant)

    @_handle.register
    def _ready(self, event: ev.InvocationReady, out: list[Instruction]) -> None:
        book = self._book
        request = book.request(event.request)
        position = event.position
        if not (type(position) is int and 0 <= position < len(request.outline)):
            raise PolicyError(
                f"{event.key!r} is at position {position!r} of request {request.name!r}; "
                f"allowed are 0 to {len(request.outline) - 1}"
            )
        known = book.invocations.get(event.key)
        here = request.invocations.get(position)
        if known is not here:
            raise PolicyError(
                f"{event.key!r} at position {position} of request {request.name!r}: "
                f"{'the key' if known else 'the position'} already belongs to "
                f"{known.request.name if known else here.key if here else ''!r}; "
                "a position keeps its key as long as the request is open"
            )
        to = State.READY if book.gate_open(request, position) else State.GATED
        if request.states[position] in (State.GATED, State.READY, State.RUNNING):
            raise book.illegal(request, position, to)
        self._activate(request.tenant, event.now)
        candidate = Candidate(
            event.key,
            request.tenant,
            request.name,
            request.outline,
            position,
            event.now,
            request.submitted,
            request.order,
        )
        invocation = Invocation(
            event.key,
            request,
            position,
            event.input_bytes,
            dict(event.input_at),
            event.steps,
            candidate,
        )
        request.invocations[position] = invocation
        book.invocations[event.key] = invocation
        if to is State.READY:
            self._enqueue(invocation, event.now)
        else:
            book.move(request, position, to)
        self._gates(request, position, event.now)

    @_handle.register
    def _unready(self, event: ev.InvocationUnready, out: list[Instruction]) -> None:
        invocation = self._book.invocation(event.key)
        request, position = invocation.request, invocation.position
        if request.states[position] not in (State.READY, State.GATED):
            raise self._book.illegal(request, position, State.BLOCKED)
        self._dequeue(invocation, State.BLOCKED)

    @_handle.register
    def _completed(self, event: ev.Completed, out: list[Instruction]) -> None:
        to = State.DONE if event.finished else State.BLOCKED
        invocation = self._running_invocation(event.key, to)
        run = invocation.run
        assert run is not None
        if event.steps > run.dispatch.steps:
            raise PolicyError(
                f"{event.key!r} reports {event.steps} steps, it was dispatched for "
                f"{run.dispatch.steps}; report the steps it did"
            )
        executor, cost_key = run.dispatch.executor, run.candidate.cost_key
        if event.missing is not None:
            self._placement.report(executor, event.missing, event.free_bytes)
        else:
            self._placement.loaded(executor, cost_key.model)
        self._end(invocation, event.used, to, event, out, steps=event.steps)
        if self.costs.observe(
            cost_key,
            event.used,
            steps=event.steps,
            loaded_share=run.missing,
            pulled=run.pull_bytes > 0,
        ):
            self._cost_moved(cost_key)

    @_handle.register
    def _failed(self, event: ev.Failed, out: list[Instruction]) -> None:
        invocation = self._running_invocation(event.key, State.DEAD)
        request = invocation.request
        self._end(invocation, event.used, State.DEAD, event, out)
        for position in sorted(request.outline.downstream(invocation.position)):
            state = request.states[position]
            if state is State.BLOCKED:
                self._book.move(request, position, State.DEAD)
            elif state in (State.READY, State.GATED):
                self._dequeue(request.invocations[position], State.DEAD)
        self._maybe_deactivate(request.tenant)

    @_handle.register
    def _lost(self, event: ev.Lost, out: list[Instruction]) -> None:
        invocation = self._running_invocation(event.key, State.BLOCKED)
        self._end(invocation, event.used, State.BLOCKED, event, out)

    @_handle.register
    def _cancelled(self, event: ev.Cancelled, out: list[Instruction]) -> None:
        invocation = self._book.invocation(event.key)
        self._cancel(invocation, event, out, stopped=event.stopped)
        self._maybe_deactivate(invocation.request.tenant)

    @_handle.register
    def _drained(self, event: ev.Drained, out: list[Instruction]) -> None:
        if event.executor not in self._draining:
            raise PolicyError(
                f"executor {event.executor!r} runs no cancelled invocation; report Drained once, "
                "after Cancelled"
            )
        self._end_draining(event.executor, event.used, event.now)

    @_handle.register
    def _skipped(self, event: ev.Skipped, out: list[Instruction]) -> None:
        request = self._book.request(event.request)
        for position in event.positions:
            if not (type(position) is int and 0 <= position < len(request.outline)):
                raise PolicyError(
                    f"position {position!r} of request {request.name!r} cannot be skipped; "
                    f"allowed are 0 to {len(request.outline) - 1}"
                )
            if request.states[position] is State.RUNNING:
                raise PolicyError(
                    f"position {position} of request {request.name!r} is running; "
                    "report Completed, not Skipped"
                )
        for position in event.positions:
            state = request.states[position]
            if state in (State.READY, State.GATED):
                self._dequeue(request.invocations[position], State.DONE)
            elif state is State.BLOCKED:
                self._book.move(request, position, State.DONE)
            self._gates(request, position, event.now)
        self._maybe_deactivate(request.tenant)

    @_handle.register
    def _settings(self, event: ev.SettingsChanged, out: list[Instruction]) -> None:
        self.settings = event.settings
        self.ledger.set_weights(event.settings.weights, event.settings.default_weight)
        self._chooser.set_weights(self.ledger.weight)
        self._chooser.set_slack(event.settings.slack_s)

    # Moving invocations

    def _enqueue(self, invocation: Invocation, now: float) -> None:
        """It is ready: all inputs exist and its producers are dispatched."""
        tenant = invocation.request.tenant
        if self._book.standing(tenant).ready:
            vtime_s = self.ledger.vtime(tenant)
        else:
            vtime_s = self.ledger.limit_credit(tenant, self.settings.slack_s)
        self._book.move(invocation.request, invocation.position, State.READY)
        invocation.candidate.since = now
        self._chooser.add(invocation.candidate, vtime_s)

    def _dequeue(self, invocation: Invocation, to: State) -> None:
        """Take a ready or gated invocation out of the queue."""
        if invocation.request.states[invocation.position] is State.READY:
            self._chooser.discard(invocation.key)
        self._book.move(invocation.request, invocation.position, to)

    def _gates(self, request: Request, position: int, now: float) -> None:
        """A producer's state moved: open or shut the gates of its callback consumers."""
        for consumer in request.outline.consumers[position]:
            state = request.states[consumer]
            if state is State.GATED:
                if self._book.gate_open(request, consumer):
                    self._enqueue(request.invocations[consumer], now)
            elif state is State.READY and not self._book.gate_open(request, consumer):
                self._dequeue(request.invocations[consumer], State.GATED)

    def _running_invocation(self, key: str, to: State) -> Invocation:
        invocation = self._book.invocation(key)
        if invocation.run is None:
            raise self._book.illegal(invocation.request, invocation.position, to)
        return invocation

    def _end(
        self,
        invocation: Invocation,
        used: ev.Measured | None,
        to: State,
        event: ev.Event,
        out: list[Instruction],
        steps: int = 1,
    ) -> None:
        """A run has ended in any way: settle its charge, free its executor, release or unblock."""
        run = invocation.run
        assert run is not None
        request = invocation.request
        self._stop_running(invocation)
        self._book.move(request, invocation.position, to)
        self._settle(request.tenant, run, used, event.now, steps)
        self._free(run.dispatch.executor)
        if to is not State.DONE:
            self._unblock(invocation, event, out)
        self._gates(request, invocation.position, event.now)
        self._maybe_deactivate(request.tenant)

    def _cancel(
        self, invocation: Invocation, event: ev.Event, out: list[Instruction], *, stopped: bool
    ) -> None:
        request, position = invocation.request, invocation.position
        state = request.states[position]
        if state in (State.READY, State.GATED):
            self._dequeue(invocation, State.DEAD)
        elif state is State.BLOCKED:
            self._book.move(request, position, State.DEAD)
        elif state is State.RUNNING:
            if stopped:
                self._end(invocation, None, State.DEAD, event, out)
                return
            run = invocation.run
            assert run is not None
            self._stop_running(invocation)
            self._book.move(request, position, State.DEAD)
            self._book.drained(request.tenant, +1)
            self._draining[run.dispatch.executor] = (request.tenant, run)
            self._unblock(invocation, event, out)
            self._gates(request, position, event.now)

    def _stop_running(self, invocation: Invocation) -> None:
        run = invocation.run
        assert run is not None
        del self._running[run.dispatch.executor]
        self._multi_step.pop(invocation.key, None)
        invocation.run = None

    def _unblock(self, producer: Invocation, event: ev.Event, out: list[Instruction]) -> None:
        """Consumers that run now would wait for a producer that is gone: tell them."""
        request = producer.request
        for position in request.outline.consumers[producer.position]:
            consumer = request.invocations.get(position)
            if consumer is not None and consumer.run is not None:
                out.append(
                    Unblock(
                        consumer.key,
                        consumer.run.dispatch.executor,
                        producer.key,
                        stimulus_id=event.stimulus_id,
                    )
                )

    def _end_draining(self, executor: str, used: ev.Measured | None, now: float) -> None:
        tenant, run = self._draining.pop(executor)
        self._settle(tenant, run, used, now, 1)
        self._book.drained(tenant, -1)
        self._free(executor)
        self._maybe_deactivate(tenant)

    # Charging

    def _settle(
        self, tenant: str, run: Run, used: ev.Measured | None, now: float, steps: int
    ) -> None:
        """Replace the estimate by what was measured, or else by the time since the dispatch."""
        if used is None:
            seconds = now - run.started
            unit_s = min(seconds, run.unit_s) if run.dispatch.steps > 1 else seconds
        else:
            seconds = used.total_s
            unit_s = seconds - used.compute_s * (1 - 1 / steps)
        self.ledger.settle(run.charge, seconds, unit_s=unit_s)
        self._recent.add(now, tenant, seconds)
        self._vtime_moved(tenant)

    def _cut(self, invocation: Invocation, now: float) -> None:
        """Charge a multi-step run only for what it has used and the step it is in."""
        run = invocation.run
        assert run is not None
        seconds = now - run.started + run.unit_s
        if seconds < self.ledger.estimate_in_flight(run.charge):
            self.ledger.revise(run.charge, seconds)
            self._vtime_moved(invocation.request.tenant)

    def _vtime_moved(self, tenant: str) -> None:
        self._chooser.set_vtime(tenant, self.ledger.vtime(tenant))

    def _activate(self, tenant: str, now: float) -> None:
        """The tenant has work. If it had none it is lifted; first, what others have charged for
        steps they may never run is cut, or the newcomer would be lifted by it."""
        if self.ledger.is_active(tenant):
            return
        for invocation in self._multi_step.values():
            self._cut(invocation, now)
        self.ledger.activate(tenant)

    def _maybe_deactivate(self, tenant: str) -> None:
        if not self._book.standing(tenant).active and self.ledger.is_active(tenant):
            self.ledger.deactivate(tenant)
            self._chooser.tenant_left(tenant)

    def _cost_moved(self, key: CostKey) -> None:
        """An estimate moved: renew paths and lanes, and the charges in flight that used it."""
        for outline in self._paths.cost_moved(key):
            self._chooser.refresh_outline(outline)
        self._chooser.refresh_model(None)
        for invocation in self._running.values():
            run = invocation.run
            assert run is not None
            other = run.candidate.cost_key
            if run.dispatch.steps == 1 and (other == key or not self.costs.is_measured(other)):
                better = self._estimate(other, run.missing, run.pull_bytes, 1).total_s
                if better != self.ledger.estimate_in_flight(run.charge):
                    self.ledger.revise(run.charge, better)
                    self._vtime_moved(invocation.request.tenant)

    # Executors

    def _known(self, executor: str) -> None:
        if executor not in self._placement:
            raise PolicyError(
                f"executor {executor!r} is not known; report ExecutorJoined first, "
                "and nothing after ExecutorLeft"
            )

    def _free(self, executor: str) -> None:
        """Idle, unless something else occupies it."""
        occupied = (
            executor in self._running or executor in self._draining or executor in self._plain
        )
        self._placement.set_idle(executor, not occupied)

    def _tick(self, now: float) -> None:
        if now < self._now:
            raise PolicyError(
                f"now is {now!r} s, after {self._now!r} s; use one monotonic clock for all events"
            )
        self._now = now

    def _check(self) -> None:
        for part in (
            self._book,
            self.ledger,
            self._chooser,
            self._placement,
            self.costs,
            self._paths,
            self._recent,
        ):
            part._check()
        book = self._book
        assert len(self._chooser) == book.ready
        running = 0
        for invocation in book.invocations.values():
            state = invocation.request.states[invocation.position]
            assert (invocation.key in self._chooser) == (state is State.READY)
            if invocation.run is not None:
                running += 1
                run = invocation.run
                assert self._running[run.dispatch.executor] is invocation
                assert (invocation.key in self._multi_step) == (run.dispatch.steps > 1)
        assert running == len(self._running)
        assert set(self._multi_step) <= {i.key for i in self._running.values()}
        draining: dict[str, int] = {}
        for tenant, _ in self._draining.values():
            draining[tenant] = draining.get(tenant, 0) + 1
        for tenant, standing in book.standings.items():
            assert standing.draining == draining.pop(tenant, 0)
            assert self.ledger.is_active(tenant) == standing.active
        assert not draining
        assert set(self.ledger.active()) <= set(book.standings)
        occupied = [*self._running, *self._draining]
        assert len(set(occupied)) == len(occupied), "an executor runs two invocations"
        for executor in self._placement.executors():
            busy = executor in occupied or executor in self._plain
            assert self._placement.is_idle(executor) != busy
        assert len(self._paths) == len({r.outline for r in book.requests.values()})
