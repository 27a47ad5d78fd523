"""Streamed outputs: items are read while they are made, by board or by message, and losses are news."""

from __future__ import annotations

import gc
import os
import pickle
import signal
import threading
import time

import numpy as np
import pytest
import torch

import st2i_dask as st2i
from st2i_dask.errors import ProducerLostError
from st2i_dask.outputs import TaskOutputs, packing
from worker_plugin.arena import Arena
from worker_plugin.host_heap import HostHeap
from worker_plugin.streams import Boards, Opened, StreamReader
from worker_plugin.tensor_store import SMALL, TensorStore

from .tensors import (
    TIMEOUT,
    Noise,
    Reader,
    Timed,
    cluster,
    moved,
    read_in_order,
    streamed,
    used,
)

MANY = SMALL // 4  # float32 elements: the least that goes into the arena


@pytest.fixture
def stores():
    made = [TensorStore(Arena(HostHeap(1 << 22, poison=True))) for _ in range(2)]
    yield made
    gc.collect()
    for store in made:
        store.arena.heap._check()
        assert store.arena.heap.used_bytes == 0, "a block is still held"
        store.arena.heap.close()


class Reading:
    """A reader of a board, and what it asked."""

    def __init__(self, boards, store, key="k", export=0):
        self.asked, self.lost = [], None
        board = boards.get(key, export)
        opened = Opened.parse(board.length, board.address()) if board is not None else None

        def ask_item(index):
            self.asked.append(index)
            return TaskOutputs((f"asked {index}",))

        def check():
            if self.lost:
                raise ProducerLostError(self.lost)

        self.reader = StreamReader(store, lambda: opened, ask_item, check)
        self.length = self.reader.length()


def test_items_are_read_as_soon_as_they_are_put(stores):
    producer, consumer = stores
    boards, held = Boards(producer), []
    board = boards.open("k", held, 0, 3)
    reading = Reading(boards, consumer)
    assert reading.length == 3
    got, times = [], []

    def read():
        for index in range(3):
            got.append(reading.reader.item(index))
            times.append(time.monotonic())

    thread = threading.Thread(target=read)
    thread.start()
    put = []
    for index in range(3):
        time.sleep(0.15)
        assert len(got) == index, "an item was read before it was put"
        put.append(time.monotonic())
        stored = board.put(index, torch.full((MANY,), float(index)))
        assert producer.holds(stored)
    thread.join(TIMEOUT)
    assert [item[0].item() for item in got] == [0.0, 1.0, 2.0]
    assert all(read - made < 0.1 for made, read in zip(put, times, strict=True))
    assert reading.asked == []
    assert consumer.holds(got[0])
    del got[:], stored


def test_small_items_nests_and_objects_travel_on_the_board(stores):
    boards, held = Boards(stores[0]), []
    board = boards.open("k", held, 0, 2)
    board.put(0, {"a": [torch.arange(3.0)], "b": "text"})
    board.put(1, (torch.ones(MANY), torch.zeros(MANY)))
    reading = Reading(boards, stores[1])
    first, second = reading.reader.item(0), reading.reader.item(1)
    assert first["a"][0].tolist() == [0.0, 1.0, 2.0]
    assert first["b"] == "text"
    assert torch.equal(second[0], torch.ones(MANY))
    assert torch.equal(second[1], torch.zeros(MANY))
    assert reading.asked == []


def test_what_the_board_cannot_hold_is_asked_for(stores):
    boards, held = Boards(stores[0]), []
    board = boards.open("k", held, 0, 2)
    board.put(0, "x" * 5000)
    board.put(1, "short")
    reading = Reading(boards, stores[1])
    assert reading.reader.item(0) == "asked 0"
    assert reading.reader.item(1) == "short"


def test_without_room_for_a_board_every_item_is_asked_for(stores):
    filling = stores[0].keep(torch.zeros(1 << 20))
    boards, held = Boards(stores[0]), []
    board = boards.open("k", held, 0, 1)
    board.put(0, "item")
    assert board.address() is None
    assert Reading(boards, stores[1]).reader.item(0) == "asked 0"
    del filling


def test_what_a_reader_pulls_of_a_board_grows_with_the_items_alone(stores):
    """Not with their square: an item costs at most a block of the board, wherever it lies on it."""
    boards, held = Boards(stores[0]), []
    board = boards.open("k", held, 0, 300)
    for number in range(300):
        board.put(number, number)
    reading, pulled = Reading(boards, stores[1]), []
    pull = stores[1].arena.heap.pull

    def counting(ticket, into):
        pulled.append(ticket.nbytes)
        return pull(ticket, into)

    stores[1].arena.heap.pull = counting
    assert [reading.reader.item(number) for number in range(300)] == list(range(300))
    del stores[1].arena.heap.pull
    assert len(pulled) == 300
    assert max(pulled) <= 1 << 16
    assert reading.asked == []


def test_a_loss_ends_the_wait(stores):
    boards, held = Boards(stores[0]), []
    boards.open("k", held, 0, 1)
    reading = Reading(boards, stores[1])
    threading.Timer(0.2, lambda: setattr(reading, "lost", "its worker is gone")).start()
    start = time.monotonic()
    with pytest.raises(ProducerLostError, match="its worker is gone"):
        reading.reader.item(0)
    assert 0.1 < time.monotonic() - start < 2


def test_the_wait_is_bounded(stores, monkeypatch):
    monkeypatch.setattr("worker_plugin.streams.WAIT_SECONDS", 0.3)
    boards, held = Boards(stores[0]), []
    boards.open("k", held, 0, 1)
    with pytest.raises(ProducerLostError, match=r"gave nothing for 0\.3 s"):
        Reading(boards, stores[1]).reader.item(0)


def test_a_board_that_is_gone_is_a_loss_whatever_its_word_counts(stores):
    boards, held = Boards(stores[0]), []
    board = boards.open("k", held, 0, 1)
    word = board._board.word
    reading = Reading(boards, stores[1])
    held.clear()
    del board
    assert boards.get("k", 0) is None
    other = boards.open("other", held, 0, 1)
    assert other._board.word == word, "the word is used again"
    other.put(0, "another stream's")
    with pytest.raises(ProducerLostError, match="board is not there"):
        reading.reader.item(0)


def test_an_item_whose_block_is_gone_is_a_loss(stores):
    boards, held = Boards(stores[0]), []
    board = boards.open("k", held, 0, 1)
    board.put(0, torch.ones(MANY))
    reading = Reading(boards, stores[1])
    board.items.clear()
    with pytest.raises(ProducerLostError, match="not there any more"):
        reading.reader.item(0)


def test_a_new_run_takes_the_place_of_an_old_one(stores):
    boards, old, new = Boards(stores[0]), [], []
    boards.open("k", old, 0, 1)
    board = boards.open("k", new, 0, 2)
    old.clear()
    assert boards.get("k", 0) is board


def test_held_boards_do_not_travel(stores):
    outputs = TaskOutputs((1,))
    outputs.held = [object()]
    with packing(stores[0].pack):
        assert pickle.loads(pickle.dumps(outputs)).held is None


# -- live --------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def two():
    with cluster(2) as client:
        streamed.submit(client, seed=0).result(timeout=TIMEOUT)  # warm: imports
        yield client


def check(future, seed, **options):
    image, times = future.result(timeout=TIMEOUT)
    np.testing.assert_array_equal(image, read_in_order(seed, **options))
    return times


def test_the_consumer_reads_while_the_producer_runs(two):
    def one_step(seed: int):
        from .tensors import Noise, Reader, Streamed, Timed, both

        x = Noise()(seed, 256, 0.0)
        made = Streamed()(x, 4, 0.1)
        result = Reader()(x, made.samples)
        return Timed()(result.read, both([made.times], result.times))

    workflow = st2i.workflow(name="streams-one-step", replace=True)(one_step)
    before = moved(two, "host")
    _, (made, read) = workflow.submit(two, seed=1).result(timeout=TIMEOUT)
    # made[0]: the producer's start; made[i]: just before item i is published.
    assert read[0] < made[-1], "the first item was read only after the producer had ended"
    assert all(r > m for m, r in zip(made[1:], read, strict=True))
    assert moved(two, "host") - before >= 4 << 20


def test_many_at_once_leave_nothing(two):
    futures = [streamed.submit(two, seed=s, seconds=0.01) for s in range(8)]
    for seed, future in enumerate(futures):
        check(future, seed)
    del futures, future
    assert set(used(two).values()) == {0}


def test_by_message_where_the_heap_is_out_of_reach(two):
    def blind(dask_worker):
        plugin = dask_worker.plugins["st2i-worker"]
        plugin.store.arena.heap.reach = lambda other: False
        plugin.exchange._reachable.clear()

    def see(dask_worker):
        plugin = dask_worker.plugins["st2i-worker"]
        del plugin.store.arena.heap.reach
        plugin.exchange._reachable.clear()

    two.run(blind)
    try:
        by_host, by_comm = moved(two, "host"), moved(two, "comm")
        check(streamed.submit(two, seed=2), 2)
        assert moved(two, "host") == by_host
        assert moved(two, "comm") - by_comm >= 8 << 20
    finally:
        two.run(see)


@pytest.mark.parametrize("victim", [0, 1])
@pytest.mark.parametrize("moment", [0.12, 0.3])
def test_kill_9_in_the_middle_of_a_stream(two, victim, moment):
    futures = [streamed.submit(two, seed=s, seconds=0.06) for s in range(2)]
    time.sleep(moment)
    os.kill(sorted(two.run(os.getpid).values())[victim], signal.SIGKILL)
    for seed, future in enumerate(futures):
        check(future, seed)
    two.wait_for_workers(2, timeout=TIMEOUT)
    del futures, future
    assert set(used(two).values()) == {0}


def test_cancelled_in_the_middle_of_a_stream(two):
    future = streamed.submit(two, seed=0, seconds=0.2)
    time.sleep(0.5)
    future.cancel()
    check(streamed.submit(two, seed=1, seconds=0.01), 1)
    del future
    assert set(used(two).values()) == {0}


def test_attached_anew_in_the_middle_of_streams(two):
    """Every worker gets another arena; what ran meanwhile runs again."""
    futures = [streamed.submit(two, seed=s, seconds=0.08) for s in range(3)]
    for size in ("32 MiB", "64 MiB"):
        time.sleep(0.4)
        st2i.attach(two, arena_bytes=size)
    for seed, future in enumerate(futures):
        check(future, seed)
    del futures, future
    assert set(used(two).values()) == {0}


class RaisesMidway(st2i.ModelFn):
    def setup_io(self):
        self.add_input("x")
        self.add_output("samples")

    def execute(self, model_components, x):
        samples = st2i.stream("samples", 3)
        samples.append(x + 1)
        time.sleep(1.0)
        raise ZeroDivisionError("midway")


def test_a_cancelled_consumer_is_released_and_leaves_nothing(two):
    """Nobody tells it of its producer's failure any more."""

    def midway(seed: int):
        x = Noise()(seed, 256, 0.0)
        result = Reader()(x, RaisesMidway()(x))
        return Timed()(result.read, result.times)

    workflow = st2i.workflow(name="streams-midway", replace=True)(midway)
    future = workflow.submit(two, seed=1)
    time.sleep(0.5)
    future.cancel()
    del future
    time.sleep(1.5)
    busy = two.run(lambda dask_worker: dask_worker.state.executing_count)
    assert set(busy.values()) == {0}
    assert set(used(two).values()) == {0}
    check(streamed.submit(two, seed=1, seconds=0.01), 1)
