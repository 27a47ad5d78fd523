"""Profiles: what is learned of a model's layers, and what contradicts it."""

from __future__ import annotations

import math

import pytest

from st2i_dask.errors import PolicyError
from worker_plugin import profile_records
from worker_plugin.profiles import Profile

from .profiling import KEY, LAYERS, ORDER, measured

# What is learned


def test_a_profile_is_there_once_every_layer_was_loaded_and_computed(open_profiles):
    profiles = open_profiles()
    assert profiles.get(KEY) is None
    profiles.observe_run(KEY, [0.1, 0.2, 0.3, 0.4], ORDER, None)
    for layer in (3, 1, 0):
        profiles.observe_load(KEY, layer, 1.0 + layer, LAYERS)
        assert profiles.get(KEY) is None
        assert profiles.prefix(KEY) is None
    profiles.observe_load(KEY, 2, 3.0, LAYERS)
    assert profiles.get(KEY) == Profile((1.0, 2.0, 3.0, 4.0), (0.1, 0.2, 0.3, 0.4), (0, 1, 2, 3), 1)


def test_loads_without_a_run_are_no_profile(open_profiles):
    profiles = open_profiles()
    measured(profiles, runs=0)
    assert profiles.get(KEY) is None
    profiles.observe_run(KEY, None, ORDER, 0.0)
    assert profiles.get(KEY) is None


def test_layers_that_no_run_needs_may_be_unknown(open_profiles):
    profiles = open_profiles()
    for layer in (2, 3):
        profiles.observe_load(KEY, layer, 1.0, LAYERS)
    profiles.observe_run(KEY, [0.0, 0.0, 0.1, 0.1], [3, 2, 3, 2], None)
    assert profiles.get(KEY) == Profile((0, 0, 1.0, 1.0), (0, 0, 0.1, 0.1), (3, 2), 1)


def test_estimates_are_medians_of_the_last_seven(open_profiles):
    profiles = open_profiles()
    measured(profiles, runs=1)
    for seconds in (100.0, 1.0, 1.0, 1.0, 2.0, 2.0, 3.0):
        profiles.observe_load(KEY, 0, seconds, LAYERS)
    assert profiles.get(KEY).load_s[0] == 2.0
    for seconds in (3.0, 3.0):  # 100 and a 1 are forgotten
        profiles.observe_load(KEY, 0, seconds, LAYERS)
    assert profiles.get(KEY).load_s == (2.0, 0.02, 0.02, 0.02)
    profiles.observe_load(KEY, 0, 3.0, LAYERS)
    assert profiles.get(KEY).load_s[0] == 3.0


def test_loads_are_shared_by_shapes_and_by_nothing_else(open_profiles):
    profiles = open_profiles()
    measured(profiles)
    for other in (
        KEY._replace(bucket="128x128"),
        KEY._replace(dtype="float32"),
        KEY._replace(device="NVIDIA H800"),
        KEY._replace(weights="other"),
    ):
        profiles.observe_run(other, [0.3] * LAYERS, ORDER, None)
        assert (profiles.get(other) is not None) == (other.bucket != KEY.bucket)
    assert profiles.get(KEY).compute_s == (0.01,) * LAYERS


def test_compute_is_measured_on_the_first_three_runs(open_profiles):
    profiles = open_profiles()
    for _ in range(3):
        assert profiles.wants_compute(KEY)
        profiles.observe_run(KEY, [0.1] * LAYERS, ORDER, None)
    assert not profiles.wants_compute(KEY)
    assert profiles.wants_compute(KEY._replace(bucket="other"))


def test_a_run_that_was_not_measured_does_not_count_as_one(open_profiles):
    profiles = open_profiles()
    for _ in range(3):
        profiles.observe_run(KEY, None, ORDER, None)
    assert profiles.wants_compute(KEY)


def test_the_prefix_follows_the_order_of_execution(open_profiles):
    profiles = open_profiles()
    # Executed from the last to the first; the one executed first takes longest to load.
    for layer, seconds in enumerate([0.001, 0.001, 0.001, 1.0]):
        profiles.observe_load(KEY, layer, seconds, LAYERS)
    profiles.observe_run(KEY, [0.01] * LAYERS, [3, 2, 1, 0], None)
    assert profiles.prefix(KEY) == 1
    measured(profiles, KEY._replace(weights="uniform"), load_s=0.03, compute_s=0.01)
    # Eq. 2: ceil((4 * (0.03 - 0.01) + 0.01) / 0.03)
    assert profiles.prefix(KEY._replace(weights="uniform")) == 3


def test_another_number_of_layers_starts_anew(open_profiles):
    profiles = open_profiles()
    measured(profiles)
    profiles.observe_load(KEY, 0, 1.0, LAYERS + 1)
    assert profiles.get(KEY) is None
    assert profiles.wants_compute(KEY)
    measured(profiles)
    profiles.observe_run(KEY, [0.1] * 2, [0, 1], None)
    assert profiles.get(KEY) is None


def test_buckets_are_bounded(open_profiles, monkeypatch):
    monkeypatch.setattr(profile_records, "BUCKETS", 3)
    profiles = open_profiles()
    keys = [KEY._replace(bucket=str(number)) for number in range(4)]
    for key in (*keys[:3], keys[0], keys[3]):
        measured(profiles, key)
    assert [profiles.get(key) is not None for key in keys] == [True, False, True, True]


@pytest.mark.parametrize("seconds", [-1e-9, math.nan, math.inf])
def test_impossible_observations_are_refused_and_change_nothing(open_profiles, seconds):
    profiles = open_profiles()
    measured(profiles)
    before = profiles.get(KEY)
    for refused in (
        lambda: profiles.observe_load(KEY, 0, seconds, LAYERS),
        lambda: profiles.observe_load(KEY, LAYERS, 1.0, LAYERS),
        lambda: profiles.observe_load(KEY, -1, 1.0, LAYERS),
        lambda: profiles.observe_run(KEY, [seconds] * LAYERS, ORDER, None),
        lambda: profiles.observe_run(KEY, None, ORDER, seconds),
        lambda: profiles.observe_run(KEY, [0.1] * LAYERS, [LAYERS], None),
        lambda: profiles.observe_run(KEY, None, [-1], None),
    ):
        with pytest.raises(PolicyError):
            refused()
    assert profiles.get(KEY) == before


# Drift


def test_three_stalls_of_five_runs_contradict_the_profile(open_profiles):
    profiles = open_profiles()
    measured(profiles)
    for stalled in (0.005, 0.0, 0.005, 0.0, 0.0, 0.005, 0.0, 0.005):  # more than 10 % of 0.04
        profiles.observe_run(KEY, None, ORDER, stalled)
        assert not profiles.wants_compute(KEY)
    profiles.observe_run(KEY, None, ORDER, 0.005)
    assert profiles.wants_compute(KEY)
    assert profiles.get(KEY).compute_s == (0.01,) * LAYERS, "the old figures serve meanwhile"


@pytest.mark.parametrize(
    ("compute_s", "stalled", "counts"),
    [
        (0.01, 0.0039, False),
        (0.01, 0.0041, True),
        (0.001, 0.0019, False),  # the floor is 2 ms, though 10 % is 0.4
        (0.001, 0.0021, True),
        (0.01, None, False),  # began without its prefix
    ],
)
def test_what_counts_as_a_stall(open_profiles, compute_s, stalled, counts):
    profiles = open_profiles()
    measured(profiles, compute_s=compute_s)
    for _ in range(5):
        profiles.observe_run(KEY, None, ORDER, stalled)
    assert profiles.wants_compute(KEY) == counts


def test_stalls_while_measuring_contradict_nothing(open_profiles):
    profiles = open_profiles()
    measured(profiles, runs=0)
    for _ in range(5):
        profiles.observe_run(KEY, [0.01] * LAYERS, ORDER, 1.0)
    assert not profiles.wants_compute(KEY)


def test_old_figures_are_forgotten_as_new_ones_come_in(open_profiles):
    profiles = open_profiles()
    measured(profiles, runs=7)
    for _ in range(3):
        profiles.observe_run(KEY, None, ORDER, 1.0)
    profiles.observe_load(KEY, 1, 0.5, LAYERS)
    assert profiles.get(KEY).load_s == (0.02, 0.5, 0.02, 0.02)
    profiles.observe_run(KEY, [0.7] * LAYERS, ORDER, None)
    assert profiles.get(KEY).compute_s == (0.7,) * LAYERS
    profiles.observe_load(KEY, 1, 0.7, LAYERS)
    assert profiles.get(KEY).load_s[1] == 0.6, "new ones are not forgotten"
