"""What of a loaded model comes and goes, what of it only together, and what may not be used twice."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from st2i_dask.errors import LoadError
from worker_plugin.content import ContentIds
from worker_plugin.held import held_bytes
from worker_plugin.layers import ROOT
from worker_plugin.virtual_modules import find_virtual, make_weights

from .models import (
    PLAIN,
    Model,
    Stack,
    layer_bytes,
    read_plain,
    same,
    save_plain,
    store_of,
)

NO_LIMIT = 1 << 30
X = torch.linspace(-1, 1, 8).expand(1, 8, 8)


@pytest.fixture
def path(tmp_path):
    return save_plain(tmp_path / "model.safetensors", "uneven")


class Pair(Model):
    """Components that share modules. options: shape, how."""

    def load_model(self, model_path):
        model = read_plain(model_path, "uneven")
        kind = self.options["kind"]
        if kind == "part":
            return {"model": model, "part": model.blocks[1]}
        if kind == "part first":
            return {"part": model.blocks[1], "model": model}
        if kind == "list":
            return {"model": model, "part": nn.Sequential(*model.blocks)}
        if kind == "by reference":
            other = read_plain(model_path, "uneven")
            other.blocks, other.scale = model.blocks, model.scale
            return {"model": model, "other": other}
        if kind == "joining":
            other = read_plain(model_path, "uneven")
            return {"model": model, "other": other, "part": nn.ModuleList([model, other])}
        raise AssertionError(kind)


SHARED = ["part", "part first", "list", "by reference", "joining"]


@pytest.mark.parametrize("kind", SHARED)
def test_modules_that_share_parameters_come_and_go_together(path, kind):
    """Else one would execute with what the other has evicted."""

    def results(components):
        with torch.no_grad():
            return [[m(X)] for m in components.values() if callable_(m)]

    model = Pair(str(path), kind=kind)
    expected = results(model.load_model(model.model_path))
    with store_of(NO_LIMIT) as store:
        for prefix in range(7):
            with store.lease(model) as lease:
                for got, wanted in zip(results(lease.components), expected, strict=True):
                    assert same(got, wanted)
                assert len(lease.ids) == 1
            store.trim(model, prefix)
            store._check()
        sizes, _ = layer_bytes(store, model)
    with store_of(sum(sizes)) as store, store.lease(model) as lease:
        for got, wanted in zip(results(lease.components), expected, strict=True):
            assert same(got, wanted)


def callable_(module):
    return type(module).forward is not nn.Module.forward


@pytest.mark.parametrize("kind", PLAIN)
def test_every_parameter_in_a_file_is_in_one_layer(tmp_path, kind):
    module = read_plain(save_plain(tmp_path / "m.safetensors", kind), kind)
    (found,) = find_virtual({"model": module}, ContentIds())
    parameters = [p for layer in found.layers for _, p in layer.parameters]
    assert {id(p) for p in parameters} == {id(p) for p in module.parameters()}
    assert len(parameters) == len(set(map(id, parameters)))
    assert held_bytes({"model": module}, [found]) == 0
    weights = make_weights(found, "", "cpu")
    assert weights.nbytes >= sum(p.nbytes for p in module.parameters())
    assert [found.layers[i].name for i in weights.roots] == [ROOT] * len(weights.roots)
    assert not any(p.isnan().any() for p in module.parameters()), "nothing is changed"


class Remembering(Model):
    """Returns the module that it has built before: what is forbidden."""

    def load_model(self, model_path):
        return {"model": built.setdefault(model_path, read_plain(model_path, "uneven"))}


built: dict[str, nn.Module] = {}


def test_a_module_that_was_returned_before_is_refused(path):
    with store_of(NO_LIMIT) as store:
        for number in range(3):
            model = Remembering(str(path), kind="uneven", number=number)
            if number == 0:
                with store.lease(model) as lease:
                    assert isinstance(lease.components["model"], Stack)
                continue
            with (
                pytest.raises(LoadError, match=r"Stack that it has returned before.* build a new"),
                store.lease(model),
            ):
                pytest.fail("entered")
        assert len(store.models()) == 1
    built.clear()
