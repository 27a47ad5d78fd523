"""Figures of what is resident: the share that is missing, hits, and when a prefix is known."""

from __future__ import annotations

import pytest

from worker_plugin.lease import Timing
from worker_plugin.profiles import MEASURED_RUNS, Profiles
from worker_plugin.residency import Residency
from worker_plugin.skeletons import ModelWeights

LAYERS = 4


def weights(name="w", sizes=(10, 10, 20, 40), roots=(), virtual=True):
    table = object() if virtual else None
    about = {"architecture": f"form of {name}", "dtype": "float32"}
    return ModelWeights(name, tuple(sizes), tuple(roots), table, **about)


class Measured(Timing):
    """A timing with given seconds."""

    def __init__(self, of, seconds, order=None):
        super().__init__(of, "cpu")
        self._seconds = seconds
        self.order = list(order if order is not None else range(len(seconds)))

    def compute_s(self):
        return self._seconds


@pytest.fixture
def residency():
    return Residency(Profiles(None), "cpu")


def measure(residency, of, load=1.0, compute=1.0, bucket=""):
    """Runs enough for a profile; the last prefix."""
    for layer in range(len(of.sizes)):
        residency.loaded(of, layer, load)
    for _ in range(MEASURED_RUNS):
        residency.begins(of, bucket, [True] * len(of.sizes))
        prefix = residency.ends(of, bucket, Measured(of, [compute] * len(of.sizes)), 0.0)
    return prefix


def test_what_was_not_measured_is_missing_by_bytes(residency):
    one = weights()
    assert residency.missing([one]) == 1.0
    residency.loaded(one, 3, 0.1)
    assert residency.missing([one]) == 0.5
    residency.evicted(one, 3)
    assert residency.missing([one]) == 1.0


def test_several_count_by_their_bytes(residency):
    one, other = weights("a"), weights("b", (20, 20))
    for layer in range(LAYERS):
        residency.loaded(one, layer, 0.1)
    assert residency.missing([one, other]) == pytest.approx(40 / 120)
    assert residency.missing([]) == 0.0


def test_what_was_measured_is_missing_by_what_a_run_would_wait(residency):
    """Loads that hide behind compute are not missing."""
    one = weights()
    measure(residency, one, load=1.0, compute=1.0)
    assert residency.missing([one]) == 0.0
    residency.evicted(one, 3)
    assert residency.missing([one]) == 0.0, "it loads while the others compute"
    for layer in range(LAYERS - 1):
        residency.evicted(one, layer)
    assert residency.missing([one]) == 1.0


def test_the_prefix_is_what_hides_the_rest_without_roots(residency):
    assert measure(residency, weights("slow load"), load=10.0, compute=1.0) == LAYERS
    assert 0 < measure(residency, weights("even"), load=1.0, compute=1.0) < LAYERS
    rooted = measure(residency, weights("even with a root", roots=[0]), load=1.0, compute=1.0)
    assert 0 <= rooted < LAYERS - 1


def test_no_prefix_before_it_was_measured(residency):
    one = weights()
    residency.begins(one, "", [False] * LAYERS)
    assert residency.ends(one, "", None, 1.0) is None


def test_held_weights_are_neither_profiled_nor_counted_as_loads(residency):
    held = weights("held", (100,), (0,), virtual=False)
    residency.begins(held, "", [False])
    residency.loaded(held, 0, 0.0)
    assert residency.ends(held, "", None, 1.0) is None
    figures = residency.figures([held])
    assert (figures["runs"], figures["loads"], figures["load_s"]) == (1, 0, 0.0)
    assert residency.missing([held]) == 0.0


def test_a_hit_finds_every_layer_of_every_weights(residency):
    one, other = weights("a"), weights("b")
    for there in (False, True, True):
        residency.begins(one, "", [True] * LAYERS)
        residency.begins(other, "", [True, True, True, there])
        residency.ends(one, "", None, 0.5)
        residency.ends(other, "", None, 0.25)
    figures = residency.figures([one, other])
    assert (figures["runs"], figures["hits"]) == (3, 2)
    assert figures["stalled_s"] == 1.5


def test_the_version_changes_whenever_missing_does(residency):
    one = weights()
    seen = {residency.version: residency.missing([one])}

    def look():
        missing = residency.missing([one])
        assert seen.setdefault(residency.version, missing) == missing

    measure(residency, one)
    look()
    for bucket in ("", "large", "", "huge"):
        residency.begins(one, bucket, [True] * LAYERS)
        look()
        residency.evicted(one, 2)
        look()
        residency.ends(one, bucket, Measured(one, [5.0] * LAYERS), 0.0)
        look()
    residency.forget(one)
    look()


def test_buckets_have_prefixes_of_their_own(residency):
    one = weights()
    large = measure(residency, one, load=1.0, compute=10.0, bucket="large")
    small = measure(residency, one, load=1.0, compute=0.01, bucket="small")
    assert large < small == LAYERS


def test_who_was_forgotten_begins_anew(residency):
    one = weights()
    for layer in range(LAYERS):
        residency.loaded(one, layer, 0.1)
    version = residency.version
    residency.forget(one)
    assert residency.version > version
    residency.forget(one)
    assert residency.version == version + 1
    assert residency.missing([one]) == 1.0
