"""One-sided reads between processes: right bytes or none, whatever the owner does meanwhile."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
import time

import numpy as np
import pytest

from st2i_dask._core import GRANULE, Heap, Peer

from .heaps import mapped, new_name, nothing_left, open_files, silence

MIB = 1 << 20


@pytest.fixture(autouse=True)
def nothing_is_left():
    with nothing_left():
        yield


@contextlib.contextmanager
def process(code, *args):
    """A Python process; it ends with the block."""
    child = subprocess.Popen(
        [sys.executable, "-c", code, *map(str, args)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        yield child
    finally:
        child.kill()
        child.wait(10)
        with contextlib.suppress(BrokenPipeError):
            child.stdin.close()
        child.stdout.close()


def tell(child, value):
    child.stdin.write(json.dumps(value) + "\n")
    child.stdin.flush()


def hear(child):
    return json.loads(child.stdout.readline())


OWNER = """
import json, sys
import numpy as np
from st2i_dask._core import Heap
heap = Heap(1 << 28, sys.argv[1])
blocks = []
for line in sys.stdin:
    nbytes = json.loads(line)
    if nbytes:
        blocks.append(heap.allocate(nbytes))
        np.asarray(blocks[-1].array())[:] = np.arange(nbytes) % 251
        print(json.dumps([heap.pid, heap.fd, blocks[-1].offset, blocks[-1].generation]), flush=True)
    else:
        blocks.clear()
        print("null", flush=True)
"""


def pattern(nbytes):
    return (np.arange(nbytes) % 251).astype(np.uint8)


def test_a_block_of_another_process_is_read_until_it_is_freed():
    name = new_name()
    with process(OWNER, name) as owner:
        for nbytes in (1, GRANULE, 5 * MIB + 3):
            tell(owner, nbytes)
            pid, fd, offset, generation = hear(owner)
            into = np.zeros(nbytes + 1, np.uint8)
            peer = Peer(pid, fd, name)
            assert peer.nbytes == 1 << 28
            assert peer.get(offset, generation, nbytes, into.ctypes.data)
            assert (into[:-1] == pattern(nbytes)).all()
            assert into[-1] == 0
            assert not peer.get(offset, generation + 1, nbytes, into.ctypes.data)
            tell(owner, 0)
            assert hear(owner) is None
            assert not peer.get(offset, generation, nbytes, into.ctypes.data)


def test_reading_takes_no_memory_from_the_owner_and_leaves_no_file_open():
    heap = Heap(256 * MIB, new_name())
    block = heap.allocate(10)
    files = open_files()
    peer = Peer(heap.pid, heap.fd, heap.name)
    assert open_files() == files
    before = os.fstat(heap.fd).st_blocks
    into = np.zeros(10, np.uint8)
    assert peer.get(block.offset, block.generation, 10, into.ctypes.data)
    # A stale ticket for memory that was never taken does not take it.
    assert not peer.get(128 * MIB, 77, 64 * MIB, into.ctypes.data)
    assert os.fstat(heap.fd).st_blocks <= before + 16  # pages of the table of generations


def resident_of_peers():
    """Bytes of other heaps' maps that pages are mapped for; only those are read-only."""
    total, counts = 0, False
    with open("/proc/self/smaps") as maps:
        for line in maps:
            if "-" in line.split()[0]:
                counts = "st2i-arena" in line and "r--s" in line
            elif counts and line.startswith("Rss:"):
                total += int(line.split()[1]) * 1024
    return total


def test_what_is_read_is_mapped_and_nothing_else():
    heap = Heap(64 * MIB, new_name())
    small, large = heap.allocate(GRANULE), heap.allocate(20 * MIB)
    peer = Peer(heap.pid, heap.fd, heap.name)
    into = np.zeros(20 * MIB, np.uint8)
    for block, least, most in ((small, GRANULE, MIB), (large, 20 * MIB, 22 * MIB)):
        assert peer.get(block.offset, block.generation, block.nbytes, into.ctypes.data)
        assert least <= resident_of_peers() < most


# Reuse under readers: contents are a function of the generation.

READER = """
import json, sys
import numpy as np
from st2i_dask._core import Peer
peer = Peer(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3])
print(json.dumps("ready"), flush=True)
good = gone = wrong = 0
into = np.zeros(12 << 20, np.uint8)
for line in sys.stdin:
    ticket = json.loads(line)
    if ticket is None:
        break
    offset, generation, nbytes = ticket
    while peer.get(offset, generation, nbytes, into.ctypes.data):
        good += 1
        wrong += int((into[:nbytes] != generation % 200).any())
    gone += 1
print(json.dumps([good, gone, wrong]), flush=True)
"""


@pytest.mark.parametrize("readers", [1, 3])
def test_no_reader_takes_freed_or_reused_memory_for_good(readers):
    heap = Heap(32 * MIB, new_name(), poison=True)
    random = np.random.default_rng(readers)
    with contextlib.ExitStack() as stack:
        children = [
            stack.enter_context(process(READER, heap.pid, heap.fd, heap.name))
            for _ in range(readers)
        ]
        for child in children:
            assert hear(child) == "ready"
        for _ in range(150):
            block = heap.allocate(int(random.integers(1, 12 * MIB)))  # both ways of copying
            np.asarray(block.array())[:] = block.generation % 200  # never the poison
            for child in children:
                tell(child, [block.offset, block.generation, block.nbytes])
            time.sleep(random.choice([0.001, 0.006]))
            del block
        for child in children:
            tell(child, None)
        results = [hear(child) for child in children]
    heap._check()
    assert [wrong for _, _, wrong in results] == [0] * readers
    assert [gone for _, gone, _ in results] == [150] * readers
    # How often each came to read is the machine's affair.
    assert all(good for good, _, _ in results)
    assert sum(good for good, _, _ in results) >= 50


# Deaths


def test_a_map_outlives_the_killed_owner_and_a_new_one_is_refused():
    name = new_name()
    nbytes = 32 * MIB
    with process(OWNER, name) as owner:
        tell(owner, nbytes)
        pid, fd, offset, generation = hear(owner)
        peer = Peer(pid, fd, name)
        into, expected = np.zeros(nbytes, np.uint8), pattern(nbytes)
        results, killed = [], threading.Event()

        def read():
            after = 0
            while after < 3:  # copies that began after the death
                after += killed.is_set()
                into[:] = 0
                good = peer.get(offset, generation, nbytes, into.ctypes.data)
                results.append(good and (into == expected).all())

        reader = threading.Thread(target=read)
        reader.start()
        while len(results) < 2:
            time.sleep(0.001)
        owner.send_signal(signal.SIGKILL)
        owner.wait(10)
        killed.set()
        reader.join(30)
        assert len(results) >= 5
        assert all(results)
        with pytest.raises(FileNotFoundError, match=name):
            Peer(pid, fd, name)


COPIER = """
import sys
import numpy as np
from st2i_dask._core import Peer
pid, fd, name, offset, generation, nbytes = sys.argv[1:]
peer = Peer(int(pid), int(fd), name)
into = np.zeros(int(nbytes), np.uint8)
print("1", flush=True)
while True:
    assert peer.get(int(offset), int(generation), int(nbytes), into.ctypes.data)
"""


def test_a_reader_killed_while_copying_leaves_the_owner_alone():
    heap = Heap(64 * MIB, new_name(), poison=True)
    block = heap.allocate(48 * MIB)
    np.asarray(block.array())[:] = 1
    args = (heap.pid, heap.fd, heap.name, block.offset, block.generation, block.nbytes)
    for _ in range(2):
        with process(COPIER, *args) as reader:
            assert hear(reader) == 1
            time.sleep(0.05)
            reader.send_signal(signal.SIGKILL)
            reader.wait(10)
        heap._check()
    assert (np.asarray(block.array()) == 1).all()
    del block
    assert heap.allocate(64 * MIB) is not None


def test_the_heap_of_a_killed_owner_goes_with_its_last_reader():
    name = new_name()
    with process(OWNER, name) as owner:
        tell(owner, 20 * MIB)
        pid, fd, offset, generation = hear(owner)
        peer = Peer(pid, fd, name)
        owner.kill()
        owner.wait(10)
    into = np.zeros(20 * MIB, np.uint8)
    assert peer.get(offset, generation, into.nbytes, into.ctypes.data)
    assert mapped() == 1
    del peer
    assert mapped() == 0


# The interpreter


def test_copying_leaves_the_interpreter_to_others():
    heap = Heap(128 * MIB, new_name())
    block = heap.allocate(128 * MIB)
    peer = Peer(heap.pid, heap.fd, heap.name)
    into = np.zeros(block.nbytes, np.uint8)
    ticket = (block.offset, block.generation, block.nbytes, into.ctypes.data)
    for _ in range(5):  # another process may have the core for all of one copy
        read = []
        longest, took = silence(lambda read=read: read.append(peer.get(*ticket)))
        assert read == [True]
        if longest < took / 2:
            return
    raise AssertionError("no Python ran while a copy did")


def test_threads_share_a_peer():
    heap = Heap(64 * MIB, new_name())
    blocks = [heap.allocate(4 * MIB) for _ in range(12)]
    for number, block in enumerate(blocks):
        np.asarray(block.array())[:] = number
    peer = Peer(heap.pid, heap.fd, heap.name)
    wrong = []

    def read(first):
        into = np.zeros(4 * MIB, np.uint8)
        for number in range(first, first + 12):
            block = blocks[number % 12]
            good = peer.get(block.offset, block.generation, block.nbytes, into.ctypes.data)
            if not good or not (into == number % 12).all():
                wrong.append(number)

    threads = [threading.Thread(target=read, args=(3 * number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong
