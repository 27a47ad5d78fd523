"""Taking over Dask's dispatch and giving it back: refusals, and what is left behind."""

from __future__ import annotations

import threading
import time

import pytest
from distributed import Scheduler
from distributed.collections import HeapSet

import st2i_dask as st2i
from scheduler_plugin.plugin import ServingSchedulerPlugin
from scheduler_plugin.seams import SUPPORTED, QueuedTasks, Seams, check
from st2i_dask import cluster as cluster_module

from .live import TIMEOUT, chain, hooks, plugin_of, rest, runs, serving, standing, until

PLUGIN = "st2i-scheduler"


# Refusing


class Known:
    """Everything the seams need, with Dask's own signatures."""

    _TRANSITIONS_TABLE = Scheduler._TRANSITIONS_TABLE
    stimulus_queue_slots_maybe_opened = Scheduler.stimulus_queue_slots_maybe_opened
    _add_to_processing = Scheduler._add_to_processing
    _add_to_memory = Scheduler._add_to_memory
    _validate_ready = Scheduler._validate_ready
    transitions = Scheduler.transitions
    remove_plugin = Scheduler.remove_plugin

    def __init__(self):
        self.queued = HeapSet(key=id)
        self.stream_handlers = dict.fromkeys(["task-finished", "task-erred", "reschedule"])


def test_the_installed_distributed_is_known():
    check(Known())


@pytest.mark.parametrize(
    "name",
    [
        "stimulus_queue_slots_maybe_opened",
        "_add_to_processing",
        "_add_to_memory",
        "_validate_ready",
        "transitions",
        "remove_plugin",
    ],
)
def test_a_missing_or_changed_method_is_named_with_the_cure(name):
    lacks = type("Lacks", (Known,), {name: None})
    with pytest.raises(st2i.AttachError, match=rf"no method {name}\(.*distributed {SUPPORTED}"):
        check(lacks())
    other = type("Other", (Known,), {name: lambda self, something, *, new: None})
    with pytest.raises(st2i.AttachError, match=rf"no method {name}\("):
        check(other())


@pytest.mark.parametrize(
    "gone", [("waiting", "processing"), ("queued", "processing"), ("released", "waiting")]
)
def test_a_missing_transition_is_named(gone):
    table = {moves: do for moves, do in Known._TRANSITIONS_TABLE.items() if moves != gone}
    other = type("Other", (Known,), {"_TRANSITIONS_TABLE": table})
    with pytest.raises(st2i.AttachError, match=f"no transition {gone[0]} -> {gone[1]}"):
        check(other())


def test_another_queue_and_missing_messages_are_named_together():
    scheduler = Known()
    scheduler.queued = []
    del scheduler.stream_handlers["task-erred"]
    with pytest.raises(st2i.AttachError, match=r"is a list, not a HeapSet; no message task-erred"):
        check(scheduler)


def test_a_scheduler_with_nothing_at_all():
    with pytest.raises(st2i.AttachError, match=f"install distributed {SUPPORTED}"):
        check(object())


def test_a_refusal_changes_nothing():
    scheduler = Known()
    del scheduler.stream_handlers["reschedule"]
    before = dict(vars(scheduler))
    with pytest.raises(st2i.AttachError):
        Seams(scheduler, owner=None)
    assert vars(scheduler) == before


def test_two_fair_schedulers_are_refused():
    with serving(1) as client:

        class Second(ServingSchedulerPlugin):
            name = "second"

        with pytest.raises(st2i.AttachError, match="unregister it first"):
            client.register_plugin(Second())
        assert chain.submit(client, value=1.0).result(timeout=TIMEOUT) == 4.0


# Rounds


def test_a_round_that_comes_first_makes_the_armed_one_needless():
    with serving(1) as client:
        seams = plugin_of(client).bridge.seams
        rounds = []

        def arm_and_count(dask_scheduler, opened):
            plain, seams._owner.round = seams._owner.round, lambda *args, **kw: rounds.append(args)
            seams.arm()
            if opened:
                dask_scheduler.stimulus_queue_slots_maybe_opened(stimulus_id="first")

            def back():
                seams._owner.round = plain

            dask_scheduler.loop.add_callback(back)

        def armed(opened):
            rounds.clear()
            scheduler = client.cluster.scheduler
            scheduler.loop.add_callback(arm_and_count, scheduler, opened)
            until(lambda: rounds)
            client.run_on_scheduler(lambda: None)
            return rounds

        assert armed(opened=True) == [("first",)]
        assert armed(opened=False) == [("st2i-round",)]


# Giving back


def seams_of(dask_scheduler):
    """What the seams can change. Runs on the scheduler."""
    return {
        "queued": type(dask_scheduler.queued).__name__,
        "instance": sorted(
            {"_TRANSITIONS_TABLE", "stimulus_queue_slots_maybe_opened", "remove_plugin"}
            & vars(dask_scheduler).keys()
        ),
        "handlers": {
            op: getattr(dask_scheduler.stream_handlers[op], "__qualname__", "")
            for op in ("task-finished", "task-erred", "reschedule")
        },
        "rpc": sorted(op for op in dask_scheduler.handlers if op.startswith("st2i")),
    }


def test_unregistered_it_leaves_dask_as_it_was_and_queued_tasks_finish():
    with serving(1, at_rest=False) as client:
        heap = plugin_of(client).bridge.seams._heap
        begun, go = threading.Event(), threading.Event()

        def hook(value):
            begun.set()
            go.wait(TIMEOUT)

        hooks["ann"] = hook
        futures = [
            chain.submit(client, tenant="ann", value=float(i), label="ann") for i in range(5)
        ]
        begun.wait(TIMEOUT)
        until(
            lambda: client.run_on_scheduler(lambda dask_scheduler: len(dask_scheduler.queued)) == 4
        )
        client.unregister_scheduler_plugin(PLUGIN)
        until(lambda: not client.run_on_scheduler(seams_of)["rpc"])
        now = client.run_on_scheduler(seams_of)
        assert now["queued"] == "HeapSet"
        assert client.cluster.scheduler.queued is heap
        assert not now["instance"]
        assert now["handlers"] == {
            "task-finished": "Scheduler.handle_task_finished",
            "task-erred": "Scheduler.handle_task_erred",
            "reschedule": "Scheduler._reschedule",
        }
        go.set()
        assert client.gather(futures) == [3.0 + i for i in range(5)]
        client.run_on_scheduler(lambda dask_scheduler: dask_scheduler.validate_state())

        # Again.
        del futures
        runs.clear()
        cluster_module._attached.discard(client)
        st2i.attach(client)
        assert client.run_on_scheduler(seams_of)["queued"] == "QueuedTasks"
        assert chain.submit(client, value=1.0).result(timeout=TIMEOUT) == 4.0
        rest(client)


def test_the_news_of_a_cancelled_run_may_come_after_the_plugin_has_gone():
    """Dask drops a worker that sends a message it does not know."""
    with serving(1, at_rest=False) as client:
        begun, go = threading.Event(), threading.Event()

        def hook(value):
            begun.set()
            go.wait(TIMEOUT)

        hooks["ann"] = hook
        future = chain.submit(client, tenant="ann", value=0.0, label="ann")
        begun.wait(TIMEOUT)
        before = set(client.scheduler_info(n_workers=-1)["workers"])
        future.cancel()
        until(lambda: client.run_on_scheduler(standing)["draining"] == 1)
        client.unregister_scheduler_plugin(PLUGIN)
        go.set()
        time.sleep(0.5)
        assert set(client.scheduler_info(n_workers=-1)["workers"]) == before
        assert client.submit(sum, [1, 2]).result(timeout=TIMEOUT) == 3
        del future


def test_other_plugins_may_come_and_go():
    from distributed import SchedulerPlugin

    class Other(SchedulerPlugin):
        name = "other"

    with serving(1) as client:
        client.register_plugin(Other())
        client.unregister_scheduler_plugin("other")
        assert client.run_on_scheduler(seams_of)["queued"] == "QueuedTasks"
        assert chain.submit(client, value=1.0).result(timeout=TIMEOUT) == 4.0
        with pytest.raises(ValueError, match="Could not find plugin"):
            client.unregister_scheduler_plugin("other")


# The queue


class Task:
    def __init__(self, key, priority):
        self.key, self.priority = key, priority


def test_the_queue_is_a_set_of_both_kinds_and_pops_only_plain_ones():
    ours, plain = Task("ours", (0,)), [Task(f"p{i}", (-i,)) for i in range(3)]
    queued = QueuedTasks(HeapSet(key=lambda ts: ts.priority), lambda ts: ts is ours)
    assert not queued
    for task in (ours, *plain):
        queued.add(task)
    assert len(queued) == 4
    assert set(queued) == {ours, *plain}
    assert all(task in queued for task in (ours, *plain))
    assert queued.peek() is plain[2]
    assert list(queued.peekn(2)) == [plain[2], plain[1]]
    assert queued.pop() is plain[2]
    assert queued.heap_view
    assert len(queued.heap_view) == 3
    queued.remove(plain[0])
    queued.discard(plain[1])
    queued.discard(plain[1])
    assert queued
    assert not queued.heap_view  # for Dask's dispatch there is nothing left
    with pytest.raises(KeyError):
        queued.remove(plain[0])
    queued.remove(ours)
    assert not queued
    queued.add(ours)
    queued.clear()
    assert not queued
