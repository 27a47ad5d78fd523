"""Tensors between real workers: by ticket where the heap is reached, as bytes elsewhere, never wrong."""

from __future__ import annotations

import os
import signal
import time

import numpy as np
import pytest
from distributed import wait

import st2i_dask as st2i
from worker_plugin.exchange import FORGET_SECONDS

from . import tensors
from .tensors import TIMEOUT, cluster, fails, fork, forked, moved, used

MIB = 1 << 20


@pytest.fixture(scope="module")
def two():
    with cluster(2) as client:
        fork.submit(client, seed=0).result(timeout=TIMEOUT)  # warm: imports
        yield client


def results(futures):
    return [future.result(timeout=TIMEOUT) for future in futures]


def check(futures, seeds, **options):
    for seed, got in zip(seeds, results(futures), strict=True):
        np.testing.assert_array_equal(got, forked(seed, **options))


def check_one_by_one(client, seeds):
    """Alone and with steps that last, the two sides of a fork run on two workers: tensors must move."""
    for seed in seeds:
        check([fork.submit(client, seed=seed, seconds=0.05)], [seed])


def intermediate(client, final, position):
    """A future of another task of the same request."""
    wait(final, timeout=TIMEOUT)
    request = final.key.rsplit("-", 1)[1]

    def find(dask_scheduler, ending):
        return [key for key in dask_scheduler.tasks if key.endswith(ending)]

    (key,) = client.run_on_scheduler(find, ending=f"-{position:03d}-{request}")
    (future,) = client.get({}, [key], sync=False)
    wait(future, timeout=TIMEOUT)
    return future


def owners(client, future):
    return list(client.who_has([future])[future.key])


def test_tensors_go_through_shared_memory_and_leave_nothing(two):
    before = moved(two, "host")
    check([fork.submit(two, seed=s) for s in range(6)], range(6))
    check_one_by_one(two, range(6, 12))
    assert moved(two, "host") - before >= 6 * MIB
    assert moved(two, "comm") < 100_000, "only what is small travels in messages"
    assert set(used(two).values()) == {0}


def test_intermediate_tensors_are_for_who_asks(two):
    final = fork.submit(two, seed=3)
    result = st2i.fetch(final, timeout=TIMEOUT)
    assert isinstance(result, np.ndarray)
    np.testing.assert_array_equal(result, forked(3))
    (x,) = st2i.fetch(final, position=0, timeout=TIMEOUT)
    assert np.array_equal(x.numpy(), tensors.noise(3).numpy())
    for position in (8, -1, "0"):
        with pytest.raises(st2i.ParameterError, match="no invocation at position"):
            st2i.fetch(final, position=position)
    del final
    assert set(used(two).values()) == {0}


def test_a_request_just_submitted_is_not_unknown(two):
    for seed in range(5):
        (x,) = st2i.fetch(fork.submit(two, seed=seed), position=0, timeout=TIMEOUT)
        assert np.array_equal(x.numpy(), tensors.noise(seed).numpy())


def test_replicas_are_real_copies(two):
    """What Dask's own policies do with replicas never leaves a handle to freed memory."""
    final = fork.submit(two, seed=5)
    future = intermediate(two, final, 0)
    two.replicate([future], n=2)
    assert len(owners(two, future)) == 2
    first = owners(two, future)[0]

    def drop(dask_scheduler, address, key):
        dask_scheduler.request_remove_replicas(address, [key], stimulus_id="test")

    two.run_on_scheduler(drop, address=first, key=future.key)
    deadline = time.monotonic() + TIMEOUT
    while first in owners(two, future):
        assert time.monotonic() < deadline
        time.sleep(0.05)
    (x,) = st2i.fetch(future, timeout=TIMEOUT)
    assert np.array_equal(x.numpy(), tensors.noise(5).numpy())
    np.testing.assert_array_equal(final.result(timeout=TIMEOUT), forked(5))
    del future, final
    assert set(used(two).values()) == {0}


def test_cancelled_requests_leave_nothing(two):
    futures = [fork.submit(two, seed=s, seconds=0.05) for s in range(8)]
    time.sleep(0.4)
    for future in futures[::2]:
        future.cancel()
    check(futures[1::2], range(1, 8, 2))
    del futures
    assert set(used(two).values()) == {0}


def test_failed_requests_leave_nothing(two):
    futures = [fails.submit(two, seed=s) for s in range(4)]
    for future in futures:
        with pytest.raises(ZeroDivisionError, match="fails on"):
            future.result(timeout=TIMEOUT)
    del futures, future
    assert set(used(two).values()) == {0}


def test_a_worker_that_cannot_reach_a_heap_gets_bytes(two):
    def blind(dask_worker):
        store = dask_worker.plugins["st2i-worker"].store
        store.arena.heap.reach = lambda other: False
        dask_worker.plugins["st2i-worker"].exchange._reachable.clear()

    def see(dask_worker):
        del dask_worker.plugins["st2i-worker"].store.arena.heap.reach
        dask_worker.plugins["st2i-worker"].exchange._reachable.clear()

    two.run(blind)
    try:
        by_host, by_comm = moved(two, "host"), moved(two, "comm")
        check([fork.submit(two, seed=s) for s in range(4)], range(4))
        check_one_by_one(two, range(4, 8))
        assert moved(two, "host") == by_host
        assert moved(two, "comm") - by_comm >= 4 * MIB
    finally:
        two.run(see)
    check_one_by_one(two, [9])
    assert moved(two, "host") > by_host
    assert set(used(two).values()) == {0}


def test_a_worker_that_no_longer_reaches_a_heap_gets_bytes():
    """As one that has started again at the same address, and cannot map what it could before."""

    def ask_often():
        from worker_plugin import exchange

        exchange.ASK_AGAIN_SECONDS = 1.0

    def blind(dask_worker):
        def pull(ticket, into):
            raise OSError("out of reach")

        heap = dask_worker.plugins["st2i-worker"].store.arena.heap
        heap.reach, heap.pull = lambda other: False, pull

    with cluster(2) as client:
        client.run(ask_often)
        check([fork.submit(client, seed=s) for s in range(3)], range(3))
        assert moved(client, "comm") < 100_000
        client.run(blind)
        check([fork.submit(client, seed=s) for s in range(4)], range(4))
        check_one_by_one(client, range(4, 8))
        assert moved(client, "comm") >= 4 * MIB
        assert set(used(client).values()) == {0}


def test_a_pull_that_fails_is_done_again(two):
    """As when the owner dies between its answer and the pull."""

    def fail_once(dask_worker):
        heap = dask_worker.plugins["st2i-worker"].store.arena.heap
        plain, failed = heap.pull, []

        def pull(ticket, into):
            if len(failed) < 2:
                failed.append(ticket)
                raise OSError("the owner is gone")
            return plain(ticket, into)

        heap.pull = pull

    def restore(dask_worker):
        del dask_worker.plugins["st2i-worker"].store.arena.heap.pull

    two.run(fail_once)
    try:
        check([fork.submit(two, seed=s) for s in range(4)], range(4))
    finally:
        two.run(restore)
    assert set(used(two).values()) == {0}


@pytest.mark.parametrize("moment", [0.15, 0.4, 0.7])
def test_kill_9_of_any_worker_at_any_time(two, moment):
    futures = [fork.submit(two, seed=s, seconds=0.1) for s in range(4)]
    time.sleep(moment)
    os.kill(sorted(two.run(os.getpid).values())[0], signal.SIGKILL)
    check(futures, range(4))
    two.wait_for_workers(2, timeout=TIMEOUT)
    del futures
    assert set(used(two).values()) == {0}
    check([fork.submit(two, seed=s) for s in range(3)], range(3))  # new peers are mapped
    for pid in two.run(os.getpid).values():
        # Own segment (file, mapping) and the other worker's mapping; no dead worker's memory.
        assert tensors.arena_files(pid) <= 3


def test_a_dead_workers_memory_goes_though_nobody_new_is_mapped(two):
    check([fork.submit(two, seed=s) for s in range(6)], range(6))
    victim, survivor = sorted(two.run(os.getpid).values())
    assert tensors.arena_files(survivor) == 3, "own file, own mapping and the victim's memory"
    os.kill(victim, signal.SIGKILL)
    deadline = time.monotonic() + 3 * FORGET_SECONDS
    while tensors.arena_files(survivor) > 2 and time.monotonic() < deadline:
        time.sleep(0.1)
    assert tensors.arena_files(survivor) == 2
    two.wait_for_workers(2, timeout=TIMEOUT)


def test_restart_of_all_workers(two):
    lost = fork.submit(two, seed=1, seconds=1.0)
    time.sleep(0.3)
    two.restart(timeout=TIMEOUT)
    assert lost.status in ("cancelled", "lost", "pending")
    check([fork.submit(two, seed=s) for s in range(3)], range(3))
    assert set(used(two).values()) == {0}


def test_retired_workers_hand_their_tensors_over():
    with cluster(2) as client:
        final = fork.submit(client, seed=4)
        future = intermediate(client, final, 0)
        (owner,) = owners(client, future)[:1]
        client.retire_workers([owner])
        assert owner not in owners(client, future)
        (x,) = st2i.fetch(future, timeout=TIMEOUT)
        assert np.array_equal(x.numpy(), tensors.noise(4).numpy())
        np.testing.assert_array_equal(final.result(timeout=TIMEOUT), forked(4))
        del future, final
        assert set(used(client).values()) == {0}


@pytest.mark.parametrize("arena_bytes", [64 << 10, 3 * MIB])
def test_an_arena_far_too_small(arena_bytes):
    with cluster(2, arena_bytes=arena_bytes) as client:
        check(client_futures := [fork.submit(client, seed=s) for s in range(64)], range(64))
        found = st2i.data_plane(client).values()
        assert sum(w["arena"]["fallbacks"] for w in found) > 0
        assert all(w["arena"]["peak"] <= arena_bytes for w in found)
        del client_futures
        assert set(used(client).values()) == {0}


def test_two_workers_of_one_process_share_tensors():
    """Without a wire between them results are passed on as they are: no bytes move at all."""
    with (
        st2i.local_cluster(2, processes=False, dashboard_address=":0") as made,
        tensors.Client(made) as client,
    ):
        st2i.attach(client)
        check([fork.submit(client, seed=s) for s in range(3)], range(3))
        assert moved(client, "host") == moved(client, "comm") == 0
        assert set(used(client).values()) == {0}
