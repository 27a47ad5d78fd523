"""The device heap over a fake of NVSHMEM and CUDA: blocks and streams. No figure, no device."""

from __future__ import annotations

import gc
import random
import threading

import pytest
import torch

from st2i_dask._core import GRANULE
from worker_plugin import nvshmem_heap
from worker_plugin.heap import HeapAddress

from .nvshmem_fake import pe
from .nvshmem_heaps import NAME, attach_all, pulled, written
from .nvshmem_pe import pattern


@pytest.fixture
def alone(tmp_path):
    """(heap, cuda) of a world of one."""
    part = pe(tmp_path)
    (heap,) = attach_all([part])
    yield heap, part[1]
    heap._check()
    part[2].close()


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


def test_weights_lie_in_one_block(alone):
    heap, _ = alone
    blocks = [heap.allocate(GRANULE) for _ in range(63)]
    del blocks[::2]
    assert heap.allocate_weights(2 * GRANULE) is None
    weights = heap.allocate_weights(GRANULE - 1)
    assert (weights.shape, weights.dtype) == ((GRANULE - 1,), torch.uint8)
    assert heap.block_of(weights)[1] == 0
    assert heap.used_bytes == 32 * GRANULE
    del weights
    assert heap.used_bytes == 31 * GRANULE


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


def test_a_device_that_hangs_is_an_error_and_no_leak(alone, monkeypatch):
    heap, cuda = alone
    monkeypatch.setattr(nvshmem_heap, "_WAIT_S", 0.05)
    cuda.held(heap._words)
    with pytest.raises(OSError, match="has not copied a word in"):
        heap.allocate(1)
    heap._check()
    cuda.held(heap._words, False)
    gc.collect()
    assert heap.used_bytes == 0
    assert heap.allocate(heap.address.nbytes) is not None


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
