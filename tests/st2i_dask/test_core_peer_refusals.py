"""What a peer refuses: arguments outside of the heap, and whatever is not the heap it was told of."""

from __future__ import annotations

import fcntl
import os
import struct
import subprocess
import sys

import numpy as np
import pytest

from st2i_dask._core import GRANULE, Heap, Peer

from .heaps import new_name, nothing_left


@pytest.fixture(autouse=True)
def nothing_is_left():
    with nothing_left():
        yield


@pytest.mark.parametrize(
    ("arguments", "error", "match"),
    [
        ((-GRANULE, 1, 1), IndexError, "-65536"),
        ((4 * GRANULE, 1, 1), IndexError, "not in a heap of 262144"),
        ((1 << 62, 1, 1), IndexError, "not in a heap"),
        ((0, 1, 0), IndexError, "not in a heap"),
        ((0, 1, -5), IndexError, "-5"),
        ((0, 1, 4 * GRANULE + 1), IndexError, "262145"),
        ((GRANULE, 1, (1 << 63) - 1), IndexError, "not in a heap"),
        ((5, 1, 1), ValueError, "multiple of 65536"),
        ((0, 0, 1), ValueError, "generation 0"),
    ],
)
def test_arguments_outside_are_refused(arguments, error, match):
    heap = Heap(4 * GRANULE, new_name())
    block = heap.allocate(4 * GRANULE)
    assert block.generation == 1
    peer = Peer(heap.pid, heap.fd, heap.name)
    into = np.zeros(1, np.uint8)
    with pytest.raises(error, match=match):
        peer.get(*arguments, into.ctypes.data)
    with pytest.raises(ValueError, match="address 0"):
        peer.get(0, 1, 1, 0)
    assert not into.any()


def test_a_peer_that_is_not_there_or_another_is_an_os_error():
    heap = Heap(GRANULE, new_name())
    gone = subprocess.Popen([sys.executable, "-c", ""])
    gone.wait(30)
    read_end, write_end = os.pipe()
    try:
        for pid, fd, name in [
            (gone.pid, 3, heap.name),
            (heap.pid, 9999, heap.name),
            (heap.pid, -1, heap.name),
            (-1, heap.fd, heap.name),
            (heap.pid, heap.fd, heap.name + "x"),
            (heap.pid, heap.fd, heap.name[:-1]),
            (heap.pid, read_end, heap.name),  # opening it for reading could wait for ever
            (heap.pid, 0, heap.name),
        ]:
            with pytest.raises(OSError, match=r"/proc/-?\d+/fd"):
                Peer(pid, fd, name)
    finally:
        os.close(read_end)
        os.close(write_end)
    with pytest.raises(ValueError, match="1 to 200"):
        Peer(heap.pid, heap.fd, "")


HEADER = struct.Struct("<QIIQQ")
MAGIC = 0x616E657261693274
SIZE = 4096 + 3 * GRANULE  # more than enough, and wrong


@pytest.mark.parametrize(
    ("header", "sealed", "match"),
    [
        (HEADER.pack(MAGIC, 1, GRANULE, GRANULE, SIZE), False, "not sealed"),
        (HEADER.pack(MAGIC + 1, 1, GRANULE, GRANULE, SIZE), True, "not an arena"),
        (b"short", True, "not an arena"),
        (HEADER.pack(MAGIC, 2, GRANULE, GRANULE, SIZE), True, "version 2"),
        (HEADER.pack(MAGIC, 1, 4096, GRANULE, SIZE), True, "version"),
        (HEADER.pack(MAGIC, 1, GRANULE, 0, SIZE), True, "size"),
        (HEADER.pack(MAGIC, 1, GRANULE, GRANULE + 1, SIZE), True, "size"),
        (HEADER.pack(MAGIC, 1, GRANULE, 1 << 63, SIZE), True, "size"),
        (HEADER.pack(MAGIC, 1, GRANULE, GRANULE, SIZE), True, "size"),
    ],
)
def test_shared_memory_that_is_no_arena_is_an_os_error(header, sealed, match):
    name = new_name()
    fd = os.memfd_create(name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        os.write(fd, header)
        if header != b"short":
            os.ftruncate(fd, SIZE)
        if sealed:
            fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW)
        with pytest.raises(OSError, match=match):
            Peer(os.getpid(), fd, name)
    finally:
        os.close(fd)


def test_the_segment_is_sealed_and_closed_on_exec():
    heap = Heap(GRANULE, new_name())
    with pytest.raises(PermissionError):
        os.ftruncate(heap.fd, 0)
    with pytest.raises(PermissionError):
        os.ftruncate(heap.fd, 1 << 30)
    assert not os.get_inheritable(heap.fd)
    assert os.readlink(f"/proc/self/fd/{heap.fd}") == f"/memfd:{heap.name} (deleted)"
