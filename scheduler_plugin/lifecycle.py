"""How invocations move: into the queue and out of it, through gates, and off executors."""

from __future__ import annotations

from .candidates import Chooser
from .charging import Charging
from .events import Event, Measured
from .fleet import Fleet
from .instructions import Instruction, Unblock
from .requests import Invocation, Request, RequestBook, Run, Standing, State


class Lifecycle:
    """Keeps book, queue, fleet and charges in step. Every way a run can end passes `end`."""

    def __init__(self, book: RequestBook, fleet: Fleet, charging: Charging) -> None:
        self.book = book
        self.fleet = fleet
        self.charging = charging
        self.chooser: Chooser = charging.chooser
        self.dequeued: dict[str, Standing] = {}  # tenants that may have nothing ready any more

    def enqueue(self, invocation: Invocation) -> None:
        """It is ready: all inputs exist and its producers are dispatched."""
        tenant = invocation.request.tenant
        if self.charging.ledger.is_ready(tenant):
            vtime_s = self.charging.ledger.vtime(tenant)
        else:
            vtime_s = self.charging.becomes_ready(tenant)
        self.book.move(invocation.request, invocation.position, State.READY)
        self.chooser.add(invocation.candidate, vtime_s)

    def dequeue(self, invocation: Invocation, to: State) -> None:
        """Take a ready or gated invocation out of the queue."""
        request = invocation.request
        if request.states[invocation.position] is State.READY:
            self.chooser.discard(invocation.key)
            self.dequeued[request.tenant] = request.standing
        self.book.move(request, invocation.position, to)

    def start(self, invocation: Invocation, run: Run) -> None:
        """It runs: off the queue, onto its executor; its callback consumers may follow."""
        request, position = invocation.request, invocation.position
        self.chooser.dispatched(run.candidate)
        self.chooser.discard(invocation.key)
        self.book.move(request, position, State.RUNNING)
        self.fleet.occupy(invocation, run)
        self.charging.dispatched(run)
        self.gates(request, position)
        self.dequeued[request.tenant] = request.standing
        self.settle_readiness()

    def gates(self, request: Request, position: int) -> None:
        """A producer's state moved: open or shut the gates of its callback consumers."""
        for consumer in request.outline.consumers[position]:
            state = request.states[consumer]
            if state is State.GATED:
                if self.book.gate_open(request, consumer):
                    self.enqueue(request.invocations[consumer])
            elif state is State.READY and not self.book.gate_open(request, consumer):
                self.dequeue(request.invocations[consumer], State.GATED)

    def end(
        self,
        invocation: Invocation,
        used: Measured | None,
        to: State,
        event: Event,
        out: list[Instruction],
        steps: int = 1,
        members: int | None = None,
    ) -> None:
        """A run has ended in any way: settle its charge, free its executors, release or unblock."""
        request = invocation.request
        run = self.fleet.vacate(invocation)
        self.book.move(request, invocation.position, to)
        self.charging.settle(request.tenant, run, used, event.now, steps, members)
        self.fleet.release(run)
        if to is not State.DONE:
            self.unblock(request, invocation.position, invocation.key, event, out)
        self.gates(request, invocation.position)
        self.settle_activity(request.tenant, request.standing)

    def cancel(
        self, invocation: Invocation, event: Event, out: list[Instruction], *, stopped: bool
    ) -> None:
        """Nobody wants it. A run goes on draining unless it has stopped."""
        request, position = invocation.request, invocation.position
        state = request.states[position]
        if state in (State.READY, State.GATED):
            self.dequeue(invocation, State.DEAD)
        elif state is State.BLOCKED:
            self.book.move(request, position, State.DEAD)
        elif state is State.RUNNING and stopped:
            self.end(invocation, None, State.DEAD, event, out)
        elif state is State.RUNNING:
            run = self.fleet.vacate(invocation)
            self.book.move(request, position, State.DEAD)
            self.book.drained(request.tenant, +1)
            self.fleet.draining[run.dispatch.executor] = (request.tenant, run)
            self.unblock(request, position, invocation.key, event, out)
            self.gates(request, position)

    def end_draining(self, executor: str, used: Measured | None, now: float) -> None:
        """The cancelled run there has ended: it is charged like any other."""
        tenant, run = self.fleet.draining.pop(executor)
        standing = self.book.standing(tenant)
        self.charging.settle(tenant, run, used, now, 1)
        self.book.drained(tenant, -1)
        self.fleet.release(run)
        self.settle_activity(tenant, standing)

    def member_left(self, executor: str, now: float) -> None:
        """An executor that a run led by another holds is gone: the run goes on without it."""
        run = self.fleet.depart(executor, now)
        self.charging.revise(run, run.estimate_s)

    def unblock(
        self, request: Request, position: int, key: str, event: Event, out: list[Instruction]
    ) -> None:
        """Consumers that run now would wait for a producer that is gone: tell them."""
        for later in request.outline.consumers[position]:
            consumer = request.invocations.get(later)
            if consumer is not None and consumer.run is not None:
                out.append(
                    Unblock(
                        consumer.key,
                        consumer.run.dispatch.executor,
                        key,
                        stimulus_id=event.stimulus_id,
                    )
                )

    def settle_activity(self, tenant: str, standing: Standing) -> None:
        """Tell the ledger if the tenant has no work left."""
        if not (standing.open or standing.draining):
            self.charging.deactivate(tenant)

    def settle_readiness(self) -> None:
        """Tell the ledger whose last ready invocation went, at the end of an event or dispatch: a
        tenant whose producer lets in its own callback consumer has been ready throughout."""
        ledger = self.charging.ledger
        for tenant, standing in self.dequeued.items():
            if not standing.ready and ledger.is_ready(tenant):
                ledger.set_ready(tenant, False)
        self.dequeued.clear()

    def _check(self) -> None:
        self.book._check()
        self.fleet._check()
        self.charging._check()
        self.chooser._check()
        assert len(self.chooser) == self.book.ready
        running = 0
        for invocation in self.book.invocations.values():
            state = invocation.request.states[invocation.position]
            assert (invocation.key in self.chooser) == (state is State.READY)
            if invocation.run is not None:
                running += 1
                assert self.fleet.running[invocation.run.dispatch.executor] is invocation
        assert running == len(self.fleet.running)
        draining: dict[str, int] = {}
        for tenant, _ in self.fleet.draining.values():
            draining[tenant] = draining.get(tenant, 0) + 1
        ledger = self.charging.ledger
        for tenant, standing in self.book.standings.items():
            assert standing.draining == draining.pop(tenant, 0)
            assert ledger.is_active(tenant) == standing.active
            assert ledger.is_ready(tenant) == (standing.ready > 0)
        assert not draining
        assert not self.dequeued
        assert set(ledger.active()) <= set(self.book.standings)
