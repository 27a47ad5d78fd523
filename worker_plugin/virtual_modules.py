"""The modules of a model whose weights lie in safetensors files: which these are, in layers, and where the
parameters lie. Their weights may come and go.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from st2i_dask.errors import LoadError

from .components import modules
from .content import ContentIds, Source
from .layer_table import ALIGNMENT, LayerTable
from .layers import ROOT, Layer, divide
from .mappings import file_ranges
from .skeletons import ModelWeights
from .stored import Stored, converted

# Of a module whose parameters follow a table.
_TAKEN = "_st2i_taken"


@dataclass
class Found:
    """A virtual module that was found: the layers that can come and go, where they lie, and the id of
    their content."""

    layers: list[Layer]
    sources: list[tuple[Stored, ...]]
    id: str


def find_virtual(components: Mapping[str, Any], ids: ContentIds) -> list[Found]:
    """The modules whose weights lie in files; those that share parameters count as one. Nothing is
    changed. LoadError for a module that is in use already: its weights are where its table says."""
    found = []
    for layers, where in _divided(modules(components)):
        kept, sources = [], []
        for layer in layers:
            pairs = [(e, at) for e in layer.parameters if (at := where[id(e[1])]) is not None]
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
    """The weights of a module, with a table of their own. unit: keeps them apart from others.

    Equal values that lie otherwise in their file are other weights: see `layer_table`.
    """
    table = LayerTable(found.layers, device)
    phases = [slot.offset % ALIGNMENT for slots in table.slots for slot in slots]
    # Or a copy would write over what lies behind it.
    assert all(
        stored.dtype != slot.dtype or stored.range.nbytes == slot.nbytes
        for slots, where in zip(table.slots, found.sources, strict=True)
        for slot, stored in zip(slots, where, strict=True)
    )
    roots = tuple(i for i, layer in enumerate(found.layers) if layer.name == ROOT)
    first = found.layers[0].parameters[0][1]
    architecture = _architecture(found.layers)
    return ModelWeights(
        f"{unit}\0{found.id}\0{architecture}\0{_digest(phases)}",
        table.nbytes,
        roots,
        table,
        tuple(found.sources),
        frozenset(stored.range.file for layer in found.sources for stored in layer),
        architecture,
        str(first.dtype),
        found.id.partition("-")[0],
    )


def mark_taken(components: Mapping[str, Any]) -> None:
    """Parameters of these modules follow tables from now on; see `find_virtual`."""
    for module in modules(components):
        module.__dict__[_TAKEN] = True


#: By id of a parameter, where it lies.
_Places = dict[int, Stored | None]


def _divided(found: Sequence[Any]) -> list[tuple[list[Layer], _Places]]:
    """The layers of each module; of modules that share parameters together, or one would evict what
    the other executes with."""
    groups: list[tuple[list[Layer], _Places]] = []
    for module in found:
        if module.__dict__.get(_TAKEN):
            raise LoadError(
                f"load_model returned a {type(module).__name__} that it has returned before, or a "
                "copy of one; its weights come and go: build a new one in every call"
            )
        layers = divide(module)
        entries = [entry for layer in layers for entry in layer.parameters]
        places = {
            id(parameter): at
            for (_, parameter), at in zip(entries, _where(module, entries), strict=True)
        }
        apart = []
        for other, elsewhere in groups:
            if places.keys().isdisjoint(elsewhere):
                apart.append((other, elsewhere))
            else:
                layers = _joined([*other, *layers])
                places |= {key: at for key, at in elsewhere.items() if at is not None}
        groups = [*apart, (layers, places)]
    return groups


def _joined(layers: Sequence[Layer]) -> list[Layer]:
    """Those that share parameters as one, which is a root layer if one of them is."""
    joined: list[Layer] = []
    for layer in layers:
        mine = parameter_ids([layer])
        sharing = [i for i, e in enumerate(joined) if not mine.isdisjoint(parameter_ids([e]))]
        union = _union([*(joined[i] for i in sharing), layer])
        joined = [e for i, e in enumerate(joined) if i not in sharing]
        joined.insert(sharing[0] if sharing else len(joined), union)
    return joined


def _union(layers: Sequence[Layer]) -> Layer:
    is_root = any(layer.name == ROOT for layer in layers)
    modules = {id(module): module for layer in layers for module in layer.modules}
    parameters: dict[int, tuple[str, Any]] = {}
    for layer in layers:
        for name, parameter in layer.parameters:
            parameters.setdefault(id(parameter), (name, parameter))
    return Layer(
        ROOT if is_root else layers[0].name,
        () if is_root else tuple(modules.values()),
        tuple(parameters.values()),
    )


def parameter_ids(layers: Sequence[Layer]) -> set[int]:
    return {id(parameter) for layer in layers for _, parameter in layer.parameters}


def _contents(layers: Sequence[Layer], sources: Sequence[tuple[Stored, ...]]) -> list[Source]:
    found = []
    for layer, where in zip(layers, sources, strict=True):
        for (name, parameter), stored in zip(layer.parameters, where, strict=True):
            at, dtype = stored.range, str(parameter.dtype)
            if stored.dtype != parameter.dtype:
                dtype += f" from {stored.dtype}"
            found.append(Source(name, dtype, tuple(parameter.shape), at.file, at.offset, at.nbytes))
    return found


def _architecture(layers: Sequence[Layer]) -> str:
    """Digest (16 hex digits) of the layers' names and shapes."""
    shapes = [(layer.name, [tuple(p.shape) for _, p in layer.parameters]) for layer in layers]
    return _digest(shapes)


def _digest(value: Any) -> str:
    return hashlib.sha256(repr(value).encode()).hexdigest()[:16]
