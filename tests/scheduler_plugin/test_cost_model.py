"""Costs: what is learned, what is guessed, what is not believed, and how it is kept."""

from __future__ import annotations

import json
import math

import pytest

from scheduler_plugin.cost_model import PRIOR_COMPUTE_S, PRIOR_LOAD_S, CostModel, units
from scheduler_plugin.events import Measured
from scheduler_plugin.outline import CostKey
from scheduler_plugin.robust import RobustSeconds
from st2i_dask.errors import PolicyError

KEY = CostKey("Denoiser", "flux", "1024x1024")


@pytest.fixture
def costs():
    costs = CostModel()
    yield costs
    costs._check()


def learn(costs, key, *, load=0.0, compute=0.0, transfer=0.0, times=1, steps=1):
    moved = False
    for _ in range(times):
        moved = costs.observe(
            key,
            Measured(load, compute, transfer),
            steps=steps,
            loaded_share=1.0 if load else 0.0,
            pulled=transfer > 0,
        )
    return moved


def test_before_anything_was_seen_there_is_a_prior(costs):
    assert costs.compute_s(KEY) == PRIOR_COMPUTE_S
    assert costs.load_s(KEY) == PRIOR_LOAD_S
    assert costs.transfer_s(KEY) is None
    assert costs.own_s(KEY) == PRIOR_COMPUTE_S
    assert not costs.is_measured(KEY)


def test_load_compute_and_transfer_are_learned_apart(costs):
    learn(costs, KEY, load=3.0, compute=0.25, transfer=0.01, times=3)
    assert costs.load_s(KEY) == 3.0
    assert costs.compute_s(KEY) == 0.25
    assert costs.transfer_s(KEY) == 0.01


def test_a_partial_load_is_scaled_to_the_whole_and_a_tiny_one_ignored(costs):
    costs.observe(KEY, Measured(1.0, 1.0, 0.0), loaded_share=0.25, pulled=False)
    assert costs.load_s(KEY) == 4.0
    costs.observe(KEY, Measured(1.0, 1.0, 0.0), loaded_share=0.01, pulled=False)
    assert costs.load_s(KEY) == 4.0


def test_several_steps_are_learned_as_one_step(costs):
    learn(costs, KEY, compute=2.0, steps=8)
    assert costs.compute_s(KEY) == 0.25


def test_the_first_run_counts_only_until_there_is_another(costs):
    learn(costs, KEY, compute=30.0)
    assert costs.compute_s(KEY) == 30.0
    learn(costs, KEY, compute=0.25)
    assert costs.compute_s(KEY) == 0.25


def test_stragglers_are_outvoted(costs):
    learn(costs, KEY, compute=1.0, times=10)
    for straggler in (100.0, 0.0, 60.0):
        assert not learn(costs, KEY, compute=straggler)
    assert costs.compute_s(KEY) == 1.0


def test_a_lasting_change_is_followed(costs):
    learn(costs, KEY, compute=1.0, times=20)
    learn(costs, KEY, compute=2.0, times=RobustSeconds.WINDOW)
    assert costs.compute_s(KEY) == 2.0


def test_a_tremor_moves_nothing(costs):
    learn(costs, KEY, compute=1.0, times=5)
    version = costs.version
    assert not learn(costs, KEY, compute=1.01, times=15)
    assert costs.version == version
    assert costs.compute_s(KEY) == 1.0


def test_another_bucket_of_the_model_is_scaled_by_size(costs):
    learn(costs, KEY, compute=1.0)
    assert costs.compute_s(KEY._replace(bucket="512x512")) == 0.25
    assert costs.load_s(KEY._replace(bucket="512x512")) == PRIOR_LOAD_S


def test_another_model_of_the_modelfn_comes_next_same_bucket_first(costs):
    learn(costs, KEY, compute=1.0)
    learn(costs, KEY._replace(model="sd3", bucket="512x512"), compute=0.1)
    new = KEY._replace(model="qwen")
    assert costs.compute_s(new) == 1.0
    assert costs.compute_s(new._replace(bucket="512x512")) == 0.1
    assert costs.compute_s(new._replace(bucket="512x1024")) == pytest.approx((0.5 + 0.2) / 2)


def test_at_last_everything_that_was_seen(costs):
    learn(costs, KEY, compute=1.0, load=3.0)
    assert costs.compute_s(CostKey("Other", "x", "y")) == 1.0
    assert costs.load_s(CostKey("Other", "x", "y")) == 3.0


def test_load_is_guessed_from_the_same_model_then_the_same_modelfn(costs):
    learn(costs, KEY, load=3.0)
    learn(costs, CostKey("Other", "other", "1"), load=9.0)
    assert costs.load_s(CostKey("Tiler", "flux", "1")) == 3.0
    assert costs.load_s(CostKey("Other", "new", "1")) == 9.0


def test_a_guess_gives_way_to_what_is_learned(costs):
    other = KEY._replace(model="sd3")
    assert costs.compute_s(other) == PRIOR_COMPUTE_S
    learn(costs, KEY, compute=0.5)
    assert costs.compute_s(other) == 0.5
    learn(costs, other, compute=0.7)
    assert costs.compute_s(other) == 0.7


@pytest.mark.parametrize(
    ("bucket", "expected"),
    [("1024x1024", 2.0**20), ("77", 77.0), ("", 1.0), ("tiny", 1.0), ("0x512", 512.0)],
)
def test_units_are_the_product_of_the_numbers(bucket, expected):
    assert units(bucket) == expected


def test_what_was_learned_survives_a_restart_through_json(costs):
    learn(costs, KEY, load=3.0, compute=0.25, transfer=0.01, times=20)
    learn(costs, CostKey("Text", "t5", "77"), compute=0.1)
    saved = json.loads(json.dumps(costs.to_dict()))
    restored = CostModel.from_dict(saved)
    restored._check()
    assert restored.to_dict() == costs.to_dict()
    assert restored.own_s(KEY) == costs.own_s(KEY)
    learn(restored, CostKey("Text", "t5", "77"), compute=0.3)
    assert restored.compute_s(CostKey("Text", "t5", "77")) == 0.3, "still only a warm-up"


def broken(**changes):
    saved = CostModel().to_dict()
    saved.update(changes)
    return saved


@pytest.mark.parametrize(
    ("saved", "message"),
    [
        ([], "not a mapping"),
        (None, "not a mapping"),
        (broken(version=99), "version 99"),
        (broken(version=None), "version None"),
        (broken(compute=None), "'compute' is None"),
        (broken(compute=[["a", "b", "c", 1]]), "row 0 of 'compute'"),
        (broken(compute=[["a", "b", "c", 1, []]]), "row 0"),
        (broken(compute=[["a", "b", 3, 1, [1.0]]]), "row 0"),
        (broken(compute=[["a", "b", "c", 1, [-1.0]]]), "row 0"),
        (broken(compute=[["a", "b", "c", 1, [math.nan]]]), "row 0"),
        (broken(compute=[["a", "b", "c", 1, [True]]]), "row 0"),
        (broken(compute=[["a", "b", "c", 0, [1.0]]]), "row 0"),
        (broken(load=[["a", "b", "c", 1, [1.0]]]), "row 0 of 'load'"),
        (broken(transfer={}), "'transfer' is {}"),
    ],
)
def test_a_malformed_file_is_refused_with_the_place(saved, message):
    with pytest.raises(PolicyError, match=message):
        CostModel.from_dict(saved)
