"""Layer lookup table: where a model's layers lie, and its parameters as views of them.

A layer's tensors are packed into one buffer, in either region of memory. While it is resident the
parameters of every skeleton, that is of every module with these weights, are views of that buffer;
while it is not they are placeholders: one NaN expanded to the shape, so that a wrong use shows as NaN
and never as a plausible image. Parameter objects stay the same ones, so hooks, compiled code and
`module.device` keep working.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass
from operator import itemgetter
from typing import Any

from .layers import Layer

#: Bytes. What torch's CPU allocator gives, and the widest that CPU kernels ask for.
ALIGNMENT = 64


@dataclass(frozen=True, slots=True)
class Slot:
    """A tensor's place in its layer's buffer. offset, nbytes: bytes, gaps of its strides included."""

    name: str
    offset: int
    nbytes: int
    dtype: Any
    shape: tuple[int, ...]
    stride: tuple[int, ...]


@dataclass(frozen=True, slots=True, eq=False)
class Views:
    """A layer's tensors in one buffer, which they keep alive."""

    layer: int
    tensors: tuple[Any, ...]


@dataclass(frozen=True, slots=True, eq=False)
class Skeleton:
    """A module whose parameters a table binds: its Parameter objects, layer by layer."""

    layers: tuple[tuple[Any, ...], ...]


class LayerTable:
    """The layers of one set of weights. Thread-safe; rebinding takes microseconds.

    layers: of a module in memory, from `layers.divide`; it is not changed until it is registered, and
    says the shapes, dtypes and strides of all. device: where placeholders lie and where the model
    runs; None: where each parameter is now. Who calls answers for it that no skeleton executes a layer
    while it is bound or unbound.
    """

    def __init__(self, layers: Sequence[Layer], device: Any = None) -> None:
        packed = [_pack(layer, device) for layer in layers]
        #: Per layer and parameter, in the order of `Layer.parameters`. Those that share memory share
        #: a place.
        self.slots: tuple[tuple[Slot, ...], ...] = tuple(slots for slots, _ in packed)
        #: Bytes of each layer's buffer.
        self.nbytes: tuple[int, ...] = tuple(nbytes for _, nbytes in packed)
        self.names: tuple[str, ...] = tuple(layer.name for layer in layers)
        self._placeholders = tuple(
            tuple(_placeholder(parameter, device) for _, parameter in layer.parameters)
            for layer in layers
        )
        self._lock = threading.Lock()
        self._bound: list[Views | None] = [None] * len(self.slots)
        self._skeletons: list[Skeleton] = []

    def register(self, layers: Sequence[Layer]) -> Skeleton:
        """From now on the parameters of these layers follow the table; what they held is let go.

        ValueError, and nothing changed, unless they have the names, shapes and dtypes of the table's.
        """
        for expected, layer in zip(self.slots, layers, strict=False):
            _check_same(expected, layer)
        if len(layers) != len(self.slots):
            raise ValueError(f"{len(layers)} layers do not fit a table of {len(self.slots)}")
        skeleton = Skeleton(tuple(tuple(p for _, p in layer.parameters) for layer in layers))
        with self._lock:
            self._skeletons.append(skeleton)
            for number, parameters in enumerate(skeleton.layers):
                _rebind(parameters, self._tensors(number))
        return skeleton

    def unregister(self, skeleton: Skeleton) -> None:
        """Its parameters become placeholders, except those that another skeleton has too."""
        with self._lock:
            self._skeletons.remove(skeleton)
            kept = {id(p) for other in self._skeletons for layer in other.layers for p in layer}
            for parameters, placeholders in zip(skeleton.layers, self._placeholders, strict=True):
                pairs = zip(parameters, placeholders, strict=True)
                alone = [(p, holder) for p, holder in pairs if id(p) not in kept]
                _rebind([p for p, _ in alone], [holder for _, holder in alone])

    def views(self, layer: int, buffer: Any) -> Views:
        """The layer's tensors in a buffer: contiguous torch.uint8 of at least its bytes, in any
        memory. About a microsecond a tensor: made beside the run, not in its way."""
        _check_buffer(buffer, self.nbytes[layer])
        return Views(layer, _views(self.slots[layer], buffer[: self.nbytes[layer]]))

    def bind(self, layer: int, where: Any) -> None:
        """The parameters of that layer become views. where: a buffer, or `views` made of one."""
        views = where if isinstance(where, Views) else self.views(layer, where)
        if views.layer != layer:
            raise ValueError(f"views of layer {views.layer} do not fit layer {layer}")
        with self._lock:
            self._bound[layer] = views
            for skeleton in self._skeletons:
                _rebind(skeleton.layers[layer], views.tensors)

    def unbind(self, layer: int) -> None:
        """The parameters of that layer become placeholders; the table keeps no view of its buffer."""
        with self._lock:
            self._bound[layer] = None
            for skeleton in self._skeletons:
                _rebind(skeleton.layers[layer], self._placeholders[layer])

    def is_bound(self, layer: int) -> bool:
        return self._bound[layer] is not None

    @property
    def skeletons(self) -> int:
        """How many modules follow the table."""
        return len(self._skeletons)

    def _tensors(self, layer: int) -> tuple[Any, ...]:
        views = self._bound[layer]
        return self._placeholders[layer] if views is None else views.tensors

    def _check(self) -> None:
        with self._lock:
            for number, slots in enumerate(self.slots):
                tensors = self._tensors(number)
                assert all(slot.offset + slot.nbytes <= self.nbytes[number] for slot in slots)
                for skeleton in self._skeletons:
                    for slot, parameter, tensor in zip(
                        slots, skeleton.layers[number], tensors, strict=True
                    ):
                        assert parameter.data_ptr() == tensor.data_ptr(), slot.name
                        assert parameter.shape == slot.shape, slot.name
                        assert parameter.dtype == slot.dtype, slot.name
                        assert parameter.stride() == tensor.stride(), slot.name


def _pack(layer: Layer, device: Any) -> tuple[tuple[Slot, ...], int]:
    """In order of address: what lies side by side in a file does so here, and is copied as one.

    On a CPU a tensor is as far from a multiple of ALIGNMENT as the parameter is where it was read:
    kernels may sum in another order by it, and every bit would not be the reference's. Devices have
    the reference's weights at multiples of it too.
    """
    places: dict[tuple[int, int], int] = {}
    end = 0
    items = {_place(name, parameter): parameter for name, parameter in layer.parameters}
    for place, parameter in sorted(items.items(), key=itemgetter(0)):
        phase = phase_of(parameter) if device is None or str(device) == "cpu" else 0
        places[place] = end + (phase - end) % ALIGNMENT
        end = places[place] + place[1]
    slots = (
        Slot(
            name,
            places[_place(name, parameter)],
            extent(parameter),
            parameter.dtype,
            tuple(parameter.shape),
            parameter.stride(),
        )
        for name, parameter in layer.parameters
    )
    return tuple(slots), -(-end // ALIGNMENT) * ALIGNMENT


def phase_of(tensor: Any) -> int:
    """Bytes beyond a multiple of ALIGNMENT; 0 for one that no view of bytes can be made at."""
    phase: int = tensor.data_ptr() % ALIGNMENT
    return 0 if phase % tensor.element_size() else phase


def _place(name: str, parameter: Any) -> tuple[int, int]:
    """Address and bytes."""
    if parameter.device.type == "meta":
        raise ValueError(f"parameter {name} has no memory (device meta): load the model first")
    return parameter.data_ptr(), extent(parameter)


def extent(tensor: Any) -> int:
    """Bytes from a strided tensor's first element to the end of its last."""
    if not tensor.numel():
        return 0
    steps = sum((size - 1) * step for size, step in zip(tensor.shape, tensor.stride(), strict=True))
    nbytes: int = (1 + steps) * tensor.element_size()
    return nbytes


def _placeholder(parameter: Any, device: Any) -> Any:
    import torch

    floats = parameter.is_floating_point() or parameter.is_complex()
    with torch.inference_mode(False):
        value = torch.tensor(float("nan") if floats else -1).to(parameter.dtype)
        return value.to(device or parameter.device).expand(parameter.shape)


def _views(slots: Sequence[Slot], buffer: Any) -> tuple[Any, ...]:
    import torch

    found = []
    # Views that know nothing of autograd, whatever mode the calling thread is in.
    with torch.inference_mode(False), torch.no_grad():
        typed = {dtype: buffer.view(dtype) for dtype in {slot.dtype for slot in slots}}
        for slot in slots:
            base = typed[slot.dtype]
            start = base.storage_offset() + slot.offset // base.element_size()
            found.append(torch.as_strided(base, slot.shape, slot.stride, start))
    return tuple(found)


def _rebind(parameters: Sequence[Any], tensors: Sequence[Any]) -> None:
    for parameter, tensor in zip(parameters, tensors, strict=True):
        parameter.data = tensor


def _check_same(expected: Sequence[Slot], layer: Layer) -> None:
    found = [(name, tuple(p.shape), p.dtype) for name, p in layer.parameters]
    wanted = [(slot.name, slot.shape, slot.dtype) for slot in expected]
    if found != wanted:
        differing = [pair for pair in zip(found, wanted, strict=False) if pair[0] != pair[1]]
        got, slot = differing[0] if differing else (len(found), len(wanted))
        raise ValueError(f"layer {layer.name!r} does not fit the table: {got}, expected {slot}")
    for name, parameter in layer.parameters:
        if parameter.device.type == "meta":
            raise ValueError(f"parameter {name} has no memory (device meta): it cannot be rebound")


def _check_buffer(buffer: Any, nbytes: int) -> None:
    import torch

    if buffer.dtype != torch.uint8 or buffer.dim() != 1 or not buffer.is_contiguous():
        raise ValueError(
            f"a layer goes into a contiguous uint8 buffer; got {buffer.dtype} {list(buffer.shape)}"
        )
    if buffer.numel() < nbytes:
        raise ValueError(f"a layer of {nbytes} bytes does not fit {buffer.numel()} bytes")
    if buffer.storage_offset() % ALIGNMENT:
        raise ValueError(
            f"a layer's buffer starts at a multiple of {ALIGNMENT} bytes of its storage; got "
            f"{buffer.storage_offset()}"
        )
