"""Models without their weights: what `load_model` returned, its parameters left to layer tables.

Every module whose parameters lie in safetensors files is *virtual*: its weights come and go layer by
layer. Everything else (parameters made or converted in this process, bare tensors, arrays) is *held*:
it is there as long as the skeleton is.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from st2i_dask.outputs import is_tensor

from .content import ContentIds, Source
from .content import FileIdentity as ContentFile
from .layer_table import LayerTable
from .layers import ROOT, Layer, divide
from .mappings import FileIdentity, file_ranges
from .stored import Stored, converted

#: What is held beside virtual weights is left out of the books below this share of them.
NEGLIGIBLE = 0.01


@dataclass
class ModelWeights:
    """One module's weights on this worker; several skeletons may have them.

    table: None for what is held. sources: per layer, where its tensors come from. architecture: names
    the shapes, for measurements that hold for all weights of that form.
    """

    id: str
    sizes: tuple[int, ...]
    roots: tuple[int, ...]
    table: LayerTable | None = None
    sources: tuple[tuple[Stored, ...], ...] = ()
    architecture: str = ""
    dtype: str = ""

    @property
    def nbytes(self) -> int:
        return sum(self.sizes)

    @property
    def files(self) -> set[FileIdentity]:
        return {stored.range.file for layer in self.sources for stored in layer}


@dataclass
class Part:
    """A virtual module of a skeleton. bound: what its weights' table knows it by."""

    weights: ModelWeights
    layers: Sequence[Layer]
    bound: Any


@dataclass
class Skeleton:
    """One loaded ModelFn. key: its model_key and its unit, which keeps it apart from others (see
    WeightStore). stale: its files have changed; nobody gets it any more. handles: of its hooks."""

    key: str
    model_key: str
    label: str
    unit: str
    components: Mapping[str, Any]
    parts: list[Part] = field(default_factory=list)
    held: ModelWeights | None = None
    users: int = 0
    stale: bool = False
    handles: list[Any] = field(default_factory=list)

    @property
    def weights(self) -> list[ModelWeights]:
        return [part.weights for part in self.parts] + ([self.held] if self.held else [])


@dataclass
class Found:
    """A virtual module that was found: the layers that can come and go, where they lie, and the id of
    their content."""

    layers: list[Layer]
    sources: list[tuple[Stored, ...]]
    id: str


def find_virtual(components: Mapping[str, Any], ids: ContentIds) -> list[Found]:
    """The modules whose weights lie in files. Nothing is changed."""
    found = []
    for module in _modules(components):
        layers = divide(module)
        rest = iter(_where(module, [entry for layer in layers for entry in layer.parameters]))
        kept, sources = [], []
        for layer in layers:
            pairs = [(entry, at) for entry in layer.parameters if (at := next(rest)) is not None]
            if pairs:
                kept.append(replace(layer, parameters=tuple(entry for entry, _ in pairs)))
                sources.append(tuple(at for _, at in pairs))
        if kept:
            found.append(Found(kept, sources, ids.id(_contents(kept, sources))))
    return found


def _where(module: Any, parameters: Sequence[tuple[str, Any]]) -> list[Stored | None]:
    """Mapped as they are, or to be converted again."""
    mapped = file_ranges([parameter for _, parameter in parameters])
    found = [
        Stored(at, parameter.dtype) if at is not None else None
        for at, (_, parameter) in zip(mapped, parameters, strict=True)
    ]
    if None in found:
        absent = [entry for entry, at in zip(parameters, found, strict=True) if at is None]
        others = iter(converted(module, absent))
        found = [at if at is not None else next(others) for at in found]
    return found


def make_weights(found: Found, unit: str, device: str) -> ModelWeights:
    """The weights of a module, with a table of their own. unit: keeps them apart from others."""
    table = LayerTable(found.layers, device)
    roots = tuple(i for i, layer in enumerate(found.layers) if layer.name == ROOT)
    first = found.layers[0].parameters[0][1]
    architecture = _architecture(found.layers)
    return ModelWeights(
        f"{unit}\0{found.id}\0{architecture}",
        table.nbytes,
        roots,
        table,
        tuple(found.sources),
        architecture,
        str(first.dtype),
    )


def held_bytes(components: Mapping[str, Any], virtual: Sequence[Found]) -> int:
    """Bytes of the tensors of modules, pipelines, bare tensors and arrays that stay with the
    skeleton; shared ones once."""
    elsewhere = {id(p) for f in virtual for layer in f.layers for _, p in layer.parameters}
    storages: dict[int, int] = {}
    for part in _parts(components):
        for tensor in _tensors(part):
            if id(tensor) not in elsewhere:
                storage = tensor.untyped_storage()
                storages[storage.data_ptr()] = storage.nbytes()
        if isinstance(part, np.ndarray):
            storages[part.ctypes.data] = part.nbytes
    return sum(storages.values())


def move_held(components: Mapping[str, Any], device: str) -> None:
    """Move what is held to the device: modules in place, bare tensors in the mapping."""
    for name, value in components.items():
        if is_tensor(value):
            components[name] = value.to(device)  # type: ignore[index]
    for part in _parts(components):
        if not is_tensor(part) and hasattr(part, "to") and hasattr(part, "parameters"):
            part.to(device)  # placeholders are there already


def install_hooks(
    part: Part,
    enter: Callable[[ModelWeights, int], None],
    leave: Callable[[ModelWeights, int], None],
) -> list[Any]:
    """Call `enter` before and `leave` after every forward of a module that needs a layer; handles."""
    handles = []
    for number, layer in enumerate(part.layers):
        for module in layer.modules:

            def before(module: Any, args: Any, number: int = number) -> None:
                enter(part.weights, number)

            def after(module: Any, args: Any, output: Any, number: int = number) -> None:
                leave(part.weights, number)

            handles.append(module.register_forward_pre_hook(before, prepend=True))
            handles.append(module.register_forward_hook(after, always_call=True))
    return handles


def _modules(components: Mapping[str, Any]) -> list[Any]:
    """Every torch module among the components, once; those of pipelines too."""
    found: dict[int, Any] = {}
    for part in _parts(components):
        if hasattr(part, "register_forward_pre_hook") and hasattr(part, "parameters"):
            found[id(part)] = part
    return list(found.values())


def _parts(components: Mapping[str, Any]) -> list[Any]:
    found: list[Any] = []
    for value in components.values():
        inner = getattr(value, "components", None)
        found += inner.values() if isinstance(inner, Mapping) and inner else [value]
    return found


def _tensors(part: Any) -> list[Any]:
    if is_tensor(part):
        return [part]
    if hasattr(part, "parameters") and hasattr(part, "buffers"):
        return [*part.parameters(), *part.buffers()]
    return []


def _contents(layers: Sequence[Layer], sources: Sequence[tuple[Stored, ...]]) -> list[Source]:
    found = []
    for layer, where in zip(layers, sources, strict=True):
        for (name, parameter), stored in zip(layer.parameters, where, strict=True):
            at, dtype = stored.range, str(parameter.dtype)
            if stored.dtype != parameter.dtype:
                dtype += f" from {stored.dtype}"
            file = ContentFile(
                at.file.path, at.file.device, at.file.inode, at.file.nbytes, at.file.mtime_ns
            )
            found.append(Source(name, dtype, tuple(parameter.shape), file, at.offset, at.nbytes))
    return found


def _architecture(layers: Sequence[Layer]) -> str:
    """Digest (16 hex digits) of the layers' names and shapes."""
    shapes = [(layer.name, [tuple(p.shape) for _, p in layer.parameters]) for layer in layers]
    return hashlib.sha256(repr(shapes).encode()).hexdigest()[:16]
