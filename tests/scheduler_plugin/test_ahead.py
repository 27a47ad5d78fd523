"""Several steps as one task: the same results whatever happens on the way, and nothing kept."""

from __future__ import annotations

import threading
import time

import pytest
from dask._task_spec import Task
from distributed.worker_state_machine import FreeKeysEvent, PauseEvent, UnpauseEvent

import st2i_dask as st2i
from scheduler_plugin.ahead import ComputedAhead, chain_lengths, fused
from scheduler_plugin.events import Skipped
from scheduler_plugin.outline import Outline, Step

from .live import (
    TIMEOUT,
    chain,
    decisions_of,
    events_of,
    fan,
    hooks,
    idle,
    learn,
    rest,
    runs,
    serving,
    standing,
    until,
)


def outline(*steps):
    """Steps as (model, deps) or (model, deps, callbacks)."""
    return Outline("w", tuple(Step("F", step[0], "", *step[1:]) for step in steps))


# What may run ahead


@pytest.mark.parametrize(
    ("steps", "lengths"),
    [
        ([("m", ())], (1,)),
        ([("m", ()), ("m", (0,)), ("m", (1,))], (3, 2, 1)),
        ([("t", ()), ("m", (0,)), ("m", (0, 1)), ("m", (0, 2))], (1, 3, 2, 1)),
        ([("m", ()), ("n", (0,)), ("m", (1,))], (1, 1, 1)),
        ([("m", ()), ("m", ()), ("m", (0, 1))], (1, 1, 1)),
        ([("m", ()), ("m", (0,)), ("m", (0,))], (2, 1, 1)),
        ([("m", ()), ("m", (0,)), ("m", (0, 1))], (3, 2, 1)),
        # Needs a result that the first step of the chain does not wait for.
        ([("t", ()), ("m", ()), ("m", (0, 1))], (1, 1, 1)),
        ([("c", ()), ("m", (), (0,)), ("m", (1,)), ("m", (2,), (0,))], (1, 2, 1, 1)),
    ],
)
def test_chain_lengths(steps, lengths):
    assert chain_lengths(outline(*steps)) == lengths


def test_foreign_functions_are_never_fused():
    assert fused([Task("a", sum, [1, 2]), Task("b", sum, [1, 2])]) is None


def test_results_are_taken_once_or_left_over():
    ahead = ComputedAhead()
    report = {"st2i": {"ahead": {"b": 10, "c": 20, "d": 30}}}
    ahead.note("a", "w1", {"metadata": report, "type": b"t", "typename": "T"})
    ahead.note("x", "w1", {"metadata": None})
    assert ahead.worker("b") == "w1"
    taken = ahead.take("b")
    assert (taken.worker, taken.nbytes, taken.type, taken.typename) == ("w1", 10, b"t", "T")
    assert ahead.worker("b") is None
    assert ahead.leftover("y") == []
    assert sorted(ahead.leftover("a")) == ["c", "d"]
    assert ahead.leftover("a") == []


# Results


def test_a_step_computed_ahead_goes_from_waiting_to_memory_and_is_told_once():
    with serving(1, steps_per_task=8) as client:
        told = events_of(client)
        future = chain.submit(client, value=0.0, label="c", steps=4)
        assert future.result(timeout=TIMEOUT) == 4.0
        moves = client.run_on_scheduler(
            lambda dask_scheduler: {
                (move.key.split("-")[1], move.start, move.finish)
                for move in dask_scheduler.transition_log
            }
        )
        assert {(start, finish) for key, start, finish in moves if key == "000"} >= {
            ("waiting", "queued"),
            ("queued", "processing"),
            ("processing", "memory"),
        }
        for later in ("001", "002", "003"):
            assert (later, "waiting", "memory") in moves
            assert not any(key == later and "processing" in pair for key, *pair in moves)
        del future
        rest(client)
        assert [event.positions for event in told if type(event) is Skipped] == [(1,), (2,), (3,)]


@pytest.mark.parametrize("n_workers", [1, 2])
def test_results_do_not_depend_on_the_steps_per_task(n_workers):
    results = {}
    for steps in (1, 3, 8):
        with serving(n_workers, steps_per_task=steps) as client:
            made = decisions_of(client)
            futures = [
                *(chain.submit(client, value=float(i), label="c", steps=11) for i in range(3)),
                *(fan.submit(client, value=float(i), label="f", width=4) for i in range(3)),
            ]
            results[steps] = client.gather(futures)
            assert len(runs) == 3 * 11 + 3 * 9  # every position once
            assert max(d.steps for d in made) == min(steps, 8)
            usage = client.sync(client.scheduler.st2i_usage)["default"]
            assert usage["invocations"] == len(runs)
            del futures
    assert results[1] == results[3] == results[8]


def test_results_do_not_depend_on_yields():
    """A newcomer every few steps."""
    with serving(1, steps_per_task=8) as client:
        learn(client, steps=30, seconds=0.01)
        made = decisions_of(client)
        long = chain.submit(client, tenant="ann", value=0.0, label="ann", steps=30, seconds=0.01)
        for number in range(6):
            until(lambda n=4 * number + 1: len([r for r in runs if r.label == "ann"]) >= n)
            short = chain.submit(client, tenant="bob", value=0.5, label="bob", steps=1)
            assert short.result(timeout=TIMEOUT) == 1.5
        assert long.result(timeout=TIMEOUT) == 30.0
        assert [run.value for run in runs if run.label == "ann"] == [float(i) for i in range(30)]
        assert len([d for d in made if d.tenant == "ann"]) > 30 / 8 + 3
        del long, short


def test_a_worker_that_pauses_meanwhile_keeps_no_results_that_nobody_knows():
    with serving(2, steps_per_task=4) as client:
        begun, go = threading.Event(), threading.Event()

        def hook(value):
            if value == 1.0:
                begun.set()
                go.wait(TIMEOUT)

        hooks["ann"] = hook
        future = chain.submit(client, tenant="ann", value=0.0, label="ann", steps=6)
        begun.wait(TIMEOUT)
        here = next(w for w, keys in client.processing().items() if keys)
        (worker,) = (w for w in client.cluster.workers.values() if w.address == here)

        def pause():
            worker.handle_stimulus(PauseEvent(stimulus_id="test"))
            worker.batched_stream.send(
                {"op": "worker-status-change", "status": "paused", "stimulus_id": "test"}
            )

        worker.loop.add_callback(pause)
        until(
            lambda: client.run_on_scheduler(lambda dask_scheduler: len(dask_scheduler.running)) == 1
        )
        go.set()
        assert future.result(timeout=TIMEOUT) == 6.0
        worker.loop.add_callback(worker.handle_stimulus, UnpauseEvent(stimulus_id="test"))
        worker.loop.add_callback(
            worker.batched_stream.send,
            {"op": "worker-status-change", "status": "running", "stimulus_id": "test"},
        )
        del future


def test_taken_back_as_it_ends():
    """Cancelled between the end of the thread and Dask's hearing of it: no news of the results."""
    with serving(1, steps_per_task=4) as client:
        (worker,) = client.cluster.workers.values()
        runner = worker.plugins["st2i-worker"].runner
        ended = threading.Event()
        over = runner._over

        def then_freed(key, *args):
            over(key, *args)
            worker.handle_stimulus(FreeKeysEvent(keys=[key], stimulus_id="test"))
            ended.set()

        runner._over = then_freed
        future = chain.submit(client, value=0.0, label="ann", steps=8)
        ended.wait(TIMEOUT)
        until(lambda: len(worker.data) == 3)
        assert client.run_on_scheduler(standing)["running"] == 1
        del runner._over
        future.cancel()
        until(lambda: idle(client), "the executor is lost")
        until(lambda: not worker.data, "results are left")
        del future


def test_cancelled_while_the_news_is_on_its_way():
    """The scheduler hears of results that nobody wants any more."""
    with serving(1, steps_per_task=4) as client:
        (worker,) = client.cluster.workers.values()
        heard = threading.Event()

        def cross(dask_scheduler, key, client):
            handler = dask_scheduler.stream_handlers["task-finished"]

            def crossing(**message):
                dask_scheduler.client_releases_keys(
                    keys=[key], client=client, stimulus_id="test-crossing"
                )
                handler(**message)
                dask_scheduler.stream_handlers["task-finished"] = handler
                heard.set()

            dask_scheduler.stream_handlers["task-finished"] = crossing

        begun, go = threading.Event(), threading.Event()

        def hook(value):
            begun.set()
            go.wait(TIMEOUT)

        hooks["ann"] = hook
        future = chain.submit(client, value=0.0, label="ann", steps=8)
        begun.wait(TIMEOUT)
        client.cluster.scheduler.loop.add_callback(
            cross, client.cluster.scheduler, future.key, client.id
        )
        time.sleep(0.1)
        go.set()
        heard.wait(TIMEOUT)
        until(lambda: not worker.data, "results are left")
        assert len(runs) == 4
        del future


def test_cancelled_while_steps_run_ahead():
    with serving(1, steps_per_task=8) as client:
        begun, go = threading.Event(), threading.Event()

        def hook(value):
            if value == 3.0:
                begun.set()
                go.wait(TIMEOUT)

        hooks["ann"] = hook
        future = chain.submit(client, value=0.0, label="ann", steps=8)
        begun.wait(TIMEOUT)
        future.cancel()
        until(lambda: client.run_on_scheduler(standing)["draining"] == 1)
        go.set()
        until(lambda: idle(client))
        assert [run.value for run in runs] == [0.0, 1.0, 2.0, 3.0]
        rows = {row["tenant"]: row["service_s"] for row in st2i.tenants(client)}
        assert rows["default"] > 0.0  # it is charged for what ran
        rest(client)
        del future
