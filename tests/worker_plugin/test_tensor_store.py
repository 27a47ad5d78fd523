"""Stored tensors are the same tensors; tickets give the same bytes elsewhere, or an OSError."""

from __future__ import annotations

import gc
import pickle

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from st2i_dask.outputs import TaskOutputs, packing
from worker_plugin.arena import Arena
from worker_plugin.host_heap import HostHeap
from worker_plugin.tensor_store import SMALL, TensorStore, receiving
from worker_plugin.transports import Transports

MANY = SMALL // 4  # float32 elements: the least that goes into the arena
DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.int64, torch.bool, torch.complex64]


@pytest.fixture
def stores():
    """Two stores of one process."""
    made = [TensorStore(Arena(HostHeap(1 << 22, poison=True))) for _ in range(2)]
    yield made
    gc.collect()
    for store in made:
        store.arena.heap._check()
        assert store.arena.heap.used_bytes == 0, "a block is still held"
        store.arena.heap.close()


def travel(value, sender, receiver):
    """Pickled as for a receiver that reaches the sender's heap."""
    with packing(sender.pack):
        data = pickle.dumps(TaskOutputs((value,)), protocol=5)
    return data, receive(data, receiver)


def receive(data, receiver):
    with receiving(receiver):
        return pickle.loads(data)


def same(a, b):
    assert (a.dtype, a.shape, a.stride(), a.device) == (b.dtype, b.shape, b.stride(), b.device)
    assert torch.equal(a, b)


@pytest.mark.parametrize("dtype", DTYPES)
def test_kept_and_sent_tensors_are_the_same(stores, dtype):
    first, second = stores
    tensor = torch.randn(3, SMALL).to(dtype)
    kept = first.keep(tensor)
    assert first.holds(kept)
    assert not first.holds(tensor)
    same(kept, tensor)
    data, outputs = travel([{"a": kept}], first, second)
    assert len(data) < 1000, "it travels as a ticket"
    (got,) = outputs.values
    same(got[0]["a"], tensor)
    assert second.holds(got[0]["a"])
    nbytes = tensor.numel() * tensor.element_size()
    assert second.transports.statistics()["process"] == (1, nbytes)


@given(
    order=st.permutations(range(4)),
    step=st.sampled_from([1, 2]),
    expand=st.booleans(),
)
def test_strides_are_kept_and_gaps_are_not(order, step, expand):
    store = TensorStore(Arena(HostHeap(1 << 22)))
    tensor = torch.randn(4, 9, 16, 64).permute(*order)[..., ::step]
    if expand:
        tensor = tensor[:1].expand(16, *tensor.shape[1:])
    kept = store.keep(tensor)
    assert torch.equal(kept, tensor)
    assert kept.stride() == tensor.clone().stride()
    assert store.holds(kept)


def test_what_is_in_the_arena_already_is_not_copied(stores):
    store = stores[0]
    kept = store.keep(torch.randn(4, MANY))
    assert store.keep(kept) is kept or store.keep(kept).data_ptr() == kept.data_ptr()
    turned = store.keep(kept.t())
    assert turned.data_ptr() == kept.data_ptr()
    assert store.arena.heap.used_bytes == 64 << 10
    part = store.keep(kept[1:])
    assert part.data_ptr() != kept[1:].data_ptr(), "a part must not hold the whole"
    same(part, kept[1:])


def test_small_tensors_parameters_and_empty_ones_stay_outside(stores):
    store, other = stores
    small = torch.zeros(MANY - 1)
    parameter = torch.nn.Parameter(torch.zeros(MANY))
    empty = torch.zeros(0, 5)
    for tensor in (small, empty):
        assert not store.holds(store.keep(tensor))
    assert store.keep(parameter) is parameter
    assert store.keep("text") == "text"
    _, outputs = travel([small, empty, parameter], store, other)
    same(outputs.values[0][0], small)
    same(outputs.values[0][1], empty)
    assert type(outputs.values[0][2]) is torch.nn.Parameter
    assert other.transports.statistics()["process"] == (0, 0)


@pytest.mark.parametrize("where", ["arena", "small", "full"])
def test_a_kept_tensor_does_not_follow_its_source(stores, where):
    filling = stores[0].keep(torch.zeros(1 << 20)) if where == "full" else None
    source = torch.zeros(3 if where == "small" else MANY)
    kept = stores[0].keep(source)
    assert stores[0].holds(kept) == (where == "arena")
    source.fill_(1)
    assert not kept.any()
    del filling


def test_a_full_arena_falls_back_and_the_tensor_travels_as_bytes(stores):
    first, second = stores
    filling = first.keep(torch.zeros(1 << 20))  # all 4 MiB of it
    tensor = torch.randn(MANY)
    kept = first.keep(tensor)
    assert not first.holds(kept)
    assert first.arena.statistics().fallbacks == 1
    data, outputs = travel(kept, first, second)
    assert len(data) > SMALL
    same(outputs.values[0], tensor)
    del filling


def test_a_receiver_without_room_pulls_into_its_own_memory(stores):
    first, second = stores
    filling = second.keep(torch.zeros(1 << 20))
    kept = first.keep(torch.randn(MANY))
    _, outputs = travel(kept, first, second)
    same(outputs.values[0], kept)
    assert not second.holds(outputs.values[0])
    assert second.arena.statistics().fallbacks == 1
    del filling


def test_a_freed_block_is_a_loss_and_never_wrong_bytes(stores):
    first, second = stores
    kept = first.keep(torch.ones(MANY))
    with packing(first.pack):
        data = pickle.dumps(TaskOutputs((kept,)), protocol=5)
    del kept
    reused = first.keep(torch.zeros(MANY))
    outputs = receive(data, second)
    assert outputs.values == ()
    assert "not there any more" in outputs.lost
    assert first.holds(reused)
    assert second.arena.heap.used_bytes == 0
    assert second.transports.statistics()["process"] == (0, 0)


def test_without_a_store_in_the_process_it_is_a_loss(stores, monkeypatch):
    monkeypatch.setattr("worker_plugin.tensor_store._stores", {})
    with packing(stores[0].pack):
        data = pickle.dumps(TaskOutputs((stores[0].keep(torch.ones(MANY)),)), protocol=5)
    assert "no arena in this process" in pickle.loads(data).lost


def test_the_block_lives_as_long_as_any_view(stores):
    store = stores[0]
    kept = store.keep(torch.arange(4.0 * MANY).reshape(4, MANY))
    view = kept[2, 5:7].numpy()
    outputs = TaskOutputs((kept,))
    del kept
    assert store.arena.heap.used_bytes > 0
    del outputs
    gc.collect()
    assert view.tolist() == [2.0 * MANY + 5, 2.0 * MANY + 6]
    del view
    assert store.arena.heap.used_bytes == 0


def test_transports_count():
    transports = Transports()
    transports.count("host", 5)
    transports.count("host", 7)
    transports.count("comm", 1)
    assert transports.statistics() == {
        "process": (0, 0),
        "host": (2, 12),
        "nvshmem": (0, 0),
        "comm": (1, 1),
    }
