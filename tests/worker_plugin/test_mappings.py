"""Where parameters lie on disk: the very bytes, or None whenever they might be others."""

from __future__ import annotations

import os

import pytest
import torch
from safetensors.torch import load_file, save_file

from worker_plugin import mappings
from worker_plugin.mappings import file_ranges


@pytest.fixture
def path(tmp_path):
    return str(tmp_path / "model.safetensors")


@pytest.fixture
def tensors(path):
    """Mapped from the file at `path`."""
    save_file(random_tensors(), path)
    return load_file(path)


def random_tensors():
    return {
        "a.weight": torch.randn(1000, 300),
        "a.bias": torch.randn(300).to(torch.bfloat16),
        "b.weight": torch.randint(0, 255, (7, 9), dtype=torch.uint8),
    }


def test_ranges_are_the_bytes_of_the_tensors(path, tensors):
    found = file_ranges(list(tensors.values()))
    with open(path, "rb") as file:
        content = file.read()
    for tensor, part in zip(tensors.values(), found, strict=True):
        assert part.file.path == path
        assert part.nbytes == tensor.numel() * tensor.element_size()
        expected = tensor.reshape(-1).view(torch.uint8).numpy().tobytes()
        assert content[part.offset : part.offset + part.nbytes] == expected
    state = os.stat(path)
    file = found[0].file
    assert (file.device, file.inode, file.nbytes) == (state.st_dev, state.st_ino, state.st_size)
    assert file.mtime_ns == state.st_mtime_ns


def test_parts_of_a_tensor_are_found_too(tensors):
    whole = tensors["a.weight"]
    all_of_it, rows, columns, turned = file_ranges([whole, whole[10:20], whole[:, 1:], whole.t()])
    assert rows.offset == all_of_it.offset + 10 * 300 * 4
    assert rows.nbytes == 10 * 300 * 4
    assert columns is None, "not contiguous"
    assert turned is None, "not contiguous"


def test_memory_of_the_process_is_in_no_file(tensors):
    changed = tensors["a.weight"].to(torch.float64)
    assert file_ranges(
        [torch.randn(5), changed, torch.empty(0), torch.empty(3, device="meta")]
    ) == [
        *(None, None, None, None),
    ]
    # Also where no file is mapped at all.
    tensors.clear()
    assert file_ranges([torch.randn(5)]) == [None]


def test_a_changed_tensor_makes_its_whole_file_private(tmp_path, tensors):
    other_path = str(tmp_path / "other.safetensors")
    save_file(random_tensors(), other_path)
    other = load_file(other_path)
    tensors["b.weight"] += 1
    assert file_ranges(list(tensors.values())) == [None] * 3
    assert None not in file_ranges(list(other.values()))


def test_a_deleted_or_replaced_file_is_no_source(path, tensors):
    os.rename(path, path + ".old")
    assert file_ranges(list(tensors.values())) == [None] * 3
    save_file(random_tensors(), path)
    assert file_ranges(list(tensors.values())) == [None] * 3
    os.replace(path + ".old", path)
    assert None not in file_ranges(list(tensors.values()))
    os.unlink(path)
    assert file_ranges(list(tensors.values())) == [None] * 3


def test_other_names_are_not_taken_for_weights(tmp_path):
    path = str(tmp_path / "model.bin")
    save_file(random_tensors(), path)
    mapped = torch.from_file(path, size=100, dtype=torch.uint8)
    assert file_ranges([mapped]) == [None]


def test_odd_names_are_found_or_none(tmp_path):
    for name in ("with space", "with (deleted)", "ümlaut", "new\nline"):
        path = str(tmp_path / f"{name}.safetensors")
        save_file(random_tensors(), path)
        tensors = load_file(path)
        found = file_ranges(list(tensors.values()))
        if name == "new\nline":
            assert found == [None] * 3
        else:
            assert [part.file.path for part in found] == [path] * 3


def test_file_systems_that_show_other_numbers_in_the_map_are_asked(path, tensors, monkeypatch):
    with open(path, "rb") as file:
        shown = mappings._shown(file.fileno())
    state = os.stat(path)
    major, minor = os.major(state.st_dev), os.minor(state.st_dev)
    assert shown == f"{major:02x}:{minor:02x} {state.st_ino}", "an ordinary file system"
    # As on overlay and btrfs: the device of `stat` is not that of the map.
    monkeypatch.setattr(mappings.os, "minor", lambda _: 254)
    assert None not in file_ranges(list(tensors.values()))
    monkeypatch.setattr(mappings, "_shown", lambda _: "00:00 1")
    assert file_ranges(list(tensors.values())) == [None] * 3


def test_the_map_is_read_once_for_all(path, tensors, monkeypatch):
    opened = []
    plain = open

    def counting(name, *args):
        opened.append(name)
        return plain(name, *args)

    monkeypatch.setattr(mappings, "open", counting, raising=False)
    file_ranges(list(tensors.values()) * 100)
    # Other tests' models may be mapped too.
    for name in ("/proc/self/maps", "/proc/self/smaps", path):
        assert opened.count(name) == 1, name
