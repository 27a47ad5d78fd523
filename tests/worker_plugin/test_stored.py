"""Converted parameters are found again in the files that they come from, or not at all."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

torch = pytest.importorskip("torch")
from safetensors.torch import save_file  # noqa: E402

from worker_plugin.stored import converted  # noqa: E402


class Model(torch.nn.Module):
    def __init__(self, folder):
        super().__init__()
        self.a = torch.nn.Linear(3, 4)
        self.b = torch.nn.Linear(4, 2, bias=False)
        self.config = SimpleNamespace(_name_or_path=str(folder))


@pytest.fixture
def stored(tmp_path):
    """A model in bfloat16 in two files, and the same one as it is read into float32."""
    model = Model(tmp_path).to(torch.bfloat16)
    state = model.state_dict()
    save_file({k: v for k, v in state.items() if k[0] == "a"}, tmp_path / "1.safetensors")
    save_file({k: v for k, v in state.items() if k[0] == "b"}, tmp_path / "2.safetensors")
    return model.float()


def read(found):
    with open(found.range.file.path, "rb") as file:
        file.seek(found.range.offset)
        raw = bytearray(file.read(found.range.nbytes))
    return torch.frombuffer(raw, dtype=found.dtype)


def test_every_parameter_is_found_with_its_stored_dtype(stored):
    named = list(stored.named_parameters())
    for (_, parameter), found in zip(named, converted(stored, named), strict=True):
        assert found.dtype is torch.bfloat16
        assert torch.equal(read(found).float().view(parameter.shape), parameter)


def test_a_parameter_that_was_changed_is_its_own(stored):
    with torch.no_grad():
        stored.a.bias[0] += 1
    found = dict(zip(dict(stored.named_parameters()), converted(stored, [*stored.named_parameters()]), strict=True))  # fmt: skip
    assert [name for name, at in found.items() if at is None] == ["a.bias"]


@pytest.mark.parametrize("what", ["transposed", "integers", "another name", "another shape"])
def test_what_does_not_match_is_not_found(stored, what):
    name, parameter = "b.weight", stored.b.weight.detach()
    if what == "transposed":
        parameter = parameter.T.contiguous().T
    elif what == "integers":
        parameter = parameter.to(torch.int32)
    elif what == "another name":
        name = "c.weight"
    else:
        parameter = parameter[:1]
    assert converted(stored, [(name, parameter)]) == [None]


def test_broken_files_and_unknown_folders_give_nothing(stored, tmp_path):
    (tmp_path / "1.safetensors").write_bytes(b"\xff" * 20)
    (tmp_path / "2.safetensors").write_bytes(b"")
    named = list(stored.named_parameters())
    assert converted(stored, named) == [None] * 3
    stored.config._name_or_path = "no/such/folder"
    assert converted(stored, named) == [None] * 3
    assert converted(torch.nn.Linear(1, 1), named) == [None] * 3
