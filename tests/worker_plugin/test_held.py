"""What of a loaded model stays: counted, and in memory of its own."""

from __future__ import annotations

import os

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

from worker_plugin.content import ContentIds
from worker_plugin.held import held_bytes, take_from_files
from worker_plugin.mappings import file_ranges
from worker_plugin.virtual_modules import find_virtual

from .aligned import align
from .models import Model, make_plain, mapped_weights, outputs, same, store_of

NO_LIMIT = 1 << 30
X = torch.linspace(-1, 1, 8).expand(1, 8, 8)


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
