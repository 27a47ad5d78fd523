"""Copies between addresses: every byte, none beside them, and other threads run meanwhile."""

from __future__ import annotations

import threading
import time

import numpy as np
import pytest

from st2i_dask import _core

MIB = 1 << 20


@pytest.mark.parametrize("nbytes", [0, 1, 63, 4096, 8 * MIB - 1, 8 * MIB, 8 * MIB + 65])
@pytest.mark.parametrize(("to_at", "from_at"), [(0, 0), (3, 8), (64, 1)])
def test_all_bytes_and_none_beside_them(nbytes, to_at, from_at):
    source = np.random.default_rng(nbytes).integers(0, 256, from_at + nbytes, np.uint8)
    into = np.full(to_at + nbytes + 64, 0xAB, np.uint8)
    _core.copy(into.ctypes.data + to_at, source.ctypes.data + from_at, nbytes)
    assert np.array_equal(into[to_at : to_at + nbytes], source[from_at:])
    assert (into[:to_at] == 0xAB).all()
    assert (into[to_at + nbytes :] == 0xAB).all()


@pytest.mark.parametrize("arguments", [(-1, 0, 0), (0, -1, 0), (0, 0, -1), (0, 0), (0, "1", 0)])
def test_what_is_no_address_or_size_is_refused(arguments):
    with pytest.raises(TypeError):
        _core.copy(*arguments)


def test_other_threads_run_meanwhile():
    source, into = np.ones(256 * MIB, np.uint8), np.zeros(256 * MIB, np.uint8)
    started, steps = threading.Event(), []

    def copy():
        started.set()
        _core.copy(into.ctypes.data, source.ctypes.data, into.nbytes)
        steps.append(None)

    thread = threading.Thread(target=copy)
    thread.start()
    started.wait(10)
    ticks = 0
    while not steps:
        time.sleep(0.001)
        ticks += 1
    thread.join(10)
    # Holding the GIL it would let this thread run at most once or twice.
    assert ticks >= 5
    assert into.all()
