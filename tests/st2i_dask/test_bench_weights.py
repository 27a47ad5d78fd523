"""The benchmarks of weights, shortened: their keys, and that what they measure is what happened."""

from __future__ import annotations

import os

import pytest

from st2i_dask.bench import load, rebind
from st2i_dask.bench._transformers import Shape


def test_rebinding_is_measured_against_what_pytorch_offers():
    figures = rebind.run(rounds=20, requests=8, shape=Shape(layers=(1, 2), heads=2))
    assert set(figures) == {
        *("parameters", "us_per_layer", "bind_us", "unbind_us", "views_us", "assign_us", "ratio"),
        *("request_overhead", "step_ms"),
    }
    assert figures["parameters"] == 32
    assert figures["us_per_layer"] == max(figures["bind_us"], figures["unbind_us"])
    assert figures["us_per_layer"] < 100  # about 5 on a quiet machine
    assert figures["ratio"] == pytest.approx(
        figures["us_per_layer"] / figures["assign_us"], abs=0.001
    )
    assert figures["ratio"] < 0.2
    assert figures["step_ms"] > 0.1
    assert -1 < figures["request_overhead"] < 5  # of a step of 2 ms


def test_loads_are_measured_against_a_copy():
    figures = load.run(width=256, rounds=3)
    assert set(figures) == {
        *("ratio", "gb_per_s", "copy_gb_per_s", "first_touch_ratio", "layer_mib"),
    }
    assert figures["gb_per_s"] > 0.1
    assert figures["copy_gb_per_s"] > 0.1
    assert figures["ratio"] > 0.1
    assert figures["first_touch_ratio"] > 0.05
    assert figures["layer_mib"] == pytest.approx([1.9, 4.5], abs=0.1)


def test_the_layers_that_are_loaded_are_those_of_the_file(tmp_path):
    path = tmp_path / "model.safetensors"
    table, sources = load._saved_model(path, 256)
    assert [len(layer) for layer in sources] == [14, 32]
    covered = sum(part.nbytes for layer in sources for part in layer)
    assert 0 <= os.stat(path).st_size - covered < 10_000
    table._check()
    assert sum(table.nbytes) == pytest.approx(covered, rel=0.01)
