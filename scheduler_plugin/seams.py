"""The seams of Dask's scheduler where the fair policy takes over dispatch. Nothing else touches them.

Dask promises none of these internals, so they are checked before anything is changed, and put back
when the plugin goes:

1. `_TRANSITIONS_TABLE`: transitions of ModelFn tasks (waiting -> processing leads to queued, or to
   memory where the step was computed ahead; queued -> processing). A task that is to run again may
   first get more dependencies. Every other task takes Dask's own functions.
2. `queued`: Dask's heap with the ModelFn tasks beside it, so that `ts in scheduler.queued` stays true.
3. `stimulus_queue_slots_maybe_opened`, which Dask calls whenever a slot may have opened: our round of
   decisions, Dask's own for its heap, and ours again for what that has left.
4. `stream_handlers`: the end of a run is heard, also that of one nobody wants (a message of ours).
5. `remove_plugin`: Dask does not tell a plugin that it was unregistered.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from typing import Any, Protocol

from st2i_dask.errors import AttachError

from .ahead import Result

#: Releases of `distributed` that the seams were tried with.
SUPPORTED = "2026.8"

_MESSAGES = ("task-finished", "task-erred", "reschedule")


class Owner(Protocol):
    """Who decides. All calls come from the scheduler's event loop."""

    def owns(self, ts: Any) -> bool:
        """Whether the task is a ModelFn that the policy dispatches."""
        ...

    def needs_again(self, ts: Any) -> list[Any]:
        """Tasks that a task about to wait for its inputs must wait for beside them."""
        ...

    def ready(self, ts: Any, stimulus_id: str) -> None:
        """The task's inputs exist: it has been queued."""
        ...

    def place(self, ts: Any) -> Any:
        """The WorkerState that a decision just made chose for the task; None: none did."""
        ...

    def round(self, stimulus_id: str, plain_wait: bool = False) -> None:
        """Make decisions while an executor is idle. plain_wait: Dask's heap gets its turn next."""
        ...

    def ended(self, key: Any, worker: str, message: dict[str, Any]) -> None:
        """The worker says that its run of `key` is over, in whatever way. Before Dask hears it."""
        ...

    def settled(self, key: Any, worker: str) -> None:
        """Dask has taken the same message in."""
        ...

    def told(self, worker: str, message: dict[str, Any]) -> None:
        """The worker says which models it has: `missing` and `free_bytes`."""
        ...

    def take_computed(self, ts: Any) -> tuple[Any, Result] | None:
        """The task's result and the WorkerState that computed it ahead of its turn; None: it must run."""
        ...


class Seams:
    """Installs into one scheduler and restores it."""

    def __init__(self, scheduler: Any, owner: Owner):
        check(scheduler)
        if isinstance(scheduler.queued, QueuedTasks):
            raise AttachError(
                "another fair scheduler plugin serves on this scheduler; unregister it first: "
                "client.unregister_scheduler_plugin(name)"
            )
        self._scheduler = scheduler
        self._owner = owner
        self._armed = ""  # by which stimulus; a callback is on its way
        self._round_due = False  # something came that no round has seen
        self._installed = False
        self._later: Any = None  # a timer

    def install(self) -> None:
        scheduler = self._scheduler
        self._heap = scheduler.queued
        scheduler.queued = QueuedTasks(self._heap, self._owner.owns)
        self._table = scheduler._TRANSITIONS_TABLE
        scheduler._TRANSITIONS_TABLE = {
            **self._table,
            ("released", "waiting"): self._released_waiting,
            ("waiting", "processing"): self._waiting_processing,
            ("queued", "processing"): self._queued_processing,
        }
        self._plain_slots = scheduler.stimulus_queue_slots_maybe_opened
        scheduler.stimulus_queue_slots_maybe_opened = self._slots_opened
        self._handlers = {op: scheduler.stream_handlers[op] for op in _MESSAGES}
        for op, handler in self._handlers.items():
            scheduler.stream_handlers[op] = self._hearing(handler)
        scheduler.stream_handlers["st2i_ended"] = self._run_ended
        scheduler.stream_handlers["st2i_residency"] = self._residency
        self._plain_remove_plugin = scheduler.remove_plugin
        scheduler.remove_plugin = self._remove_plugin
        self._installed = True

    def restore(self) -> None:
        """Put everything back; ModelFn tasks that are queued go into Dask's heap."""
        if not self._installed:
            return
        self._installed = False
        scheduler = self._scheduler
        if self._later is not None:
            scheduler.loop.remove_timeout(self._later)
        for ts in scheduler.queued.ours:
            self._heap.add(ts)
        scheduler.queued = self._heap
        del scheduler._TRANSITIONS_TABLE  # the class's own
        del scheduler.stimulus_queue_slots_maybe_opened
        del scheduler.remove_plugin
        scheduler.stream_handlers.update(self._handlers)
        # Workers may still send them, and Dask drops a worker whose message it does not know.
        scheduler.stream_handlers["st2i_ended"] = _ignore
        scheduler.stream_handlers["st2i_residency"] = _ignore
        scheduler.stimulus_queue_slots_maybe_opened(stimulus_id="st2i-restored")

    def arm(self, stimulus_id: str = "st2i-round") -> None:
        """A round in the next tick, unless there is one before: Dask opens no slots after new tasks
        arrived."""
        self._round_due = True
        if not self._armed:
            self._armed = stimulus_id
            self._scheduler.loop.add_callback(self._armed_round)

    def arm_in(self, seconds: float) -> None:
        """A round in so many seconds, if nothing brings one about before; one at a time."""
        if self._later is not None:
            self._scheduler.loop.remove_timeout(self._later)
        self._later = self._scheduler.loop.call_later(seconds, self.arm)

    def dispatch(self, ts: Any, stimulus_id: str) -> bool:
        """Send the queued task where `Owner.place` says. False if Dask refused."""
        self._scheduler.transitions({ts.key: "processing"}, stimulus_id)
        return bool(ts.state == "processing")

    # -- what Dask calls ---------------------------------------------------------------------------

    def _released_waiting(self, scheduler: Any, key: Any, stimulus_id: str) -> Any:
        ts = scheduler.tasks[key]
        if self._owner.owns(ts):
            for needed in self._owner.needs_again(ts):
                ts.add_dependency(needed)
        return self._table["released", "waiting"](scheduler, key, stimulus_id)

    def _waiting_processing(self, scheduler: Any, key: Any, stimulus_id: str) -> Any:
        ts = scheduler.tasks[key]
        if not self._owner.owns(ts):
            return self._table["waiting", "processing"](scheduler, key, stimulus_id)
        computed = self._owner.take_computed(ts)
        if computed is None:
            return self._queue(ts, stimulus_id)
        worker, result = computed
        recommendations: dict[Any, str] = {}
        to_clients: dict[str, list[Any]] = {}
        ts.set_nbytes(result.nbytes)
        scheduler._add_to_memory(
            ts, worker, recommendations, to_clients, type=result.type, typename=result.typename
        )
        return recommendations, to_clients, {}

    def _queue(self, ts: Any, stimulus_id: str) -> Any:
        scheduler = self._scheduler
        if scheduler.validate:
            scheduler._validate_ready(ts)
        ts.state = "queued"
        scheduler.queued.add(ts)
        self._owner.ready(ts, stimulus_id)
        self.arm(stimulus_id)
        return {}, {}, {}

    def _queued_processing(self, scheduler: Any, key: Any, stimulus_id: str) -> Any:
        ts = scheduler.tasks[key]
        if not self._owner.owns(ts):
            return self._table["queued", "processing"](scheduler, key, stimulus_id)
        worker = self._owner.place(ts)
        if worker is None:
            return {}, {}, {}
        scheduler.queued.discard(ts)
        done = scheduler._add_to_processing(ts, worker, stimulus_id=stimulus_id)
        for message in done[2].get(worker.address, ()):
            if message["op"] == "compute-task":
                message["stimulus_id"] = stimulus_id  # Dask makes one up that nobody else knows
        return done

    def _slots_opened(self, *, stimulus_id: str) -> None:
        self._round_due = False
        if self._heap:
            self._owner.round(stimulus_id, plain_wait=True)
            self._dask_slots(stimulus_id)
        self._owner.round(stimulus_id)

    def _dask_slots(self, stimulus_id: str) -> None:
        """Dask's own dispatch from its heap."""
        scheduler = self._scheduler
        queued = scheduler.queued
        scheduler.queued = queued.heap_view
        try:
            self._plain_slots(stimulus_id=stimulus_id)
        finally:
            scheduler.queued = queued

    def _armed_round(self) -> None:
        stimulus_id, self._armed = self._armed, ""
        if self._installed and self._round_due:
            self._scheduler.stimulus_queue_slots_maybe_opened(stimulus_id=stimulus_id)

    def _hearing(self, handler: Callable[..., Any]) -> Callable[..., Any]:
        def heard(*args: Any, key: Any, worker: str, **message: Any) -> Any:
            self._owner.ended(key, worker, message)
            try:
                return handler(*args, key=key, worker=worker, **message)
            finally:
                self._owner.settled(key, worker)

        return heard

    def _run_ended(self, *, key: Any, worker: str, **message: Any) -> None:
        self._owner.ended(key, worker, message)
        self._owner.settled(key, worker)
        self.arm()

    def _residency(self, *, worker: str, **message: Any) -> None:
        self._owner.told(worker, message)
        self.arm()

    def _remove_plugin(self, name: str | None = None) -> None:
        plugin = self._scheduler.plugins.get(name)
        self._plain_remove_plugin(name)
        if getattr(plugin, "bridge", None) is self._owner:
            self.restore()
            self._scheduler.loop.add_callback(plugin.close)


def _ignore(**message: Any) -> None:
    pass


class QueuedTasks:
    """Dask's heap of queued tasks, with ModelFn tasks beside it: a set for everything but order."""

    def __init__(self, heap: Any, owns: Callable[[Any], bool]):
        self.heap = heap
        self.ours: dict[Any, None] = {}
        self._owns = owns

    @property
    def heap_view(self) -> Any:
        """What Dask's own dispatch may take from: all of the set, but only plain tasks to peek at."""
        return _HeapView(self)

    def add(self, ts: Any) -> None:
        if self._owns(ts):
            self.ours[ts] = None
        else:
            self.heap.add(ts)

    def discard(self, ts: Any) -> None:
        if ts in self.ours:
            del self.ours[ts]
        else:
            self.heap.discard(ts)

    def remove(self, ts: Any) -> None:
        if ts in self.ours:
            del self.ours[ts]
        else:
            self.heap.remove(ts)

    def peek(self) -> Any:
        return self.heap.peek()

    def peekn(self, n: int) -> Iterator[Any]:
        return iter(self.heap.peekn(n))

    def pop(self) -> Any:
        return self.heap.pop()

    def clear(self) -> None:
        self.ours.clear()
        self.heap.clear()

    def __contains__(self, ts: object) -> bool:
        return ts in self.ours or ts in self.heap

    def __iter__(self) -> Iterator[Any]:
        yield from self.ours
        yield from self.heap

    def __len__(self) -> int:
        return len(self.ours) + len(self.heap)

    def __bool__(self) -> bool:
        return bool(self.ours or self.heap)


class _HeapView:
    """The same set, false when Dask's heap is empty: Dask's dispatch then stops."""

    def __init__(self, queued: QueuedTasks):
        self._queued = queued

    def __bool__(self) -> bool:
        return bool(self._queued.heap)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._queued, name)

    def __contains__(self, ts: object) -> bool:
        return ts in self._queued

    def __iter__(self) -> Iterator[Any]:
        return iter(self._queued)

    def __len__(self) -> int:
        return len(self._queued)


def check(scheduler: Any) -> None:
    """AttachError unless this `distributed` has every seam with the signature we know."""
    import distributed

    problems = []
    table = getattr(type(scheduler), "_TRANSITIONS_TABLE", {})
    problems += [
        f"no transition {start} -> {finish}"
        for start, finish in (
            ("released", "waiting"),
            ("waiting", "processing"),
            ("queued", "processing"),
        )
        if (start, finish) not in table
    ]
    for name, parameters in (
        ("stimulus_queue_slots_maybe_opened", ["stimulus_id"]),
        ("_add_to_processing", ["ts", "ws", "stimulus_id"]),
        ("_add_to_memory", ["ts", "ws", "recommendations", "client_msgs", "type", "typename"]),
        ("_validate_ready", ["ts"]),
        ("transitions", ["recommendations", "stimulus_id"]),
        ("remove_plugin", ["name"]),
    ):
        method = getattr(type(scheduler), name, None)
        if method is None or list(inspect.signature(method).parameters)[1:] != parameters:
            problems.append(f"no method {name}({', '.join(parameters)})")
    queued = getattr(scheduler, "queued", None)
    if type(queued).__name__ not in ("HeapSet", "QueuedTasks"):
        problems.append(f"scheduler.queued is a {type(queued).__name__}, not a HeapSet")
    handlers = getattr(scheduler, "stream_handlers", {})
    problems += [f"no message {op}" for op in _MESSAGES if op not in handlers]
    if problems:
        raise AttachError(
            f"distributed {distributed.__version__} is not one that st2i_dask knows "
            f"({'; '.join(problems)}); install distributed {SUPPORTED}"
        )
