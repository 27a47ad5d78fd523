"""Requests that are cancelled on a live cluster, at every stage of their runs."""

from __future__ import annotations

import threading
import time

import pytest

import st2i_dask as st2i

from .live import (
    TIMEOUT,
    Closure,
    decisions_of,
    gate,
    hooks,
    idle,
    plugin_of,
    serving,
    standing,
    started,
    submit,
    until,
)


def test_cancel_while_waiting_and_queued():
    with serving(1) as client:
        begun, go = gate("ann")
        (running,) = submit(client, "ann", 1, steps=1)
        begun.wait(TIMEOUT)
        queued = submit(client, "bob", 2, steps=3)
        until(lambda: client.run_on_scheduler(standing)["queued"] == 2)
        client.cancel(queued)
        until(lambda: client.run_on_scheduler(standing)["queued"] == 0)
        go.set()
        assert running.result(timeout=TIMEOUT) == 1.0
        assert not started("bob")
        del running, queued


@pytest.mark.parametrize("steps", [1, 8])
def test_a_cancelled_run_holds_its_executor_until_the_thread_ends(steps):
    with serving(1, steps_per_task=8) as client:
        begun, go = gate("ann")
        (cancelled,) = submit(client, "ann", 1, steps=steps)
        begun.wait(TIMEOUT)
        made = decisions_of(client)
        cancelled.cancel()
        until(lambda: client.run_on_scheduler(standing)["draining"] == 1)
        (next_one,) = submit(client, "bob", 1, steps=2)
        until(lambda: client.run_on_scheduler(standing)["queued"] == 1)
        time.sleep(0.3)  # longer than the worker looks
        assert not made
        assert not next_one.done()
        go.set()
        assert next_one.result(timeout=TIMEOUT) == 2.0
        assert [run.value for run in started("ann")] == [0.0]  # no step after the cancel
        del cancelled, next_one


def test_cancel_a_run_that_has_not_begun_frees_the_executor():
    """Dispatched behind a plain task on the same worker, it waits there without a thread."""
    with serving(1) as client:
        release = threading.Event()
        block = Closure(lambda i: release.wait(TIMEOUT))
        plain = [client.submit(block, i, pure=False) for i in range(2)]
        made = decisions_of(client)
        worker = client.run_on_scheduler(lambda dask_scheduler: list(dask_scheduler.workers))[0]
        until(lambda: len(client.processing()[worker]) == 2)
        bridge = plugin_of(client).bridge
        bridge._turn.add(worker)  # as after a plain task
        (ours,) = submit(client, "ann", 1, steps=2)
        until(lambda: made)
        ours.cancel()
        until(lambda: idle(client), "the executor is lost")
        release.set()
        client.gather(plain)
        assert submit(client, "bob", 1, steps=2)[0].result(timeout=TIMEOUT) == 2.0
        assert not started("ann")
        # It used nothing, and is charged for nothing.
        rows = {row["tenant"]: row["service_s"] for row in st2i.tenants(client)}
        assert rows["ann"] == 0.0
        del ours, plain


def test_cancel_when_done_and_when_erred():
    with serving(1) as client:
        (done,) = submit(client, "ann", 1, steps=2)
        assert done.result(timeout=TIMEOUT) == 2.0
        done.cancel()

        def fail(value):
            raise ZeroDivisionError("as asked")

        hooks["bob"] = fail
        (erred,) = submit(client, "bob", 1, steps=3)
        with pytest.raises(ZeroDivisionError, match="as asked"):
            erred.result(timeout=TIMEOUT)
        erred.cancel()
        del done, erred


def test_a_cancelled_run_that_raises_frees_its_executor():
    with serving(1) as client:
        begun, go = threading.Event(), threading.Event()

        def fail(value):
            begun.set()
            go.wait(TIMEOUT)
            raise ZeroDivisionError

        hooks["ann"] = fail
        (future,) = submit(client, "ann", 1)
        begun.wait(TIMEOUT)
        future.cancel()
        until(lambda: client.run_on_scheduler(standing)["draining"] == 1)
        go.set()
        until(lambda: idle(client))
        del future


def test_the_draining_executor_stays_busy_whatever_plain_tasks_do_there():
    with serving(1) as client:
        begun, go = gate("ann")
        (cancelled,) = submit(client, "ann", 1, steps=1)
        begun.wait(TIMEOUT)
        cancelled.cancel()
        until(lambda: client.run_on_scheduler(standing)["draining"] == 1)
        (waiting,) = submit(client, "bob", 1, steps=1)
        plain = client.submit(sum, [1, 2])  # Dask sends it to the worker, where it waits
        until(lambda: any(client.processing().values()))
        plain.cancel()
        until(lambda: not any(client.processing().values()))
        plain = client.submit(sum, [3, 4])
        state = client.run_on_scheduler(standing)
        assert state["draining"] == state["draining in the bridge"] == 1
        assert not started("bob")
        go.set()
        assert plain.result(timeout=TIMEOUT) == 7
        assert waiting.result(timeout=TIMEOUT) == 1.0
        del cancelled, waiting, plain
