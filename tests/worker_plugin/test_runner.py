"""Running the calls of a task: yields, errors on the way, and what the scheduler is told."""

from __future__ import annotations

from contextlib import contextmanager
from types import SimpleNamespace

import pytest
from distributed import Reschedule, Status
from distributed.comm import CommClosedError
from distributed.worker import thread_state
from distributed.worker_state_machine import FreeKeysEvent, UpdateDataEvent

import worker_plugin.runner as module
from st2i_dask.errors import OutputError, ProducerLostError
from st2i_dask.invocation import Call
from st2i_dask.outputs import TaskOutputs
from worker_plugin.executor import Seconds, UnwantedError
from worker_plugin.runner import StepRunner

KEYS = [f"k{n}" for n in range(4)]


class FakeLoop:
    """Callbacks wait until a test runs them."""

    def __init__(self):
        self.soon, self.later = [], []

    def add_callback(self, function, *args):
        self.soon.append((function, args))

    def call_later(self, seconds, function, *args):
        assert 0 < seconds < 1
        self.later.append((function, args))

    def run(self, waiting):
        calls, waiting[:] = list(waiting), []
        for function, args in calls:
            function(*args)


class FakeWorker:
    def __init__(self):
        self.loop = FakeLoop()
        self.state = SimpleNamespace(tasks={})
        self.sent, self.stimuli = [], []
        self.batched_stream = SimpleNamespace(send=self.sent.append)
        self.handle_stimulus = self.stimuli.append
        self.stream_handlers = {}
        self.handlers = {}
        self.status = Status.running
        self.address = "w1"

    def set_state(self, key, state, previous=None):
        self.state.tasks[key] = SimpleNamespace(
            state=state,
            previous=previous,
            metadata=None,
            annotations={"st2i": {"request": "r1", "bucket": "64x64"}},
        )


class FakeExecutor:
    """Each call takes 1 s and returns its number; before it does, a test may interfere."""

    def __init__(self):
        self.before = lambda number: None
        self.number = 0
        self.residency = SimpleNamespace(version=1)
        self.models = SimpleNamespace(
            residency=self.residency, missing=lambda: {"m": 0.5}, free_bytes=lambda: 7
        )
        self.belongs = None
        self.closing = False

    @contextmanager
    def in_use(self):
        yield not self.closing

    def run(self, task, request, bucket, together, wanted, kept):
        self.belongs = request, bucket
        number, self.number = self.number, self.number + 1
        self.before(number)
        return TaskOutputs((number, tuple(task.dependencies))), Seconds(0.25, 0.5, 0.25)


@pytest.fixture
def worker(monkeypatch):
    class Bound:
        def __init__(self, packed, parameters, about, dependencies, *more):
            self.dependencies = dependencies

    monkeypatch.setattr(module, "BoundTask", Bound)
    thread_state.key = "k0"
    yield FakeWorker()
    del thread_state.key


@pytest.fixture
def executor():
    return FakeExecutor()


@pytest.fixture
def runner(worker, executor):
    worker.set_state("k0", "executing")
    pulls = SimpleNamespace(
        producer=None, boards=SimpleNamespace(open=lambda *of: None), over=lambda consumer: None
    )
    return StepRunner(worker, executor, pulls, gangs=None)


def calls(n):
    return [
        Call(None, {}, None, (), dependencies=(KEYS[i - 1],) if i else ("start",), key=KEYS[i])
        for i in range(n)
    ]


def go(runner, n):
    return runner.run(calls(n), {"start": "s"})


def report(worker):
    return worker.state.tasks["k0"].metadata["st2i"]


def test_one_call(runner, worker):
    assert go(runner, 1).values == (0, ("s",))
    seconds = {"load": 0.25, "compute": 0.5, "transfer": 0.25}
    assert report(worker) == {**seconds, "missing": {"m": 0.5}, "free_bytes": 7}
    worker.loop.run(worker.loop.soon)
    assert not worker.sent
    assert not worker.stimuli


def test_later_calls_get_the_results_of_earlier_ones_and_are_kept_under_their_keys(runner, worker):
    assert go(runner, 3).values == (0, ("s",))
    worker.loop.run(worker.loop.soon)
    (event,) = worker.stimuli
    assert isinstance(event, UpdateDataEvent)
    assert list(event.data) == ["k1", "k2"]
    assert event.data["k2"].values[0] == 2
    assert event.data["k2"].values[1] == (event.data["k1"],)
    assert report(worker)["compute"] == 1.5
    assert report(worker)["ahead"] == {k: v.__sizeof__() for k, v in event.data.items()}


@pytest.mark.parametrize("error", [OutputError("written to"), RuntimeError("a late one")])
def test_nothing_is_kept_of_a_run_whose_lease_ends_with_an_error(
    runner, worker, monkeypatch, error
):
    def close(kept):
        raise error

    monkeypatch.setattr(module.RunLease, "close", close)
    with pytest.raises(type(error)):
        go(runner, 3)
    worker.loop.run(worker.loop.soon)
    assert not worker.stimuli
    assert not runner._steps


@pytest.mark.parametrize("error", [ProducerLostError("gone"), UnwantedError("cancelled")])
def test_nothing_is_kept_of_a_run_that_is_to_begin_anew(runner, worker, executor, error):
    def fail(number):
        if number == 2:
            raise error

    executor.before = fail
    with pytest.raises(Reschedule):
        go(runner, 3)
    worker.loop.run(worker.loop.soon)
    assert not worker.stimuli
    assert not runner._steps


def test_what_is_resident_is_told_when_it_changes(runner, worker, executor):
    go(runner, 1)
    go(runner, 1)
    assert "missing" not in report(worker)
    executor.residency.version += 1
    go(runner, 1)
    assert report(worker)["missing"] == {"m": 0.5}


def test_a_worker_attached_anew_lets_a_task_end_and_runs_no_other(runner, worker, executor):
    """Its models go with the last task: nobody is told of them."""
    executor.before = lambda number: setattr(executor, "closing", True)
    assert go(runner, 2).values == (0, ("s",))
    assert "missing" not in report(worker)
    with pytest.raises(Reschedule):
        go(runner, 1)
    assert executor.number == 2


def test_what_is_resident_can_be_announced(runner, worker):
    runner.announce()
    assert worker.sent == [{"op": "st2i_residency", "missing": {"m": 0.5}, "free_bytes": 7}]


@pytest.mark.parametrize("annotations", [None, {}, {"st2i": "nonsense"}, {"st2i": {"bucket": 7}}])
def test_the_executor_hears_request_and_bucket_as_far_as_they_are_said(
    runner, worker, executor, annotations
):
    go(runner, 1)
    assert executor.belongs == ("r1", "64x64")
    worker.state.tasks["k0"].annotations = annotations
    go(runner, 1)
    assert executor.belongs == ("", "7" if annotations and "bucket" in str(annotations) else "")


def test_a_yield_hands_back_after_the_current_step(runner, worker, executor):
    executor.before = lambda number: number == 1 and runner.yield_wanted("k0")
    go(runner, 4)
    assert executor.number == 2
    assert list(report(worker)["ahead"]) == ["k1"]
    assert not runner._yielding


@pytest.mark.parametrize("state", ["waiting", "ready", "constrained"])
def test_a_yield_may_come_before_the_thread(runner, worker, executor, state):
    worker.set_state("k0", state)
    runner.yield_wanted("k0")
    worker.set_state("k0", "executing")
    go(runner, 4)
    assert executor.number == 1
    assert not runner._yielding


@pytest.mark.parametrize("state", ["memory", "released", "cancelled", "error", "flight"])
def test_a_yield_that_comes_too_late_is_forgotten(runner, worker, state):
    worker.set_state("k0", state)
    runner.yield_wanted("k0")
    runner.yield_wanted("unknown")
    assert not runner._yielding


def test_yields_of_runs_that_never_came_are_forgotten_with_the_next(runner, worker):
    worker.set_state("k9", "ready")
    runner.yield_wanted("k9")
    del worker.state.tasks["k9"]
    runner.yield_wanted("k0")
    assert runner._yielding == {"k0"}


def test_a_cancelled_run_stops_after_its_step_and_says_what_it_used(runner, worker, executor):
    executor.before = lambda number: (
        number == 1 and worker.set_state("k0", "cancelled", "executing")
    )
    go(runner, 4)
    assert executor.number == 2
    worker.loop.run(worker.loop.soon)
    assert worker.sent == [{"op": "st2i_ended", "key": "k0", "seconds": [0.5, 1.0, 0.5]}]
    assert not worker.stimuli


def test_an_error_in_the_first_call_is_the_tasks_error(runner, worker, executor):
    def fail(number):
        raise ZeroDivisionError

    executor.before = fail
    with pytest.raises(ZeroDivisionError):
        go(runner, 4)
    worker.loop.run(worker.loop.soon)
    assert not worker.sent
    assert not worker.stimuli
    assert worker.state.tasks["k0"].metadata is None


def test_an_error_in_a_later_call_only_ends_the_row(runner, worker, executor):
    def fail(number):
        if number == 2:
            raise ZeroDivisionError

    executor.before = fail
    assert go(runner, 4).values[0] == 0
    assert list(report(worker)["ahead"]) == ["k1"]


# Taken back


def test_taken_back_without_a_thread_is_answered_at_once(runner, worker):
    for state in (None, "released", "flight", "memory"):
        worker.sent.clear()
        worker.state.tasks.clear()
        if state:
            worker.set_state("k1", state)
        runner.yield_wanted("k1", taken_back=True)
        assert worker.sent == [{"op": "st2i_ended", "key": "k1", "seconds": [0.0, 0.0, 0.0]}]
    assert not runner._watched


@pytest.mark.parametrize(
    ("state", "previous"),
    [
        ("cancelled", "executing"),
        ("cancelled", "long-running"),
        ("resumed", "executing"),
        ("executing", None),
    ],
)
def test_taken_back_while_its_thread_runs_is_answered_when_that_ends(
    runner, worker, state, previous
):
    worker.set_state("k0", state, previous)
    runner.yield_wanted("k0", taken_back=True)
    worker.loop.run(worker.loop.later)
    assert not worker.sent
    del worker.state.tasks["k0"]
    worker.loop.run(worker.loop.later)
    # Not by way of `run`: nobody knows what it used.
    assert worker.sent == [{"op": "st2i_ended", "key": "k0"}]
    assert not worker.loop.later
    assert not runner._watched


def test_the_thread_itself_answers_first_and_once(runner, worker):
    worker.set_state("k0", "cancelled", "executing")
    runner.yield_wanted("k0", taken_back=True)
    go(runner, 1)
    worker.loop.run(worker.loop.soon)
    del worker.state.tasks["k0"]
    worker.loop.run(worker.loop.later)
    assert worker.sent == [{"op": "st2i_ended", "key": "k0", "seconds": [0.25, 0.5, 0.25]}]


def test_taken_back_as_it_ends_frees_what_ran_ahead(runner, worker):
    go(runner, 3)
    worker.loop.run(worker.loop.soon)
    worker.stimuli.clear()
    worker.set_state("k0", "cancelled", "executing")
    runner.yield_wanted("k0", taken_back=True)
    (event,) = worker.stimuli
    assert isinstance(event, FreeKeysEvent)
    assert event.keys == ["k1", "k2"]
    runner.yield_wanted("k0", taken_back=True)
    assert len(worker.stimuli) == 1


def test_only_the_last_rows_are_remembered(runner, worker):
    for number in range(100):
        runner._over("k0", Seconds(), {f"ahead-{number}": 1})
        worker.state.tasks[f"k0-{number}"] = worker.state.tasks["k0"]
        runner._over(f"k0-{number}", Seconds(), {f"more-{number}": 1})
    assert len(runner._ahead) <= 16


def test_a_closed_connection_or_worker_is_no_error(runner, worker):
    def closed(message):
        raise CommClosedError

    worker.batched_stream.send = closed
    runner.yield_wanted("gone", taken_back=True)
    worker.set_state("k0", "cancelled", "executing")
    runner.yield_wanted("k0", taken_back=True)
    worker.status = Status.closed
    worker.loop.run(worker.loop.later)
    assert not worker.loop.later
