"""Blocks of a heap live exactly as long as something can see them."""

from __future__ import annotations

import gc
import itertools
import os
import subprocess
import sys
import threading

import numpy as np
import pytest
import torch

from st2i_dask._core import GRANULE, Heap, Peer

from .heaps import mapped, new_name

MIB = 1 << 20


def new_heap(nbytes=4 * MIB, **options):
    return Heap(nbytes, new_name(), **options)


def blocks_of(heap):
    return heap.statistics()["blocks"]


def run(code, *args, timeout=60):
    done = subprocess.run(
        [sys.executable, "-c", code, *args], capture_output=True, text=True, timeout=timeout
    )
    return done.returncode, done.stdout, done.stderr


# Lifetime


def views_of(block):
    """Everything that may keep a block: itself, arrays and tensors of it, and views of those."""
    tensor = torch.from_dlpack(block.array())
    array = np.asarray(block.array())
    return {
        "block": block,
        "exporter": block.array(),
        "tensor": tensor,
        "shaped": tensor[:96].view(torch.bfloat16).view(3, 16)[1].t(),
        "numpy": array,
        "slice": np.from_dlpack(block.array())[5:50].view(np.int8),
    }


@pytest.mark.parametrize("last", range(6))
def test_a_block_lives_as_long_as_its_last_view_whichever_that_is(last):
    heap = new_heap(poison=True)
    names = list(views_of(heap.allocate(1000)))
    for order in itertools.permutations(names[:last] + names[last + 1 :]):
        views = views_of(heap.allocate(1000))
        views["tensor"].fill_(last + 1)
        for name in (*order, names[last]):
            gc.collect(0)
            assert blocks_of(heap) == 1
            for alive in views.values():
                if isinstance(alive, np.ndarray):
                    assert (alive == last + 1).all()
            del views[name]
            alive = None
        assert blocks_of(heap) == 0
    heap._check()


def test_views_outlive_the_heap_object_and_then_everything_goes():
    files = len(os.listdir("/proc/self/fd"))
    heap = new_heap()
    name = heap.name
    tensor = torch.from_dlpack(heap.allocate(100).array())
    del heap
    gc.collect()
    tensor.fill_(3)
    assert mapped(name) == 1
    assert int(tensor.sum()) == 300
    del tensor
    assert mapped(name) == 0
    assert len(os.listdir("/proc/self/fd")) == files


def test_the_last_view_may_die_on_any_thread():
    heap = new_heap()
    views = [torch.from_dlpack(heap.allocate(10).array()) for _ in range(20)]
    threads = [threading.Thread(target=views.pop) for _ in range(20)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert blocks_of(heap) == 0
    heap._check()


def test_views_are_the_memory_itself():
    heap = new_heap()
    block = heap.allocate(GRANULE + 1)
    tensor, array = torch.from_dlpack(block.array()), np.from_dlpack(block.array())
    assert (tensor.shape, tensor.dtype, array.dtype) == ((GRANULE + 1,), torch.uint8, np.uint8)
    assert tensor.data_ptr() == array.ctypes.data == heap.base + block.offset
    assert array.flags.writeable
    array[7] = 9
    assert tensor[7] == 9


def test_a_tensor_alive_at_exit_says_nothing():
    code, out, err = run(
        "import torch; from st2i_dask._core import Heap; h = Heap(1 << 20, 'st2i-arena-exit')\n"
        "b = h.allocate(5); t = torch.from_dlpack(b.array()); torch.kept = t[1:]; print('end')"
    )
    assert (code, out, err) == (0, "end\n", "")


# Finding


def test_find_gives_the_live_block_that_contains_the_address():
    heap = new_heap()
    low, high = heap.allocate(GRANULE - 5), heap.allocate(2 * GRANULE)
    assert (low.offset, high.offset) == (0, GRANULE)
    assert heap.find(heap.base) is low
    assert heap.find(heap.base + low.nbytes - 1) is low
    assert heap.find(heap.base + low.nbytes) is None  # rounded up, but nobody's
    assert heap.find(heap.base + GRANULE) is high
    assert heap.find(heap.base + 3 * GRANULE - 1) is high
    for address in (0, heap.base - 1, heap.base + heap.nbytes, 2**64 - 1):
        assert heap.find(address) is None
    tensor = torch.from_dlpack(high.array())
    generation = high.generation
    del high
    assert heap.find(tensor.data_ptr()).generation == generation
    del tensor
    assert heap.find(heap.base + GRANULE) is None


# Threads


def test_four_threads_allocate_write_read_and_drop():
    heap = new_heap(16 * MIB, poison=True)
    generations, wrong = [], []

    def work(number):
        random = np.random.default_rng(number)
        mine = []
        for step in range(400):
            if len(mine) < 5 and random.random() < 0.6:
                block = heap.allocate(int(random.integers(1, 6 * GRANULE)))
                if block is not None:
                    generations.append(block.generation)
                    array = np.asarray(block.array())
                    array[:] = number
                    mine.append(array)
            elif mine:
                array = mine.pop(int(random.integers(len(mine))))
                found = heap.find(array.ctypes.data)
                if found is None or not (array == number).all():
                    wrong.append((number, step))

    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    heap._check()
    assert not wrong
    assert blocks_of(heap) == 0
    assert len(set(generations)) == len(generations) > 100
    assert 0 not in generations


# Memory


def test_an_idle_heap_costs_nothing_and_a_used_one_what_it_uses():
    heap = new_heap(1 << 30)
    assert heap.statistics()["taken"] == 0
    assert os.fstat(heap.fd).st_blocks * 512 < 64 * 1024
    block = heap.allocate(1)
    assert os.fstat(heap.fd).st_blocks * 512 == pytest.approx(32 * MIB, rel=0.01)
    assert heap.statistics()["taken"] == 32 * MIB
    for _ in range(200):  # what is freed is used again, from the start
        del block
        block = heap.allocate(20 * MIB)
        assert block.offset == 0
    assert heap.statistics()["taken"] == 32 * MIB
    more = heap.allocate(20 * MIB)
    assert more.offset + more.nbytes <= heap.statistics()["taken"] == 64 * MIB


def test_freed_memory_is_poisoned_on_demand():
    for poison, byte in ((True, 0xDB), (False, 1)):
        heap = new_heap(poison=poison)
        np.asarray(heap.allocate(1000).array())[:] = 1
        again = np.asarray(heap.allocate(1000).array())
        assert (again == byte).all()


def test_a_full_heap_says_so_and_recovers():
    heap = new_heap(2 * GRANULE)
    first, second = heap.allocate(1), heap.allocate(GRANULE)
    assert heap.allocate(1) is None
    assert heap.allocate(1 << 62) is None
    del first, second
    assert heap.allocate(2 * GRANULE) is not None


def test_allocators_are_selectable():
    heap = new_heap(16 * GRANULE, allocator="buddy")
    block = heap.allocate(3 * GRANULE)
    assert heap.statistics()["used"] == 4 * GRANULE
    assert block.nbytes == 3 * GRANULE


# Refusals


@pytest.mark.parametrize("nbytes", [0, -1, GRANULE - 1, 1 << 60])
def test_sizes_are_refused_with_the_limits(nbytes):
    with pytest.raises(ValueError, match=rf"heap of {nbytes} bytes .* {GRANULE} .* at most \d+"):
        new_heap(nbytes)


@pytest.mark.parametrize("name", ["", "x" * 201, "a\0b"])
def test_names_are_refused(name):
    with pytest.raises(ValueError, match="1 to 200 bytes"):
        Heap(GRANULE, name)


def test_other_values_are_refused():
    with pytest.raises(ValueError, match=r"first_fit.*best_fit, buddy"):
        new_heap(allocator="first_fit")
    heap = new_heap()
    for nbytes in (0, -1):
        with pytest.raises(ValueError, match=f"block of {nbytes} bytes"):
            heap.allocate(nbytes)
    assert blocks_of(heap) == 0
    heap._check()


def test_a_refused_heap_leaves_nothing():
    files = len(os.listdir("/proc/self/fd"))
    for _ in range(5):
        with pytest.raises(ValueError, match="first_fit"):
            new_heap(allocator="first_fit")
    assert len(os.listdir("/proc/self/fd")) == files


# Forks

FORKED = """
import os
import numpy as np
from st2i_dask._core import Heap, Peer
heap = Heap(1 << 20, "st2i-arena-fork", poison=True)
block = heap.allocate(100)
np.asarray(block.array())[:] = 5
offset, generation = block.offset, block.generation
child = os.fork()
if child == 0:
    for refused in (lambda: heap.allocate(1), heap.allocate_word):
        try:
            refused()
            os._exit(1)
        except RuntimeError as error:
            assert "heap of its own" in str(error)
    del block
    os._exit(0)
assert os.waitpid(child, 0)[1] == 0
into = np.zeros(100, np.uint8)
assert Peer(os.getpid(), heap.fd, heap.name).get(offset, generation, 100, into.ctypes.data)
assert (into == 5).all() and heap.statistics()["blocks"] == 1
print("intact")
"""


def test_a_fork_cannot_free_or_allocate():
    code, out, err = run(FORKED)
    assert (code, out) == (0, "intact\n"), err


def test_a_peer_in_the_same_process_sees_frees():
    heap = new_heap()
    peer = Peer(os.getpid(), heap.fd, heap.name)
    block = heap.allocate(10)
    into = np.zeros(10, np.uint8)
    ticket = (block.offset, block.generation, 10, into.ctypes.data)
    assert peer.get(*ticket)
    del block
    assert not peer.get(*ticket)
    again = heap.allocate(10)
    assert again.offset == ticket[0]
    assert not peer.get(*ticket)
