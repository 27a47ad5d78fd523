"""What a task hands to later tasks: the exported values, in order.

Pickles with protocol 5 without copying tensors: their bytes travel out of band, for every dtype
(Dask's own torch support refuses bfloat16). Tensors are immutable by contract.
"""

from __future__ import annotations

import pickle
import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import cloudpickle
import numpy as np

from .errors import OutputError


class PackedTensor(ABC):
    """A tensor as it travels: picklable, and a tensor again where it arrives."""

    __slots__ = ()

    @abstractmethod
    def unpack(self) -> Any:
        """The tensor. OSError when its bytes cannot be had any more."""


#: How the tensors of outputs that are pickled in this context travel; None: as their bytes.
_packing: ContextVar[Callable[[Any], PackedTensor | None] | None] = ContextVar(
    "st2i-packing", default=None
)


@contextmanager
def packing(pack: Callable[[Any], PackedTensor | None] | None) -> Iterator[None]:
    """Outputs pickled in the body send what `pack(tensor)` returns; None: the tensor's bytes."""
    token = _packing.set(pack)
    try:
        yield
    finally:
        _packing.reset(token)


class TaskOutputs:
    """Exported values of one task. `values[i]` belongs to `TaskProgram.exports[i]`.

    lost: why these outputs arrived without their values; None for all that are sound. Never left in
    a worker's memory. held: what must live as long as they do where they were made; does not travel.
    versions: by model key, which weights the request has used so far to make them. spoilt: the task of
    the request whose outputs were the first with NaN in them; None if there was none.
    """

    __slots__ = ("held", "lost", "spoilt", "values", "versions")

    def __init__(
        self,
        values: tuple[Any, ...],
        lost: str | None = None,
        versions: Mapping[str, str] | None = None,
        spoilt: str | None = None,
    ):
        self.values = values
        self.spoilt = spoilt
        self.versions: Mapping[str, str] = versions or {}
        self.lost = lost
        self.held: Any = None

    def __reduce__(self) -> tuple[Any, ...]:
        values = map_values(self.values, is_plain_tensor, _pack)
        return TaskOutputs._restore, (values, dict(self.versions), self.spoilt)

    @staticmethod
    def _restore(
        values: tuple[Any, ...], versions: dict[str, str], spoilt: str | None
    ) -> TaskOutputs:
        try:
            values = map_values(values, _is_packed, lambda packed: packed.unpack())
            return TaskOutputs(values, versions=versions, spoilt=spoilt)
        except OSError as error:
            # Dask would take it for a failed task; who asked for it looks at `lost` instead.
            return TaskOutputs((), str(error) or type(error).__name__)

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


#: How deep tuples, lists and dicts may be nested in what a task hands on.
MAX_DEPTH = 50


def check_values(values: Any, where: str) -> None:
    """OutputError where there is nothing to hand on: a tensor without data, a list that never ends."""
    pending = [(values, 0)]
    while pending:
        tree, depth = pending.pop()
        if depth > MAX_DEPTH:
            raise OutputError(
                f"{where} hands on tuples, lists or dicts nested more than {MAX_DEPTH} deep, or one "
                "that contains itself; return a flatter value"
            )
        if type(tree) in (list, tuple, dict):
            inside = tree.values() if type(tree) is dict else tree
            pending += [(item, depth + 1) for item in inside]
        elif is_tensor(tree) and tree.is_meta:
            raise OutputError(
                f"{where} hands on a tensor of shape {tuple(tree.shape)} on the device 'meta', which has "
                "no data; load the model's weights, or move the tensor to the model's device"
            )


def _try_pickle(value: Any) -> None:
    """As Dask does it: cloudpickle where pickle refuses (classes of a notebook)."""
    try:
        pickle.dumps(value, protocol=5, buffer_callback=lambda buffer: None)
    except Exception:
        cloudpickle.dumps(value, protocol=5, buffer_callback=lambda buffer: None)


class _TensorBytes(PackedTensor):
    """A tensor as dtype name, shape, strides and raw bytes.

    Strides are kept (channels last, a transposed matrix): kernels choose their order of summation by
    them, so a result must not depend on whether a tensor has travelled. Gaps and repetitions of a
    view are left out, as in `Tensor.clone`.
    """

    __slots__ = ("dtype", "raw", "shape", "stride")

    def __init__(self, dtype: str, shape: tuple[int, ...], stride: tuple[int, ...], raw: Any):
        self.dtype, self.shape, self.stride, self.raw = dtype, shape, stride, raw

    @classmethod
    def pack(cls, tensor: Any) -> _TensorBytes:
        import torch

        tensor = dense(tensor.detach().to("cpu"))
        flat = tensor.as_strided((tensor.numel(),), (1,))
        raw = flat.view(torch.uint8).numpy() if flat.numel() else np.empty(0, np.uint8)
        return cls(dtype_name(tensor), tuple(tensor.shape), tensor.stride(), raw)

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
        return _TensorBytes, (self.dtype, self.shape, self.stride, self.raw)


def dense(tensor: Any) -> Any:
    """The tensor, or a copy with the same strides order, whose elements fill their memory without
    gaps or repetitions, and without lazy conjugation or negation."""
    tensor = tensor.resolve_conj().resolve_neg()
    if tensor.is_contiguous():
        return tensor
    widest_first = sorted(range(tensor.ndim), key=tensor.stride, reverse=True)
    return tensor if tensor.permute(widest_first).is_contiguous() else tensor.clone()


def dtype_name(tensor: Any) -> str:
    return str(tensor.dtype).removeprefix("torch.")


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


def _pack(tensor: Any) -> PackedTensor:
    pack = _packing.get()
    return (pack(tensor) if pack is not None else None) or _TensorBytes.pack(tensor)


def is_plain_tensor(value: Any) -> bool:
    """Whether `value` is a strided tensor and nothing more: subclasses (parameters, quantised
    tensors) keep their own pickling."""
    if not is_tensor(value) or value.layout != sys.modules["torch"].strided or value.is_quantized:
        return False
    return type(value) is sys.modules["torch"].Tensor


def _is_packed(value: Any) -> bool:
    return isinstance(value, PackedTensor)


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
