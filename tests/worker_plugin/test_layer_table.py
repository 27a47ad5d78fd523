"""Bound parameters are the weights, unbound ones are NaN; modules and compiled code notice nothing."""

from __future__ import annotations

import copy
import gc
import itertools
import threading
import weakref

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

from st2i_dask import _core
from st2i_dask.catalogue import tiny
from worker_plugin.host_heap import HostHeap
from worker_plugin.layer_table import ALIGNMENT, LayerTable, extent
from worker_plugin.layers import divide


class Resident:
    """A module, its table, and its values in host memory."""

    def __init__(self, module):
        self.module = module
        self.layers = divide(module)
        self.table = LayerTable(self.layers)
        # Detached they keep their memory when the parameters leave it.
        self.values = [[p.detach() for _, p in layer.parameters] for layer in self.layers]
        self.skeleton = self.table.register(self.layers)

    def load(self, layer, buffer=None):
        """The buffer, filled with that layer's values, and bound."""
        if buffer is None:
            buffer = torch.empty(self.table.nbytes[layer], dtype=torch.uint8)
        for slot, value in zip(self.table.slots[layer], self.values[layer], strict=True):
            _core.copy(buffer.data_ptr() + slot.offset, value.data_ptr(), slot.nbytes)
        self.table.bind(layer, self.table.views(layer, buffer))
        self.table._check()
        return buffer

    def load_all(self):
        return [self.load(layer) for layer in range(len(self.layers))]

    def unload_all(self):
        for layer in range(len(self.layers)):
            self.table.unbind(layer)
        self.table._check()


class Block(nn.Module):
    """A transformer block: normalisation, attention and a feed-forward part, all with residuals."""

    def __init__(self, width=32):
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.q, self.k, self.v, self.out = (nn.Linear(width, width) for _ in range(4))
        self.feed_forward = nn.Sequential(nn.Linear(width, 64), nn.GELU(), nn.Linear(64, width))

    def forward(self, x):
        y = self.norm(x)
        heads = (
            part(y).unflatten(-1, (4, -1)).transpose(1, 2) for part in (self.q, self.k, self.v)
        )
        mixed = nn.functional.scaled_dot_product_attention(*heads)
        x = x + self.out(mixed.transpose(1, 2).flatten(2))
        return x + self.feed_forward(self.norm(x))


class Stack(nn.Module):
    def __init__(self, depth=3):
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(depth))

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return x


def parameters_of(layers):
    return [parameter for layer in layers for _, parameter in layer.parameters]


def test_outputs_are_the_same_bits_before_and_after():
    torch.manual_seed(0)
    model, x = Stack().eval(), torch.randn(2, 5, 32)
    with torch.no_grad():
        expected = model(x)
        resident = Resident(model)
        before = parameters_of(resident.layers)
        for _ in range(3):
            resident.load_all()
            assert torch.equal(model(x), expected)
            resident.unload_all()
            assert model(x).isnan().all()
    assert all(a is b for a, b in zip(before, parameters_of(divide(model)), strict=False))


def test_one_missing_layer_is_nan_and_never_a_plausible_result():
    resident = Resident(Stack().eval())
    resident.load_all()
    resident.table.unbind(1)
    with torch.no_grad():
        assert resident.module(torch.randn(2, 5, 32)).isnan().all()
    assert [resident.table.is_bound(layer) for layer in range(3)] == [True, False, True]


def test_a_flux_transformer_runs_from_the_heap():
    model = tiny.flux().transformer
    inputs = dict(
        hidden_states=torch.randn(1, 4, 16),
        encoder_hidden_states=torch.randn(1, 3, 32),
        pooled_projections=torch.randn(1, 32),
        timestep=torch.tensor([0.5]),
        guidance=torch.tensor([1.0]),
        img_ids=torch.zeros(4, 3),
        txt_ids=torch.zeros(3, 3),
        return_dict=False,
    )
    heap = HostHeap(1 << 22, poison=True)
    with torch.no_grad():
        expected = model(**inputs)[0]
        resident = Resident(model)
        blocks = [heap.allocate(nbytes) for nbytes in resident.table.nbytes]
        for layer, block in enumerate(blocks):
            resident.load(layer, heap.tensor(block))
        del block, blocks
        assert heap.used_bytes >= sum(resident.table.nbytes)
        assert torch.equal(model(**inputs)[0], expected)
    resident.unload_all()
    gc.collect()
    assert heap.used_bytes == 0, "a view of a block is left"
    heap.close()


def test_compiled_blocks_are_not_compiled_again():
    torch.manual_seed(0)
    graphs = []

    def backend(graph, _):
        graphs.append(graph)
        return graph.forward

    model, x = Stack().eval(), torch.randn(2, 5, 32)
    with torch.no_grad():
        expected = model(x)
        resident = Resident(model)
        for block in model.blocks:
            block.compile(backend=backend)
        resident.load_all()
        assert torch.equal(model(x), expected)
        compiled = len(graphs)
        assert compiled > 0
        for _ in range(3):
            resident.unload_all()
            resident.load_all()
            assert torch.equal(model(x), expected)
        # Layer by layer, as hooks do it while others are absent.
        resident.unload_all()
        y = x
        for layer, block in enumerate(model.blocks):
            resident.load(layer)
            y = block(y)
            resident.table.unbind(layer)
        assert torch.equal(y, expected)
    assert len(graphs) == compiled
    torch._dynamo.reset()


# ---------------------------------------------------------------- packing and views


ODD = {
    "plain": torch.randn(3, 5),
    "turned": torch.randn(4, 6).t(),
    "images": torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last),
    "gaps": torch.randn(8, 8)[:, ::2],
    "wide": torch.randn(6, 1).expand(6, 7),
    "scalar": torch.tensor(3.0),
    "empty": torch.empty(0, 4),
    "small_float": torch.randn(7).to(torch.float16),
    "large_float": torch.randn(3).to(torch.float64),
    "small": torch.arange(5, dtype=torch.int8),
    "flags": torch.tensor([True, False]),
    "eighth": torch.randn(9).to(torch.float8_e4m3fn),
    "complex": torch.randn(3, dtype=torch.complex64),
}


def odd_module():
    module = nn.Module()
    for name, tensor in ODD.items():
        module.register_parameter(name, nn.Parameter(tensor, requires_grad=False))
    return module


def test_all_dtypes_and_strides_are_kept_at_aligned_offsets():
    resident = Resident(odd_module())
    ends = []
    for slot in resident.table.slots[0]:
        assert slot.offset % ALIGNMENT == 0
        ends.append((slot.offset, slot.offset + slot.nbytes))
    filled = sorted(end for end in ends if end[0] != end[1])
    assert all(one[1] <= other[0] for one, other in itertools.pairwise(filled))
    assert filled[-1][1] <= resident.table.nbytes[0]
    resident.load(0)
    for name, tensor in ODD.items():
        parameter = getattr(resident.module, name)
        assert parameter.dtype == tensor.dtype
        assert parameter.shape == tensor.shape
        assert parameter.stride() == tensor.stride()
        assert torch.equal(parameter.to(torch.complex128), tensor.to(torch.complex128))
    resident.table.unbind(0)
    for name, tensor in ODD.items():
        parameter = getattr(resident.module, name)
        assert (parameter.dtype, parameter.shape) == (tensor.dtype, tensor.shape)
        assert parameter.untyped_storage().nbytes() <= 16
        if tensor.is_floating_point():
            assert parameter.to(torch.float32).isnan().all()


def test_extent_is_what_a_tensor_spans():
    assert extent(ODD["plain"]) == 3 * 5 * 4
    assert extent(ODD["gaps"]) == (8 * 8 - 1) * 4
    assert extent(ODD["wide"]) == 6 * 4
    assert extent(ODD["scalar"]) == 4
    assert extent(ODD["empty"]) == 0


def test_tensors_are_packed_in_order_of_address():
    memory = torch.randn(3, 16)
    module = nn.Module()
    for name, row in (("last", 2), ("first", 0), ("middle", 1)):
        module.register_parameter(name, nn.Parameter(memory[row]))
    slots = LayerTable(divide(module)).slots[0]
    assert [(slot.name, slot.offset) for slot in slots] == [
        ("last", 128),
        ("first", 0),
        ("middle", 64),
    ]


def test_tied_parameters_have_one_place():
    embedding, head = nn.Embedding(5, 3), nn.Linear(3, 5, bias=False)
    head.weight = nn.Parameter(embedding.weight.detach())
    resident = Resident(nn.ModuleDict({"embedding": embedding, "head": head}))
    assert resident.table.nbytes == (64,)
    resident.load(0)
    assert embedding.weight.data_ptr() == head.weight.data_ptr()


def test_modes_of_the_calling_thread_do_not_matter():
    resident = Resident(nn.Linear(4, 4))
    with torch.inference_mode():
        resident.load_all()
        resident.unload_all()
        resident.load_all()
    weight = resident.module.weight
    assert weight.requires_grad
    assert not weight.is_inference()
    assert torch.equal(weight, resident.values[0][0])
    resident.module(torch.randn(2, 4)).sum().backward()
    assert weight.grad is not None


# ---------------------------------------------------------------- skeletons


def test_all_skeletons_follow_and_a_late_one_is_bound_at_once():
    torch.manual_seed(0)
    first = Resident(Stack().eval())
    x = torch.randn(2, 5, 32)
    first.load_all()
    with torch.no_grad():
        expected = first.module(x)
        second = copy.deepcopy(first.module)
        skeleton = first.table.register(divide(second))
        assert first.table.skeletons == 2
        first.table._check()
        assert torch.equal(second(x), expected)
        for one, other in zip(first.module.parameters(), second.parameters(), strict=True):
            assert one is not other
            assert one.data_ptr() == other.data_ptr()
        first.unload_all()
        assert second(x).isnan().all()
        first.load_all()
        first.table.unregister(skeleton)
        first.table._check()
        assert second(x).isnan().all()
        assert torch.equal(first.module(x), expected)


def test_a_parameter_of_two_skeletons_stays_bound_with_either():
    resident = Resident(nn.Linear(4, 4))
    again = resident.table.register(resident.layers)
    resident.load_all()
    resident.table.unregister(again)
    resident.table._check()
    assert torch.equal(resident.module.weight, resident.values[0][0])
    resident.table.unregister(resident.skeleton)
    assert resident.module.weight.isnan().all()


def test_no_view_of_a_buffer_is_left_after_unbinding():
    resident = Resident(nn.Linear(64, 64))
    buffer = resident.load(0)
    storage = weakref.ref(buffer.untyped_storage())
    watched = weakref.ref(buffer)
    address = resident.module.weight.data_ptr()
    del buffer
    assert resident.module.weight.data_ptr() == address
    resident.unload_all()
    gc.collect()
    assert watched() is None
    assert storage() is None


@pytest.mark.parametrize("bind", [False, True], ids=["unbound", "bound"])
def test_registration_lets_go_of_the_files_mapping(tmp_path, bind):
    path = str(tmp_path / "model.safetensors")
    model = Stack()
    save_file(model.state_dict(), path)

    def mapped():
        with open("/proc/self/maps") as maps:
            return sum(path in line for line in maps)

    model.load_state_dict(load_file(path), assign=True)
    assert mapped() == 1
    layers = divide(model)
    table = LayerTable(layers)
    if bind:
        for layer, nbytes in enumerate(table.nbytes):
            table.bind(layer, torch.zeros(nbytes, dtype=torch.uint8))
    assert mapped() == 1
    table.register(layers)
    assert mapped() == 0


# ---------------------------------------------------------------- refusals


def test_another_model_is_refused_and_unchanged():
    table = Resident(Stack(2)).table
    for other in (Stack(3), Stack(1), Stack(2).to(torch.float16), nn.Linear(4, 4)):
        addresses = [p.data_ptr() for p in other.parameters()]
        with pytest.raises(ValueError, match=r"do(es)? not fit"):
            table.register(divide(other))
        assert [p.data_ptr() for p in other.parameters()] == addresses
    assert table.skeletons == 1
    narrow = Stack(2)
    narrow.blocks[1].norm = nn.LayerNorm(16)
    with pytest.raises(ValueError, match=r"'blocks.1' .*blocks.1.norm.weight.*\(16,\).*\(32,\)"):
        table.register(divide(narrow))


def test_parameters_without_memory_are_refused():
    with torch.device("meta"):
        hollow = nn.Linear(4, 4)
    with pytest.raises(ValueError, match="meta"):
        LayerTable(divide(hollow))
    table = Resident(nn.Linear(4, 4)).table
    with pytest.raises(ValueError, match="meta"):
        table.register(divide(hollow))


def test_buffers_that_do_not_fit_are_refused():
    resident = Resident(nn.Linear(4, 4))
    nbytes = resident.table.nbytes[0]
    for buffer, words in (
        (torch.empty(nbytes - 1, dtype=torch.uint8), "does not fit"),
        (torch.empty(nbytes, dtype=torch.int8), "uint8"),
        (torch.empty(2, nbytes, dtype=torch.uint8), "uint8"),
        (torch.empty(2 * nbytes, dtype=torch.uint8)[::2], "uint8"),
        (torch.empty(nbytes + 8, dtype=torch.uint8)[8:], "multiple of 64"),
    ):
        with pytest.raises(ValueError, match=words):
            resident.table.bind(0, buffer)
    stack = Resident(Stack(2))
    views = stack.table.views(0, torch.empty(stack.table.nbytes[0], dtype=torch.uint8))
    with pytest.raises(ValueError, match="layer 0 do not fit layer 1"):
        stack.table.bind(1, views)
    resident.table._check()
    assert not resident.table.is_bound(0)


def test_a_larger_buffer_will_do():
    resident = Resident(nn.Linear(4, 4))
    resident.load(0, torch.empty(1000, dtype=torch.uint8)[64:])
    assert torch.equal(resident.module.weight, resident.values[0][0])


def test_threads_may_bind_different_layers_while_skeletons_come_and_go():
    resident = Resident(Stack(4))
    errors = []

    def work(layer):
        try:
            for _ in range(50):
                resident.load(layer)
                resident.table.unbind(layer)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=work, args=(layer,)) for layer in range(4)]
    for thread in threads:
        thread.start()
    other = copy.deepcopy(resident.module)
    for _ in range(50):
        resident.table.unregister(resident.table.register(divide(other)))
    for thread in threads:
        thread.join(30)
    assert not errors
    resident.table._check()
