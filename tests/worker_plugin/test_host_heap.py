"""HostHeap: what the tensor store needs of a symmetric heap, over shared memory."""

from __future__ import annotations

import contextlib
import gc
import os
import pickle
import subprocess
import sys
import threading
import time

import numpy as np
import pytest
import torch

from st2i_dask import _core
from st2i_dask.errors import AttachError
from worker_plugin import host_heap
from worker_plugin.arena import Arena
from worker_plugin.heap import HeapAddress, SymmetricHeap, Ticket
from worker_plugin.host_heap import HostHeap
from worker_plugin.tensor_store import TensorStore

MIB = 1 << 20


def put(heap, values):
    """A block with these bytes, and its ticket."""
    block = heap.allocate(values.numel())
    heap.tensor(block).copy_(values)
    return block, Ticket(heap.address, block.offset, block.nbytes, block.generation)


def random_bytes(nbytes, seed=0):
    return torch.frombuffer(bytearray(np.random.default_rng(seed).bytes(nbytes)), dtype=torch.uint8)


def mapped(heap_uuid):
    with open("/proc/self/maps") as maps:
        return sum(heap_uuid in line for line in maps)


OWNER = """
import pickle, sys
import numpy as np
from worker_plugin.heap import Ticket
from worker_plugin.host_heap import HostHeap
from worker_plugin.tensor_store import TensorStore
heap = HostHeap(64 << 20, poison=True)
blocks = []
def put(nbytes, seed):
    blocks.append(heap.allocate(nbytes))
    np.asarray(blocks[-1].array())[:] = np.frombuffer(np.random.default_rng(seed).bytes(nbytes), np.uint8)
    return Ticket(heap.address, blocks[-1].offset, nbytes, blocks[-1].generation)
for line in sys.stdin:
    answer = eval(line)
    print(pickle.dumps(answer).hex(), flush=True)
"""


class Owner:
    """A HostHeap in a process of its own."""

    def __init__(self):
        self.process = subprocess.Popen(
            [sys.executable, "-c", OWNER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )

    def __call__(self, expression):
        self.process.stdin.write(expression + "\n")
        self.process.stdin.flush()
        return pickle.loads(bytes.fromhex(self.process.stdout.readline()))

    def kill(self):
        self.process.kill()
        self.process.wait(10)


@contextlib.contextmanager
def owner_process():
    owner = Owner()
    try:
        yield owner
    finally:
        owner.kill()
        with contextlib.suppress(BrokenPipeError):
            owner.process.stdin.close()
        owner.process.stdout.close()


def test_it_is_a_symmetric_heap():
    heap: SymmetricHeap = HostHeap(MIB)
    address = heap.address
    assert address.kind == "host"
    assert address.nbytes == MIB
    assert address.place[0] == os.getpid()
    assert pickle.loads(pickle.dumps(address)) == address
    assert HostHeap(MIB).address.uuid != address.uuid


def test_allocation_and_what_it_uses():
    heap = HostHeap(4 * _core.GRANULE)
    assert heap.used_bytes == 0
    block = heap.allocate(_core.GRANULE + 1)
    assert block.nbytes == _core.GRANULE + 1
    assert heap.used_bytes == 2 * _core.GRANULE
    assert heap.allocate(3 * _core.GRANULE) is None
    tensor = heap.tensor(block)
    assert (tensor.shape, tensor.dtype) == ((block.nbytes,), torch.uint8)
    del block
    assert heap.used_bytes == 2 * _core.GRANULE
    del tensor
    assert heap.used_bytes == 0
    heap._check()


def test_block_of_any_view():
    heap = HostHeap(MIB)
    heap.allocate(1)
    filler = heap.allocate(1)
    block = heap.allocate(4096)
    whole = heap.tensor(block)
    shaped = whole[256:].view(torch.bfloat16).view(2, 3, 320)[1, 1:].transpose(0, 1)
    assert heap.block_of(whole) == (block, 0)
    assert heap.block_of(shaped) == (block, 256 + 2 * (3 * 320 + 320))
    assert heap.block_of(whole[4000:4000]) == (block, 4000)
    assert heap.block_of(heap.tensor(filler))[0] is filler
    assert heap.block_of(torch.zeros(5)) is None
    assert heap.block_of(torch.zeros(0)) is None
    assert heap.block_of(torch.zeros(5, device="meta")) is None
    assert heap.block_of(torch.eye(3).to_sparse()) is None
    assert HostHeap(MIB).block_of(whole) is None


def in_pieces(heap):
    """Blocks that leave a heap no gap of two granules."""
    blocks = []
    while (block := heap.allocate(1)) is not None:
        blocks.append(block)
    return blocks[1::2]


def test_weights_lie_in_several_blocks():
    heap = HostHeap(16 * _core.GRANULE)
    whole = heap.allocate_weights(3 * _core.GRANULE)
    assert heap.block_of(whole)[1] == 0
    del whole
    others = in_pieces(heap)
    weights = heap.allocate_weights(3 * _core.GRANULE + 5)
    assert (weights.shape, weights.dtype) == ((3 * _core.GRANULE + 5,), torch.uint8)
    assert heap.used_bytes == 12 * _core.GRANULE
    assert heap.block_of(weights) is None
    assert mapped(heap.address.uuid) == 5
    assert heap.allocate_weights(4 * _core.GRANULE + 1) is None
    view = weights[100:].view(torch.uint8)[5:]
    del weights
    assert heap.used_bytes == 12 * _core.GRANULE
    del view
    assert heap.used_bytes == 8 * _core.GRANULE
    assert mapped(heap.address.uuid) == 1
    del others
    heap._check()


def test_an_output_that_aliases_weights_is_copied_into_a_block():
    store = TensorStore(Arena(HostHeap(32 * _core.GRANULE, poison=True)))
    heap = store.arena.heap
    others = in_pieces(heap)
    weights = heap.allocate_weights(4 * _core.GRANULE)
    parameter = weights.view(torch.float32).view(256, -1)
    parameter.copy_(torch.arange(parameter.numel()).view_as(parameter))
    expected = parameter.clone()
    others.clear()
    assert not store.holds(parameter)
    for output in (parameter, parameter[3:200], parameter.t()):
        kept = store.keep(output)
        assert store.holds(kept)
        assert torch.equal(kept, output)
        assert store.pack(kept) is not None
        assert store.pack(output) is None, "nobody else can read it"
    kept = store.keep(parameter)
    del weights, parameter, output
    gc.collect()
    assert mapped(heap.address.uuid) == 1
    assert torch.equal(kept, expected)
    del kept
    assert heap.used_bytes == 0
    heap._check()


def test_pull_within_the_process_maps_nothing():
    producer, consumer = HostHeap(8 * MIB), HostHeap(MIB)
    values = random_bytes(3 * MIB + 5)
    block, ticket = put(producer, values)
    into = torch.zeros_like(values)
    assert consumer.reach(producer.address)
    assert consumer.pull(ticket, into)
    assert torch.equal(into, values)
    assert producer.pull(ticket, into)
    assert mapped(producer.address.uuid) == 1
    del block
    assert not consumer.pull(ticket, into)
    again, _ = put(producer, values)
    assert again.offset == ticket.offset
    assert not consumer.pull(ticket, into)


def test_a_heap_whose_object_is_gone_is_read_while_its_block_lives():
    producer, consumer = HostHeap(MIB), HostHeap(MIB)
    block, ticket = put(producer, random_bytes(1000))
    del producer
    gc.collect()
    into = torch.zeros(1000, dtype=torch.uint8)
    assert consumer.pull(ticket, into)
    assert torch.equal(into, random_bytes(1000))
    del block
    assert not consumer.pull(ticket, into)
    consumer.close()


def test_pull_between_processes():
    heap = HostHeap(MIB)
    with owner_process() as owner:
        for seed, nbytes in enumerate((1, 1000, 5 * MIB + 1)):
            ticket = owner(f"put({nbytes}, {seed})")
            into = torch.zeros(nbytes, dtype=torch.uint8)
            assert heap.reach(ticket.heap)
            assert heap.pull(ticket, into)
            assert torch.equal(into, random_bytes(nbytes, seed))
            owner("blocks.clear()")
            assert not heap.pull(ticket, into)
        assert mapped(ticket.heap.uuid) == 1
        heap._check()
        heap.close()
        assert mapped(ticket.heap.uuid) == 0


def test_two_heaps_pull_from_each_other():
    mine = HostHeap(8 * MIB)
    block, ticket = put(mine, random_bytes(MIB, 7))
    with owner_process() as owner:
        owner("globals().update(torch=__import__('torch'))")
        owner("globals().update(into=torch.zeros(1 << 20, dtype=torch.uint8))")
        theirs = owner("put(1 << 20, 8)")
        assert owner(f"heap.pull(pickle.loads({pickle.dumps(ticket)!r}), into)")
        assert torch.equal(owner("into"), random_bytes(MIB, 7))
        into = torch.zeros(MIB, dtype=torch.uint8)
        assert mine.pull(theirs, into)
        assert torch.equal(into, random_bytes(MIB, 8))
        del block
        assert not owner(f"heap.pull(pickle.loads({pickle.dumps(ticket)!r}), into)")
    mine.close()


def test_many_threads_open_another_heap_once(monkeypatch):
    real, opened = _core.Peer, []

    def open_slowly(*args):
        time.sleep(0.05)
        opened.append(args)
        return real(*args)

    producer, heap = HostHeap(MIB), HostHeap(MIB)
    block, ticket = put(producer, random_bytes(100))
    monkeypatch.setattr(host_heap, "_own", {})  # as if it were another process's
    monkeypatch.setattr(host_heap._core, "Peer", open_slowly)
    into = [torch.zeros(100, dtype=torch.uint8) for _ in range(8)]
    threads = [threading.Thread(target=heap.pull, args=(ticket, each)) for each in into]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(opened) == 1
    assert all(torch.equal(each, random_bytes(100)) for each in into)
    del block
    assert not heap.pull(ticket, into[0])


def test_what_cannot_be_reached_is_false_and_then_cheap(monkeypatch):
    heap, another = HostHeap(MIB), HostHeap(MIB)
    pid, fd = heap.address.place
    strangers = [
        HeapAddress("host", "a" * 32, MIB, (pid, fd)),
        HeapAddress("host", "b" * 32, MIB, (1 << 30, 3)),
        HeapAddress("host", "c" * 32, MIB, ("nonsense",)),
        HeapAddress("host", "d" * 32, MIB, (None, None)),
        HeapAddress("nvshmem", "e" * 32, MIB, (3, 0)),
    ]
    into = torch.zeros(10, dtype=torch.uint8)
    for stranger in strangers:
        assert heap.reach(stranger) is False
        with pytest.raises(OSError, match=stranger.uuid):
            heap.pull(Ticket(stranger, 0, 10, 1), into)
        with pytest.raises(OSError, match=stranger.uuid):
            another.pull(Ticket(stranger, 0, 10, 1), into)
    assert heap.reach(None) is False
    monkeypatch.setattr(host_heap._core, "Peer", None)  # a second try would be a TypeError
    for stranger in strangers:
        assert heap.reach(stranger) is False
        with pytest.raises(OSError, match="cannot reach"):
            heap.pull(Ticket(stranger, 0, 10, 1), into)
    heap._check()


def test_a_killed_owner_is_forgotten_and_its_memory_goes():
    heap = HostHeap(MIB)
    into = torch.zeros(MIB, dtype=torch.uint8)
    with owner_process() as first, owner_process() as second:
        ticket = first(f"put({MIB}, 1)")
        assert heap.pull(ticket, into)
        first.kill()
        assert heap.pull(ticket, into)  # what is mapped is there
        assert torch.equal(into, random_bytes(MIB, 1))
        assert heap.pull(second(f"put({MIB}, 2)"), into)  # connecting looks for the dead
        assert mapped(ticket.heap.uuid) == 0
        assert not heap.reach(ticket.heap)
        with pytest.raises(OSError, match="cannot reach"):
            heap.pull(ticket, into)
        second.kill()
        heap.forget_lost()
        heap._check()
        assert mapped("st2i-arena") == 1  # its own


def test_an_owner_that_dies_before_the_first_pull_is_an_os_error():
    heap = HostHeap(MIB)
    with owner_process() as owner:
        ticket = owner("put(1000, 1)")
    assert not heap.reach(ticket.heap)
    with pytest.raises(OSError, match=ticket.heap.uuid):
        heap.pull(ticket, torch.zeros(1000, dtype=torch.uint8))


def test_after_close_own_blocks_live_and_others_are_out_of_reach():
    heap = HostHeap(MIB)
    block, ticket = put(heap, random_bytes(100))
    with owner_process() as owner:
        theirs = owner("put(100, 1)")
        assert heap.reach(theirs.heap)
        heap.close()
        heap.close()
        heap._check()
        assert not heap.reach(theirs.heap)
        with pytest.raises(OSError, match="is closed"):
            heap.pull(theirs, torch.zeros(100, dtype=torch.uint8))
    assert torch.equal(heap.tensor(block), random_bytes(100))
    assert HostHeap(MIB).pull(ticket, torch.zeros(100, dtype=torch.uint8))


def test_destinations_that_do_not_fit_are_refused():
    heap = HostHeap(MIB)
    _, ticket = put(heap, random_bytes(100))
    with pytest.raises(ValueError, match="100 bytes does not fit 99"):
        heap.pull(ticket, torch.zeros(99, dtype=torch.uint8))
    for into in (
        torch.zeros(100, dtype=torch.int8),
        torch.zeros(200, dtype=torch.uint8)[::2],
        torch.zeros(100, dtype=torch.uint8, device="meta"),
    ):
        with pytest.raises(ValueError, match="contiguous uint8 CPU tensor"):
            heap.pull(ticket, into)


@pytest.mark.parametrize(
    ("arguments", "match"),
    [
        ({"nbytes": 0}, "heap of 0 bytes"),
        ({"nbytes": -1}, "heap of -1 bytes"),
        ({"nbytes": 1 << 60}, "at most"),
        ({"nbytes": MIB, "allocator": "slab"}, r"slab.*best_fit, buddy"),
    ],
)
def test_arenas_are_refused(arguments, match):
    with pytest.raises(AttachError, match=match):
        HostHeap(**arguments)


def test_the_buddy_is_selectable():
    heap = HostHeap(16 * _core.GRANULE, allocator="buddy")
    block = heap.allocate(3 * _core.GRANULE)
    assert block is not None
    assert heap.used_bytes == 4 * _core.GRANULE


def test_heaps_go_with_their_objects():
    files, known = len(os.listdir("/proc/self/fd")), len(host_heap._own)
    heaps = [HostHeap(MIB) for _ in range(5)]
    for heap in heaps:
        heap.allocate(10)
    assert len(host_heap._own) == known + 5
    heaps.clear()
    del heap
    gc.collect()
    assert len(host_heap._own) == known
    assert len(os.listdir("/proc/self/fd")) == files
