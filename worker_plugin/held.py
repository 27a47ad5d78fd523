"""What of a model is held: there as long as its skeleton is, as it lies in no safetensors file unchanged.

Parameters made or converted in this process, buffers, adapters, bare tensors, arrays.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from st2i_dask.outputs import is_tensor

from .components import parts
from .layer_table import ALIGNMENT
from .mappings import SUFFIX
from .virtual_modules import Found, parameter_ids

#: What is held beside virtual weights is left out of the books below this share of them.
NEGLIGIBLE = 0.01


def held_bytes(components: Mapping[str, Any], virtual: Sequence[Found]) -> int:
    """Bytes of the tensors of modules, pipelines, bare tensors and arrays that stay with the
    skeleton; shared ones once."""
    storages: dict[int, int] = {}
    for tensor in _held(components, virtual):
        storage = tensor.untyped_storage()
        storages[storage.data_ptr()] = storage.nbytes()
    for part in parts(components):
        if isinstance(part, np.ndarray):
            storages[part.ctypes.data] = part.nbytes
    return sum(storages.values())


def take_from_files(components: Mapping[str, Any], virtual: Sequence[Found]) -> None:
    """What is held gets memory of its own where it lies in a mapped file (buffers, transposed
    weights): reading there after the file was cut short would kill the worker."""
    spans = _mapped_spans()
    copies: dict[int, Any] = {}
    for tensor in _held(components, virtual) if spans else ():
        storage = tensor.untyped_storage()
        address = storage.data_ptr()
        if not any(start <= address < end for start, end in spans):
            continue
        import torch  # not for models without it

        phase = address % ALIGNMENT
        if address not in copies:
            copies[address] = torch.empty(storage.nbytes() + phase, dtype=torch.uint8)
            mapped = torch.empty(0, dtype=torch.uint8).set_(storage)
            copies[address][phase:].copy_(mapped)
        # What no view can be made at lies a few bytes off: no kernel takes it as it is either.
        skip, rest = divmod(phase, tensor.element_size())
        copy = copies[address][rest:].clone() if rest else copies[address]
        place = copy.untyped_storage(), tensor.storage_offset() + skip
        tensor.data = torch.empty(0, dtype=tensor.dtype).set_(
            *place, tensor.size(), tensor.stride()
        )


def move_held(components: Mapping[str, Any], device: str) -> None:
    """Move what is held to the device: modules in place, bare tensors in the mapping."""
    for name, value in components.items():
        if is_tensor(value):
            components[name] = value.to(device)  # type: ignore[index]
    for part in parts(components):
        if not is_tensor(part) and hasattr(part, "to") and hasattr(part, "parameters"):
            part.to(device)  # placeholders are there already


def _tensors(part: Any) -> list[Any]:
    if is_tensor(part):
        return [part]
    if hasattr(part, "parameters") and hasattr(part, "buffers"):
        return [*part.parameters(), *part.buffers()]
    return []


def _held(components: Mapping[str, Any], virtual: Sequence[Found]) -> list[Any]:
    """Tensors that no table has."""
    elsewhere = {i for found in virtual for i in parameter_ids(found.layers)}
    return [t for part in parts(components) for t in _tensors(part) if id(t) not in elsewhere]


def _mapped_spans() -> list[tuple[int, int]]:
    """Addresses where this process has safetensors files mapped. Linux; elsewhere none."""
    try:
        with open("/proc/self/maps") as maps:
            lines = [line.split(maxsplit=1)[0] for line in maps if SUFFIX in line]
    except OSError:
        return []
    return [(int(start, 16), int(end, 16)) for start, _, end in (e.partition("-") for e in lines)]
