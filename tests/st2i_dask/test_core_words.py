"""Signal words wake who waits, in this process and in others, and nobody waits past a time-out."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time

import pytest

from st2i_dask._core import GRANULE, Heap, Peer

from .heaps import new_name


def new_heap():
    return Heap(GRANULE, new_name())


def start(code, *args):
    return subprocess.Popen(
        [sys.executable, "-c", code, *map(str, args)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )


def end(process):
    process.kill()
    process.wait(10)
    process.stdin.close()
    process.stdout.close()


def test_values():
    heap = new_heap()
    word = heap.allocate_word()
    assert heap.value(word) == 0
    heap.signal(word, 2**32 - 1)
    assert heap.value(word) == 2**32 - 1
    peer = Peer(os.getpid(), heap.fd, heap.name)
    assert peer.value(word) == 2**32 - 1


def test_a_wait_ends_at_once_when_it_is_so_already():
    heap = new_heap()
    word = heap.allocate_word()
    heap.signal(word, 7)
    assert heap.wait(word, 7, 0) == 7
    assert heap.wait(word, 3, 0) == 7
    assert heap.wait(word, 8, 0) is None


@pytest.mark.parametrize("side", ["own", "peer"])
def test_a_wait_times_out_in_time(side):
    heap = new_heap()
    where = heap if side == "own" else Peer(os.getpid(), heap.fd, heap.name)
    word = heap.allocate_word()
    for seconds in (0.02, 0.25):
        before = time.monotonic()
        assert where.wait(word, 1, seconds) is None
        assert seconds * 0.98 <= time.monotonic() - before < seconds + 2


def test_a_signal_below_the_awaited_value_does_not_end_the_wait():
    heap = new_heap()
    word = heap.allocate_word()
    found = []
    waiter = threading.Thread(target=lambda: found.append(heap.wait(word, 3, 20)))
    waiter.start()
    for value in (1, 2):
        heap.signal(word, value)
        time.sleep(0.03)
        assert not found
    heap.signal(word, 4)
    waiter.join(10)
    assert found == [4]


def test_values_wrap():
    heap = new_heap()
    word = heap.allocate_word()
    heap.signal(word, 2)
    assert heap.wait(word, 2**32 - 3, 0) == 2  # five ahead
    heap.signal(word, 2**32 - 3)
    assert heap.wait(word, 2, 0) is None


WAITER = """
import sys
from st2i_dask._core import Peer
peer = Peer(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3])
print("ready", flush=True)
print(peer.wait(int(sys.argv[4]), int(sys.argv[5]), float(sys.argv[6])), flush=True)
"""


def test_a_signal_wakes_another_process():
    heap = new_heap()
    word = heap.allocate_word()
    waiter = start(WAITER, heap.pid, heap.fd, heap.name, word, 1, 30)
    try:
        assert waiter.stdout.readline() == "ready\n"
        time.sleep(0.2)
        before = time.monotonic()
        heap.signal(word, 6)
        assert waiter.stdout.readline() == "6\n"
        assert time.monotonic() - before < 5
    finally:
        end(waiter)


def test_a_waiter_that_is_killed_disturbs_nobody():
    heap = new_heap()
    word = heap.allocate_word()
    waiters = [start(WAITER, heap.pid, heap.fd, heap.name, word, 1, 30) for _ in range(2)]
    try:
        for waiter in waiters:
            assert waiter.stdout.readline() == "ready\n"
        time.sleep(0.1)
        waiters[0].kill()
        waiters[0].wait(10)
        heap.signal(word, 1)
        assert waiters[1].stdout.readline() == "1\n"
        heap._check()
    finally:
        for waiter in waiters:
            end(waiter)


OWNER = """
import sys
from st2i_dask._core import Heap
heap = Heap(1 << 20, sys.argv[1])
print(heap.pid, heap.fd, heap.allocate_word(), flush=True)
sys.stdin.read()
"""


def test_a_wait_for_an_owner_that_is_killed_times_out():
    name = new_name()
    owner = start(OWNER, name)
    try:
        pid, fd, word = map(int, owner.stdout.readline().split())
        peer = Peer(pid, fd, name)
        found = []
        waiter = threading.Thread(target=lambda: found.append(peer.wait(word, 1, 0.6)))
        waiter.start()
        time.sleep(0.1)
        owner.kill()
        waiter.join(10)
        assert found == [None]
        assert peer.value(word) == 0
    finally:
        end(owner)


@pytest.mark.parametrize("side", ["heap", "Peer(heap.pid, heap.fd, heap.name)"])
def test_control_c_gets_through_a_wait(side):
    waiter = start(
        "from st2i_dask._core import Heap, Peer\n"
        "heap = Heap(1 << 20, 'st2i-arena-interrupted'); word = heap.allocate_word()\n"
        f"where = {side}\n"
        "print('ready', flush=True)\n"
        "try:\n    where.wait(word, 1, 60)\nexcept KeyboardInterrupt:\n    print('interrupted', flush=True)"
    )
    try:
        assert waiter.stdout.readline() == "ready\n"
        time.sleep(0.2)
        before = time.monotonic()
        waiter.send_signal(signal.SIGINT)
        assert waiter.stdout.readline() == "interrupted\n"
        assert time.monotonic() - before < 2
        assert waiter.wait(10) == 0
    finally:
        end(waiter)


def test_control_c_gets_through_when_another_thread_takes_the_signal():
    """The kernel may give it to any thread; then the slice brings the waiter back."""
    waiter = start(
        "import signal, threading, time\n"
        "from st2i_dask._core import Heap\n"
        "heap = Heap(1 << 20, 'st2i-arena-interrupted'); word = heap.allocate_word()\n"
        "threading.Thread(target=time.sleep, args=(30,), daemon=True).start()\n"
        "signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT])\n"  # only in the main thread
        "print('ready', flush=True)\n"
        "try:\n    heap.wait(word, 1, 60)\nexcept KeyboardInterrupt:\n    print('interrupted', flush=True)"
    )
    try:
        assert waiter.stdout.readline() == "ready\n"
        time.sleep(0.2)
        waiter.send_signal(signal.SIGINT)
        assert waiter.stdout.readline() == "interrupted\n"
    finally:
        end(waiter)


def test_waiting_leaves_the_interpreter_to_others():
    heap = new_heap()
    word = heap.allocate_word()
    waiter = threading.Thread(target=heap.wait, args=(word, 1, 20))
    waiter.start()
    before = time.monotonic()
    while time.monotonic() - before < 0.3:  # would hang for 20 s
        pass
    assert waiter.is_alive()
    heap.signal(word, 1)
    waiter.join(10)
    assert not waiter.is_alive()


def test_a_word_is_given_to_one_and_comes_back_as_zero():
    heap = new_heap()
    first, second = heap.allocate_word(), heap.allocate_word()
    assert first != second
    heap.signal(first, 9)
    heap.free_word(first)
    assert heap.allocate_word() == first
    assert heap.value(first) == 0
    heap._check()


def test_words_run_out_and_come_back():
    heap = new_heap()
    words = [heap.allocate_word() for _ in range(16384)]
    assert sorted(words) == list(range(16384))
    with pytest.raises(RuntimeError, match="all 16384 signal words"):
        heap.allocate_word()
    heap.free_word(500)
    assert heap.allocate_word() == 500


def test_refusals():
    heap = new_heap()
    peer = Peer(os.getpid(), heap.fd, heap.name)
    word = heap.allocate_word()
    for unknown in (-1, 16384, 1 << 40):
        for call in (heap.value, heap.free_word, peer.value):
            with pytest.raises(IndexError, match=f"{unknown} does not exist.*16383"):
                call(unknown)
        for call in (heap.wait, peer.wait):
            with pytest.raises(IndexError, match=str(unknown)):
                call(unknown, 1, 0)
        with pytest.raises(IndexError, match=str(unknown)):
            heap.signal(unknown, 1)
    for call in (heap.value, heap.free_word):
        with pytest.raises(ValueError, match="5 is not allocated"):
            call(5)
    for value in (-1, 2**32):
        with pytest.raises(ValueError, match=f"{value} is not in 0 to"):
            heap.signal(word, value)
        for where in (heap, peer):
            with pytest.raises(ValueError, match=f"{value} is not in 0 to"):
                where.wait(word, value, 0)
    for timeout in (-0.1, float("nan")):
        with pytest.raises(ValueError, match="time-out"):
            heap.wait(word, 1, timeout)
