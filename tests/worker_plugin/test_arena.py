"""An arena waits for room within its bound and keeps a record of what did not fit."""

from __future__ import annotations

import threading
import time

import pytest

from st2i_dask._core import GRANULE
from worker_plugin.arena import Arena
from worker_plugin.host_heap import HostHeap


@pytest.fixture
def arena():
    heap = HostHeap(4 * GRANULE)
    arena = Arena(heap)
    yield arena
    arena.reclaim = None
    heap._check()
    assert heap.used_bytes == 0
    heap.close()
    del arena.heap  # pytest keeps the arena for longer than the module


def test_statistics_follow_the_blocks(arena):
    block = arena.allocate(GRANULE + 1)
    found = arena.statistics()
    assert (found.kind, found.nbytes, found.used, found.peak) == (
        "host",
        4 * GRANULE,
        2 * GRANULE,
        2 * GRANULE,
    )
    del block
    found = arena.statistics()
    assert (found.used, found.peak, found.fallbacks) == (0, 2 * GRANULE, 0)


def test_without_room_it_says_so_at_once_and_counts(arena):
    block = arena.allocate(3 * GRANULE)
    start = time.monotonic()
    assert arena.allocate(2 * GRANULE) is None
    assert time.monotonic() - start < 0.05
    assert (arena.statistics().fallbacks, arena.statistics().fallback_bytes) == (1, 2 * GRANULE)
    del block


def test_it_waits_for_a_block_that_is_freed_in_time(arena):
    blocks = [arena.allocate(4 * GRANULE)]
    freeing = threading.Timer(0.05, blocks.clear)
    freeing.start()
    block = arena.allocate(GRANULE, wait_s=10.0)
    freeing.join()
    assert block is not None
    assert arena.statistics().fallbacks == 0
    del block


def test_the_wait_is_bounded(arena):
    block = arena.allocate(4 * GRANULE)
    start = time.monotonic()
    assert arena.allocate(GRANULE, wait_s=0.1) is None
    assert 0.1 <= time.monotonic() - start < 2
    del block


def test_an_arena_that_stays_full_costs_the_wait_once(arena):
    blocks = [arena.allocate(GRANULE) for _ in range(4)]
    assert arena.allocate(GRANULE, wait_s=0.1) is None
    start = time.monotonic()
    for _ in range(5):
        assert arena.allocate(GRANULE, wait_s=10.0) is None
    assert time.monotonic() - start < 5
    blocks.pop()
    start = time.monotonic()
    assert arena.allocate(2 * GRANULE, wait_s=0.1) is None, "something was freed: it waits again"
    assert time.monotonic() - start >= 0.1
    blocks.clear()


def test_what_can_never_fit_does_not_wait(arena):
    start = time.monotonic()
    assert arena.allocate(5 * GRANULE, wait_s=30.0) is None
    assert time.monotonic() - start < 5
    assert arena.statistics().fallbacks == 1


def test_weights_make_room_for_tensors_and_are_counted_apart(arena):
    cached = [arena.heap.allocate(GRANULE) for _ in range(4)]
    arena.count_weights(4 * GRANULE)

    def reclaim(nbytes):
        if cached:
            cached.pop()
            arena.count_weights(-GRANULE)
            return True
        return False

    arena.reclaim = reclaim
    block = arena.allocate(2 * GRANULE)
    assert block is not None
    assert len(cached) == 2
    found = arena.statistics()
    assert (found.used, found.peak, found.weights) == (2 * GRANULE, 2 * GRANULE, 2 * GRANULE)
    assert arena.tensor_bytes() == 2 * GRANULE
    assert arena.allocate(3 * GRANULE) is None, "two tensors' worth is in use"
    assert not cached
    assert arena.statistics().fallbacks == 1
    del block


def test_weights_are_not_given_up_for_what_can_never_fit(arena):
    arena.reclaim = lambda nbytes: pytest.fail("nothing is to be gained")
    assert arena.allocate(5 * GRANULE) is None
