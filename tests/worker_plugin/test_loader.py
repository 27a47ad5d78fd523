"""The loader's thread: right bytes in either region, outcomes in order, nothing kept."""

from __future__ import annotations

import gc
import os
import threading
import weakref
from pathlib import Path
from resource import RUSAGE_SELF, getrusage

import pytest
import torch

from st2i_dask._core import GRANULE
from st2i_dask.errors import LoadError
from worker_plugin.arena import Arena
from worker_plugin.content import ContentIds
from worker_plugin.host_heap import HostHeap
from worker_plugin.host_tier import HostTier
from worker_plugin.layer_table import ALIGNMENT
from worker_plugin.loader import MAPPED, Loader, aligned
from worker_plugin.virtual_modules import find_virtual, make_weights
from worker_plugin.weight_books import Load

from .models import make_plain, read_plain, save_plain

WAIT = 20.0


class Outcomes:
    """A loader and what it has reported, in order."""

    def __init__(self, arena_bytes=4 * GRANULE):
        self.arena = Arena(HostHeap(arena_bytes))
        self.host = HostTier(1 << 30)
        self.seen = []
        self.arrived = threading.Condition()
        self.loader = Loader(
            self.host,
            "cpu",
            self.arena,
            lambda load, buffer, seconds: self.note("loaded", load, buffer, seconds),
            lambda load: self.note("no room", load),
            lambda load, error: self.note("failed", load, error),
        )

    def note(self, *outcome):
        with self.arrived:
            self.seen.append(outcome)
            self.arrived.notify_all()

    def wait(self, number):
        with self.arrived:
            assert self.arrived.wait_for(lambda: len(self.seen) >= number, WAIT)
        return self.seen[number - 1]


@pytest.fixture
def outcomes():
    outcomes = Outcomes()
    yield outcomes
    outcomes.loader.close()
    outcomes.host.close()
    outcomes.seen.clear()
    gc.collect()
    assert outcomes.arena.heap.used_bytes == 0, "a block is still held"
    outcomes.arena.heap.close()
    assert "st2i-loader" not in {thread.name for thread in threading.enumerate()}


@pytest.fixture
def weights(tmp_path):
    path = save_plain(tmp_path / "w.safetensors", "uneven")
    (found,) = find_virtual({"model": read_plain(path, "uneven")}, ContentIds())
    made = make_weights(found, "", "cpu")
    made.path = str(path)
    return made


@pytest.mark.parametrize("region", ["framework", "arena"])
def test_layers_are_copied_to_either_region(outcomes, weights, region):
    values = dict(make_plain("uneven").named_parameters())
    for layer in range(len(weights.sizes)):
        outcomes.loader.submit(Load("w", layer, region), weights)
        kind, load, buffer, seconds = outcomes.wait(layer + 1)
        assert (kind, load.layer) == ("loaded", layer)
        assert 0 < seconds < WAIT
        assert buffer.tensor.data_ptr() % ALIGNMENT == 0
        assert buffer.arena_bytes == (GRANULE if region == "arena" else 0)
        assert (outcomes.arena.heap.block_of(buffer.tensor) is not None) == (region == "arena")
        views = weights.table.views(layer, buffer.tensor)
        for slot, view in zip(weights.table.slots[layer], views.tensors, strict=True):
            assert torch.equal(view, values[slot.name])
        outcomes.seen[layer] = None
        del buffer, views, view


def test_no_room_in_the_arena_is_told(outcomes, weights):
    blocks = [outcomes.arena.allocate(GRANULE) for _ in range(4)]
    assert all(blocks)
    outcomes.loader.submit(Load("w", 0, "arena"), weights)
    assert outcomes.wait(1)[0] == "no room"
    blocks.clear()
    outcomes.loader.submit(Load("w", 0, "arena"), weights)
    assert outcomes.wait(2)[0] == "loaded"


def test_a_failing_copy_is_told_and_keeps_no_memory(outcomes, weights):
    os.truncate(weights.path, 10)
    outcomes.loader.submit(Load("w", 1, "arena"), weights)
    kind, load, error = outcomes.wait(1)
    assert (kind, load.layer) == ("failed", 1)
    assert isinstance(error, LoadError)
    assert weights.path in str(error)
    assert outcomes.arena.heap.used_bytes == 0, "though the error is still there"
    outcomes.loader.submit(Load("w", 0, "framework"), weights)
    assert outcomes.wait(2)[0] == "failed", "the thread goes on"


def test_closing_finishes_what_was_submitted_and_lets_go(weights):
    outcomes = Outcomes()
    for _ in range(5):
        outcomes.loader.submit(Load("w", 0, "arena"), weights)
    outcomes.loader.close()
    assert [kind for kind, *_ in outcomes.seen] == ["loaded"] * 4 + ["no room"]
    outcomes.host.close()
    heap = weakref.ref(outcomes.arena.heap)
    outcomes.seen.clear()
    outcomes.arena = None
    gc.collect()
    assert heap() is None


def test_closing_without_a_load_starts_no_thread():
    outcomes = Outcomes()
    outcomes.loader.close()
    outcomes.host.close()


def test_a_layers_memory_comes_in_large_pages():
    pages = Path("/sys/kernel/mm/transparent_hugepage/enabled")
    if not pages.exists() or "[never]" in pages.read_text():
        pytest.skip("this system has no large pages")
    aligned(MAPPED).fill_(1)  # imports what it needs
    before = getrusage(RUSAGE_SELF).ru_minflt
    layer = aligned(64 << 20).fill_(1)
    faults = getrusage(RUSAGE_SELF).ru_minflt - before
    assert faults < layer.numel() / 4096 / 4
