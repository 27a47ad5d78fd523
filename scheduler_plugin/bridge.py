"""Between Dask's scheduler and the policy: transitions become events, decisions become dispatches.

Rule between the two kinds of tasks on one worker: they take turns. A worker runs one ModelFn at a time.
Plain Dask tasks keep Dask's own order and go where Dask sends them; a worker that has any takes no
ModelFn while another worker is free. When none is, the end of a plain task lets one ModelFn in, ahead of
the plain tasks that wait there; Dask's worker has then begun the next of them. So per worker a plain task
waits for one ModelFn task, and a ModelFn for two plain ones.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from time import perf_counter
from typing import Any

from dask._task_spec import Task

from st2i_dask.errors import LimitError, St2iError
from st2i_dask.invocation import WORKER_PLUGIN
from st2i_dask.request import ANNOTATION

from . import events as ev
from .ahead import ComputedAhead, Result, fused
from .instructions import Dispatch, Unblock
from .intake import Intake
from .journal import Journal
from .policy import FairPolicy
from .producers import Producers
from .requests import State
from .reservations import Reservations
from .seams import Seams

logger = logging.getLogger(__name__)

# Ahead of every plain task in a worker's own queue: the turn has been decided here.
_FIRST = (-(10**9), 0, 0)


class Bridge:
    """Drives one policy for one scheduler. Event loop only."""

    def __init__(self, scheduler: Any, policy: FairPolicy, clock: Callable[[], float]):
        self.scheduler = scheduler
        self.policy = policy
        self._clock = clock
        self.intake = Intake(scheduler)
        self._producers = Producers(scheduler, policy, self.intake)
        self.seams = Seams(scheduler, self)
        self._chosen: dict[Any, str] = {}  # key -> executor, between decision and dispatch
        self._known: set[str] = set()  # executors that the policy was told of
        self._turn: set[str] = set()  # executors where the next turn is a ModelFn's
        self._after_ours: set[str] = set()  # executors where a ModelFn has just ended
        self._busy: set[str] = set()  # executors that the policy was told are busy
        # executor -> key that was taken back but may still run there, and whether it was cancelled
        self._draining: dict[str, tuple[Any, bool]] = {}
        self._ending: Any = None  # key of the run whose end a worker is just telling
        self._ahead = ComputedAhead()
        self.reservations = Reservations()
        #: Those who only watch hear of everything here.
        self.journal = Journal()

    def start(self) -> None:
        self.seams.install()
        for address in self.scheduler.workers:
            self.joined(address)

    def stop(self) -> None:
        self.seams.restore()

    # -- events of the cluster ---------------------------------------------------------------------

    def joined(self, worker: str) -> None:
        self._known.add(worker)
        self._tell(ev.ExecutorJoined(self._clock(), worker))
        self.seams.arm()

    def left(self, worker: str) -> None:
        if worker not in self._known:
            return  # the loss of a task that ran there has told
        self._known.discard(worker)
        self._turn.discard(worker)
        self._busy.discard(worker)
        self._draining.pop(worker, None)
        self._tell(ev.ExecutorLeft(self._clock(), worker))

    def submitted(self, keys: list[Any], stimulus_id: str) -> None:
        """New tasks: those with a sound annotation become requests of the policy.

        A client asks before it submits; whoever did not, or was overtaken, gets a request over the
        cap back as one that fails with the reason.
        """
        for new in self.intake.take(keys):
            self.reservations.arrived(new.tenant)
            why = self.policy.refusal(new.tenant)
            if why is not None:
                self.journal.refused(new.tenant, 1, why, self._clock(), stimulus_id)
                for key in self.intake.disown(new.name):
                    self.scheduler.tasks[key].run_spec = Task(key, refuse, why)
                continue
            self._tell(
                ev.RequestSubmitted(
                    self._clock(), new.name, new.tenant, new.outline, stimulus_id=stimulus_id
                ),
                otherwise=lambda new=new: self.intake.disown(new.name),  # type: ignore[misc]
            )

    # -- events of tasks ---------------------------------------------------------------------------

    def transitioned(
        self, key: Any, start: str, finish: str, stimulus_id: str, message: dict[str, Any]
    ) -> None:
        """message: what came with it, for a task that was processing."""
        entry = self.intake.entries.get(key)
        if entry is None:
            if start == "processing" and message.get("worker") in self._known:
                self._turn.add(message["worker"])
            return
        if start == "processing":
            self._run_over(key, finish, stimulus_id, message)
        elif finish == "erred" or (finish == "released" and not self._wanted(key)):
            # It will not run: something before or after it failed, or the request is cancelled.
            if not self.policy.is_over(entry.request, entry.position):
                skipped = entry.request, (entry.position,)
                self._tell(ev.Skipped(self._clock(), *skipped, stimulus_id=stimulus_id))
        elif start == "memory" and finish == "released":
            where = key, entry.request, entry.position
            self._tell(ev.ResultLost(self._clock(), *where, stimulus_id=stimulus_id))
        elif start == "queued" and finish == "released":
            self._tell(ev.InvocationUnready(self._clock(), key, stimulus_id=stimulus_id))
        if finish == "forgotten":
            request = self.intake.forget(key)
            if request is not None:
                self._tell(ev.RequestClosed(self._clock(), request, stimulus_id=stimulus_id))

    def _wanted(self, key: Any) -> bool:
        ts = self.scheduler.tasks[key]
        return bool(ts.who_wants or ts.waiters)

    def _run_over(self, key: Any, finish: str, stimulus_id: str, message: dict[str, Any]) -> None:
        if self.policy.state(key) is not State.RUNNING:
            return  # the executor left first, and with it the run
        now = self._clock()
        executor = self._chosen.pop(key)
        self._turn.discard(executor)
        self._after_ours.add(executor)
        event: ev.Event
        if finish == "memory":
            report = (message.get("metadata") or {}).get(ANNOTATION) or {}
            event = ev.Completed(
                now,
                key,
                _measured(report, message.get("startstops") or ()),
                missing=report.get("missing"),
                free_bytes=report.get("free_bytes"),
                steps=1 + len(report.get("ahead", ())),
                members=report.get("members"),
                stimulus_id=stimulus_id,
            )
        elif finish == "erred":
            event = ev.Failed(now, key, stimulus_id=stimulus_id)
        elif executor not in self.scheduler.workers:
            self.left(executor)
            return
        else:
            # The thread cannot be stopped: the executor is not free before it says so.
            stopped = key == self._ending
            wanted = self._wanted(key)
            if wanted:
                event = ev.Lost(now, key, stimulus_id=stimulus_id)  # or Reschedule, or a retry
            else:
                event = ev.Cancelled(now, key, stopped=stopped, stimulus_id=stimulus_id)
            if not stopped:
                self._draining[executor] = key, not wanted
                self.scheduler.loop.add_callback(self._take_back, executor, key)
        self._tell(event)

    def _take_back(self, executor: str, key: Any) -> None:
        """After Dask has told the worker to drop the run: ask it to say when that has ended."""
        if self._draining.get(executor, (None,))[0] != key:
            return
        if WORKER_PLUGIN in self.scheduler.worker_plugins:
            message = {"op": "st2i_yield", "key": key, "taken_back": True}
            self.scheduler.worker_send(executor, message)
        else:  # nobody there would answer
            self.ended(key, executor, {})
            self.settled(key, executor)
            self.seams.arm()

    # -- Owner of the seams ------------------------------------------------------------------------

    def owns(self, ts: Any) -> bool:
        return ts.key in self.intake.entries

    def needs_again(self, ts: Any) -> list[Any]:
        return self._producers.needed_again(ts)

    def ready(self, ts: Any, stimulus_id: str) -> None:
        entry = self.intake.entries[ts.key]
        total = 0
        at: dict[str, int] = {}
        for dependency in ts.dependencies:
            total += dependency.nbytes
            for holder in dependency.who_has or ():
                at[holder.address] = at.get(holder.address, 0) + dependency.nbytes
        self._tell(
            ev.InvocationReady(
                self._clock(),
                ts.key,
                entry.request,
                entry.position,
                total,
                at,
                steps=entry.steps,
                stimulus_id=stimulus_id,
            )
        )

    def place(self, ts: Any) -> Any:
        executor = self._chosen.get(ts.key)
        return self.scheduler.workers.get(executor) if executor is not None else None

    def ended(self, key: Any, worker: str, message: dict[str, Any]) -> None:
        self._ending = key
        draining, cancelled = self._draining.get(worker, (None, False))
        if draining == key:
            del self._draining[worker]
            if cancelled:
                self._tell(ev.Drained(self._clock(), worker, _used(message)))
        self._ahead.note(key, worker, message)

    def settled(self, key: Any, worker: str) -> None:
        self._ending = None
        leftover = self._ahead.leftover(key)
        if leftover:
            self._send(worker, op="free-keys", keys=leftover, stimulus_id=f"st2i-leftover-{key}")

    def told(self, worker: str, message: dict[str, Any]) -> None:
        if worker in self._known:
            missing, free_bytes = message["missing"], message["free_bytes"]
            self._tell(ev.ResidencyReported(self._clock(), worker, missing, free_bytes))

    def take_computed(self, ts: Any) -> tuple[Any, Result] | None:
        worker = self._ahead.worker(ts.key)
        if worker is None:
            return None
        state = self.scheduler.workers.get(worker)
        # Dask assigns nothing to a worker that is paused or about to leave.
        if state not in self.scheduler.running:
            return None
        entry = self.intake.entries[ts.key]
        now = self._clock()
        self._tell(ev.Skipped(now, entry.request, (entry.position,)))
        self.journal.computed(entry.request, entry.position, now)
        return state, self._ahead.take(ts.key)

    def round(self, stimulus_id: str, plain_wait: bool = False) -> None:
        """Decide while an executor is idle; then where it is a ModelFn's turn beside plain tasks.

        plain_wait: plain tasks are queued on the scheduler, and get the executors where a ModelFn
            has just ended.
        """
        spared = set(self._after_ours) if plain_wait else set()
        self._after_ours = spared
        if not self.policy.queued:
            return
        self._note_busy(spared)
        while self.policy.idle_executors and self._decide(stimulus_id):
            pass
        for worker in sorted(self._turn & self._busy):
            state = self.scheduler.workers.get(worker)
            if not self.policy.queued:
                break
            if state is None or state not in self.scheduler.running or worker in self._draining:
                continue
            if any(self.owns(ts) for ts in state.processing):
                continue
            self._set_busy(worker, False)
            self._decide(stimulus_id)
            self._set_busy(worker, True)
        for instruction in self.policy.yields(self._clock()):
            self.journal.yielding(instruction.key)
            self._send(instruction.executor, op="st2i_yield", key=instruction.key)

    # -- inside ------------------------------------------------------------------------------------

    def _decide(self, stimulus_id: str) -> bool:
        now, begun = self._clock(), perf_counter()
        decision = self.policy.peek(now)
        if decision is None:
            if self.policy.waits_until is not None:
                self.seams.arm_in(max(0.0, self.policy.waits_until - now))
            return False
        ts = self.scheduler.tasks[decision.key]
        self.policy.commit(decision, now)
        self.journal.dispatched(decision, now, perf_counter() - begun, stimulus_id)
        self._chosen[decision.key] = decision.executor
        ts.priority = _FIRST
        self._producers.name(ts)
        _name_members(ts, decision.members)
        alone = ts.run_spec
        if decision.steps > 1:
            ts.run_spec = self._fused(decision, ts) or alone
        sent = self.seams.dispatch(ts, stimulus_id)
        ts.run_spec = alone  # a re-run after a loss may have other steps
        if not sent:
            # Dask refused it (inputs beyond the worker's memory): it has erred, or waits again.
            if self.policy.state(decision.key) is State.RUNNING:
                self._chosen.pop(decision.key, None)
                self._tell(ev.Lost(now, decision.key, ev.Measured(), stimulus_id=stimulus_id))
            return ts.state == "erred"
        stealing = self.scheduler.extensions.get("stealing")
        if stealing is not None:
            stealing.remove_key_from_stealable(ts)
            # It comes back from here as soon as the first task of its kind is done.
            stealing.unknown_durations.get(ts.prefix.name, set()).discard(ts)
        return True

    def _fused(self, decision: Dispatch, ts: Any) -> Any:
        keys = self.intake.keys_from(ts.key, decision.steps)
        tasks = [self.scheduler.tasks[key] for key in keys]
        if any(task.state != "waiting" for task in tasks[1:]):
            return None
        return fused([task.run_spec for task in tasks])

    def _note_busy(self, spared: set[str]) -> None:
        """Tell the policy which executors plain tasks hold, or which do not run tasks now."""
        scheduler = self.scheduler
        for worker in {*self.policy.idle_names(), *self._busy}:
            state = scheduler.workers[worker]
            # From Dask's own books: stealing moves plain tasks without any transition.
            held = any(
                ts not in state.long_running and not self.owns(ts) for ts in state.processing
            )
            absent = state not in scheduler.running or worker in self._draining
            self._set_busy(worker, held or absent or worker in spared)

    def _set_busy(self, worker: str, busy: bool) -> None:
        if busy and worker not in self._busy:
            self._busy.add(worker)
            self._tell(ev.ExecutorBusy(self._clock(), worker))
        elif not busy and worker in self._busy:
            self._busy.discard(worker)
            self._tell(ev.ExecutorIdle(self._clock(), worker))

    def _tell(self, event: ev.Event, otherwise: Callable[[], object] | None = None) -> None:
        try:
            instructions = self.policy.handle(event)
        except St2iError as error:
            # The scheduler must live on; the task then takes Dask's own way.
            if otherwise is not None:
                otherwise()
            logger.warning("st2i: %s [%s]", error, event.stimulus_id)
            return
        self.journal.happened(event)
        for instruction in instructions:
            if isinstance(instruction, Unblock):
                self._send(
                    instruction.executor,
                    op="st2i_unblock",
                    key=instruction.key,
                    producer=instruction.producer,
                )

    def _send(self, worker: str, **message: Any) -> None:
        if worker in self.scheduler.stream_comms:
            self.scheduler.worker_send(worker, message)


def _name_members(ts: Any, members: tuple[str, ...]) -> None:
    """Tell the worker which others it may use, in the task's annotation; a task that runs again must
    not find those of its last run."""
    annotation = ts.annotations[ANNOTATION]
    if members or "members" in annotation:
        annotation = {**annotation, "members": list(members)}
        ts.annotations = {**ts.annotations, ANNOTATION: annotation}


def refuse(why: str) -> None:
    """What the tasks of a refused request run instead."""
    raise LimitError(why)


def _used(message: dict[str, Any]) -> ev.Measured | None:
    """Seconds that a run nobody wants any more has used, if its worker says."""
    if "seconds" in message:
        return ev.Measured(*message["seconds"])
    report = (message.get("metadata") or {}).get(ANNOTATION) or {}
    return _measured(report, ()) if "compute" in report else None


def _measured(report: dict[str, Any], startstops: Any) -> ev.Measured:
    """The worker's own seconds; without them, the time that Dask saw the task compute."""
    if "compute" in report:
        return ev.Measured(report["load"], report["compute"], report["transfer"])
    seconds = sum(s["stop"] - s["start"] for s in startstops if s["action"] == "compute")
    return ev.Measured(compute_s=max(0.0, seconds))
