"""Sending many requests through a cluster, a bounded number at a time.

The main thread submits and keeps count; Dask's callback thread reports finished futures; a few
writer threads fetch results and save them. All talk to the main thread through one queue.
"""

from __future__ import annotations

import queue
import time
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from itertools import islice
from typing import TYPE_CHECKING, Any

from ..errors import AttachError, LimitError, St2iError, said
from .interrupts import Interrupts
from .jobs import Job
from .pictures import with_pictures
from .prompts import Failure

if TYPE_CHECKING:
    from distributed import Client, Future

    from ..request import Request
    from ..workflow import Workflow

#: Requests in flight: this many at least, and so many per executor. Results wait in the cluster's
#: memory only for as long as it takes to fetch them.
WINDOW_LEAST, WINDOW_PER_EXECUTOR = 64, 4

_WRITERS = 4
_POLL_SECONDS = 0.2
_WINDOW_AGE_SECONDS = 10.0
# How long to wait before asking again for a tenant that is at its cap of queued requests.
_CAP_SECONDS = 1.0

#: save(job, result, seconds) keeps a result. OSError stops the run; St2iError fails the job.
Save = Callable[[Job, Any, float], None]


@dataclass
class Outcome:
    """What became of the jobs. `stopped` tells why some were never run, or is None."""

    made: int = 0
    seconds: list[tuple[Job, float]] = field(default_factory=list)  # submit to finished
    failures: list[Failure] = field(default_factory=list)
    stopped: str | None = None


@dataclass
class _Flight:
    job: Job
    future: Future
    submitted: float
    answered: float | None = None


def run_jobs(
    client: Client,
    workflow: Workflow,
    jobs: Iterable[Job],
    save: Save,
    interrupts: Interrupts,
    on_done: Callable[[Job, Failure | None], None],
    on_wait: Callable[[str], None] = lambda reason: None,
) -> Outcome:
    """Run the jobs in order and save every result as it comes.

    on_done is called in this thread for every job that ended, on_wait while a tenant is at its cap
    of queued requests (the run asks again every second). A signal (see Interrupts), a failed
    save or the loss of the scheduler stops the run: what is pending is cancelled, what has arrived
    is still saved.
    """
    return _Run(client, workflow, save, interrupts, on_done, on_wait).run(iter(jobs))


class _Run:
    def __init__(
        self,
        client: Client,
        workflow: Workflow,
        save: Save,
        interrupts: Interrupts,
        on_done: Callable[[Job, Failure | None], None],
        on_wait: Callable[[str], None],
    ):
        self.client, self.workflow, self.save = client, workflow, save
        self.interrupts, self.on_done, self.on_wait = interrupts, on_done, on_wait
        self.outcome = Outcome()
        self.events: queue.SimpleQueue[tuple[str, str, Any]] = queue.SimpleQueue()
        self.flights: dict[str, _Flight] = {}  # by key, until saved or failed
        self._window = (0, 0.0)
        self._held: list[tuple[Job, Request]] = []  # refused for now: the tenant is at its cap
        self._batch = WINDOW_LEAST
        self._not_before = 0.0

    def run(self, jobs: Any) -> Outcome:
        with ThreadPoolExecutor(_WRITERS, "st2i-writer") as writers:
            try:
                self._loop(jobs, writers)
            finally:
                self._cancel_pending()
        return self.outcome

    def _loop(self, jobs: Any, writers: ThreadPoolExecutor) -> None:
        while True:
            if self.outcome.stopped is None:
                self._watch()
            if self.outcome.stopped is None:
                self._fill(jobs)
            if self.outcome.stopped is not None:
                self._cancel_pending()
            if not self.flights and (self.outcome.stopped is not None or not self._held):
                return
            try:
                event = self.events.get(timeout=_POLL_SECONDS)
                while True:
                    self._handle(*event, writers)
                    event = self.events.get_nowait()
            except queue.Empty:
                continue

    def _watch(self) -> None:
        """Reasons to stop that no event reports."""
        if self.interrupts.received:
            self.outcome.stopped = "interrupted"
        elif self.client.status not in ("running", "connecting"):
            self._lost()

    def _lost(self) -> None:
        self.outcome.stopped = "the connection to the scheduler was lost"

    def _fill(self, jobs: Any) -> None:
        """Submit as many jobs as the window and the tenants' caps have room for."""
        room = self._attempt(self._room)
        while room and time.monotonic() >= self._not_before and self.outcome.stopped is None:
            size = min(room, self._batch)
            batch, self._held = self._held[:size], self._held[size:]
            batch += self._requests(islice(jobs, size - len(batch)))
            if not batch:
                return
            try:
                self._attempt(self._submit, batch)
            except LimitError as error:
                self._held = batch + self._held
                if len(batch) == 1:  # nothing fits before something ends, ours or another's
                    self._not_before = time.monotonic() + _CAP_SECONDS
                    self.on_wait(str(error))
                self._batch = max(1, len(batch) // 2)
            else:
                room -= len(batch)
                self._batch = min(2 * self._batch, WINDOW_LEAST)

    def _attempt(self, call: Callable[..., Any], *arguments: Any) -> Any:
        """Call Dask. When the connection goes in the middle of it, it raises many kinds."""
        try:
            return call(*arguments)
        except St2iError:
            raise
        except Exception:
            if self.client.status == "running":
                raise
            self._lost()

    def _room(self) -> int:
        size, asked = self._window
        now = time.monotonic()
        if not size or now - asked > _WINDOW_AGE_SECONDS:  # clusters grow and shrink
            executors = len(self.client.nthreads())
            size = max(WINDOW_LEAST, WINDOW_PER_EXECUTOR * executors)
            self._window = (size, now)
        return max(0, size - len(self.flights))

    def _requests(self, jobs: Iterable[Job]) -> list[tuple[Job, Request]]:
        made = []
        for job in jobs:
            try:
                values = with_pictures(self.workflow, job.values)
                made.append((job, self.workflow.request(job.tenant, **values)))
            except St2iError as error:
                self._end(job, str(error))
        return made

    def _submit(self, batch: list[tuple[Job, Request]]) -> None:
        from ..submission import submit_requests

        now = time.monotonic()
        futures = submit_requests(self.client, [request for _, request in batch])
        for (job, _), future in zip(batch, futures, strict=True):
            self.flights[future.key] = _Flight(job, future, now)
            future.add_done_callback(self._answered)

    def _answered(self, future: Future) -> None:
        self.events.put(("answered", future.key, time.monotonic()))

    def _handle(self, what: str, key: str, value: Any, writers: ThreadPoolExecutor) -> None:
        flight = self.flights.get(key)
        if flight is None:
            return  # cancelled meanwhile
        if what == "answered":
            flight.answered = value
            if flight.future.status == "cancelled":
                del self.flights[key]
                if self.client.status != "running":
                    self._lost()
                self._end(flight.job, "was cancelled on the cluster; run it again")
            else:
                writers.submit(self._keep, flight)
            return
        del self.flights[key]
        flight.future.release()
        if isinstance(value, OSError):
            place = f" {value.filename!r}" if value.filename else ""
            self.outcome.stopped = f"cannot write{place}: {value.strerror or value}"
            return
        self._end(flight.job, value, flight)

    def _keep(self, flight: _Flight) -> None:
        """In a writer thread: fetch one result and save it."""
        problem: OSError | str | None = None
        assert flight.answered is not None
        try:
            result = flight.future.result()
        except BaseException as error:  # cancellation is no Exception
            problem = one_line(error)
        else:
            try:
                self.save(flight.job, result, flight.answered - flight.submitted)
            except OSError as error:
                problem = error
            except Exception as error:
                problem = one_line(error)
        self.events.put(("kept", flight.future.key, problem))

    def _end(self, job: Job, problem: str | None, flight: _Flight | None = None) -> None:
        failure = None
        if problem is not None:
            failure = Failure(job.where, job.prompt, problem)
            self.outcome.failures.append(failure)
        else:
            assert flight is not None
            assert flight.answered is not None
            self.outcome.made += 1
            self.outcome.seconds.append((job, flight.answered - flight.submitted))
        self.on_done(job, failure)

    def _cancel_pending(self) -> None:
        """Forget what has not been answered; results that are there are still saved."""
        pending = [flight for flight in self.flights.values() if flight.answered is None]
        # A result may have come whose event is still in the queue.
        pending = [flight for flight in pending if flight.future.status == "pending"]
        for flight in pending:
            del self.flights[flight.future.key]
        if pending and self.client.status == "running":
            self.client.cancel([flight.future for flight in pending])


def one_line(error: BaseException) -> str:
    """An error's message for a list: one line of at most 500 characters."""
    text = said(error)
    return text if len(text) <= 500 else text[:400] + "..." + text[-97:]


def lost_connection(outcome: Outcome) -> AttachError:
    """The error for a run that ended because its scheduler went away."""
    return AttachError(f"{outcome.stopped}; start the cluster again")
