"""Runs that raise on a live cluster, are tried again, or can never run: nothing else suffers."""

from __future__ import annotations

import functools

import dask
import pytest
from distributed import Reschedule

import st2i_dask as st2i

from .live import (
    TIMEOUT,
    decisions_of,
    gate,
    hooks,
    runs,
    serving,
    standing,
    submit,
    until,
)


def release(*futures):
    """Where `result` has raised, Dask keeps the exception, and with it the future."""
    for future in futures:
        future.release()


def test_a_model_that_raises_in_the_middle_of_several_steps():
    with serving(1, steps_per_task=8) as client:

        def fail(value):
            if value == 3.0:
                raise ZeroDivisionError("at three")

        hooks["ann"] = fail
        (future,) = submit(client, "ann", 1, steps=8)
        with pytest.raises(ZeroDivisionError, match="at three"):
            future.result(timeout=TIMEOUT)
        assert [run.value for run in runs] == [0.0, 1.0, 2.0]
        hooks.clear()
        # Client.retry wants the failed task's own future, which nobody has.
        client.sync(client.scheduler.retry, keys=[future.key], client=client.id)
        until(functools.partial(lambda future: future.status != "error", future))
        assert future.result(timeout=TIMEOUT) == 8.0
        release(future)


@pytest.mark.parametrize("steps_per_task", [1, 8])
def test_retries(steps_per_task):
    failures = []

    def fail(value):
        if value == 2.0 and len(failures) < 2:
            failures.append(value)
            raise ZeroDivisionError

    with serving(1, steps_per_task=steps_per_task) as client:
        hooks["ann"] = fail
        with dask.annotate(retries=2):
            (future,) = submit(client, "ann", 1, steps=4)
        assert future.result(timeout=TIMEOUT) == 4.0
        assert len(failures) == 2
        del future


@pytest.mark.parametrize("steps_per_task", [1, 8])
def test_reschedule(steps_per_task):
    times = []

    def again(value):
        if value == 1.0 and len(times) < 3:
            times.append(value)
            raise Reschedule

    with serving(2, steps_per_task=steps_per_task) as client:
        hooks["ann"] = again
        futures = submit(client, "ann", 3, steps=4)
        assert client.gather(futures) == [4.0, 5.0, 6.0]
        assert len(times) == 3
        del futures


def test_inputs_beyond_a_workers_memory_fail_that_request_alone():
    with serving(1, slack_s=0.0) as client:
        worker = client.run_on_scheduler(lambda dask_scheduler: list(dask_scheduler.workers))[0]
        client.gather(submit(client, "bob", 1, steps=1, seconds=0.1))  # ann goes first from here on
        begun, go = gate("ann")
        blocked = submit(client, "ann", 1, steps=2)
        begun.wait(TIMEOUT)
        others = submit(client, "bob", 3, steps=1)
        until(lambda: client.run_on_scheduler(standing)["queued"] == 3)
        st2i.settings(client, steps_per_task=1)
        made = decisions_of(client)

        def shrink(dask_scheduler):
            dask_scheduler.workers[worker].memory_limit = 1

        client.run_on_scheduler(shrink)
        go.set()
        with pytest.raises(MemoryError, match="worth of input"):
            blocked[0].result(timeout=TIMEOUT)
        assert client.gather(others) == [1.0, 2.0, 3.0]
        assert made[0].tenant == "ann"  # nothing but its failure could start the others
        release(*blocked)
        del others


def test_a_request_that_waited_too_long_for_a_worker_fails_and_later_ones_run():
    config = {
        "distributed.scheduler.no-workers-timeout": "200 ms",
    }
    with serving(0, config=config) as client:
        (future,) = submit(client, "ann", 1, steps=3)
        with pytest.raises(Exception, match="without any running workers"):
            future.result(timeout=TIMEOUT)
        client.cluster.scale(1)
        client.wait_for_workers(1, timeout=TIMEOUT)
        assert submit(client, "bob", 1, steps=3)[0].result(timeout=TIMEOUT) == 3.0
        release(future)
