"""Gangs: members share a leader's steps over the data plane, and whatever becomes of them, the result is
that of one executor."""

from __future__ import annotations

import os
import time

import numpy as np
import pytest

import st2i_dask as st2i
from scheduler_plugin import events as ev

from .gang_models import alone, shared
from .tensors import TIMEOUT, arena_files, cluster, moved, used

WARM = 99


@pytest.fixture(scope="module")
def three():
    with cluster(3) as client:
        for _ in range(2):
            shared.submit(client, seed=WARM).result(timeout=TIMEOUT)  # imports, costs
        yield client


@pytest.fixture
def client(three):
    three.wait_for_workers(3, timeout=TIMEOUT)
    yield three
    check_nothing_left(three)


def check(future, seed, steps=4):
    """The result is right; executors that ran each step."""
    x, sizes = future.result(timeout=TIMEOUT)
    np.testing.assert_array_equal(x, alone(seed, steps))
    return sizes


def left(dask_worker):
    import threading

    gangs = dask_worker.plugins["st2i-worker"].gangs
    gangs._check()
    dask_worker.plugins["st2i-worker"].executor.models._check()
    doing = [t.name for t in threading.enumerate() if t.name.startswith("Dask-Default-Threads")]
    return {
        "members": len(gangs._members),
        "leaders": len(gangs._leaders),
        "rings": len(gangs._rings),
        "threads beyond one": max(0, len(doing) - 1),
        "leases": len(dask_worker.plugins["st2i-worker"].executor.models._leases),
    }


def check_nothing_left(client):
    assert set(used(client).values()) == {0}
    deadline = time.monotonic() + 20
    while True:
        found = client.run(left)
        if not any(any(counts.values()) for counts in found.values()):
            break
        assert time.monotonic() < deadline, found
        time.sleep(0.1)


def told(client):
    """Completions that the policy hears of from now on."""
    policy, heard = client.cluster.scheduler.plugins["st2i-scheduler"].policy, []
    handle = policy.handle

    def recording(event):
        if isinstance(event, ev.Completed):
            heard.append(event)
        return handle(event)

    policy.handle = recording
    return heard


def test_members_share_every_step_and_the_scheduler_hears_how_many(client):
    heard, before = told(client), moved(client, "host")
    assert check(shared.submit(client, seed=1), 1) == [3, 3, 3, 3]
    assert {e.members for e in heard if e.members is not None} == {2}
    assert moved(client, "host") - before > 10 << 20


@pytest.mark.slow
def test_gangs_take_turns_with_other_requests(client):
    futures = [shared.submit(client, seed=s, seconds=0.01) for s in range(6)]
    for seed, future in enumerate(futures):
        check(future, seed)


@pytest.mark.parametrize("rank", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_a_member_that_is_killed_costs_its_step(client, tmp_path, rank):
    trouble = ("kill", rank, 3, str(tmp_path / "done"))
    sizes = check(shared.submit(client, seed=rank, seconds=0.05, trouble=trouble), rank)
    assert (tmp_path / "done").exists()
    assert sizes[0] == 1, "the step is run again, alone"
    assert 2 in sizes or 3 in sizes, "it goes on with who is left"


def test_a_leader_that_is_killed_is_run_again_elsewhere(client, tmp_path):
    trouble = ("kill", 0, 3, str(tmp_path / "done"))
    check(shared.submit(client, seed=5, seconds=0.05, trouble=trouble), 5)
    assert (tmp_path / "done").exists()


@pytest.mark.parametrize("rank", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_a_member_that_raises_is_left_out(client, tmp_path, rank):
    trouble = ("raise", rank, 2, str(tmp_path / "done"))
    heard = told(client)
    assert check(shared.submit(client, seed=7, trouble=trouble), 7) == [1, 2, 2, 2]
    assert {e.members for e in heard if e.members is not None} == {1}


def test_a_leader_that_raises_fails_its_request_alone(client, tmp_path):
    trouble = ("raise", 0, 2, str(tmp_path / "done"))
    with pytest.raises(ZeroDivisionError, match="in the middle"):
        shared.submit(client, seed=7, trouble=trouble).result(timeout=TIMEOUT)
    assert check(shared.submit(client, seed=8), 8) == [3, 3, 3, 3]


def test_a_member_that_hangs_is_left_out(client, tmp_path):
    def hurry(seconds, dask_worker):
        from worker_plugin import rings

        rings.Circle.collect.__defaults__ = (seconds,)

    client.run(hurry, 0.4)
    try:
        trouble = ("sleep", 1, 2, str(tmp_path / "done"))
        sizes = check(shared.submit(client, seed=7, seconds=0.05, trouble=trouble), 7)
    finally:
        client.run(hurry, 60.0)
    assert sizes[0] == 1
    assert sizes[-1] < 3


def test_members_that_begin_late_join_at_the_next_step(client):
    """Their threads are busy with something of Dask's."""

    def delay(seconds, dask_worker):
        from worker_plugin import gang_leader, gang_member

        member, loop = gang_member.Member, dask_worker.loop
        gang_leader.JOIN_SECONDS = 0.2 if seconds else 2.0
        if seconds:
            member.start_now = member.start
            member.start = lambda self: loop.call_later(seconds, self.start_now)
        else:
            member.start = member.start_now

    client.run(delay, 0.5)
    try:
        sizes = check(shared.submit(client, seed=9, seconds=0.1, steps=6), 9, steps=6)
    finally:
        client.run(delay, 0.0)
    assert sizes[0] == 1
    assert sizes[-1] == 3


def test_nobody_comes(client):
    """A worker without the question, of members that there are not, refuses."""

    def deaf(dask_worker):
        dask_worker.handlers.pop("st2i_assist")

    def hear(dask_worker):
        gangs = dask_worker.plugins["st2i-worker"].gangs
        dask_worker.handlers["st2i_assist"] = gangs._assist

    client.run(deaf)
    try:
        assert check(shared.submit(client, seed=9, steps=2), 9, steps=2) == [1, 1]
    finally:
        client.run(hear)


def test_by_message_where_the_heap_is_out_of_reach(client):
    def blind(dask_worker):
        plugin = dask_worker.plugins["st2i-worker"]
        plugin.store.arena.heap.reach = lambda other: False
        plugin.exchange._reachable.clear()

    def see(dask_worker):
        plugin = dask_worker.plugins["st2i-worker"]
        del plugin.store.arena.heap.reach
        plugin.exchange._reachable.clear()

    client.run(blind)
    try:
        by_host, by_comm = moved(client, "host"), moved(client, "comm")
        assert check(shared.submit(client, seed=2, steps=2), 2, steps=2) == [3, 3]
        assert moved(client, "host") == by_host
        assert moved(client, "comm") - by_comm > 5 << 20
    finally:
        client.run(see)


def test_cancelled_in_the_middle(client):
    future = shared.submit(client, seed=0, seconds=0.5, steps=20)
    time.sleep(1.0)
    future.cancel()
    assert check(shared.submit(client, seed=1), 1)[-1] == 3
    busy = client.run(lambda dask_worker: dask_worker.state.executing_count)
    assert set(busy.values()) == {0}


@pytest.mark.slow
def test_another_tenant_gets_its_executor_at_the_next_step(client):
    long = shared.submit(client, seed=0, seconds=0.3, steps=12, tenant="a")
    time.sleep(0.7)
    start = time.monotonic()
    short = shared.submit(client, seed=1, steps=1, tenant="b")
    check(short, 1, steps=1)
    assert not long.done()
    assert time.monotonic() - start < 2.5
    check(long, 0, steps=12)


def test_attached_anew_in_the_middle(client):
    futures = [shared.submit(client, seed=s, seconds=0.3) for s in range(2)]
    for size in ("32 MiB", "64 MiB"):
        time.sleep(0.4)
        st2i.attach(client, arena_bytes=size)
    for seed, future in enumerate(futures):
        check(future, seed)


@pytest.mark.slow
def test_a_member_that_is_retired_leaves_at_once():
    with cluster(3) as client:
        shared.submit(client, seed=WARM).result(timeout=TIMEOUT)
        future = shared.submit(client, seed=3, seconds=0.3, steps=8)
        fleet = client.cluster.scheduler.plugins["st2i-scheduler"].policy._fleet
        deadline = time.monotonic() + TIMEOUT
        while not (held := [i.run for i in fleet.running.values() if i.run.members]):
            assert time.monotonic() < deadline
            time.sleep(0.01)
        time.sleep(1.0)
        start = time.monotonic()
        client.retire_workers([held[0].members[0]], remove=True, close_workers=True)
        sizes = check(future, 3, steps=8)
        assert time.monotonic() - start < 20
        assert sizes[0] == 3
        assert sizes[-1] == 2
        check_nothing_left(client)


@pytest.mark.slow
def test_no_file_of_an_arena_is_left_by_many_gangs(client):
    pids = client.run(os.getpid).values()
    shared.submit(client, seed=3).result(timeout=TIMEOUT)
    check_nothing_left(client)
    before = {pid: arena_files(pid) for pid in pids}
    for seed in range(5):
        check(shared.submit(client, seed=seed), seed)
    check_nothing_left(client)
    assert all(arena_files(pid) <= before[pid] for pid in pids)


@pytest.mark.slow
def test_with_one_worker_it_runs_alone():
    with cluster(1) as client:
        assert check(shared.submit(client, seed=4), 4) == [1, 1, 1, 1]
        check_nothing_left(client)
