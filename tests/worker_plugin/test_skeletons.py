"""What of a loaded model comes and goes, what stays, and what may not be used twice."""

from __future__ import annotations

import os
import threading

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

from st2i_dask.errors import LoadError
from worker_plugin.content import ContentIds
from worker_plugin.layers import ROOT
from worker_plugin.mappings import file_ranges
from worker_plugin.skeletons import find_virtual, held_bytes, make_weights, take_from_files

from .aligned import align
from .models import (
    PLAIN,
    Model,
    Stack,
    layer_bytes,
    make_plain,
    mapped_weights,
    outputs,
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


def test_what_lies_in_no_file_is_held():
    module = make_plain("uneven")
    bare = torch.ones(100)
    components = {"model": module, "bare": bare, "again": bare, "name": "text", "array": X.numpy()}
    assert find_virtual(components, ContentIds()) == []
    nbytes = sum(p.nbytes for p in module.parameters())
    # X is expanded: a row is in memory once, but NumPy counts its shape.
    assert held_bytes(components, []) == nbytes + 400 + X.numpy().nbytes


class Buffered(nn.Module):
    """A layer with a buffer, and a weight that lies transposed in its file."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(8, 8, bias=False)
        self.turned = nn.Parameter(torch.randn(8, 4).t())
        self.register_buffer("mean", torch.randn(8))

    def forward(self, x):
        return self.linear(x - self.mean) @ self.turned.t()


class HeldToo(Model):
    def load_model(self, model_path):
        tensors = load_file(model_path)
        with torch.device("meta"):
            model = Buffered()
        turned = tensors.pop("turned")
        model.load_state_dict(tensors, assign=True, strict=False)
        model.turned = nn.Parameter(turned.t())
        return {"model": model, "bare": tensors["bare"]}


def test_what_is_held_does_not_stay_in_the_mapped_file(tmp_path):
    """A file that is cut short would kill the worker when it reads there."""
    path = str(tmp_path / "held.safetensors")
    of_others = set(mapped_weights())
    module = Buffered()
    tensors = {
        "linear.weight": module.linear.weight.detach(),
        "turned": module.turned.detach().t().contiguous(),
        "mean": module.mean,
        "bare": torch.arange(5.0),
    }
    save_file(tensors, path)
    model = HeldToo(path, kind="held")
    expected = outputs(model.load_model(path)["model"], "uneven", {"x": X})
    with store_of(NO_LIMIT) as store:
        with store.lease(model) as lease:
            assert path not in mapped_weights() or lease.skeleton.parts, "only the host tier's"
            assert same(outputs(lease.components["model"], "uneven", {"x": X}), expected)
            held = lease.components
            before = set(mapped_weights())
        assert before - of_others <= {path}
        os.truncate(path, 0)
        assert torch.equal(held["bare"], tensors["bare"])
        assert torch.equal(held["model"].mean, module.mean)
        assert torch.equal(held["model"].turned, module.turned)


@pytest.mark.parametrize("phase", [0, 4, 8, 40])
def test_what_is_held_is_aligned_as_it_was_in_its_file(tmp_path, phase):
    path = tmp_path / "held.safetensors"
    save_file({"a": torch.arange(10.0), "b": torch.arange(12.0)}, path)
    align(path, phase)
    components = load_file(path)
    before = {name: tensor.data_ptr() % 64 for name, tensor in components.items()}
    take_from_files(components, [])
    assert {name: tensor.data_ptr() % 64 for name, tensor in components.items()} == before
    assert file_ranges(list(components.values())) == [None, None]
    assert torch.equal(components["b"], torch.arange(12.0))


def test_tied_tensors_that_are_held_stay_tied(tmp_path):
    path = tmp_path / "t.safetensors"
    save_file({"w": torch.arange(32.0).reshape(4, 8)}, path)
    module = nn.Linear(4, 8, bias=False)
    whole = load_file(path)["w"]
    module.weight = nn.Parameter(whole.t())
    components = {"model": module, "bare": whole}
    assert find_virtual(components, ContentIds()) == []
    assert None not in file_ranges([whole, module.weight.t()])
    take_from_files(components, [])
    assert file_ranges([whole, module.weight.t()]) == [None, None]
    assert torch.equal(module.weight.t(), torch.arange(32.0).reshape(4, 8))
    with torch.no_grad():
        whole[0, 1] = 77
        assert module.weight[1, 0] == 77


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


def test_models_are_built_one_at_a_time_in_a_process(path):
    """Libraries change torch for the whole process while they build one."""
    busy, most = [], []

    def note(delta):
        busy.append(delta)
        most.append(sum(busy))

    notes.note = note
    with store_of(NO_LIMIT) as one, store_of(NO_LIMIT) as other:

        def work(store, number):
            with store.lease(Noting(str(path), kind="uneven", number=number)):
                pass

        threads = [
            threading.Thread(target=work, args=(store, number))
            for store in (one, other)
            for number in range(2)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(20)
            assert not thread.is_alive()
    assert max(most) == 1
    assert len(most) == 8


class Notes:
    note = None


notes = Notes()


class Noting(Model):
    def load_model(self, model_path):
        notes.note(1)
        threading.Event().wait(0.01)
        model = read_plain(model_path, "uneven")
        notes.note(-1)
        return {"model": model}
