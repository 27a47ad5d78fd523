"""Leases in one thread: what they keep in memory, what is refused, what an error leaves behind."""

from __future__ import annotations

import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from st2i_dask.errors import LoadError
from worker_plugin.arena import Arena
from worker_plugin.host_heap import HostHeap
from worker_plugin.weights import WeightStore

from .leases import (
    LAYER,
    NO_LIMIT,
    WAIT,
    give,
    loads,
    reference,
    row,
    run,
    use,
)
from .models import (
    Model,
    layer_bytes,
    resident,
    same,
    save_plain,
    store_of,
)


def test_a_model_is_read_once_and_counted(store, even):
    model = even("a")
    for _ in range(3):
        assert same(use(store, model), reference(model))
    figures = row(store, model)
    assert (figures["runs"], figures["hits"], figures["loads"]) == (3, 2, 4)
    assert (figures["layers"], figures["resident_layers"]) == (4, 4)
    assert figures["nbytes"] == figures["resident_bytes"] == 4 * LAYER
    assert figures["load_s"] > 0
    assert store.free_bytes() == NO_LIMIT - 4 * LAYER


def test_the_least_recently_used_gives_way_layer_by_layer(even):
    first, second, third = even("a"), even("b"), even("c", depth=2)
    with store_of(9 * LAYER) as store:
        for model in (first, second, first, third):
            use(store, model)
        assert [row(store, m)["resident_layers"] for m in (first, second, third)] == [4, 3, 2]
        assert resident(store, second) == [True, True, True, False]


def test_a_model_in_use_keeps_what_it_executes(even):
    model, other = even("a"), even("b")
    with store_of(4 * LAYER) as store:
        for _ in range(4):
            use(store, model)
        with store.lease(model) as lease:
            assert lease.held
            assert not store.relieve(LAYER)
            assert not store._layers._reclaim(LAYER)
            store.trim(model, 0)
            assert all(resident(store, model))
            assert same(give(lease), reference(model))
        assert store.relieve(LAYER)
        assert resident(store, model) == [True, True, True, False]
        assert same(use(store, other), reference(other))


def test_relief_evicts_no_more_than_asked(store, even):
    model = even("a")
    use(store, model)
    assert store.relieve(1)
    assert sum(resident(store, model)) == 3, "one layer at least: there was no gap"
    while store.relieve(1):
        store._check()
    assert not any(resident(store, model))


def test_missing_is_the_share_of_what_is_still_to_load(even):
    model = even("a")
    with store_of(NO_LIMIT) as store:
        use(store, model)
        version = store.residency.version
        assert store.missing() == {model.model_key: 0.0}
        store.trim(model, 1)
        assert store.residency.version > version
        assert 0 <= store.missing()[model.model_key] < 1  # by seconds: what hides is not missing
        store.trim(model, 0)
        assert store.missing() == {model.model_key: 1.0}


def test_seconds_of_loading_are_told_from_those_of_layers(even):
    class Lingering(Model):
        def load_model(self, model_path):
            time.sleep(0.05)
            return super().load_model(model_path)

    model = even("a", cls=Lingering)
    with store_of(NO_LIMIT, bandwidth=4 * LAYER / 0.4) as store:
        with store.lease(model) as lease:
            assert 0.05 <= lease.load_s < WAIT
            assert lease.stalled_s == 0
            give(lease)
            assert lease.stalled_s > 0.02
            assert lease.load_s == pytest.approx(lease.stalled_s + lease.load_s - lease.stalled_s)
        with store.lease(model) as lease:
            give(lease)
            assert lease.load_s == lease.stalled_s == 0


def test_a_lease_within_a_lease(even):
    outer, inner = even("a"), even("b")
    with store_of(3 * LAYER) as store:
        for _ in range(4):
            with store.lease(outer) as first:
                one = give(first)
                with store.lease(inner) as second, store.lease(outer) as third:
                    assert third.components is first.components
                    assert same(give(second), reference(inner))
                    assert same(give(third), one)
                    assert same(give(first), one)
                assert same(give(first), one)
            assert same(one, reference(outer))


def test_an_outer_lease_is_found_while_others_use_its_model(even):
    """The hook must not take another thread's lease, nor give up, because an inner one is there."""
    outer, inner = even("a"), even("b")
    there, go_on = threading.Event(), threading.Event()

    def other():
        with store.lease(outer):
            there.set()
            assert go_on.wait(WAIT)

    with store_of(3 * LAYER) as store, ThreadPoolExecutor(1) as pool:
        with store.lease(outer) as lease:
            future = pool.submit(other)
            assert there.wait(WAIT)
            with store.lease(inner):
                try:
                    assert same(give(lease), reference(outer))
                finally:
                    go_on.set()
        future.result(WAIT)


def test_model_code_may_run_it_in_a_thread_of_its_own(even):
    model = even("a")
    with store_of(2 * LAYER) as store, ThreadPoolExecutor(1) as pool:
        for _ in range(4):
            with store.lease(model) as lease:
                assert same(pool.submit(give, lease).result(WAIT), reference(model))


def test_a_model_that_runs_outside_of_its_lease_is_refused(store, even):
    model = even("a")
    with store.lease(model) as lease:
        module = lease.components["model"]
    with (
        pytest.warns(UserWarning, match="always_call"),
        pytest.raises(LoadError, match="ran outside of its invoc"),
    ):
        run(module)
    assert same(use(store, model), reference(model))


# ---------------------------------------------------------------- refusals and errors


@pytest.mark.parametrize("mode", ["mcache", "wcache", "nocache"])
def test_a_whole_model_one_byte_over_the_budget_is_refused(even, mode):
    model, fitting = even("a"), even("b", 3)
    with store_of(4 * LAYER - 1, mode=mode) as store:
        with pytest.raises(LoadError) as caught:
            use(store, model)
        assert f"model {model!r} does not fit this worker: all their layers, 65,536 bytes" in str(
            caught.value
        )
        assert "there is 65,535 in framework" in str(caught.value)
        assert "raise its memory with st2i.attach(client, memory_bytes=...)" in str(caught.value)
        assert same(use(store, fitting), reference(fitting))
    with store_of(4 * LAYER, mode=mode) as store:
        assert same(use(store, model), reference(model))


def test_a_layer_over_the_budget_is_refused(even, tmp_path):
    path = save_plain(tmp_path / "roots.safetensors", "uneven")
    model = Model(str(path), kind="uneven")
    with store_of(NO_LIMIT) as store:
        with store.lease(model):
            pass
        sizes, roots = layer_bytes(store, model)
    least = sum(sizes[i] for i in roots) + max(sizes[1:])
    with store_of(least - 1) as store:
        with pytest.raises(LoadError) as caught, store.lease(model):
            pass
        assert f"the root layers, {sizes[0]:,} bytes, and the largest layer, {max(sizes):,}" in str(
            caught.value
        )
        other = even("b")
        with pytest.raises(LoadError, match="does not fit this worker"):
            use(store, other)
    with store_of(least) as store, store.lease(model):
        pass


def test_memory_no_larger_than_its_arena_is_refused():
    arena = Arena(HostHeap(1 << 20))
    with pytest.raises(LoadError, match=r"memory of 1,048,576 bytes is no more than the arena"):
        WeightStore(memory=1 << 20, arena=arena)


def test_a_failing_load_leaves_nothing(store, slow, even):
    loads.failures["a"] = 1
    with pytest.raises(OSError, match="no such folder"), store.lease(slow("a")):
        pytest.fail("entered")
    assert store.models() == []
    assert not store._layers._weights
    assert not store._shelf._loading
    use(store, even("b"))
    with store.lease(slow("a")) as lease:
        assert lease.components["name"] == "a"


def break_off(store, model, error):
    """A run of it, in whose third block something raises."""

    def fail(*_):
        raise error

    with store.lease(model) as lease:
        handle = lease.components["model"].blocks[2].register_forward_pre_hook(fail)
        try:
            give(lease)
        finally:
            handle.remove()


@pytest.mark.parametrize("error", [ZeroDivisionError("the model's own words"), KeyboardInterrupt()])
@pytest.mark.parametrize("runs", [0, 4])
def test_model_code_that_raises_in_a_layer_leaves_nothing_pinned(even, error, runs):
    model, other = even("a"), even("b")

    with store_of(3 * LAYER) as store:
        for _ in range(runs):
            use(store, model)
        with pytest.raises(type(error)):
            break_off(store, model, error)
        assert not any(store._cache.is_pinned(w, layer) for w, layer in store._layers._buffers)
        assert same(use(store, other), reference(other))
        for _ in range(3):
            assert same(use(store, model), reference(model))
        # What a run that broke off did not reach is no less a layer of the model.
        order = store._cache._books.weights[next(iter(w for w in store._layers._weights))].executed
        assert order == 4


def test_a_run_that_broke_off_is_no_measurement(store, even):
    model = even("a")
    for _ in range(3):
        with pytest.raises(ZeroDivisionError):
            break_off(store, model, ZeroDivisionError())
    with store.lease(model) as lease:
        weights = lease.skeleton.weights[0]
        assert store._cache._books.weights[weights.id].executed == 4
        assert store.profiles.wants_compute(store.residency.key(weights, ""))
