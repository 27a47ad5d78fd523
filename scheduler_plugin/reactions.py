"""What each event does. One method per event; the policy calls `handle`.

An illegal event raises PolicyError before anything has changed.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from st2i_dask.errors import PolicyError

from . import events as ev
from .candidates import Candidate
from .critical_path import CriticalPaths
from .instructions import Instruction
from .lifecycle import Lifecycle
from .requests import Invocation, State
from .settings import Settings


class Reactions:
    """Events in; changes of the books and of the queue out."""

    def __init__(self, lifecycle: Lifecycle, paths: CriticalPaths, settings: Settings) -> None:
        self.settings = settings
        self._lifecycle = lifecycle
        self._book = lifecycle.book
        self._fleet = lifecycle.fleet
        self._charging = lifecycle.charging
        self._paths = paths
        self._reactions: dict[type, Callable[[Any, list[Instruction]], None]] = {
            ev.ExecutorJoined: self._joined,
            ev.ExecutorLeft: self._left,
            ev.ExecutorBusy: self._busy,
            ev.ExecutorIdle: self._idle,
            ev.ResidencyReported: self._residency,
            ev.RequestSubmitted: self._submitted,
            ev.RequestClosed: self._closed,
            ev.InvocationReady: self._ready,
            ev.InvocationUnready: self._unready,
            ev.Completed: self._completed,
            ev.Failed: self._failed,
            ev.Lost: self._lost,
            ev.Cancelled: self._cancelled,
            ev.Drained: self._drained,
            ev.Skipped: self._skipped,
            ev.ResultLost: self._result_lost,
            ev.SettingsChanged: self._settings,
            ev.CostsReplaced: self._costs,
        }

    def refusal(self, tenant: str, requests: int = 1) -> str | None:
        """Why that many more requests of this tenant would be refused now; None: they would not."""
        cap = self.settings.cap(tenant)
        waiting = self._book.standing(tenant).waiting
        if cap is None or waiting + requests <= cap:
            return None
        return (
            f"tenant {tenant!r} has {waiting} queued requests, {requests} more are on their way or "
            f"asked for, its limit is {cap}; wait for some to start, cancel some, or ask the operator for a higher cap"
        )

    def handle(self, event: ev.Event) -> list[Instruction]:
        """Take in an event. What running tasks must be told at once, usually nothing."""
        instructions: list[Instruction] = []
        react = self._reactions.get(type(event))
        if react is None:
            raise PolicyError(f"{event!r} is not an event; see scheduler_plugin/events.py for all")
        react(event, instructions)
        if self._lifecycle.dequeued:
            self._lifecycle.settle_readiness()
        return instructions

    def _joined(self, event: ev.ExecutorJoined, out: list[Instruction]) -> None:
        self._fleet.join(event.executor, event.missing, event.free_bytes)

    def _left(self, event: ev.ExecutorLeft, out: list[Instruction]) -> None:
        self._fleet.known(event.executor)
        invocation = self._fleet.running.get(event.executor)
        if invocation is not None:
            self._lifecycle.end(invocation, None, State.BLOCKED, event, out)
        if event.executor in self._fleet.draining:
            self._lifecycle.end_draining(event.executor, None, event.now)
        if event.executor in self._fleet.members:
            self._lifecycle.member_left(event.executor, event.now)
        self._fleet.leave(event.executor)

    def _busy(self, event: ev.ExecutorBusy, out: list[Instruction]) -> None:
        self._fleet.known(event.executor)
        self._fleet.set_plain(event.executor, True)

    def _idle(self, event: ev.ExecutorIdle, out: list[Instruction]) -> None:
        self._fleet.known(event.executor)
        self._fleet.set_plain(event.executor, False)
        if event.executor in self._fleet.draining:
            self._lifecycle.end_draining(event.executor, None, event.now)

    def _residency(self, event: ev.ResidencyReported, out: list[Instruction]) -> None:
        self._fleet.known(event.executor)
        self._fleet.placement.report(event.executor, event.missing, event.free_bytes)

    def _submitted(self, event: ev.RequestSubmitted, out: list[Instruction]) -> None:
        if event.request in self._book.requests:
            raise PolicyError(
                f"request {event.request!r} is already open; give every request its own name"
            )
        why = self.refusal(event.tenant)
        if why is not None:
            raise PolicyError(f"request {event.request!r} refused: {why}")
        self._charging.activate(event.tenant, event.now)
        outline = self._paths.hold(event.outline)
        self._book.submit(event.request, event.tenant, outline, event.now)

    def _closed(self, event: ev.RequestClosed, out: list[Instruction]) -> None:
        request = self._book.request(event.request)
        if request.open:
            for invocation in list(request.invocations.values()):
                self._lifecycle.cancel(invocation, event, out, stopped=False)
        self._book.close(request)
        if self._paths.release(request.outline):
            self._lifecycle.chooser.outline_left(request.outline)
        self._lifecycle.settle_activity(request.tenant, request.standing)

    def _ready(self, event: ev.InvocationReady, out: list[Instruction]) -> None:
        book = self._book
        request = book.request(event.request)
        position = event.position
        request.check_position(position)
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
        if not request.open:
            self._charging.activate(request.tenant, event.now)
        candidate = Candidate(
            event.key,
            request.tenant,
            request.name,
            request.outline,
            position,
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
            self._lifecycle.enqueue(invocation)
        else:
            book.move(request, position, to)
        self._lifecycle.gates(request, position)

    def _unready(self, event: ev.InvocationUnready, out: list[Instruction]) -> None:
        invocation = self._book.invocation(event.key)
        request, position = invocation.request, invocation.position
        if request.states[position] not in (State.READY, State.GATED):
            raise self._book.illegal(request, position, State.BLOCKED)
        self._lifecycle.dequeue(invocation, State.BLOCKED)

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
        placement = self._fleet.placement
        if event.missing is not None:
            placement.report(run.dispatch.executor, event.missing, event.free_bytes)
        else:
            for executor in run.executors:
                placement.loaded(executor, run.candidate.model)
        self._lifecycle.end(
            invocation, event.used, to, event, out, steps=event.steps, members=event.members
        )
        self._charging.learn(run, event)

    def _failed(self, event: ev.Failed, out: list[Instruction]) -> None:
        invocation = self._running_invocation(event.key, State.DEAD)
        request = invocation.request
        self._lifecycle.end(invocation, event.used, State.DEAD, event, out)
        for position in sorted(request.outline.downstream(invocation.position)):
            state = request.states[position]
            if state is State.BLOCKED:
                self._book.move(request, position, State.DEAD)
            elif state in (State.READY, State.GATED):
                self._lifecycle.dequeue(request.invocations[position], State.DEAD)
        self._lifecycle.settle_activity(request.tenant, request.standing)

    def _lost(self, event: ev.Lost, out: list[Instruction]) -> None:
        invocation = self._running_invocation(event.key, State.BLOCKED)
        self._lifecycle.end(invocation, event.used, State.BLOCKED, event, out)

    def _cancelled(self, event: ev.Cancelled, out: list[Instruction]) -> None:
        invocation = self._book.invocation(event.key)
        self._lifecycle.cancel(invocation, event, out, stopped=event.stopped)
        request = invocation.request
        self._lifecycle.settle_activity(request.tenant, request.standing)

    def _drained(self, event: ev.Drained, out: list[Instruction]) -> None:
        if event.executor not in self._fleet.draining:
            raise PolicyError(
                f"executor {event.executor!r} runs no cancelled invocation; report Drained once, "
                "after Cancelled"
            )
        self._lifecycle.end_draining(event.executor, event.used, event.now)

    def _skipped(self, event: ev.Skipped, out: list[Instruction]) -> None:
        request = self._book.request(event.request)
        states, consumers = request.states, request.outline.consumers
        for position in event.positions:
            request.check_position(position)
            if states[position] is State.RUNNING:
                raise PolicyError(
                    f"position {position} of request {request.name!r} is running; "
                    "report Completed, not Skipped"
                )
        for position in event.positions:
            state = states[position]
            if state is State.BLOCKED:
                self._book.move(request, position, State.DONE)
            elif state is State.READY or state is State.GATED:
                self._lifecycle.dequeue(request.invocations[position], State.DONE)
            if consumers[position]:
                self._lifecycle.gates(request, position)
        self._lifecycle.settle_activity(request.tenant, request.standing)

    def _result_lost(self, event: ev.ResultLost, out: list[Instruction]) -> None:
        request, position = self._book.request(event.request), event.position
        request.check_position(position)
        if request.states[position] is not State.DONE:
            raise self._book.illegal(request, position, State.BLOCKED)
        self._charging.activate(request.tenant, event.now)
        self._book.move(request, position, State.BLOCKED)
        self._lifecycle.unblock(request, position, event.key, event, out)
        self._lifecycle.gates(request, position)

    def _settings(self, event: ev.SettingsChanged, out: list[Instruction]) -> None:
        self.settings = event.settings
        self._charging.set_settings(event.settings)
        chooser = self._lifecycle.chooser
        chooser.set_weights(self._charging.ledger.weight)
        chooser.set_slack(event.settings.slack_s)

    def _costs(self, event: ev.CostsReplaced, out: list[Instruction]) -> None:
        self._charging.replace_costs(event.costs)

    def _running_invocation(self, key: str, to: State) -> Invocation:
        invocation = self._book.invocation(key)
        if invocation.run is None:
            raise self._book.illegal(invocation.request, invocation.position, to)
        return invocation
