"""Plain Dask tasks beside ModelFns on a live cluster: neither kind starves, each keeps its order."""

from __future__ import annotations

import logging
import threading
import time

import dask
import pytest
from distributed import get_client, secede

from .live import (
    TIMEOUT,
    Closure,
    chain,
    decisions_of,
    gate,
    hooks,
    learn,
    runs,
    serving,
    submit,
    until,
)


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
