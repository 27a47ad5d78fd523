"""What tasks hand on: every tensor comes back equal, laid out and aligned as it was."""

from __future__ import annotations

import pickle
import socket
import threading

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from st2i_dask.errors import OutputError
from st2i_dask.outputs import TaskOutputs, is_tensor, map_values

torch = pytest.importorskip("torch")

DTYPES = [
    *(torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.float8_e4m3fn),
    *(torch.int8, torch.int16, torch.int32, torch.int64),
    *(torch.uint8, torch.uint16, torch.uint32, torch.uint64),
    *(torch.bool, torch.complex64, torch.complex128),
]


def in_band(outputs):
    return pickle.loads(pickle.dumps(outputs, protocol=5))


def out_of_band(outputs):
    """As a receiving worker has it: read-only frames at any address."""
    buffers = []
    data = pickle.dumps(outputs, protocol=5, buffer_callback=buffers.append)
    return pickle.loads(data, buffers=[bytes(buffer.raw()) for buffer in buffers])


def same_memory(outputs):
    buffers = []
    data = pickle.dumps(outputs, protocol=5, buffer_callback=buffers.append)
    return pickle.loads(data, buffers=buffers)


def unaligned(outputs):
    buffers = []
    data = pickle.dumps(outputs, protocol=5, buffer_callback=buffers.append)
    shifted = []
    for buffer in buffers:
        raw = np.empty(buffer.raw().nbytes + 1, np.uint8)[1:]
        raw[:] = np.frombuffer(buffer.raw(), np.uint8) if raw.size else 0
        shifted.append(raw)
    return pickle.loads(data, buffers=shifted)


def through_dask(outputs):
    from distributed.protocol import deserialize, serialize

    header, frames = serialize(outputs)
    return deserialize(header, [bytes(frame) for frame in frames])


WAYS = [in_band, out_of_band, same_memory, unaligned, through_dask]
ways = pytest.mark.parametrize("way", WAYS)


def as_bytes(tensor):
    plain = torch.empty(tensor.shape, dtype=tensor.dtype)
    plain.copy_(tensor.detach())
    return plain.flatten().view(torch.uint8).numpy().tobytes()


def check_same(restored, tensor):
    assert type(restored) is torch.Tensor
    assert restored.dtype == tensor.dtype
    assert restored.shape == tensor.shape
    # Bytes, so that NaN equals itself and float8 can be compared.
    assert as_bytes(restored) == as_bytes(tensor)
    assert not restored.requires_grad
    if restored.numel():
        assert restored.data_ptr() % 64 == 0


def random_tensor(dtype, shape):
    raw = torch.randint(0, 255, (*shape, max(1, dtype.itemsize)), dtype=torch.uint8)
    if dtype == torch.bool:
        return raw[..., 0] > 127
    return raw.view(dtype)[..., 0].contiguous()


# ---------------------------------------------------------------- tensors


@ways
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(), (0,), (3, 0, 2), (1,), (3, 5), (2, 3, 4, 5)], ids=str)
def test_every_dtype_and_shape_comes_back(way, dtype, shape):
    tensor = random_tensor(dtype, shape)
    check_same(way(TaskOutputs((tensor,))).values[0], tensor)


VIEWS = {
    "transposed": torch.randn(4, 6).T,
    "permuted": torch.randn(2, 3, 4).permute(2, 0, 1),
    "channels last": torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last),
    "one of a batch, channels last": torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last)[
        :1
    ],
    "expanded": torch.randn(1, 4).expand(3, 4),
    "expanded scalar": torch.tensor(3.0).expand(2, 2),
    "expanded inside": torch.randn(3, 1, 2).expand(3, 4, 2),
    "every second": torch.randn(10)[::2],
    "columns": torch.randn(5, 8)[:, 2:6],
    "columns of a transposed": torch.randn(5, 8).T[2:6],
    "offset": torch.randn(10)[3:],
    "flipped": torch.randn(6).flip(0),
    "requires grad": torch.randn(3, requires_grad=True),
    "with history": torch.randn(3, requires_grad=True) * 2,
    "conjugated": torch.randn(4, dtype=torch.complex64).conj(),
    "negated": torch.randn(4, dtype=torch.complex64).conj().imag,
    "overlapping": torch.randn(6).unfold(0, 3, 1),
    "odd strides of length one": torch.empty_strided((1, 4, 1), (99, 1, 0)).fill_(1.5),
    "one element of stride nought": torch.tensor(3.0).expand(1),
    "one element of stride two": torch.randn(2)[::2],
    "nan and inf": torch.tensor([float("nan"), float("inf"), -0.0]),
}


@ways
@pytest.mark.parametrize("name", VIEWS)
def test_views_come_back(way, name):
    tensor = VIEWS[name]
    check_same(way(TaskOutputs((tensor,))).values[0], tensor.resolve_conj().resolve_neg())


@ways
@pytest.mark.parametrize("name", VIEWS)
def test_the_layout_is_the_one_that_a_clone_has(way, name):
    """A kernel may sum in another order on another layout: images would depend on placement."""
    tensor = VIEWS[name].detach()
    restored = way(TaskOutputs((tensor,))).values[0]
    for memory_format in (torch.contiguous_format, torch.channels_last):
        if memory_format == torch.contiguous_format or tensor.ndim == 4:
            assert restored.is_contiguous(memory_format=memory_format) == (
                tensor.clone().is_contiguous(memory_format=memory_format)
            )
    long = [i for i in range(tensor.ndim) if tensor.shape[i] > 1]
    assert [restored.stride(i) for i in long] == [tensor.clone().stride(i) for i in long]


@given(data=st.data())
def test_any_view_of_a_tensor_comes_back(data):
    shape = data.draw(st.lists(st.integers(0, 4), max_size=4))
    tensor = torch.arange(int(np.prod(shape)), dtype=torch.float32).reshape(shape)
    tensor = tensor.permute(data.draw(st.permutations(range(tensor.ndim))))
    for dimension in range(tensor.ndim):
        start = data.draw(st.integers(0, tensor.shape[dimension]))
        step = data.draw(st.integers(1, 3))
        tensor = tensor[(slice(None),) * dimension + (slice(start, None, step),)]
    if data.draw(st.booleans()):
        tensor = tensor.unsqueeze(0).expand(3, *tensor.shape)
    for way in (in_band, out_of_band):
        check_same(way(TaskOutputs((tensor,))).values[0], tensor)


def test_a_restored_tensor_is_writable_and_apart_from_what_was_sent():
    tensor = torch.zeros(100)
    restored = out_of_band(TaskOutputs((tensor,))).values[0]
    restored += 1
    assert tensor.sum() == 0


def test_bytes_are_not_copied_out_of_band():
    tensor = torch.zeros(1000)
    buffers = []
    data = pickle.dumps(TaskOutputs((tensor,)), protocol=5, buffer_callback=buffers.append)
    assert len(data) < 500
    (buffer,) = buffers
    address = np.frombuffer(buffer.raw(), np.uint8).ctypes.data
    assert address == tensor.data_ptr()


def test_only_the_viewed_part_travels():
    part = torch.zeros(1000, 1000)[:2]
    assert len(pickle.dumps(TaskOutputs((part,)), protocol=5)) < 10_000


# ---------------------------------------------------------------- other values


@ways
def test_trees_and_other_values_come_back(way):
    tensor = torch.randn(3, dtype=torch.bfloat16)
    values = ({"a": [tensor, (tensor, 1)]}, None, "text", np.arange(3), 2.5, [])
    tree, *rest = way(TaskOutputs(values)).values
    check_same(tree["a"][0], tensor)
    check_same(tree["a"][1][0], tensor)
    assert type(tree["a"][1]) is tuple
    assert rest[:2] == [None, "text"]
    assert np.array_equal(rest[2], np.arange(3))
    assert rest[3:] == [2.5, []]


@ways
@pytest.mark.parametrize(
    "value",
    [
        torch.nn.Parameter(torch.randn(2)),
        torch.eye(3).to_sparse(),
        "quantised",
    ],
    ids=["parameter", "sparse", "quantised"],
)
@pytest.mark.filterwarnings("ignore:.*quantize.*", "ignore:.*TypedStorage.*")
def test_special_tensors_keep_their_own_pickling(way, value):
    if isinstance(value, str):
        value = torch.quantize_per_tensor(torch.randn(4), 0.1, 0, torch.qint8)
    restored = way(TaskOutputs((value,))).values[0]
    assert type(restored) is type(value)
    assert restored.layout == value.layout
    assert restored.dtype == value.dtype
    assert torch.equal(restored.to_dense(), value.to_dense())


def test_a_scheduler_with_tensors_inside_comes_back():
    class Scheduler:
        def __init__(self):
            self.sigmas = torch.linspace(1, 0, 5)

    from distributed.protocol import deserialize, serialize

    again = deserialize(*serialize(TaskOutputs((Scheduler(),)))).values[0]
    assert torch.equal(again.sigmas, torch.linspace(1, 0, 5))


# ---------------------------------------------------------------- sizes


def test_size_counts_tensors_and_arrays():
    from dask.sizeof import sizeof

    tensor = torch.zeros(1000, dtype=torch.bfloat16)
    assert 2000 <= sizeof(TaskOutputs((tensor,))) < 2300
    assert 8000 <= sizeof(TaskOutputs((np.zeros(1000),))) < 8300
    nested = TaskOutputs(({"a": [tensor, (tensor,)]}, tensor))
    assert 6000 <= sizeof(nested) < 6500
    assert sizeof(TaskOutputs((torch.zeros(1).expand(1_000_000),))) >= 4_000_000


def test_repr_is_short():
    text = repr(TaskOutputs((torch.zeros(1000), 1)))
    assert text.startswith("TaskOutputs(2 values, ")


# ---------------------------------------------------------------- what cannot be sent


class Unpicklable:
    def __reduce__(self):
        raise RuntimeError("holds a device handle")


@pytest.mark.parametrize("kind", ["lock", "generator", "socket", "object"])
def test_what_cannot_be_sent_is_refused_with_place_reason_and_cure(kind):
    with socket.socket() as opened:
        value = {
            "lock": threading.Lock(),
            "generator": (i for i in ()),
            "socket": opened,
            "object": Unpicklable(),
        }[kind]
        with pytest.raises(OutputError) as caught:
            TaskOutputs((torch.zeros(1), {"a": [value]})).check_sendable("workflow 'w': vae#1")
    message = str(caught.value)
    assert message.startswith("workflow 'w': vae#1 hands on values (Tensor, dict) that cannot be")
    assert "return tensors, arrays and plain picklable objects" in message


def test_what_dask_can_send_is_not_refused():
    class OfNotebook:
        value = 5

    TaskOutputs((OfNotebook(), lambda: 0, torch.zeros(1))).check_sendable("w")
    from distributed.protocol import deserialize, serialize

    assert deserialize(*serialize(TaskOutputs((OfNotebook(),)))).values[0].value == 5


def test_checking_does_not_copy_tensors():
    import tracemalloc

    outputs = TaskOutputs((torch.zeros(1_000_000), np.zeros(1_000_000)))
    tracemalloc.start()
    outputs.check_sendable("w")
    assert tracemalloc.get_traced_memory()[1] < 1_000_000
    tracemalloc.stop()


def test_map_values_reaches_tensors_in_trees_only():
    tree = {"a": [torch.zeros(1), 1], "b": (torch.ones(1),)}
    assert map_values(tree, is_tensor, lambda t: t.item()) == {"a": [0.0, 1], "b": (1.0,)}
