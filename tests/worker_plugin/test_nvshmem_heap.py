"""The device heap over a fake of NVSHMEM and CUDA: blocks, streams, pulls. No figure, no device."""

from __future__ import annotations

import gc
import random
import threading

import pytest
import torch

from st2i_dask._core import GRANULE
from worker_plugin import nvshmem_heap
from worker_plugin.heap import HeapAddress, Ticket
from worker_plugin.nvshmem_heap import NvshmemHeap

from .nvshmem_fake import Faults, pe
from .nvshmem_pe import Pe, digest, pattern

ARENA = 64 * GRANULE
NAME = "a-world"


def attach_all(parts, nbytes=ARENA):
    """All PEs of one process attach, each in its thread as they wait for each other."""
    uid = parts[0][0].mint()
    threads = [
        threading.Thread(target=library.attach, args=(uid, number, len(parts), 0, nbytes))
        for number, (library, _, _) in enumerate(parts)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
        assert not thread.is_alive()
    return [
        NvshmemHeap(library, cuda, name=NAME, generation=3, pe=number, n_pes=len(parts))
        for number, (library, cuda, _) in enumerate(parts)
    ]


@pytest.fixture
def alone(tmp_path):
    """(heap, cuda) of a world of one."""
    part = pe(tmp_path)
    (heap,) = attach_all([part])
    yield heap, part[1]
    heap._check()


@pytest.fixture
def pair(tmp_path):
    """Two PEs: (heap, cuda) of each."""
    parts = [pe(tmp_path), pe(tmp_path)]
    heaps = attach_all(parts)
    yield [(heap, cuda) for heap, (_, cuda, _) in zip(heaps, parts, strict=True)]
    for heap in heaps:
        heap._check()


def written(heap, seed, nbytes):
    """(tensor, ticket) of a new block with a pattern."""
    block = heap.allocate(nbytes)
    tensor = heap.tensor(block)
    tensor.copy_(pattern(seed, nbytes))
    heap.settle()
    return tensor, Ticket(heap.address, block.offset, block.nbytes, block.generation)


def pulled(heap, ticket):
    into = torch.zeros(ticket.nbytes, dtype=torch.uint8)
    return into if heap.pull(ticket, into) else None


# ---------------------------------------------------------------- own memory


def test_the_arena_holds_words_and_payload(alone):
    heap, _ = alone
    assert heap.address == HeapAddress("nvshmem", f"{NAME}/0", 63 * GRANULE, (3, 0))
    blocks = [heap.allocate(GRANULE) for _ in range(63)]
    assert heap.allocate(1) is None
    assert heap.used_bytes == 63 * GRANULE
    assert sorted(block.offset for block in blocks) == [i * GRANULE for i in range(63)]
    tensors = [heap.tensor(block) for block in blocks]
    for number, tensor in enumerate(tensors):
        tensor.fill_(number)
    assert all((tensor == number).all() for number, tensor in enumerate(tensors))
    assert len({block.generation for block in blocks}) == 63
    assert 0 not in {block.generation for block in blocks}


@pytest.mark.parametrize("nbytes", [GRANULE, 2 * GRANULE - 1])
def test_an_arena_without_payload_is_refused(tmp_path, nbytes):
    with pytest.raises(ValueError, match="holds no payload"):
        attach_all([pe(tmp_path)], nbytes)


def test_a_block_lives_as_long_as_its_last_view(alone):
    heap, _ = alone
    tensor = heap.tensor(heap.allocate(1000))
    view = tensor[100:].view(10, 90)[3]
    del tensor
    gc.collect()
    assert heap.used_bytes == GRANULE
    block, offset = heap.block_of(view)
    assert (block.offset, offset) == (0, 370)
    del view, block
    assert heap.used_bytes == 0
    assert heap._live == {}


def test_tensors_elsewhere_are_in_no_block(alone):
    heap, _ = alone
    assert heap.block_of(torch.zeros(8)) is None
    first, second = heap.allocate(100), heap.allocate(100)
    tensor = heap.tensor(second)
    assert heap.block_of(tensor[7:]) == (second, 7)
    assert heap.block_of(tensor[4:].view(torch.float32)[2:]) == (second, 12)
    assert heap.block_of(tensor[100:]) == (second, 100)  # empty
    assert heap.block_of(torch.zeros(2, 2).to_sparse()) is None
    # what is freed, and what was never allocated, seen through a tensor that keeps nothing
    freed = heap._cuda.view(tensor.data_ptr(), 8, None)
    never = heap._cuda.view(tensor.data_ptr() + GRANULE, 8, None)
    del first, second, tensor
    assert heap.block_of(freed) is None
    assert heap.block_of(never) is None


def test_a_freed_block_is_reused_only_when_the_device_is_done_with_it(alone):
    heap, cuda = alone
    tensor = heap.tensor(heap.allocate(heap.address.nbytes))
    cuda.held(0)
    cuda.put(0, lambda: None)  # a kernel that reads the tensor
    del tensor
    for _ in range(3):
        assert heap.allocate(1) is None
        assert heap.used_bytes == heap.address.nbytes
        heap._check()
    cuda.held(0, False)
    assert heap.allocate(heap.address.nbytes) is not None


def test_every_stream_that_used_a_block_is_waited_for(alone):
    heap, cuda = alone
    side = cuda.new_stream()
    block = heap.allocate(heap.address.nbytes)
    cuda.current.stream = side
    tensor = heap.tensor(block)
    cuda.put(side, lambda: None)
    cuda.held(side)
    cuda.current.stream = 0
    del tensor, block
    assert heap.allocate(1) is None
    cuda.held(side, False)
    assert heap.allocate(1) is not None


def test_a_block_freed_while_the_device_fails_is_recorded_later(alone, monkeypatch):
    heap, cuda = alone
    block = heap.allocate(1)

    def broken(streams):
        raise RuntimeError("the driver is shutting down")

    with monkeypatch.context() as patch:
        patch.setattr(cuda, "record", broken)
        del block
    assert [events for _, events in heap._dead] == [None]
    assert heap.used_bytes == 0


def test_settle_waits_for_the_producer(alone, monkeypatch):
    heap, cuda = alone
    tensor = heap.tensor(heap.allocate(4))
    cuda.put(0, lambda: tensor.fill_(7))
    assert tensor.tolist() != [7] * 4
    heap.settle()
    assert tensor.tolist() == [7] * 4
    cuda.held(0)
    cuda.put(0, lambda: None)
    monkeypatch.setattr(nvshmem_heap, "_WAIT_S", 0.05)
    with pytest.raises(OSError, match="has not finished its work for"):
        heap.settle()
    cuda.held(0, False)


def test_allocation_keeps_to_its_books(alone):
    heap, _ = alone
    chance = random.Random(0)
    kept = []
    for _ in range(300):
        if kept and chance.random() < 0.5:
            seed, tensor = kept.pop(chance.randrange(len(kept)))
            assert torch.equal(tensor, pattern(seed, tensor.numel()))
            del tensor
        else:
            nbytes = chance.choice([1, 1000, GRANULE, GRANULE + 1, 5 * GRANULE, 20 * GRANULE])
            block = heap.allocate(nbytes)
            if block is not None:
                seed = chance.randrange(1000)
                tensor = heap.tensor(block)
                tensor.copy_(pattern(seed, nbytes))
                kept.append((seed, tensor))
                del tensor, block
        heap._check()
        live = sum(-(-tensor.numel() // GRANULE) for _, tensor in kept) * GRANULE
        assert heap.used_bytes == live


def test_threads_share_a_heap(alone):
    heap, _ = alone
    errors = []

    def work(number):
        try:
            for turn in range(60):
                tensor, ticket = written(heap, number * 100 + turn, 3 * GRANULE)
                into = pulled(heap, ticket)
                assert torch.equal(into, tensor)
                del tensor
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not errors
    assert heap.used_bytes == 0


# ---------------------------------------------------------------- pulls


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
    (one, _), (two, _) = pair
    kept, ticket = written(two, 1, 2 * GRANULE)
    get, calls = one._library.get, []

    def slow(*arguments):
        nonlocal kept
        get(*arguments)
        calls.append(arguments)
        if len(calls) == 1:  # the bytes are on their way; the word is not asked for yet
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


# ---------------------------------------------------------------- between processes


def test_processes_pull_from_each_other(tmp_path):
    part = pe(tmp_path)
    with Pe(tmp_path) as other:
        uid = other.ask("mint")
        other.tell("attach", uid, 0, 2, ARENA)
        import base64

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
