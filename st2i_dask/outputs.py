"""What a task hands to later tasks: the exported values, in order.

Pickles with protocol 5 without copying tensors: their bytes travel out of band, for every dtype
(Dask's own torch support refuses bfloat16). Tensors are immutable by contract.
"""

from __future__ import annotations

import pickle
import sys
from collections.abc import Callable
from typing import Any

import cloudpickle
import numpy as np

from .errors import OutputError


class TaskOutputs:
    """Exported values of one task. `values[i]` belongs to `TaskProgram.exports[i]`."""

    __slots__ = ("values",)

    def __init__(self, values: tuple[Any, ...]):
        self.values = values

    def __reduce__(self) -> tuple[Any, ...]:
        return TaskOutputs._restore, (_map_tensors(self.values, _PackedTensor.pack),)

    @staticmethod
    def _restore(values: tuple[Any, ...]) -> TaskOutputs:
        return TaskOutputs(_map_packed(values))

    def __sizeof__(self) -> int:
        """Bytes, tensors included: what Dask weighs for placement and spilling."""
        return sum(map(_nbytes, self.values)) + 64

    def check_sendable(self, where: str) -> None:
        """OutputError unless the values pickle. Dask would try to send them for ever."""
        try:
            _try_pickle(self)
        except Exception as error:
            kinds = ", ".join(type(value).__name__ for value in self.values)
            raise OutputError(
                f"{where} hands on values ({kinds}) that cannot be sent to another worker: "
                f"{error}; return tensors, arrays and plain picklable objects"
            ) from error

    def __repr__(self) -> str:
        return f"TaskOutputs({len(self.values)} values, {self.__sizeof__()} bytes)"


def _try_pickle(value: Any) -> None:
    """As Dask does it: cloudpickle where pickle refuses (classes of a notebook)."""
    try:
        pickle.dumps(value, protocol=5, buffer_callback=lambda buffer: None)
    except Exception:
        cloudpickle.dumps(value, protocol=5, buffer_callback=lambda buffer: None)


class _PackedTensor:
    """A CPU tensor as dtype name, shape, strides and raw bytes.

    Strides are kept (channels last, a transposed matrix): kernels choose their order of summation by
    them, so a result must not depend on whether a tensor has travelled. Gaps and repetitions of a
    view are left out, as in `Tensor.clone`.
    """

    __slots__ = ("dtype", "raw", "shape", "stride")

    def __init__(self, dtype: str, shape: tuple[int, ...], stride: tuple[int, ...], raw: Any):
        self.dtype, self.shape, self.stride, self.raw = dtype, shape, stride, raw

    @classmethod
    def pack(cls, tensor: Any) -> _PackedTensor:
        import torch

        tensor = tensor.detach().resolve_conj().resolve_neg()
        in_memory = cls._as_it_lies(tensor)
        if not in_memory.is_contiguous():
            tensor = tensor.clone()
            in_memory = cls._as_it_lies(tensor)
        flat = in_memory.as_strided((in_memory.numel(),), (1,))
        raw = flat.view(torch.uint8).numpy() if flat.numel() else np.empty(0, np.uint8)
        name = str(tensor.dtype).removeprefix("torch.")
        return cls(name, tuple(tensor.shape), tensor.stride(), raw)

    @staticmethod
    def _as_it_lies(tensor: Any) -> Any:
        """The tensor with its dimensions from the widest stride to the narrowest."""
        return tensor.permute(sorted(range(tensor.ndim), key=tensor.stride, reverse=True))

    def unpack(self) -> Any:
        import torch

        dtype = getattr(torch, self.dtype)
        raw = np.asarray(self.raw)
        if not raw.size:
            return torch.empty_strided(self.shape, self.stride, dtype=dtype)
        if not raw.flags.writeable or raw.ctypes.data % 64:
            # torch wants writeable storage, and kernels may sum in another order on data that is
            # aligned otherwise than torch's allocator aligns it: images would differ in a bit.
            aligned = torch.empty(raw.size, dtype=torch.uint8)
            aligned.numpy()[:] = raw
        else:
            aligned = torch.from_numpy(raw)
        return aligned.view(dtype).as_strided(self.shape, self.stride)

    def __reduce__(self) -> tuple[Any, ...]:
        return _PackedTensor, (self.dtype, self.shape, self.stride, self.raw)


def is_tensor(value: Any) -> bool:
    """Whether `value` is a torch tensor, without importing torch."""
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(value, torch.Tensor)


def map_values(tree: Any, leaf: Callable[[Any], bool], function: Callable[[Any], Any]) -> Any:
    """The tree (tuples, lists, dicts) with `function(x)` for every x that `leaf(x)` accepts."""
    if leaf(tree):
        return function(tree)
    if type(tree) in (list, tuple):
        return type(tree)(map_values(item, leaf, function) for item in tree)
    if type(tree) is dict:
        return {key: map_values(item, leaf, function) for key, item in tree.items()}
    return tree


def _map_tensors(tree: Any, function: Any) -> Any:
    return map_values(tree, _is_plain_tensor, function)


def _is_plain_tensor(value: Any) -> bool:
    # Subclasses (parameters, quantised tensors) keep their own pickling.
    if not is_tensor(value) or value.layout != sys.modules["torch"].strided or value.is_quantized:
        return False
    return type(value) is sys.modules["torch"].Tensor and value.device.type == "cpu"


def _map_packed(tree: Any) -> Any:
    return map_values(tree, lambda x: isinstance(x, _PackedTensor), _PackedTensor.unpack)


def _nbytes(value: Any) -> int:
    if is_tensor(value):
        return int(value.numel() * value.element_size())
    if isinstance(value, np.ndarray):
        return value.nbytes
    if type(value) in (list, tuple):
        return sum(map(_nbytes, value))
    if type(value) is dict:
        return sum(map(_nbytes, value.values()))
    return sys.getsizeof(value)
