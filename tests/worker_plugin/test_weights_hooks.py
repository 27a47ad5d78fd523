"""Hooks before and behind each layer: there while layers come and go, and out of the way else."""

from __future__ import annotations

import pytest

from worker_plugin.profiles import MEASURED_RUNS
from worker_plugin.weight_cache import WeightCache

from .leases import (
    NO_LIMIT,
    give,
    use,
)
from .models import (
    Model,
    resident,
    same,
    settle,
    store_of,
)


def hooks(lease):
    return len(lease.components["model"].blocks[0]._forward_pre_hooks)


def test_a_model_that_stays_in_memory_has_no_hooks_in_its_way(store, even):
    model = even("a")
    for _ in range(4):
        used = use(store, model)
    with store.lease(model) as lease:
        assert lease.held
        assert hooks(lease) == 0
        assert same(give(lease), used)
    store.trim(model, 1)
    with store.lease(model) as lease:
        assert not lease.held
        assert hooks(lease) == 1
        assert same(give(lease), used)


def test_hooks_stay_while_another_run_needs_them(store, even):
    model = even("a")
    for _ in range(4):
        use(store, model)
    store.trim(model, 1)
    with store.lease(model) as outer:
        assert not outer.held
        good = give(outer)
        with store.lease(model) as inner:
            assert inner.held
            assert hooks(inner) == 1
        assert same(give(outer), good)


def test_compiled_code_keeps_its_hooks(store, even):
    """They are part of it: without them it would be compiled anew."""

    class Compiled(Model):
        def load_model(self, model_path):
            components = super().load_model(model_path)
            for block in components["model"].blocks:
                block.compile(backend="eager")
            return components

    model = even("a", cls=Compiled)
    for _ in range(5):
        with store.lease(model) as lease:
            give(lease)
            assert hooks(lease) == 1
    assert lease.held


@pytest.fixture
def policy(monkeypatch):
    """The layers that runs have asked the policy for."""
    asked = []
    enter = WeightCache.enter

    def note(cache, run, weights, layer, now):
        asked.append(layer)
        return enter(cache, run, weights, layer, now)

    monkeypatch.setattr(WeightCache, "enter", note)
    return asked


def test_a_run_whose_layers_have_all_arrived_asks_for_no_more(even, policy):
    """The first two are there; the others arrive while the first one runs."""
    model = even("a", depth=6)
    with store_of(NO_LIMIT) as store:
        for _ in range(4):
            used = use(store, model)
        store.trim(model, 2)

        def until_all_are_there(*_):
            settle(store)
            assert all(resident(store, model))

        policy.clear()
        with store.lease(model) as lease:
            block = lease.components["model"].blocks[0]
            handle = block.register_forward_hook(until_all_are_there, prepend=True)
            assert same(give(lease), used)
            handle.remove()
            assert policy == [0]
            assert not lease.held, "not from the start: what it gave may have missed a layer"
            assert not store.relieve(1), "what it will run without asking stays"
            assert same(give(lease), used)
            assert policy == [0]
        assert store.relieve(1)
        store._check()


def test_a_run_beside_another_or_one_that_is_measured_asks_for_every_layer(even, policy):
    model, other = even("a"), even("b")
    with store_of(NO_LIMIT) as store:
        for _ in range(MEASURED_RUNS):
            policy.clear()
            use(store, model)
            assert policy == [0, 1, 2, 3]
        use(store, model)
        store.trim(model, 2)
        policy.clear()
        with store.lease(other), store.lease(model) as lease:
            settle(store)
            give(lease)
            settle(store)
            give(lease)
        assert policy == 2 * [0, 1, 2, 3]
