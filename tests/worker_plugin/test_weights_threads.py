"""Several threads lease models: who loads, who waits and how long."""

from __future__ import annotations

import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from st2i_dask.errors import LoadError

from .leases import (
    LAYER,
    NO_LIMIT,
    WAIT,
    give,
    hold,
    loads,
    reference,
    row,
    use,
)
from .models import (
    same,
    store_of,
)


def test_one_of_eight_threads_loads_and_all_get_the_same(store, slow):
    start = threading.Barrier(8)

    def work(_):
        start.wait(WAIT)
        with store.lease(slow("a")) as lease:
            return id(lease.components)

    with ThreadPoolExecutor(8) as pool:
        assert len(set(pool.map(work, range(8)))) == 1
    assert loads.of == {"a": 1}
    assert row(store, slow("a"))["runs"] == 8


def test_after_a_failed_load_one_waiting_thread_tries_again(store, slow):
    loads.failures["a"] = 3

    def work(_):
        try:
            with store.lease(slow("a")) as lease:
                return lease.components["name"]
        except OSError:
            return None

    with ThreadPoolExecutor(8) as pool:
        got = list(pool.map(work, range(8)))
    assert sorted(map(str, got)) == ["None"] * 3 + ["a"] * 5
    assert loads.most == 1
    assert loads.of["a"] == 4


def test_a_hit_does_not_wait_for_another_models_load(store, slow, even):
    here = even("here")
    use(store, here)
    loads.go_on.clear()
    with ThreadPoolExecutor(1) as pool:
        future = pool.submit(hold, store, slow("a"))
        assert loads.loading.wait(WAIT)
        start = time.perf_counter()
        use(store, here)
        assert time.perf_counter() - start < WAIT / 4
        assert not future.done()
        loads.go_on.set()
        assert future.result(WAIT) == "a"


def test_waiting_for_another_threads_load_is_bounded(slow):
    loads.go_on.clear()
    with store_of(NO_LIMIT, wait_s=0.05) as store, ThreadPoolExecutor(1) as pool:
        future = pool.submit(hold, store, slow("a"))
        assert loads.loading.wait(WAIT)
        with (
            pytest.raises(LoadError, match=r"still being loaded by another thread after 0\.05 s"),
            store.lease(slow("a")),
        ):
            pytest.fail("entered")
        loads.go_on.set()
        future.result(WAIT)
        assert hold(store, slow("a")) == "a"


@pytest.mark.parametrize("mode", ["elastic", "mcache"])
def test_waiting_for_room_is_bounded_and_ends_when_there_is_room(even, mode):
    model, other = even("a"), even("b")
    with store_of(4 * LAYER, mode=mode, wait_s=0.1) as store:
        for _ in range(4):
            use(store, model)
        with store.lease(model) as lease:
            assert lease.held or mode == "mcache"
            with pytest.raises(LoadError, match=r"no room for model .* for 0\.1 s; raise the wor"):
                use(store, other)
            assert same(give(lease), reference(model))
        assert same(use(store, other), reference(other))
    holding, go_on = threading.Event(), threading.Event()

    def hold():
        with store.lease(model):
            holding.set()
            assert go_on.wait(WAIT)

    with store_of(4 * LAYER, mode=mode, wait_s=WAIT) as store:
        for _ in range(4):
            use(store, model)
        with ThreadPoolExecutor(1) as pool:
            future = pool.submit(hold)
            assert holding.wait(WAIT)
            threading.Timer(0.05, go_on.set).start()
            assert same(use(store, other), reference(other))
            future.result(WAIT)


def test_who_gives_up_waiting_lets_the_next_one_in(even):
    """It may be ready at once: no load tells it."""
    holder, giant, small = even("h", 1, root=8192), even("g", 1, root=8192), even("s", 1, root=64)
    started = []

    def wait_in_vain():
        started.append(time.monotonic())
        with pytest.raises(LoadError, match="no room"), store.lease(giant):
            pass

    with store_of(4 * LAYER + 512, wait_s=3.0) as store:
        for _ in range(4):
            use(store, small)
        with ThreadPoolExecutor(1) as pool, store.lease(holder):
            future = pool.submit(wait_in_vain)
            time.sleep(1.5)
            assert same(use(store, small), reference(small))
            # Its own wait would have ended at 4.5 s.
            assert 2.9 < time.monotonic() - started[0] < 4.4
            future.result(WAIT)
