"""Equal weights are in memory once, whoever names them, and others never take their place."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from .aligned import align
from .leases import (
    LAYER,
    give,
    reference,
    row,
    use,
)
from .models import (
    Model,
    inputs,
    make_plain,
    outputs,
    read_plain,
    resident,
    same,
    save_plain,
)


def test_copies_of_a_folder_are_in_memory_once(store, even, tmp_path):
    model = even("a")
    shutil.copy(model.model_path, tmp_path / "copy.safetensors")
    copy = Model(str(tmp_path / "copy.safetensors"), **model.options)
    use(store, model)
    assert same(use(store, copy), reference(model))
    assert (row(store, copy)["loads"], row(store, copy)["hits"]) == (4, 1), (
        "nothing was left to load"
    )
    assert store._cache.used("framework") == 4 * LAYER
    for each in (model, copy):
        store.trim(each, 2)
        assert resident(store, model) == resident(store, copy) == [True, True, False, False]
        assert same(use(store, each), reference(model))


@pytest.mark.parametrize("phase", [0, 4, 8, 16, 40])
def test_tensors_are_aligned_as_they_are_in_their_file(store, even, phase):
    """Kernels may sum in another order by it: on some processors results depend on it."""
    model = even("a")
    align(Path(model.model_path), phase)
    use(store, model)
    with store.lease(model) as lease:
        for parameter in lease.components["model"].parameters():
            assert parameter.data_ptr() % 64 == phase
        # One row: what is summed by alignment.
        x = inputs("even")["x"][:1]
        assert same(
            outputs(lease.components["model"], "even", {"x": x}),
            outputs(read_plain(model.model_path, **model.options), "even", {"x": x}),
        )


def test_a_copy_that_is_aligned_otherwise_is_other_weights(store, even, tmp_path):
    model = even("a")
    path = tmp_path / "copy.safetensors"
    shutil.copy(model.model_path, path)
    align(path, 8)
    copy = Model(str(path), **model.options)
    for each in (model, copy, model):
        assert same(use(store, each), reference(each))
    assert row(store, copy)["loads"] == row(store, model)["loads"] == 4


def test_two_models_share_an_encoder(store, tmp_path):
    """As two pipelines do; each has something of its own besides."""
    path = save_plain(tmp_path / "encoder.safetensors", "even")
    for name, seed in (("first", 1), ("second", 2)):
        save_plain(tmp_path / name / "own.safetensors", "uneven", seed)

    class Pair(Model):
        def load_model(self, model_path):
            own = Model(f"{model_path}/own.safetensors", kind="uneven")
            return {
                "model": Model(str(path), kind="even").load_model(str(path))["model"],
                "own": own.load_model(own.model_path)["model"],
            }

    first, second = (Pair(str(tmp_path / name), kind="pair") for name in ("first", "second"))
    results = {}
    for model in (first, second, first, second):
        with store.lease(model) as lease:
            results.setdefault(model, []).append(
                (give(lease), outputs(lease.components["own"], "uneven", inputs("uneven")))
            )
    encoder = sum(p.nbytes for p in make_plain("even").parameters())
    own = sum(p.nbytes for p in make_plain("uneven").parameters())
    assert encoder + 2 * own <= store._cache.used("framework") < encoder + 2 * own + 4096
    (a, b), (c, d) = results[first], results[second]
    assert same(a[0], c[0])
    assert same(a[1], b[1])
    assert same(c[1], d[1])
    assert not same(a[1], c[1])


def test_files_that_differ_in_one_byte_are_other_weights(store, even, tmp_path):
    model = even("a")
    content = bytearray(Path(model.model_path).read_bytes())
    content[-1] ^= 1
    (tmp_path / "b.safetensors").write_bytes(content)
    other = Model(str(tmp_path / "b.safetensors"), **model.options)
    assert same(use(store, model), reference(model))
    assert same(use(store, other), reference(other))
    assert store._cache.used("framework") == 8 * LAYER
