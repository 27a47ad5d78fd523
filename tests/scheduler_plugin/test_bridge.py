"""The fair scheduler on live clusters that check themselves, with everything going wrong."""

from __future__ import annotations

import functools
import logging
import os
import random
import signal
import threading
import time

import dask
import pytest
from distributed import Client, Reschedule, Worker, get_client, secede, wait

import st2i_dask as st2i
from scheduler_plugin import events as ev

from .live import (
    TIMEOUT,
    Charges,
    chain,
    decisions_of,
    events_of,
    fan,
    hooks,
    idle,
    learn,
    plugin_of,
    rest,
    runs,
    serving,
    standing,
    until,
)
from .spreads import spreads


def submit(client, tenant, n, *, steps=3, seconds=0.0, workflow=chain, **more):
    return [
        workflow.submit(client, tenant=tenant, value=float(i), label=tenant, **more)
        if workflow is not chain
        else chain.submit(
            client, tenant=tenant, value=float(i), label=tenant, steps=steps, seconds=seconds
        )
        for i in range(n)
    ]


def release(*futures):
    """Where `result` has raised, Dask keeps the exception, and with it the future."""
    for future in futures:
        future.release()


def started(label):
    return [run for run in runs if run.label == label]


# Fair shares


def assert_fair(charges, slack_s, capsys):
    """Charged as measured, equal within the bound, whatever else the machine does meanwhile: seconds
    inside the models do not count here, since on a busy machine a short run takes as long around
    the model as inside. But they may not be more than was charged."""
    worst = spreads(charges, slack_s)
    contested = charges.contested()
    served = {}
    for ran in contested:
        served[ran.tenant] = served.get(ran.tenant, 0.0) + ran.used / ran.weight
    unit = slack_s + charges.largest()
    with capsys.disabled():
        print(
            f"\nservice by weight {served}, spread {worst.difference:.3f} s <= "
            f"{unit + max(unit, worst.gap) + 2 * worst.error:.3f} s (errors {worst.error:.3f} s)"
        )
    assert worst.excess <= 1e-6, worst
    inside = {}
    for run in runs:
        inside[run.key] = inside.get(run.key, 0.0) + run.stop - run.start
    assert inside
    for key, seconds in inside.items():
        assert charges.ran[key].used >= 0.98 * seconds
    return served


@pytest.mark.parametrize("n_workers", [1, 2])
def test_cheap_and_dear_tenants_get_equal_service(n_workers, capsys):
    slack = 0.02
    with serving(n_workers, slack_s=slack) as client:
        learn(client, steps=4, seconds=0.005)
        learn(client, steps=2, seconds=0.05)
        charges = Charges(client)
        futures = submit(client, "bob", 14 * n_workers, steps=2, seconds=0.05)
        futures += submit(client, "ann", 60 * n_workers, steps=4, seconds=0.005)
        client.gather(futures)
        served = assert_fair(charges, slack, capsys)
        assert min(served.values()) > 0.5 * n_workers  # there was something to divide
        ours = list(charges.ran.values())
        # Up to where one of them has hardly anything ready any more.
        rest_of = 4 * n_workers
        last = min(
            [i for i, d in enumerate(ours) if d.tenant == t][-rest_of] for t in ["ann", "bob"]
        )
        first = max(min(i for i, d in enumerate(ours) if d.tenant == t) for t in ("ann", "bob"))
        assert {d.steps for d in ours[first:last]} == {1}
        del futures


def test_weights_divide_the_service(capsys):
    weights = {"ann": 1.0, "bob": 3.0}
    with serving(1, weights=weights) as client:
        learn(client, steps=4, seconds=0.01)
        charges = Charges(client)
        futures = submit(client, "ann", 25, steps=4, seconds=0.01)
        futures += submit(client, "bob", 25, steps=4, seconds=0.01)
        client.gather(futures)
        served = assert_fair(charges, 0.02, capsys)
        assert served["ann"] > 0.15
        del futures


def test_alone_several_steps_run_as_one_task():
    with serving(1, steps_per_task=4) as client:
        made = decisions_of(client)
        assert submit(client, "ann", 1, steps=8)[0].result(timeout=TIMEOUT) == 8.0
        assert [d.steps for d in made] == [4, 4]
        assert [run.value for run in runs] == [float(i) for i in range(8)]


def test_a_newcomer_waits_for_one_step_not_for_a_task(capsys):
    step = 0.06
    waited = []
    with serving(1, steps_per_task=8) as client:
        learn(client, steps=24, seconds=step)
        learn(client, steps=1, seconds=0.001)
        told = events_of(client)
        long = submit(client, "ann", 1, steps=24, seconds=step)
        for arrival in range(3):
            until(lambda n=1 + 8 * arrival: len(started("ann")) >= n, seconds=TIMEOUT)
            chain.submit(
                client, tenant="bob", value=0.0, label=f"bob{arrival}", steps=1, seconds=0.001
            ).result(timeout=TIMEOUT)
            here = max(
                e.now for e in told if isinstance(e, ev.RequestSubmitted) and e.tenant == "bob"
            )
            (mine,) = started(f"bob{arrival}")
            between = [r for r in started("ann") if here < r.start < mine.start]
            assert len(between) <= 1, between
            waited.append(mine.start - here)
        with capsys.disabled():
            print(f"\nnewcomer waited {[round(w, 3) for w in waited]} s, a step is {step} s")
        assert long[0].result(timeout=TIMEOUT) == 24.0
        values = [run.value for run in started("ann")]
        assert values == [float(i) for i in range(24)]  # nothing ran twice
        del long


def test_a_yield_that_overtakes_the_inputs_is_not_lost():
    """The task is still fetching what it needs when a newcomer arrives."""
    with serving(1, steps_per_task=8) as client:
        learn(client, steps=8, seconds=0.02)
        worker = next(iter(client.cluster.workers.values()))
        running = threading.Event()

        def pause(value):
            if value == 0.0:
                running.set()
                time.sleep(0.2)

        hooks["ann"] = pause
        (long,) = submit(client, "ann", 1, steps=8, seconds=0.02)
        running.wait(TIMEOUT)
        runner = worker.plugins["st2i-worker"].runner
        key = next(iter(runner._worker.state.executing)).key
        # As if the thread had not been started yet.
        task = worker.state.tasks[key]

        def early():
            state, task.state = task.state, "ready"
            try:
                runner.yield_wanted(key)
            finally:
                task.state = state

        client.cluster.sync(_in_loop, early)
        made = decisions_of(client)
        assert long.result(timeout=TIMEOUT) == 8.0
        assert made, "the task did not hand back"
        del long


async def _in_loop(function):
    return function()


# Cancelling


def gate(label, at=0.0):
    """(event that says the run has begun, event that lets it go on)."""
    begun, go = threading.Event(), threading.Event()

    def hook(value):
        if value == at:
            begun.set()
            go.wait(TIMEOUT)

    hooks[label] = hook
    return begun, go


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


# Failing


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


# Workers that come and go


def test_losing_an_input_while_the_consumer_runs():
    """The thread goes on after Dask has taken the task back: its executor is not free."""
    with serving(2, steps_per_task=1) as client:
        workers = sorted(client.scheduler_info(n_workers=-1)["workers"])
        learn(client, steps=2)
        begun, go = gate("ann", at=1.0)
        (future,) = submit(client, "ann", 1, steps=2)
        begun.wait(TIMEOUT)
        here = next(w for w, keys in client.processing().items() if keys)
        (source,) = [run for run in runs if run.label == "ann"]
        key = source.key
        assert source.worker in workers
        made = decisions_of(client)

        def lose(dask_scheduler):
            dask_scheduler.transitions({key: "released"}, "test-lost")

        client.run_on_scheduler(lose)
        until(lambda: client.run_on_scheduler(standing)["draining in the bridge"] == 1)
        until(lambda: [d.key for d in made].count(key) == 1)
        assert {d.executor for d in made} == set(workers) - {here}
        go.set()
        assert future.result(timeout=TIMEOUT) == 2.0
        del future


def test_restart_in_the_middle():
    with serving(2, processes=True) as client:
        futures = submit(client, "ann", 6, steps=20, seconds=0.02)
        time.sleep(0.3)
        client.restart(timeout=TIMEOUT)
        assert all(future.status in ("cancelled", "lost") for future in futures)
        del futures
        rest(client)
        assert client.gather(submit(client, "bob", 3, steps=3)) == [3.0, 4.0, 5.0]


@pytest.mark.parametrize("steps_per_task", [1, 8])
def test_retire_workers_while_requests_run(steps_per_task):
    with serving(3, steps_per_task=steps_per_task) as client:
        futures = submit(client, "ann", 6, steps=12, seconds=0.01)
        until(lambda: runs)
        gone = sorted(client.scheduler_info(n_workers=-1)["workers"])[:2]
        client.retire_workers(gone)
        assert client.gather(futures) == [12.0 + i for i in range(6)]
        late = [r for r in runs if r.worker in gone]
        assert len(late) < len(runs)
        del futures


def test_scaling_up_and_down_while_requests_run():
    with serving(1) as client:
        cluster = client.cluster
        futures = submit(client, "ann", 12, steps=10, seconds=0.01)
        until(lambda: runs)
        cluster.scale(3)
        until(lambda: len({run.worker for run in runs}) == 3)
        cluster.scale(1)
        assert client.gather(futures) == [10.0 + i for i in range(12)]
        until(lambda: len(client.scheduler_info(n_workers=-1)["workers"]) == 1)
        del futures


def test_no_worker_at_first_and_adaptive_scaling():
    with serving(0) as client:
        futures = submit(client, "ann", 6, steps=4, seconds=0.02)
        until(lambda: client.run_on_scheduler(standing)["queued"] == 6)
        adaptive = client.cluster.adapt(minimum=0, maximum=2, interval="100 ms")
        assert client.gather(futures) == [4.0 + i for i in range(6)]
        del futures
        until(lambda: not client.scheduler_info(n_workers=-1)["workers"])
        assert submit(client, "ann", 1)[0].result(timeout=TIMEOUT) == 3.0
        adaptive.stop()


@pytest.mark.parametrize("steps_per_task", [1, 8])
def test_kill_nine_and_the_nannys_next_worker(steps_per_task):
    with serving(2, processes=True, steps_per_task=steps_per_task) as client:
        futures = submit(client, "ann", 6, steps=16, seconds=0.02)
        time.sleep(0.25)
        for pid in list(client.run(os.getpid).values())[:1]:
            os.kill(pid, signal.SIGKILL)
        assert not wait(futures, timeout=TIMEOUT).not_done
        assert client.gather(futures) == [16.0 + i for i in range(6)]
        client.wait_for_workers(2, timeout=TIMEOUT)
        del futures


def test_a_worker_comes_back_under_its_old_address():
    with serving(0, cluster_options={"protocol": "tcp"}) as client:
        address = client.cluster.scheduler_address
        first = client.cluster.sync(_start, address, 0)
        port = first.port
        begun, go = gate("ann", at=2.0)
        (future,) = submit(client, "ann", 1, steps=6)
        begun.wait(TIMEOUT)
        client.cluster.sync(_vanish, first)
        until(lambda: not client.scheduler_info(n_workers=-1)["workers"])
        hooks.clear()
        second = client.cluster.sync(_start, address, port)
        assert second.address == first.address
        assert future.result(timeout=TIMEOUT) == 6.0
        go.set()
        del future
        rest(client)
        client.cluster.sync(_close, second)


async def _start(scheduler, port):
    return await Worker(scheduler, nthreads=1, host="127.0.0.1", port=port, dashboard=False)


async def _vanish(worker):
    """The connection breaks; nothing is said."""
    worker.batched_stream.comm.abort()
    await worker.close(executor_wait=False, nanny=False)


async def _close(worker):
    await worker.close()


# Plain tasks beside


def test_neither_kind_starves_on_one_worker(capsys):
    """Long backlogs of both: plain tasks that Dask queues and such that it ships at once."""
    with serving(1, steps_per_task=1) as client:
        learn(client, steps=4, seconds=0.01)
        order = []

        def plain(i, order=order):
            order.append(("plain", i))
            time.sleep(0.01)

        hooks["ann"] = lambda value: order.append(("ours", value))
        futures = submit(client, "ann", 10, steps=4, seconds=0.01)
        beside = client.map(Closure(plain), range(40), pure=False)
        client.gather([*futures, *beside])
        kinds = [kind for kind, _ in order]
        both = while_both(kinds)
        share = both.count("ours") / len(both)
        with capsys.disabled():
            print(f"\nModelFns' share beside plain tasks: {share:.2f}, longest {longest(both)}")
        assert longest(both)["plain"] <= 3  # the rule says two; one for a late message
        assert longest(both)["ours"] <= 2
        assert 0.25 <= share <= 0.75
        del futures, beside


def while_both(kinds):
    """From the first task of the later kind to the last task of the one that ends first."""
    first = max(kinds.index(kind) for kind in ("ours", "plain"))
    last = min(len(kinds) - kinds[::-1].index(kind) for kind in ("ours", "plain"))
    return kinds[first:last]


def longest(kinds):
    """The longest row of each kind."""
    best, row, last = {"ours": 0, "plain": 0}, 0, None
    for kind in kinds:
        row = row + 1 if kind == last else 1
        last = kind
        best[kind] = max(best[kind], row)
    return best


class Closure:
    """A callable that is not pickled: workers are in this process."""

    _kept: dict[int, object] = {}  # noqa: RUF012

    def __init__(self, function):
        self.number = id(function)
        self._kept[self.number] = function

    def __call__(self, *args):
        return self._kept[self.number](*args)


@pytest.mark.parametrize("saturation", [1.0, "inf"])
def test_neither_kind_starves_whatever_the_worker_saturation(saturation):
    config = {"distributed.scheduler.worker-saturation": saturation}
    with serving(1, steps_per_task=1, config=config) as client:
        learn(client, steps=4, seconds=0.01)
        order = []
        hooks["ann"] = lambda value: order.append("ours")

        def plain(i):
            order.append("plain")
            time.sleep(0.01)

        futures = submit(client, "ann", 10, steps=4, seconds=0.01)
        until(lambda: order)
        beside = client.map(Closure(plain), range(40), pure=False)
        client.gather([*futures, *beside])
        both = while_both(order)
        assert both.count("ours") >= 0.2 * len(both)
        assert both.count("plain") >= 0.2 * len(both)
        assert len(both) > 20
        del futures, beside


def test_plain_tasks_keep_their_own_order():
    with serving(1) as client:
        order = []
        begun, go = gate("ann")
        ours = submit(client, "ann", 4, steps=2)
        begun.wait(TIMEOUT)
        note = Closure(order.append)
        # Keys of their own groups: Dask ships them at once, and the worker orders them.
        later = client.submit(note, "later", priority=-5, key="a")
        normal = client.submit(note, "normal", key="b")
        first = client.submit(note, "first", priority=5, key="c")
        until(lambda: sum(map(len, client.processing().values())) == 4)
        go.set()
        client.gather([later, normal, first, *ours])
        assert order == ["first", "normal", "later"]
        del ours, later, normal, first


def test_many_root_tasks_beside():
    with serving(2) as client:
        futures = submit(client, "ann", 5, steps=6)
        plain = client.map(lambda x: x * x, range(200))
        more = submit(client, "bob", 5, steps=6)
        total = client.submit(sum, plain)
        assert total.result(timeout=TIMEOUT) == sum(x * x for x in range(200))
        assert client.gather(futures) == client.gather(more) == [6.0 + i for i in range(5)]
        del futures, plain, more, total


def test_a_plain_task_that_secedes_may_submit_a_workflow_and_wait():
    with serving(1) as client:

        def nested(value):
            secede()
            return chain.submit(get_client(), value=value, label="nested").result(timeout=TIMEOUT)

        assert client.submit(Closure(nested), 5.0).result(timeout=TIMEOUT) == 8.0
        with_client = client.submit(_with_worker_client, 6.0)
        assert with_client.result(timeout=TIMEOUT) == 9.0
        del with_client


def _with_worker_client(value):
    from distributed import worker_client

    with worker_client() as client:
        return chain.submit(client, value=value, label="nested").result(timeout=TIMEOUT)


def test_stolen_plain_tasks_hold_the_worker_they_went_to():
    with serving(2) as client:
        victim, thief = sorted(client.scheduler_info(n_workers=-1)["workers"])
        begun, go = threading.Event(), threading.Event()

        def block(i):
            begun.set()
            go.wait(TIMEOUT)
            return i

        with dask.annotate(workers=[victim]):
            plain = client.submit(Closure(block), 1)
        begun.wait(TIMEOUT)

        def move(dask_scheduler, victim=victim, thief=thief):
            """Dask's books after a theft."""
            victim, thief = (dask_scheduler.workers[w] for w in (victim, thief))
            (ts,) = victim.processing
            victim.remove_from_processing(ts)
            ts.processing_on = thief
            thief.add_to_processing(ts)

        client.run_on_scheduler(move)
        made = decisions_of(client)
        (ours,) = submit(client, "ann", 1, steps=1)
        until(lambda: made)
        assert made[0].executor == victim
        client.run_on_scheduler(move, victim=thief, thief=victim)
        go.set()
        client.gather(plain)
        assert ours.result(timeout=TIMEOUT) == 1.0
        del ours, plain


def test_a_dispatched_modelfn_is_never_stolen():
    config = {"distributed.scheduler.work-stealing-interval": "10 ms"}
    with serving(2, config=config) as client:
        made = decisions_of(client)
        stealable = []

        def look(dask_scheduler):
            return [ts.key for ts in dask_scheduler.extensions["stealing"].key_stealable]

        futures = submit(client, "ann", 8, steps=3, seconds=0.03)
        plain = client.map(lambda x: time.sleep(0.005) or x, range(60), pure=False)
        for _ in range(20):
            stealable += client.run_on_scheduler(look)
            time.sleep(0.01)
        client.gather([*futures, *plain])
        chosen = {d.key: d.executor for d in made if d.steps == 1}
        assert all(run.worker == chosen.get(run.key, run.worker) for run in runs)
        assert not [key for key in stealable if key.startswith("Step")]
        del futures, plain


def test_tied_tasks_run_as_plain_ones(caplog):
    with serving(2) as client, caplog.at_level(logging.WARNING, "scheduler_plugin.intake"):
        worker = sorted(client.scheduler_info(n_workers=-1)["workers"])[0]
        made = decisions_of(client)
        with dask.annotate(workers=[worker]):
            (tied,) = submit(client, "ann", 1, steps=3)
        assert tied.result(timeout=TIMEOUT) == 3.0
        assert {run.worker for run in runs} == {worker}
        assert not made
        with dask.annotate(resources={"GPU": 1}):
            (never,) = submit(client, "ann", 1, steps=3)
        time.sleep(0.1)
        assert never.status == "pending"
        assert sum("tied to workers" in r.message for r in caplog.records) == 1
        del tied, never


# Waiting for workers that never come


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


# Nothing leaks


@pytest.mark.parametrize("seed", [1, 2])
def test_requests_with_random_cancels_leave_nothing(seed):
    random_ = random.Random(seed)
    with serving(2, steps_per_task=4) as client:

        def sometimes(value):
            if random_.random() < 0.02:
                raise ZeroDivisionError
            if random_.random() < 0.02:
                raise Reschedule

        futures = []
        for number in range(150):
            tenant = random_.choice(["ann", "bob", "cid"])
            hooks[tenant] = sometimes
            workflow, size = random_.choice([(chain, "steps"), (fan, "width")])
            futures.append(
                workflow.submit(
                    client,
                    tenant=tenant,
                    value=float(number),
                    label=tenant,
                    **{size: random_.randint(1, 6)},
                )
            )
            if random_.random() < 0.4:
                futures.pop(random_.randrange(len(futures))).cancel()
            if random_.random() < 0.1:
                client.map(lambda x: x, range(5), pure=False)
            time.sleep(random_.random() * 0.005)
        wait(futures, timeout=TIMEOUT)
        assert {f.status for f in futures} <= {"finished", "error"}
        until(lambda: not any(r["queued"] or r["running"] for r in st2i.tenants(client)))
        del futures
        rest(client)
        assert client.gather(submit(client, "dan", 4, steps=5)) == [5.0 + i for i in range(4)]


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(4))
def test_soak_with_killed_and_retired_workers_and_plain_tasks(seed):
    random_ = random.Random(seed)
    with serving(3, processes=True, steps_per_task=6) as client:
        futures, expected, size_of_cluster = [], [], 3
        for _ in range(120):
            value, size = float(random_.randint(0, 9)), random_.randint(1, 12)
            seconds = random_.choice([0.0, 0.005, 0.02])
            future = chain.submit(
                client,
                tenant=random_.choice(["ann", "bob", "cid"]),
                value=value,
                steps=size,
                seconds=seconds,
            )
            futures.append(future)
            expected.append(value + size)
            event = random_.random()
            if event < 0.3:
                at = random_.randrange(len(futures))
                futures.pop(at).cancel()
                expected.pop(at)
            elif event < 0.34:
                pids = client.run(os.getpid, on_error="ignore")
                os.kill(random_.choice(sorted(pids.values())), signal.SIGKILL)
                client.wait_for_workers(min(size_of_cluster, 2), timeout=TIMEOUT)
            elif event < 0.4:
                plain = client.map(time.sleep, [0.01] * 10, pure=False)
            elif event < 0.44:
                size_of_cluster = random_.choice([2, 3, 4])
                client.cluster.scale(size_of_cluster)
            time.sleep(random_.random() * 0.05)
        assert client.gather(futures) == expected
        del future, futures, plain


def test_a_client_that_disappears_takes_its_requests_along():
    with serving(1) as client:
        begun, go = gate("ann")
        with Client(client.cluster) as other:
            st2i.attach(other)
            submit(other, "ann", 5, steps=5)
            kept = submit(other, "ann", 1)
            begun.wait(TIMEOUT)
        del kept
        go.set()
        rest(client)
        assert submit(client, "bob", 1)[0].result(timeout=TIMEOUT) == 3.0
