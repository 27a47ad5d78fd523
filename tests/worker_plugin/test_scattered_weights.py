"""Layers in an arena that has no gap for one: in several blocks, with right values, gone afterwards."""

from __future__ import annotations

import gc

import torch

from st2i_dask._core import GRANULE

from .models import Model, outputs, same, save_plain, store_of

WIDTH = 256  # a layer is four granules
SHAPE = {"depth": 4, "root": 0, "width": WIDTH}


def run(module):
    return outputs(module, "even", {"x": torch.linspace(-1, 1, WIDTH).expand(2, WIDTH)})


def mappings(heap):
    with open("/proc/self/maps") as maps:
        return sum(heap.address.uuid in line for line in maps)


def test_a_model_runs_in_an_arena_without_a_gap_for_any_of_its_layers(tmp_path):
    models = []
    for name in "ab":
        path = tmp_path / f"{name}.safetensors"
        save_plain(path, "even", ord(name), **SHAPE)
        models.append(Model(str(path), kind="even", **SHAPE))
    expected = [run(model.load_model(model.model_path)["model"]) for model in models]
    with store_of(GRANULE, 64 * GRANULE) as store:
        heap = store._arena.heap
        tensors = [heap.allocate(1) for _ in range(64)]
        del tensors[::2]
        assert heap.allocate(GRANULE + 1) is None
        for turn in (0, 1, 0, 1, 1, 0):  # each has 16 granules; 32 are free
            with store.lease(models[turn]) as lease:
                given = run(lease.components["model"])
            assert same(given, expected[turn])
        assert mappings(heap) > 4 * 4, "of each layer, four"
        assert len(store.models()) == 2
        assert store._arena.tensor_bytes() == 32 * GRANULE
        del lease
        tensors.clear()
        store._check()
    gc.collect()
    assert heap.used_bytes == 0
    assert mappings(heap) == 1
    heap._check()
