"""The fragmentation benchmark, shortened: real sizes, its keys, and what the design rests on."""

from __future__ import annotations

import math

import pytest

from st2i_dask.bench import fragment
from st2i_dask.bench._layer_sizes import models, packed

KEYS = {
    *("failed", "failed_share", "failed_tensors", "failed_tensors_share", "fallbacks"),
    *("blocks", "most_blocks", "loads", "evicted_bytes", "request_bytes", "loading_share"),
    *("fill", "requests", "us_per_load", "extra_loading"),
}


def test_the_models_have_their_published_sizes():
    found = models()
    assert len(found) == 20
    billions = {name: sum(sum(layer) for layer in layers) / 1e9 for name, layers in found.items()}
    for name, published in {
        "flux-0": 11.9,
        "sd3.5-large-0": 8.1,
        "sd3.5-medium-0": 2.27,  # 2.5 with the table of positions, a buffer
        "z-image-0": 6.15,
        "t5-xxl": 4.76,
        "qwen3-4b": 4.02,
        "clip-l": 0.123,
        "clip-g": 0.69,
        "vae": 0.05,  # the decoder
    }.items():
        assert billions[name] == pytest.approx(published, rel=0.04), name


def test_a_layer_is_packed_at_64_bytes():
    assert packed([1, 32, 33]) == 64 + 64 + 128


def test_figures_of_all_rivals():
    figures = fragment.run(seconds=8, rival_seconds=8)
    assert set(figures) == {*KEYS, *fragment.RIVALS, "paged_both", "failed_contiguous_share"}
    for name in (*fragment.RIVALS, "paged_both"):
        assert set(figures[name]) == KEYS
        assert figures[name]["requests"] == figures["paged_both"]["requests"] > 30
        assert figures[name]["loads"] > 500
    assert figures["paged_both"]["extra_loading"] == 0
    assert figures["extra_loading"] == figures["same"]["extra_loading"]
    assert figures["failed_contiguous_share"] == figures["contiguous"]["failed_share"] > 0.1


@pytest.fixture(scope="module")
def served():
    """Figures of some designs over the same requests."""
    names = ("same", "same_buddy", "contiguous", "no_pages", "no_pages_buddy")
    options = {"paged_both": fragment.IDEAL} | {name: fragment.RIVALS[name] for name in names}
    return {name: fragment.Churn(**of).run(math.inf, 300) for name, of in options.items()}


def test_no_layer_is_refused_where_it_may_lie_in_several_blocks(served):
    ours, ideal = served["same"], served["paged_both"]
    assert ours["failed"] == ideal["failed"] == ideal["failed_tensors"] == 0
    assert 1 < ours["blocks"] < 5
    assert 0 < ours["failed_tensors_share"] < 0.05, "these have one block each"
    assert ours["fallbacks"] == 0
    assert ideal["loading_share"] > 0.8
    assert ideal["fill"] > 0.94
    assert ours["fill"] > ideal["fill"] - 0.01
    assert ours["request_bytes"] < 1.02 * ideal["request_bytes"]
    assert served["same_buddy"]["failed"] == 0
    assert served["same_buddy"]["fill"] < ours["fill"]


def test_one_block_for_each_layer_is_refused_often(served):
    ideal, contiguous = served["paged_both"], served["contiguous"]
    both, buddy = served["no_pages"], served["no_pages_buddy"]
    assert contiguous["blocks"] == 1
    assert 0.1 < contiguous["failed_share"] < both["failed_share"]
    assert contiguous["fill"] > ideal["fill"] - 0.02
    assert both["request_bytes"] > 1.01 * ideal["request_bytes"]
    assert both["fill"] < 0.88
    assert buddy["fill"] < 0.7


@pytest.mark.parametrize("options", fragment.RIVALS.values(), ids=fragment.RIVALS)
def test_what_lies_in_the_regions_is_what_the_policy_and_the_tensors_count(options):
    churn = fragment.Churn(**options)
    churn.run(3)
    for name, lies in churn.lies.items():
        region = churn.regions[lies]
        assert region.blocks == sum(
            len(offsets) for there, offsets in churn.places.values() if there == lies
        )
        used = sum(
            churn.sizes[weights][layer]
            for (weights, layer), (there, _) in churn.places.items()
            if there == lies
        )
        assert region.weights == used == churn.cache.used(name)
        region.allocator._check()
    assert churn.regions["arena"].tensors == sum(nbytes for *_, nbytes in churn.tensors) > 0
    churn.cache._check()
