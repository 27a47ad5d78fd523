"""Callback inputs on a live cluster: consumers start with their producers and never wait for ever."""

from __future__ import annotations

import os
import signal
import time

import dask
import numpy as np
import pytest
from distributed import Client

import st2i_dask as st2i

TIMEOUT = 60


class Control(st2i.ModelFn):
    """Sleeps, then gives its list of numbers; notes when it ran."""

    def setup_io(self):
        self.add_input("value")
        self.add_input("seconds")
        self.add_output("outputs")

    def execute(self, model_components, value, seconds):
        start = time.time()
        time.sleep(seconds)
        if seconds < 0.001:
            raise ZeroDivisionError("a control model that fails")
        return {"outputs": [value * 10, value * 100, (start, time.time())]}


class Base(st2i.ModelFn):
    """Sleeps, then touches its callback input."""

    def setup_io(self):
        self.add_input("value")
        self.add_input("seconds")
        self.add_input("control", callback=True, optional=True)
        self.add_output("sum")
        self.add_output("times")

    def execute(self, model_components, value, seconds, control):
        start = time.time()
        time.sleep(seconds)
        if control is None:
            return {"sum": value, "times": ()}
        total = value + control[0] + control[1] + len(control)
        return {"sum": total, "times": (start, time.time(), control[2])}


@st2i.glue
def note(times, more):
    return [*times, more]


@st2i.glue
def pair(value, times):
    return value, times


class Last(st2i.ModelFn):
    def setup_io(self):
        self.add_input("value")
        self.add_input("times")
        self.add_output("both")

    def execute(self, model_components, value, times):
        return {"both": (value, times)}


@st2i.workflow(name="test-callbacks", replace=True)
def controlled(value: float, control_s: float = 0.2, base_s: float = 0.2, steps: int = 3):
    control, base = Control(), Base()
    times = note([], None)
    for _ in range(steps):
        outputs = control(value, control_s)
        result = base(value, base_s, control=outputs)
        value, times = result.sum, note(times, result.times)
    return Last()(value, times)


def expected(value, steps=3):
    for _ in range(steps):
        value = value + value * 10 + value * 100 + 3
    return value


@pytest.fixture(scope="module")
def two():
    with (
        dask.config.set({"distributed.scheduler.validate": True}),
        st2i.local_cluster(2, dashboard_address=":0") as cluster,
        Client(cluster) as client,
    ):
        st2i.attach(client)
        yield client


def policy_is_clean(dask_scheduler):
    plugin = dask_scheduler.plugins["st2i-scheduler"]
    plugin.policy._check()
    plugin.bridge.intake._check()
    return plugin.policy.queued


def test_producer_and_consumer_run_at_once_on_two_workers(two):
    controlled.submit(two, value=1.0).result(timeout=TIMEOUT)  # warm
    value, times = controlled.submit(two, value=1.0).result(timeout=TIMEOUT)
    assert value == expected(1.0)
    for base_start, base_end, (control_start, control_end) in times[1:]:
        assert base_start < control_end, "the consumer started before its producer had ended"
        assert base_end >= control_end
        assert control_start < base_end
    assert two.run_on_scheduler(policy_is_clean) == 0


def test_one_worker_runs_the_consumer_after_the_producer():
    with (
        dask.config.set({"distributed.scheduler.validate": True}),
        st2i.local_cluster(1, dashboard_address=":0") as cluster,
        Client(cluster) as client,
    ):
        value, times = controlled.submit(client, value=2.0, control_s=0.02, base_s=0.02).result(
            timeout=TIMEOUT
        )
        assert value == expected(2.0)
        assert all(base_start >= control[1] for base_start, _, control in times[1:])


def test_many_requests_at_once_on_two_workers(two):
    futures = [
        controlled.submit(two, value=float(v), control_s=0.01, base_s=0.01) for v in range(12)
    ]
    results = two.gather(futures)
    assert [value for value, _ in results] == [expected(float(v)) for v in range(12)]


def test_a_killed_worker_is_no_deadlock(two):
    futures = [
        controlled.submit(two, value=float(v), control_s=0.3, base_s=0.05, steps=4)
        for v in range(3)
    ]
    time.sleep(0.9)
    os.kill(sorted(two.run(os.getpid).values())[0], signal.SIGKILL)
    assert [f.result(timeout=TIMEOUT)[0] for f in futures] == [
        expected(float(v), 4) for v in range(3)
    ]
    two.wait_for_workers(2, timeout=TIMEOUT)


class Scale(st2i.ModelFn):
    """The producer: a single number, so that nothing is drawn to where it lies."""

    def setup_io(self):
        self.add_input("value")
        self.add_output("factors")

    def execute(self, model_components, value):
        return {"factors": [float(value[0]) + 1]}


class Scaled(st2i.ModelFn):
    """Its result is large: what comes next runs where it lies."""

    def setup_io(self):
        self.add_input("value")
        self.add_input("factors", callback=True)
        self.add_output("scaled")

    def execute(self, model_components, value, factors):
        return {"scaled": value * factors[0]}


class SlowSum(st2i.ModelFn):
    def setup_io(self):
        self.add_input("value")
        self.add_output("sum")

    def execute(self, model_components, value):
        time.sleep(1.5)
        return {"sum": float(value.sum())}


def test_a_consumer_runs_again_when_its_producers_result_is_let_go(two):
    """The last consumer is lost, the producer of the one before it was done with long ago."""

    @st2i.workflow(name="test-callbacks-rerun", replace=True)
    def scaled(value: object):
        for _ in range(2):
            value = Scaled()(value, Scale()(value))
        return SlowSum()(value)

    future = scaled.submit(two, value=np.ones(100_000))
    deadline = time.monotonic() + TIMEOUT
    while not (where := [w for w, keys in two.processing().items() if "SlowSum" in str(keys)]):
        assert time.monotonic() < deadline
        time.sleep(0.02)
    states = two.run_on_scheduler(
        lambda dask_scheduler: {
            k.rsplit("-", 1)[0]: t.state for k, t in dask_scheduler.tasks.items()
        }
    )
    assert states["Scale-000"] == states["Scaled-001"] == "released"
    assert states["Scale-002"] == "memory"
    os.kill(two.run(os.getpid, workers=where)[where[0]], signal.SIGKILL)
    assert future.result(timeout=TIMEOUT) == 100_000 * 2 * 3
    two.wait_for_workers(2, timeout=TIMEOUT)


def test_a_failing_producer_fails_the_request_and_frees_the_consumer(two):
    future = controlled.submit(two, value=1.0, control_s=0.0, base_s=0.05)
    with pytest.raises(ZeroDivisionError):
        future.result(timeout=TIMEOUT)
    assert controlled.submit(two, value=1.0, control_s=0.01).result(timeout=TIMEOUT)[0] == (
        expected(1.0)
    )


def test_cancelled_while_the_consumer_waits(two):
    future = controlled.submit(two, value=1.0, control_s=0.5, base_s=0.01)
    time.sleep(0.3)
    future.cancel()
    start = time.time()
    assert controlled.submit(two, value=1.0, control_s=0.01).result(timeout=TIMEOUT)[0] == (
        expected(1.0)
    )
    assert time.time() - start < 10


def test_the_result_of_a_consumer_takes_the_producer_as_an_ordinary_input(two):
    @st2i.workflow(name="test-callbacks-last", replace=True)
    def last(value: float):
        result = Base()(value, 0.01, control=Control()(value, 0.05))
        return pair(result.sum, result.times)

    value, (base_start, _, control) = last.submit(two, value=1.0).result(timeout=TIMEOUT)
    assert value == 1 + 10 + 100 + 3
    assert base_start >= control[1]


def test_an_absent_optional_callback_input_is_none(two):
    @st2i.workflow(name="test-callbacks-none", replace=True)
    def none(value: float):
        return Base()(value, 0.0).sum

    assert none.submit(two, value=4.0).result(timeout=TIMEOUT) == 4.0
