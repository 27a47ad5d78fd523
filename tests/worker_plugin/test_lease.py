"""What a lease measures."""

from __future__ import annotations

import time
from types import SimpleNamespace

from worker_plugin.lease import Lease, Timing
from worker_plugin.skeletons import ModelWeights, Skeleton


def weights(name="w", layers=4, roots=()):
    return ModelWeights(name, (8,) * layers, tuple(roots))


def lease(*several):
    skeleton = Skeleton("key", "key", "Model(None)", "", {"model": 1})
    skeleton.parts = [SimpleNamespace(weights=each) for each in several]
    return Lease(3, skeleton, "bucket")


def test_it_names_its_weights_in_order():
    held = lease(weights("b"), weights("a"), weights("b"))
    assert list(held.ids) == ["b", "a"]
    assert held.components == {"model": 1}
    assert held.outer is None


def test_stalls_are_loads_too():
    held = lease(weights())
    held.load_s = 2.0
    held.stall(time.perf_counter() - 1.0)
    assert 1.0 <= held.stalled_s < 1.5
    assert held.load_s == 2.0 + held.stalled_s


def test_the_first_pass_counts_and_gives_the_order():
    timing = Timing(weights(roots=[0]), "cpu")
    for layer, seconds in ((2, 0.02), (1, 0.0), (2, 0.1)):
        timing.enter(layer)
        time.sleep(seconds)
        timing.leave(layer)
    assert timing.order == [0, 2, 1]
    root, one, two, three = timing.compute_s()
    assert root == three == 0.0
    assert 0.0 < one < 0.02 <= two < 0.1


def test_a_layer_that_was_not_entered_is_not_left():
    timing = Timing(weights(), "cpu")
    timing.leave(1)
    assert timing.order == []
    assert timing.compute_s() == [0.0] * 4
