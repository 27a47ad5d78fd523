"""The prefix is the fewest layers without a stall, and the paper's formula where that applies."""

from __future__ import annotations

from fractions import Fraction
from math import ceil

import pytest
from hypothesis import given
from hypothesis import strategies as st

from st2i_dask.errors import PolicyError
from worker_plugin.prefix import exposed_s, resident_prefix

SECONDS = st.integers(0, 40)
LAYERS = st.lists(st.tuples(SECONDS, SECONDS), max_size=12)


def simulated_stall(load, compute, resident):
    """A loader and a device, second by second: both work on at most one layer at a time."""
    there = [bool(r) for r in resident]
    left_to_load, left_to_compute = list(load), list(compute)
    layer, stalled = 0, 0
    while True:
        absent = [j for j, is_there in enumerate(there) if not is_there]
        while absent and left_to_load[absent[0]] == 0:
            there[absent.pop(0)] = True
        while layer < len(load) and there[layer] and left_to_compute[layer] == 0:
            layer += 1
        if layer == len(load):
            return stalled
        if absent:
            left_to_load[absent[0]] -= 1
        if there[layer]:
            left_to_compute[layer] -= 1
        else:
            stalled += 1


def first(k, layers):
    return [j < k for j in range(layers)]


@given(LAYERS, st.data())
def test_exposed_seconds_are_those_of_a_simulation(layers, data):
    load, compute = [a for a, _ in layers], [b for _, b in layers]
    resident = data.draw(st.lists(st.booleans(), min_size=len(load), max_size=len(load)))
    assert exposed_s(load, compute, resident) == simulated_stall(load, compute, resident)


@given(LAYERS)
def test_the_prefix_is_the_fewest_layers_without_a_stall(layers):
    load, compute = [a for a, _ in layers], [b for _, b in layers]
    stalls = [simulated_stall(load, compute, first(k, len(load))) for k in range(len(load) + 1)]
    assert resident_prefix(load, compute) == stalls.index(0)


@given(LAYERS, st.sampled_from([1e-9, 1e-3, 0.1, 1 / 3, 1e6]))
def test_rounding_neither_adds_layers_nor_leaves_stalls(layers, scale):
    load, compute = [a * scale for a, _ in layers], [b * scale for _, b in layers]
    k = resident_prefix(load, compute)
    assert k == resident_prefix([a for a, _ in layers], [b for _, b in layers])
    assert all(exposed_s(load, compute, first(n, len(load))) == 0 for n in range(k, len(load) + 1))
    assert all(exposed_s(load, compute, first(n, len(load))) > 0 for n in range(k))


@given(st.integers(1, 60), st.integers(1, 1000), st.integers(1, 1000))
def test_equal_layers_give_the_formula_of_the_paper(layers, load, compute):
    load, compute = max(load, compute) + 1, min(load, compute)
    paper = ceil((layers * Fraction(load - compute) + compute) / load)
    found = resident_prefix([float(load)] * layers, [float(compute)] * layers)
    assert found == min(max(paper, 0), layers)


def test_the_model_of_the_paper():
    """Flux: a pass loads 3.2 times as long as it computes; about two thirds stay."""
    assert resident_prefix([3.2] * 57, [1.0] * 57) == 40


def test_no_layers_need_no_prefix():
    assert resident_prefix([], []) == 0
    assert exposed_s([], [], []) == 0


@pytest.mark.parametrize("seconds", [float("nan"), float("inf"), -1.0])
def test_unusable_seconds_are_refused(seconds):
    for call in (resident_prefix, lambda load, compute: exposed_s(load, compute, [True])):
        with pytest.raises(PolicyError, match="finite"):
            call([seconds], [1.0])
        with pytest.raises(PolicyError, match="finite"):
            call([1.0], [seconds])


def test_other_lengths_are_refused():
    with pytest.raises(PolicyError, match="2 load times for 1 compute times"):
        resident_prefix([1.0, 2.0], [1.0])
    with pytest.raises(PolicyError, match="2 load times for 1 compute times"):
        exposed_s([1.0, 2.0], [1.0], [True])
    with pytest.raises(PolicyError, match="residency of 1 layers for 2"):
        exposed_s([1.0, 2.0], [1.0, 1.0], [True])
