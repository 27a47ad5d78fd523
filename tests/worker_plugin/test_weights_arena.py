"""Weights and tensors share an arena: tensors come first, and whoever waits sees room."""

from __future__ import annotations

import gc
import threading
import time
from weakref import ref

import pytest

from st2i_dask._core import GRANULE
from st2i_dask.errors import LoadError

from .leases import (
    WAIT,
    give,
    reference,
    use,
)
from .models import (
    same,
    store_of,
)


@pytest.fixture
def large(even):
    """A model whose layers are a granule of an arena each."""
    return even("large", 4, width=128)


def test_tensors_take_the_arena_from_weights(large):
    with store_of(GRANULE, 6 * GRANULE) as store:
        arena = store._arena
        use(store, large)
        assert arena.statistics().weights == 3 * GRANULE
        blocks = [arena.allocate(GRANULE) for _ in range(6)]
        assert all(blocks), "weights made room"
        assert arena.statistics().weights == 0
        store._check()
        assert same(use(store, large), reference(large))
        assert arena.statistics().weights == 0
        del blocks
        assert same(use(store, large), reference(large))
        assert arena.statistics().weights == 3 * GRANULE


def test_a_model_waits_for_tensors_to_leave_the_arena(large):
    """One that fits an arena without them is not refused for good."""
    with store_of(GRANULE // 2, 6 * GRANULE) as store:
        blocks = [store._arena.allocate(GRANULE) for _ in range(6)]
        assert all(blocks)
        threading.Timer(0.1, blocks.clear).start()
        assert same(use(store, large), reference(large))


def test_a_layer_waits_for_a_gap_in_the_arena(large):
    """No event of the policy tells that a tensor has gone."""
    with store_of(GRANULE // 2, 6 * GRANULE) as store, store.lease(large) as lease:
        blocks = []
        while blocks[-1:] != [None]:
            blocks.append(store._arena.allocate(GRANULE))
        assert len(blocks) > 4
        threading.Timer(0.1, blocks.clear).start()
        assert same(give(lease), reference(large))


def test_an_arena_that_stays_full_refuses_within_the_bound(large):
    with store_of(GRANULE // 2, 6 * GRANULE, wait_s=0.1) as store:
        blocks = [store._arena.allocate(GRANULE) for _ in range(6)]
        start = time.monotonic()
        with pytest.raises(LoadError, match="does not fit this worker"):
            use(store, large)
        assert time.monotonic() - start < WAIT / 2
        blocks.clear()
        assert same(use(store, large), reference(large))


def test_the_arena_of_a_closed_store_goes_with_its_last_user(large):
    """Not when the garbage collector comes: a worker that is attached anew would have two."""
    gc.collect()
    gc.disable()
    try:
        with store_of(GRANULE, 6 * GRANULE) as store:
            alive = ref(store._arena.heap)
            use(store, large)
        assert alive() is None
    finally:
        gc.enable()
