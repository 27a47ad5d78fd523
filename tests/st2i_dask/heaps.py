"""For tests of heaps: names of their own, and what of them this process has mapped and open."""

from __future__ import annotations

import gc
import os
import sys
import threading
import time
import uuid
from contextlib import contextmanager

import numpy as np

from st2i_dask._core import GRANULE, Heap


def new_name():
    return f"st2i-arena-{uuid.uuid4().hex}"


def new_heap(granules=32, **options):
    return Heap(granules * GRANULE, new_name(), **options)


def comb(heap):
    """Every second granule of an empty heap, which leaves it no gap of two."""
    blocks = []
    while (block := heap.allocate(1)) is not None:
        blocks.append(block)
    del block
    return blocks[1::2]


def mapped(name="st2i-arena"):
    """Mappings of heaps whose names begin like this."""
    with open("/proc/self/maps") as maps:
        return sum(name in line for line in maps)


def open_files():
    return len(os.listdir("/proc/self/fd"))


def left_over():
    return mapped(), open_files(), threading.active_count()


@contextmanager
def nothing_left():
    """No mapping, file or thread of the body is left after it."""
    gc.collect()
    before = left_over()
    yield
    gc.collect()
    assert left_over() == before


def silence(work):
    """Runs it in a thread: the longest time that this one, which does nothing but look at the clock, did
    not run meanwhile, and how long the work took. Seconds."""
    span = []

    def timed():
        begun = time.monotonic()
        work()
        span[:] = [begun, time.monotonic()]

    ticks = []
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    try:
        worker = threading.Thread(target=timed)
        worker.start()
        while worker.is_alive():
            ticks.append(time.monotonic())
        worker.join()
    finally:
        sys.setswitchinterval(interval)
    begun, ended = span
    during = [begun, *(tick for tick in ticks if begun < tick < ended), ended]
    return max(np.diff(during)), ended - begun
