"""Pulls between device heaps, over a fake of NVSHMEM and CUDA. No figure, no device."""

from __future__ import annotations

import base64
import pickle
import threading

import pytest
import torch

from st2i_dask._core import GRANULE
from st2i_dask.outputs import TaskOutputs, packing
from worker_plugin import nvshmem_heap
from worker_plugin.arena import Arena
from worker_plugin.heap import HeapAddress, Ticket
from worker_plugin.nvshmem_heap import NvshmemHeap
from worker_plugin.tensor_store import TensorStore, receiving

from .nvshmem_fake import Faults, pe
from .nvshmem_heaps import ARENA, NAME, attach_all, pulled, written
from .nvshmem_pe import Pe, digest, pattern


@pytest.fixture
def alone(tmp_path):
    """(heap, cuda) of a world of one."""
    part = pe(tmp_path)
    (heap,) = attach_all([part])
    yield heap, part[1]
    heap._check()
    part[2].close()


@pytest.fixture
def pair(tmp_path):
    """Two PEs: (heap, cuda) of each."""
    parts = [pe(tmp_path), pe(tmp_path)]
    heaps = attach_all(parts)
    yield [(heap, cuda) for heap, (_, cuda, _) in zip(heaps, parts, strict=True)]
    for heap in heaps:
        heap._check()
    for _, _, world in parts:
        world.close()


def test_bytes_come_from_the_other_pe(pair):
    (one, _), (two, _) = pair
    assert one.reach(two.address)
    for nbytes in (1, 1000, GRANULE, 7 * GRANULE + 3):
        kept, ticket = written(two, nbytes, nbytes)
        assert torch.equal(pulled(one, ticket), kept)
        # also into a block of the own heap
        block = one.allocate(nbytes)
        assert one.pull(ticket, one.tensor(block))
        assert torch.equal(one.tensor(block), kept)


def test_a_freed_block_is_a_loss_also_when_its_place_is_used_again(pair):
    (one, _), (two, _) = pair
    kept, ticket = written(two, 1, 4 * GRANULE)
    assert pulled(one, ticket) is not None
    del kept
    assert two.used_bytes == 0
    assert pulled(one, ticket) is None
    other, later = written(two, 2, 4 * GRANULE)
    assert later.offset == ticket.offset
    assert pulled(one, ticket) is None
    assert torch.equal(pulled(one, later), other)


def test_a_block_reused_from_its_middle_is_a_loss(pair):
    """The new block sets another word than the old one's."""
    (one, _), (two, _) = pair
    first, ticket = written(two, 1, 4 * GRANULE)
    del first
    small, _ = written(two, 2, GRANULE)
    middle, _ = written(two, 3, GRANULE)
    del small
    assert two.used_bytes == GRANULE
    assert middle.numel() == GRANULE
    assert pulled(one, ticket) is None


def test_a_block_reused_during_the_pull_is_a_loss(pair, monkeypatch):
    (one, cuda), (two, _) = pair
    kept, ticket = written(two, 1, 2 * GRANULE)
    get, calls = one._library.get, []

    def slow(*arguments):
        nonlocal kept
        get(*arguments)
        calls.append(arguments)
        if len(calls) == 1:  # the bytes have come; the word is not asked for yet
            assert cuda.done(cuda.record([one._pulls]))
            del kept
            written(two, 2, 2 * GRANULE)

    monkeypatch.setattr(one._library, "get", slow)
    assert pulled(one, ticket) is None
    assert len(calls) == 2


@pytest.mark.parametrize(
    ("offset", "nbytes"), [(-GRANULE, 4), (1, 4), (63 * GRANULE, 1), (0, 64 * GRANULE)]
)
def test_a_ticket_outside_the_heap_is_a_loss(pair, offset, nbytes):
    (one, _), (two, _) = pair
    assert pulled(one, Ticket(two.address, offset, nbytes, 1)) is None


def test_the_own_heap_is_copied_from(alone):
    heap, _ = alone
    kept, ticket = written(heap, 5, 3000)
    calls = list(heap._library._packages.bindings._world.calls)
    assert torch.equal(pulled(heap, ticket), kept)
    assert heap._library._packages.bindings._world.calls == calls
    assert pulled(heap, Ticket(heap.address, ticket.offset, 3000, ticket.generation + 1)) is None
    del kept
    assert pulled(heap, ticket) is None


def test_a_pull_starts_after_earlier_work_on_its_destination(pair):
    (one, cuda), (two, _) = pair
    _kept, ticket = written(two, 1, 100)
    into = torch.zeros(100, dtype=torch.uint8)
    order = []
    cuda.put(0, lambda: order.append(into.sum().item()))  # a kernel that still reads that memory
    cuda.held(0)
    timer = threading.Timer(0.1, cuda.held, (0, False))
    timer.start()
    assert one.pull(ticket, into)
    timer.join()
    assert order == [0]
    assert torch.equal(into, pattern(1, 100))


def test_a_pull_that_does_not_end_is_given_up_and_no_other_begins(pair, monkeypatch):
    (one, cuda), (two, _) = pair
    _kept, ticket = written(two, 1, 100)
    monkeypatch.setattr(nvshmem_heap, "_WAIT_S", 0.05)
    cuda.held(one._pulls)
    into = torch.zeros(100, dtype=torch.uint8)
    with pytest.raises(OSError, match="has not ended after"):
        one.pull(ticket, into)
    # The copy may yet be made: its destination must not become anything else.
    assert any(into is part for used in one._stuck for part in used)
    assert not one.reach(two.address)
    with pytest.raises(OSError, match="out of reach"):
        one.pull(ticket, into)
    assert two.reach(one.address)
    cuda.held(one._pulls, False)


def test_over_a_network_bytes_land_in_the_arena_first(tmp_path):
    parts = [pe(tmp_path, Faults(far=True)), pe(tmp_path)]
    one, two = attach_all(parts)
    kept, ticket = written(two, 1, 5 * GRANULE)
    assert torch.equal(pulled(one, ticket), kept)
    assert one.used_bytes == 0
    everything = one.allocate(one.address.nbytes)
    with pytest.raises(OSError, match="no gap of"):
        pulled(one, ticket)
    del everything
    block = one.allocate(5 * GRANULE)
    assert one.pull(ticket, one.tensor(block))


def test_only_heaps_of_the_same_world_are_reached(pair):
    (one, _), (two, _) = pair
    there = two.address
    strangers = [
        HeapAddress("host", there.uuid, there.nbytes, (1, 2)),
        HeapAddress("nvshmem", "another/1", there.nbytes, there.place),
        HeapAddress("nvshmem", f"{NAME}/2", there.nbytes, (3, 2)),
        HeapAddress("nvshmem", there.uuid, there.nbytes, (3, 0)),
        HeapAddress("nvshmem", there.uuid, there.nbytes, ()),
        HeapAddress("nvshmem", f"{NAME}/-1", there.nbytes, (3, -1)),
    ]
    assert [one.reach(stranger) for stranger in strangers] == [False] * len(strangers)
    with pytest.raises(OSError, match="is not in this worker's NVSHMEM world"):
        pulled(one, Ticket(strangers[1], 0, 4, 1))
    one.close()
    assert not one.reach(there)
    one.reopen()
    assert one.reach(there)
    one.sever("PE 1 is lost")
    one.reopen()
    assert one.reach(one.address)
    assert not one.reach(there)
    with pytest.raises(OSError, match="PE 1 is lost"):
        pulled(one, Ticket(there, 0, 4, 1))


@pytest.mark.parametrize("into", [torch.zeros(3, dtype=torch.uint8), torch.zeros(4)])
def test_a_destination_of_another_size_is_refused(pair, into):
    (one, _), (two, _) = pair
    _kept, ticket = written(two, 1, 4)
    with pytest.raises(ValueError, match="needs a contiguous"):
        one.pull(ticket, into)


def test_a_tensor_store_works_over_it(pair):
    """Shape, strides and dtype through a ticket; the copy lies in the receiver's arena."""
    (one, _), (two, _) = pair
    receiver, owner = TensorStore(Arena(one)), TensorStore(Arena(two))
    tensor = torch.arange(100_000).reshape(250, 400).to(torch.bfloat16).t()
    kept = owner.keep(tensor)
    assert owner.holds(kept)
    two.settle()
    with packing(owner.pack):
        message = pickle.dumps(TaskOutputs((kept,)))
    assert len(message) < 2000
    with receiving(receiver):
        (arrived,) = pickle.loads(message).values
    assert torch.equal(arrived, tensor)
    assert (arrived.dtype, arrived.stride()) == (tensor.dtype, tensor.stride())
    assert receiver.holds(arrived)
    assert not receiver.holds(kept)
    del kept, arrived
    assert one.used_bytes == two.used_bytes == 0


# ---------------------------------------------------------------- between processes


def test_processes_pull_from_each_other(tmp_path):
    part = pe(tmp_path)
    with Pe(tmp_path) as other:
        uid = other.ask("mint")
        other.tell("attach", uid, 0, 2, ARENA)
        library, cuda, _ = part
        library.attach(base64.b64decode(uid), 1, 2, 0, ARENA)
        assert other.answer() == "attached"
        heap = NvshmemHeap(library, cuda, name=uid[:8], generation=1, pe=1, n_pes=2)

        uuid, size, *rest = other.ask("write", 11, 3 * GRANULE)
        ticket = Ticket(HeapAddress("nvshmem", uuid, size, (1, 0)), *rest)
        assert torch.equal(pulled(heap, ticket), pattern(11, 3 * GRANULE))

        kept, own = written(heap, 12, 500)
        where = (own.heap.uuid, own.heap.nbytes, 1, own.offset, own.nbytes, own.generation)
        assert other.ask("pull", *where) == [True, digest(kept)]
        del kept
        assert heap.used_bytes == 0
        assert other.ask("pull", *where)[0] is False

        assert other.ask("drop") == 0
        assert pulled(heap, ticket) is None
        # a PE that is killed: what it had is lost or still right, never wrong
        uuid, size, *rest = other.ask("write", 13, 1000)
    ticket = Ticket(HeapAddress("nvshmem", uuid, size, (1, 0)), *rest)
    assert torch.equal(pulled(heap, ticket), pattern(13, 1000))
