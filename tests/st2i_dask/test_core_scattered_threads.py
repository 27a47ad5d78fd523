"""Scattered memory that threads share, while others run and other processes read beside it."""

from __future__ import annotations

import subprocess
import sys
import threading

import numpy as np
import pytest
import torch

from st2i_dask._core import GRANULE, Peer

from .heaps import comb, mapped, new_heap, nothing_left, silence


@pytest.fixture(autouse=True)
def nothing_is_left():
    with nothing_left():
        yield


def test_threads_share_a_heap():
    heap = new_heap(64, poison=True)
    wrong, several = [], []

    def work(number):
        random = np.random.default_rng(number)
        live = []
        for _ in range(150):
            nbytes = int(random.integers(1, 9 * GRANULE))
            made = (
                heap.allocate_scattered(nbytes) if random.random() < 0.6 else heap.allocate(nbytes)
            )
            if made is not None:
                several.append(len(getattr(made, "pieces", ())) > 1)
                live.append(torch.from_dlpack(made.array()))
                live[-1].fill_(number + 1)
            while len(live) > 4 or (live and made is None):
                gone = live.pop(int(random.integers(len(live))))
                if not (gone == number + 1).all():
                    wrong.append(number)
                made = gone = 0

    torch.set_num_threads(1)
    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    heap._check()
    assert not wrong
    assert sum(several) > 10
    assert heap.statistics()["largest_free"] == heap.nbytes
    assert mapped(heap.name) == 1


def test_the_last_view_may_die_on_any_thread():
    heap = new_heap(128)
    others = comb(heap)
    views = [torch.from_dlpack(heap.allocate_scattered(2 * GRANULE).array()) for _ in range(20)]
    threads = [threading.Thread(target=views.pop) for _ in range(20)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    heap._check()
    assert heap.statistics()["blocks"] == len(others)
    assert mapped(heap.name) == 1


@pytest.mark.parametrize("what", ["allocating", "freeing"])
def test_the_interpreter_is_left_to_others(what):
    heap = new_heap(4096, poison=True)
    others = comb(heap)
    made = [heap.allocate_scattered(2048 * GRANULE)]

    def allocate():
        made.append(heap.allocate_scattered(2048 * GRANULE))

    for _ in range(5):  # another process may have the core for all of one call
        if what == "allocating":
            made.clear()
        longest, took = silence(allocate if what == "allocating" else made.clear)
        if took > 2e-3 and longest < took / 2:
            break
        if what == "freeing":
            allocate()
    else:
        raise AssertionError(f"no Python ran while {what} did")
    del others


READER = """
import sys
import numpy as np
from st2i_dask._core import Peer
pid, fd, name, offset, generation, nbytes = sys.argv[1:]
peer = Peer(int(pid), int(fd), name)
into = np.zeros(int(nbytes), np.uint8)
for _ in range(200):
    assert peer.get(int(offset), int(generation), int(nbytes), into.ctypes.data)
    assert (into == 7).all()
print("read", flush=True)
sys.stdin.readline()
print(peer.get(int(offset), int(generation), int(nbytes), into.ctypes.data))
"""


def test_a_peer_reads_a_block_next_to_scattered_memory():
    heap = new_heap(64, poison=True)
    others = comb(heap)
    block = others.pop(7)
    np.asarray(block.array())[:] = 7
    where = (heap.pid, heap.fd, heap.name, block.offset, block.generation, block.nbytes)
    child = subprocess.Popen(
        [sys.executable, "-c", READER, *map(str, where)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    with child:
        reader = threading.Thread(target=child.stdout.readline)
        reader.start()
        while reader.is_alive():
            made = heap.allocate_scattered(20 * GRANULE)
            np.asarray(made.array())[:] = 9
            del made
        assert child.poll() is None, "it has read"
        del block
        taken = heap.allocate_scattered(30 * GRANULE)
        assert any(start <= where[3] < start + part for start, part in taken.pieces)
        out, _ = child.communicate("\n", timeout=60)
    assert out == "False\n", "scattered memory is not the block"
    del taken, others
    heap._check()
    assert Peer(heap.pid, heap.fd, heap.name).nbytes == heap.nbytes
