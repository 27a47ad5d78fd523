"""One range of addresses over several blocks of a heap: right bytes, and nothing is left of it."""

from __future__ import annotations

import gc
import itertools
import os
import subprocess
import sys

import numpy as np
import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from st2i_dask._core import GRANULE, Allocator, Heap

from .heaps import comb, mapped, new_heap, new_name, nothing_left

MIB = 1 << 20


@pytest.fixture(autouse=True)
def nothing_is_left():
    with nothing_left():
        yield


def test_a_gap_that_is_large_enough_serves_alone():
    heap = new_heap()
    made = heap.allocate_scattered(3 * GRANULE + 1)
    assert made.nbytes == 3 * GRANULE + 1
    assert made.pieces == [(0, made.nbytes)]
    array = np.asarray(made.array())
    assert array.ctypes.data == heap.base
    assert heap.find(heap.base).nbytes == made.nbytes
    assert mapped(heap.name) == 1
    del array, made
    assert heap.statistics()["blocks"] == 0


@pytest.mark.parametrize("allocator", ["best_fit", "buddy"])
def test_several_gaps_are_one_range(allocator):
    heap = new_heap(allocator=allocator)
    others = comb(heap)
    assert heap.allocate(GRANULE + 1) is None
    made = heap.allocate_scattered(3 * GRANULE + 7)
    assert [nbytes for _, nbytes in made.pieces] == [GRANULE, GRANULE, GRANULE, 7]
    assert mapped(heap.name) == 5
    figures = heap.statistics()
    assert (figures["blocks"], figures["free"]) == (16 + 4, 12 * GRANULE)
    tensor, array = torch.from_dlpack(made.array()), np.asarray(made.array())
    assert (tensor.shape, tensor.dtype, array.dtype) == ((made.nbytes,), torch.uint8, np.uint8)
    assert tensor.data_ptr() == array.ctypes.data
    assert tensor.data_ptr() % 4096 == 0
    assert array.flags.writeable
    assert heap.find(tensor.data_ptr()) is None
    values = torch.arange(made.nbytes) % 251
    tensor.copy_(values)
    start = 0
    for offset, nbytes in made.pieces:  # the same memory as the heap's own
        assert heap.find(heap.base + offset).nbytes == nbytes
        there = np.asarray(heap.find(heap.base + offset).array())
        assert (there == values[start : start + nbytes].numpy()).all()
        start += nbytes
    del there, others, made, array
    assert (tensor == values).all()
    del tensor
    assert heap.statistics()["largest_free"] == heap.nbytes
    assert mapped(heap.name) == 1


def test_only_too_few_bytes_refuse():
    heap = new_heap()
    others = comb(heap)
    assert heap.allocate_scattered(16 * GRANULE + 1) is None
    assert heap.allocate_scattered((1 << 63) - 1) is None
    for nbytes in (0, -1):
        with pytest.raises(ValueError, match=f"block of {nbytes} bytes"):
            heap.allocate_scattered(nbytes)
    everything = heap.allocate_scattered(16 * GRANULE)
    assert len(everything.pieces) == 16
    assert heap.allocate_scattered(1) is None
    assert heap.statistics()["free"] == 0
    del others, everything
    heap._check()


def test_the_allocator_alone_divides_the_same_way():
    allocator, heap = Allocator(32 * GRANULE), new_heap()
    offsets = [allocator.alloc(GRANULE) for _ in range(32)]
    others = comb(heap)
    for offset in offsets[::2]:
        allocator.free(offset)
    assert allocator.alloc_scattered(17 * GRANULE) is None
    with pytest.raises(ValueError, match="block of 0 bytes"):
        allocator.alloc_scattered(0)
    pieces = allocator.alloc_scattered(2 * GRANULE + 1)
    assert [offset for offset, _ in pieces] == [
        offset for offset, _ in heap.allocate_scattered(2 * GRANULE + 1).pieces
    ]
    assert allocator.statistics()["blocks"] == 16 + 3
    for offset, _ in pieces:
        allocator.free(offset)
    allocator._check()
    del others


# Lifetime


def views_of(made):
    tensor, array = torch.from_dlpack(made.array()), np.asarray(made.array())
    return {
        "itself": made,
        "exporter": made.array(),
        "tensor": tensor,
        "shaped": tensor[GRANULE : GRANULE + 96].view(torch.bfloat16).view(3, 16)[1].t(),
        "numpy": array,
        "slice": np.from_dlpack(made.array())[GRANULE - 5 : GRANULE + 5].view(np.int8),
    }


@pytest.mark.parametrize("last", range(6))
def test_it_lives_as_long_as_its_last_view_whichever_that_is(last):
    heap = new_heap(poison=True)
    others = comb(heap)
    names = list(views_of(heap.allocate_scattered(2 * GRANULE)))
    for order in itertools.permutations(names[:last] + names[last + 1 :]):
        views = views_of(heap.allocate_scattered(2 * GRANULE))
        views["tensor"].fill_(last + 1)
        for name in (*order, names[last]):
            assert heap.statistics()["blocks"] == 16 + 2
            for alive in views.values():
                if isinstance(alive, np.ndarray):
                    assert (alive == last + 1).all()
            del views[name]
            alive = None
        assert heap.statistics()["blocks"] == 16
        assert mapped(heap.name) == 1
    heap._check()
    del others


def test_it_outlives_the_heap_object_and_then_everything_goes():
    heap = new_heap()
    name, others = heap.name, comb(heap)
    tensor = torch.from_dlpack(heap.allocate_scattered(5 * GRANULE).array())
    del heap, others
    gc.collect()
    tensor.fill_(3)
    assert mapped(name) == 6
    assert (tensor == 3).all()
    del tensor
    assert mapped(name) == 0


@pytest.mark.parametrize("poison", [True, False])
def test_freed_pieces_are_poisoned_on_demand(poison):
    heap = new_heap(poison=poison)
    others = comb(heap)
    made = heap.allocate_scattered(2 * GRANULE)
    np.asarray(made.array())[:] = 1
    first = heap.base + made.pieces[0][0]
    del made
    again = heap.allocate(GRANULE)
    assert heap.base + again.offset == first
    assert (np.asarray(again.array()) == (0xDB if poison else 1)).all()
    del again, others


def test_memory_is_taken_as_for_blocks():
    heap = Heap(100 * MIB, new_name())
    low, high = heap.allocate(MIB), heap.allocate(60 * MIB)
    del low
    assert heap.statistics()["taken"] == 64 * MIB
    made = heap.allocate_scattered(40 * MIB)
    assert len(made.pieces) == 2
    assert heap.statistics()["taken"] == 100 * MIB
    blocks = os.fstat(heap.fd).st_blocks
    np.asarray(made.array())[:] = 1
    assert os.fstat(heap.fd).st_blocks == blocks, "a copy into it takes none"
    del high, made


# Any order


class Machine(RuleBasedStateMachine):
    """Blocks and scattered memory come and go; each keeps the byte it was filled with."""

    @initialize(allocator=st.sampled_from(["best_fit", "buddy"]))
    def start(self, allocator):
        self.heap = new_heap(24, allocator=allocator, poison=True)
        self.live = []  # (array, its byte, pieces)
        self.serial = 0

    def keep(self, made, nbytes, pieces):
        self.serial = self.serial % 200 + 1
        array = np.asarray(made.array())
        assert array.shape == (nbytes,)
        array[:] = self.serial
        self.live.append((array, self.serial, pieces))

    @rule(nbytes=st.integers(1, 5 * GRANULE))
    def block(self, nbytes):
        largest = self.heap.statistics()["largest_free"]
        made = self.heap.allocate(nbytes)
        assert (made is not None) == (nbytes <= largest)
        if made is not None:
            self.keep(made, nbytes, [(made.offset, nbytes)])

    @rule(nbytes=st.integers(1, 12 * GRANULE))
    def scattered(self, nbytes):
        before = self.heap.statistics()
        made = self.heap.allocate_scattered(nbytes)
        rounded = -(-nbytes // GRANULE) * GRANULE
        assert (made is not None) == (rounded <= before["free"])
        if made is not None:
            assert sum(part for _, part in made.pieces) == nbytes
            assert (len(made.pieces) == 1) == (rounded <= before["largest_free"])
            self.keep(made, nbytes, made.pieces)

    @precondition(lambda self: self.live)
    @rule(data=st.data())
    def drop(self, data):
        del self.live[data.draw(st.integers(0, len(self.live) - 1))]

    @invariant()
    def all_is_there(self):
        self.heap._check()
        for array, value, _ in self.live:
            assert (array == value).all()
        pieces = sorted(piece for *_, pieces in self.live for piece in pieces)
        for (offset, nbytes), (following, _) in itertools.pairwise(pieces):
            assert offset + nbytes <= following
        assert self.heap.statistics()["blocks"] == len(pieces)

    def teardown(self):
        if not hasattr(self, "heap"):
            return
        self.live.clear()
        self.heap._check()
        figures = self.heap.statistics()
        assert (figures["used"], figures["blocks"]) == (0, 0)
        largest = 16 if figures["largest_free"] != self.heap.nbytes else 24  # of the buddy
        assert figures["largest_free"] == largest * GRANULE
        assert mapped(self.heap.name) == 1


TestMachine = Machine.TestCase
TestMachine.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)


# Failures


def test_what_cannot_be_mapped_is_given_back():
    heap = new_heap()
    others = comb(heap)
    before = heap.statistics()
    saved, closed = os.dup(heap.fd), os.open(f"/proc/self/fd/{heap.fd}", os.O_RDONLY)
    os.dup2(closed, heap.fd, inheritable=False)  # may not be written to
    try:
        for _ in range(3):
            with pytest.raises(PermissionError, match="cannot map 65536 bytes a second time"):
                heap.allocate_scattered(5 * GRANULE)
    finally:
        os.dup2(saved, heap.fd, inheritable=False)
        os.close(saved)
        os.close(closed)
    assert heap.statistics() == before
    assert mapped(heap.name) == 1
    assert len(heap.allocate_scattered(5 * GRANULE).pieces) == 5
    del others


FORKED = """
import os
import numpy as np
from st2i_dask._core import GRANULE, Heap
heap = Heap(32 * GRANULE, "st2i-arena-fork", poison=True)
blocks = [heap.allocate(1) for _ in range(32)]
del blocks[::2]
made = heap.allocate_scattered(4 * GRANULE)
array = np.asarray(made.array())
array[:] = 5
before = heap.statistics()
child = os.fork()
if child == 0:
    try:
        heap.allocate_scattered(1)
        os._exit(1)
    except RuntimeError as error:
        assert "heap of its own" in str(error)
    assert (array == 5).all()
    del made, array
    maps = open("/proc/self/maps").read().count("st2i-arena-fork")
    os._exit(0 if maps == 1 else 2)
assert os.waitpid(child, 0)[1] == 0
assert (array == 5).all() and heap.statistics() == before
heap._check()
print("intact")
"""


def test_a_fork_cannot_free_or_allocate():
    done = subprocess.run(
        [sys.executable, "-c", FORKED], capture_output=True, text=True, timeout=60
    )
    assert (done.returncode, done.stdout) == (0, "intact\n"), done.stderr


AT_EXIT = """
import torch
from st2i_dask._core import GRANULE, Heap
heap = Heap(32 * GRANULE, "st2i-arena-exit")
blocks = [heap.allocate(1) for _ in range(32)]
del blocks[::2]
torch.kept = torch.from_dlpack(heap.allocate_scattered(4 * GRANULE).array())[1:]
print("end")
"""


def test_a_tensor_alive_at_exit_says_nothing():
    done = subprocess.run(
        [sys.executable, "-c", AT_EXIT], capture_output=True, text=True, timeout=60
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "end\n", "")
