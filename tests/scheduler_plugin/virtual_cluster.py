"""Executors in virtual time: an events heap that drives a real policy.

What a run costs is decided by `Truth`, which the policy never sees: it learns from measurements.
"""

from __future__ import annotations

import heapq
import random
from collections import OrderedDict
from collections.abc import Callable
from functools import partial

from scheduler_plugin import events as ev
from scheduler_plugin.instructions import Dispatch, Unblock
from scheduler_plugin.outline import Outline
from scheduler_plugin.policy import FairPolicy
from scheduler_plugin.requests import State

from .virtual_runs import Job, Run
from .virtual_runs import Ran as Ran
from .virtual_runs import Truth as Truth


class VirtualCluster:
    """Run requests of tenants on executors. `trace` gets every change, for the analyses below."""

    def __init__(
        self,
        policy: FairPolicy,
        executors: int,
        truth: Truth,
        *,
        seed: int = 0,
        check_every: int = 0,
    ) -> None:
        self.policy = policy
        self.truth = truth
        self.now = 0.0
        self.jobs: dict[str, Job] = {}
        self.ran: list[Ran] = []
        self.trace: list[tuple[str, float, object]] = []
        self.idle_s = 0.0  # executor seconds idle while something was ready and not held back
        self.held_s = 0.0  # executor seconds idle while all that may go next was held back
        self.refused = 0
        self.wrong_lifts: list[str] = []  # of a tenant still ready, or above one that waits
        self.unblocks: list[Unblock] = []
        self.after_batch: Callable[[VirtualCluster], None] | None = None
        self._rng = random.Random(seed)
        self._heap: list[tuple[float, int, Callable[[], None]]] = []
        self._serial = 0
        self._check_every = check_every
        self._batches = 0
        self._running: dict[str, Run] = {}  # by executor
        self._held: dict[str, Run] = {}  # by member
        self._resident: dict[str, OrderedDict[str, None]] = {}
        self._ready: dict[str, bool] = {}
        self._left: dict[str, dict[int, int]] = {}  # steps left of multi-step positions
        self._by_charge: dict[int, Ran] = {}
        revise = policy.ledger.revise

        def traced(number: int, seconds: float) -> None:
            revise(number, seconds)
            self._by_charge[number].estimates.append(seconds)

        policy.ledger.revise = traced  # type: ignore[method-assign]
        limit_credit = policy.ledger.limit_credit

        def checked(tenant: str, slack_s: float) -> float:
            before = policy.ledger.vtime(tenant)
            after = limit_credit(tenant, slack_s)
            waiting = [t for t, s in policy._book.standings.items() if s.ready]
            least = min((policy.ledger.vtime(t) for t in waiting), default=after)
            if after > before and (after > least + 1e-6 or self._ready[tenant]):
                self.wrong_lifts.append(
                    f"at {self.now}: {tenant}, {'' if self._ready[tenant] else 'not '}ready, from "
                    f"{before} to {after} beside {waiting}, the least at {least}"
                )
            return after

        policy.ledger.limit_credit = checked  # type: ignore[method-assign]
        for number in range(executors):
            self.join(f"w{number:03}")

    # What happens to the cluster

    def at(self, when: float, action: Callable[[], None]) -> None:
        self._serial += 1
        heapq.heappush(self._heap, (max(when, self.now), self._serial, action))

    def submit(
        self,
        when: float,
        tenant: str,
        outline: Outline,
        *,
        steps: dict[int, int] | None = None,
        name: str | None = None,
    ) -> str:
        """One request at `when`; `steps`: positions that are that many denoising steps."""
        self._serial += 1
        name = name or f"r{self._serial:06}-{tenant}"
        self.at(when, lambda: self._submit(name, tenant, outline, steps or {}))
        return name

    def cancel(self, when: float, request: str) -> None:
        self.at(when, lambda: self._cancel(request))

    def join(self, executor: str) -> None:
        warm = self.truth.warm
        self._resident[executor] = OrderedDict.fromkeys(warm)
        self.policy.handle(ev.ExecutorJoined(self.now, executor, 10**9, dict.fromkeys(warm, 0.0)))

    def kill(self, when: float, executor: str) -> None:
        self.at(when, lambda: self._kill(executor))

    def run(self, until: float = 1e12) -> None:
        """Until nothing is left to happen, or the time is up."""
        while self._heap and self._heap[0][0] <= until:
            when = self._heap[0][0]
            self._account_idle(when)
            self.now = when
            while self._heap and self._heap[0][0] == when:
                heapq.heappop(self._heap)[2]()
            self._note_ready()
            self._round()
        if self._heap:
            self._account_idle(until)
            self.now = until

    def _account_idle(self, when: float) -> None:
        if self.policy.queued:
            seconds = self.policy.idle_executors * (when - self.now)
            if self.policy.waits_until is None:
                self.idle_s += seconds
            else:
                self.held_s += seconds

    def _round(self) -> None:
        policy = self.policy
        while (decision := policy.next_decision(self.now)) is not None:
            self._start(decision)
            self._note_ready()
        for instruction in policy.yields(self.now):
            run = self._running[instruction.executor]
            assert run.decision.key == instruction.key
            assert policy.yield_wanted(instruction.executor)
            run.yielding = True
        if policy.idle_executors and policy.queued:
            assert policy.waits_until is not None, "an executor idles beside ready work"
            assert policy.waits_until > self.now
            self.at(policy.waits_until, lambda: None)
        self._batches += 1
        if self._check_every and self._batches % self._check_every == 0:
            policy._check()
        if self.after_batch:
            self.after_batch(self)

    def _note_ready(self) -> None:
        for tenant in (
            {job.tenant for job in self.jobs.values()} if not self._ready else self._ready
        ):
            ready = self.policy._book.standing(tenant).ready > 0
            if ready != self._ready.get(tenant):
                self._ready[tenant] = ready
                vtimes = {t: self.policy.ledger.vtime(t) for t in self._ready}
                self.trace.append(("ready", self.now, (tenant, ready, vtimes)))

    # Requests

    def _submit(self, name: str, tenant: str, outline: Outline, steps: dict[int, int]) -> None:
        try:
            self.policy.handle(ev.RequestSubmitted(self.now, name, tenant, outline))
        except ValueError:
            self.refused += 1
            return
        self._ready.setdefault(tenant, False)
        self.jobs[name] = Job(name, tenant, outline, self.now, steps)
        self._left[name] = dict(steps)
        for position in range(len(outline)):
            self._maybe_ready(name, position)

    def _maybe_ready(self, name: str, position: int) -> None:
        """Report it ready if all ordinary inputs exist and it has not been reported."""
        request = self.policy._book.requests[name]
        if request.states[position] is not State.BLOCKED:
            return
        step = request.outline.steps[position]
        if all(request.states[d] is State.DONE for d in step.deps):
            self.policy.handle(
                ev.InvocationReady(
                    self.now,
                    f"{name}/{position:03}",
                    name,
                    position,
                    input_bytes=1000 if step.deps else 0,
                    steps=self._left[name].get(position, 1),
                )
            )

    def _cancel(self, name: str) -> None:
        job = self.jobs.get(name)
        if job is None or job.closed:
            return
        for run in self._running.values():
            if run.decision.request == name:
                run.cancelled = True
        self._handle(ev.RequestClosed(self.now, name))
        job.closed = True
        del self._left[name]

    def _handle(self, event: ev.Event) -> None:
        for instruction in self.policy.handle(event):
            assert isinstance(instruction, Unblock)
            self.unblocks.append(instruction)
            run = self._running[instruction.executor]
            assert run.decision.key == instruction.key
            run.unblocked = True
            self.at(self.now, partial(self._give_up, run))

    # Runs

    def _start(self, decision: Dispatch) -> None:
        executor = decision.executor
        for taken in (executor, *decision.members):
            assert taken not in self._running, f"{taken} is busy"
            assert taken not in self._held, f"{taken} belongs to a gang"
        for producer in decision.producers:
            assert self._running[producer.executor].decision.key == producer.key
            assert producer.executor != executor
        outline = self.jobs[decision.request].outline
        key = outline.cost_keys[decision.position]
        group = (executor, *decision.members)
        assert len(group) <= outline.steps[decision.position].gang
        assert len(decision.members) <= self._spare(decision)
        share = max([self._use(loading, key.model) for loading in group])
        record = Ran(
            decision.tenant,
            decision.request,
            decision.position,
            executor,
            self.now,
            [decision.estimate.total_s * len(group)],
            self.policy.ledger.weight(decision.tenant),
            decision.steps,
            members=decision.members,
        )
        self.ran.append(record)
        invocation = self.policy._fleet.running[executor]
        assert invocation.run is not None
        self._by_charge[invocation.run.charge] = record
        run = Run(
            decision,
            record,
            self.truth.load.get(key.model, 0.0) * share,
            self.truth.transfer if outline.steps[decision.position].deps else 0.0,
            self.truth.compute_s(key, self._rng, len(group)),
            share,
            held=dict.fromkeys(decision.members),
        )
        self._running[executor] = run
        self._held.update(dict.fromkeys(decision.members, run))
        self.trace.append(("dispatch", self.now, record))
        self.at(self.now + run.load_s + run.transfer_s + run.step_s, lambda: self._step_ends(run))

    def _use(self, executor: str, model: str) -> float:
        """The model is there from now on. The share of it that has to be loaded first."""
        held = self._resident[executor]
        share = 0.0 if model in held else 1.0
        held[model] = None
        held.move_to_end(model)
        while len(held) > self.truth.held:
            held.popitem(last=False)
        return share

    def _spare(self, decision: Dispatch) -> int:
        """Executors that nothing ready would take, when this decision has just been carried out."""
        idle = self.policy.idle_executors + len(decision.members)
        return max(0, idle - self.policy.queued)

    def _step_ends(self, run: Run) -> None:
        if run.gone or run.unblocked:
            return
        run.done += 1
        if run.done < run.decision.steps and not run.yielding and not run.cancelled:
            self.at(self.now + run.step_s, lambda: self._step_ends(run))
            return
        for producer in run.decision.producers:  # it cannot end before what it consumes
            other = self._running.get(producer.executor)
            if other is not None and other.decision.key == producer.key and not other.cancelled:
                run.done -= 1
                self.at(self.now + 1e-3, lambda: self._step_ends(run))
                return
        self._complete(run)

    def _complete(self, run: Run) -> None:
        decision = run.decision
        used = ev.Measured(run.load_s, run.step_s * run.done, run.transfer_s)
        missing = dict.fromkeys(self._resident[decision.executor], 0.0)
        for member, left in run.held.items():
            if left is None:
                there = dict.fromkeys(self._resident[member], 0.0)
                free = 10**9 - 1000 * len(there)
                self._handle(ev.ResidencyReported(self.now, member, there, free))
        if run.cancelled:
            self._close(run, "cancelled", used.total_s)
            self._handle(ev.Drained(self.now, decision.executor, used))
            return
        self._close(run, "completed", used.total_s)
        left = self._left[decision.request]
        total = left.get(decision.position, 1)
        finished = run.done >= total
        if not finished:
            left[decision.position] = total - run.done
        self._handle(
            ev.Completed(
                self.now,
                decision.key,
                used,
                missing,
                10**9 - 1000 * len(missing),
                steps=run.done,
                finished=finished,
            )
        )
        job = self.jobs[decision.request]
        if not finished:
            self._maybe_ready(job.name, decision.position)
            return
        outline = job.outline
        for after in outline.successors[decision.position]:
            self._maybe_ready(job.name, after)
        request = self.policy._book.requests[job.name]
        if request.open == 0:
            job.finished = self.now
            job.closed = True
            del self._left[job.name]
            self._handle(ev.RequestClosed(self.now, job.name))

    def _close(self, run: Run, outcome: str, used: float) -> None:
        run.gone = True
        run.record.ended = self.now
        run.record.used = run.device_s(used)
        run.record.outcome = outcome
        del self._running[run.decision.executor]
        for member, left in run.held.items():
            if left is None:
                del self._held[member]
        self.trace.append(("end", self.now, run.record))

    def _give_up(self, run: Run) -> None:
        """A consumer whose producer is gone comes back with an error and is run again."""
        if run.gone:
            return
        if run.cancelled:
            self._close(run, "cancelled", self.now - run.record.dispatched)
            self._handle(ev.Drained(self.now, run.decision.executor))
            return
        self._close(run, "lost", self.now - run.record.dispatched)
        self._handle(ev.Lost(self.now, run.decision.key))
        self._maybe_ready(run.decision.request, run.decision.position)

    def _kill(self, executor: str) -> None:
        if executor not in self._resident:
            return
        run = self._running.get(executor)
        if run is not None:
            self._close(run, "lost", self.now - run.record.dispatched)
        led = self._held.pop(executor, None)
        if led is not None:
            led.held[executor] = self.now - led.record.dispatched
        del self._resident[executor]
        self._handle(ev.ExecutorLeft(self.now, executor))
        if run is not None and not run.cancelled:
            self._maybe_ready(run.decision.request, run.decision.position)

    # Analyses

    def service(self, until: float = 1e12, weighted: bool = False) -> dict[str, float]:
        """Measured device seconds per tenant of runs dispatched before `until`."""
        found: dict[str, float] = {}
        for ran in self.ran:
            if ran.dispatched < until:
                part = ran.used / (ran.weight if weighted else 1.0)
                found[ran.tenant] = found.get(ran.tenant, 0.0) + part
        return found

    def largest(self) -> float:
        """L_max: the largest vTime charge of one dispatch, estimated or measured, seconds."""
        return max((max(r.used, *r.estimates, 0.0) / r.weight for r in self.ran), default=0.0)
