"""Rings: who reads them gets every item in order, and they keep no more than somebody may still need."""

from __future__ import annotations

import gc
import threading
import time
import weakref

import pytest
import torch

from st2i_dask.outputs import TaskOutputs
from worker_plugin.arena import Arena
from worker_plugin.host_heap import HostHeap
from worker_plugin.rings import Circle, GangBroken, Ring, RingReader
from worker_plugin.tensor_store import SMALL, TensorStore

MANY = SMALL // 4  # float32 elements: the least that goes into the arena


@pytest.fixture
def stores():
    made = [TensorStore(Arena(HostHeap(1 << 22, poison=True))) for _ in range(3)]
    yield made
    gc.collect()
    while made:  # pytest keeps the list for a while
        heap = made.pop().arena.heap
        heap._check()
        assert heap.used_bytes == 0, "a block is still held"
        heap.close()


def nothing():
    pass


def circles(stores, check=nothing, asked=None):
    rings = [Ring(store) for store in stores]

    def ask(ring, index, timeout_s):
        asked.append(index)
        deadline = time.monotonic() + timeout_s
        while (found := ring.item(index)) is None:
            if time.monotonic() > deadline:
                raise TimeoutError
            time.sleep(0.001)
        return found

    def reader(store, ring):
        weak = weakref.ref(ring)
        return RingReader(store, ring.address(), lambda *about: ask(weak(), *about), check)

    return [
        Circle(rank, rings[rank], [reader(store, r) for r in rings if r is not rings[rank]])
        for rank, store in enumerate(stores)
    ]


def together(work, circles):
    """What `work(circle)` gives in a thread for each."""
    found = [None] * len(circles)

    def one(circle):
        found[circle.rank] = work(circle)

    threads = [threading.Thread(target=one, args=(circle,)) for circle in circles]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
        assert not thread.is_alive()
    return found


@pytest.mark.parametrize("size", [1, 2, 3])
def test_all_collect_what_all_published_in_any_tempo(stores, size):
    def work(circle):
        for number in range(50):
            if number % 7 == circle.rank:
                time.sleep(0.005)
            circle.publish((torch.full((MANY,), float(100 * circle.rank + number)), "text"))
            tensors, texts = zip(*circle.collect(), strict=True)
            assert [t[-1].item() for t in tensors] == [100.0 * r + number for r in range(size)]
            assert set(texts) == {"text"}
        return True

    assert all(together(work, circles(stores[:size])))


def test_a_ring_keeps_two_items_however_many_there_were(stores):
    heap = stores[0].arena.heap
    ring = Ring(stores[0])
    board = heap.used_bytes
    for number in range(20):
        ring.put(torch.full((1 << 16,), float(number)))
    assert heap.statistics()["peak"] - board == 2 * (1 << 18)
    assert ring.item(19).values[0][0].item() == 19.0
    assert ring.item(20) is None
    with pytest.raises(LookupError):
        ring.item(17)


def test_words_and_blocks_go_with_the_ring(stores):
    words = set()
    for _ in range(5):
        ring = Ring(stores[0])
        ring.put(torch.ones(MANY))
        words.add(ring._board.word)
        del ring
    assert len(words) == 1
    assert stores[0].arena.heap.used_bytes == 0


@pytest.mark.parametrize("how", ["no board", "long items", "full"])
def test_items_are_asked_for_where_the_board_does_not_have_them(stores, how):
    asked = []
    filling = [stores[0].keep(torch.zeros(1 << 20))] if how == "full" else []
    made = circles(stores[:2], asked=asked)
    if how == "no board":
        for circle in made:
            for reader in circle._others:
                reader._board = None
    text = "x" * (20_000 if how == "long items" else 1)

    def work(circle):
        for number in range(5):
            circle.publish((torch.full((MANY,), float(number)), text))
            assert [t[0].item() for t, _ in circle.collect()] == [number, number]
        return True

    assert all(together(work, made))
    assert asked
    filling.clear()


def test_what_others_published_is_brought_to_the_device(stores):
    made = circles(stores[:2])
    for circle in made:
        circle._on_device = lambda item: item.double()  # as a stand-in for another device

    def work(circle):
        circle.publish(torch.ones(MANY))
        return [t.dtype for t in circle.collect()]

    double, single = torch.float64, torch.float32
    assert together(work, made) == [[single, double], [double, single]]


def test_news_of_a_loss_and_the_bound_end_the_wait(stores):
    news = []

    def check():
        if news:
            raise GangBroken(news[0], 1)

    circle, _ = circles(stores[:2], check=check, asked=[])
    circle.publish(torch.ones(MANY))
    start = time.monotonic()
    with pytest.raises(GangBroken, match=r"nothing for 0\.3 s") as caught:
        circle.collect(0.3)
    assert caught.value.rank == 1
    threading.Timer(0.2, lambda: news.append("gone")).start()
    with pytest.raises(GangBroken, match="gone"):
        circle.collect(20)
    assert time.monotonic() - start < 5
    del caught


def test_a_ring_that_is_gone_is_a_loss(stores):
    one, other = circles(stores[:2], asked=[])
    other.publish(torch.ones(MANY))
    del other
    gc.collect()
    one.publish(torch.ones(MANY))
    with pytest.raises(GangBroken, match="is lost") as caught:
        one.collect(5)
    assert caught.value.rank == 1
    del caught


def test_what_was_lost_on_its_way_is_a_loss(stores):
    one, _ = circles(stores[:2], asked=[])
    one._others[0]._board = None
    one._others[0]._ask = lambda *about: TaskOutputs((), lost="the block is gone")
    one.publish(torch.ones(MANY))
    with pytest.raises(GangBroken, match="the block is gone"):
        one.collect(5)
