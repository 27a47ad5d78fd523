"""Models without their weights: what `load_model` returned, its parameters left to layer tables.

Every module whose parameters lie in safetensors files is *virtual*: its weights come and go layer by
layer. Everything else (parameters made or converted in this process, adapters, bare tensors, arrays) is
*held*: it is there as long as the skeleton is.
"""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from operator import attrgetter
from typing import Any

import numpy as np

from st2i_dask.errors import LoadError
from st2i_dask.outputs import is_tensor

from .adapters import adapter_parameters, is_adapted
from .content import ContentIds, Source
from .file_identity import FileIdentity
from .layer_table import ALIGNMENT, LayerTable
from .layers import ROOT, Layer, divide
from .mappings import SUFFIX, file_ranges
from .stored import Stored, converted

#: What is held beside virtual weights is left out of the books below this share of them.
NEGLIGIBLE = 0.01
#: Called with the weights and the layer that a module is about to need, or has needed.
Hook = Callable[["ModelWeights", int], None]

_version = attrgetter("_version")

# Of a module whose parameters follow a table.
_TAKEN = "_st2i_taken"


@dataclass(eq=False)
class ModelWeights:
    """One module's weights on this worker; several skeletons may have them.

    table: None for what is held. sources: per layer, where its tensors come from; files: all of these.
    architecture: names the shapes, for measurements that hold for all weights of that form. content:
    names the values, alike in every process (see `content.py`).
    """

    id: str
    sizes: tuple[int, ...]
    roots: tuple[int, ...]
    table: LayerTable | None = None
    sources: tuple[tuple[Stored, ...], ...] = ()
    files: frozenset[FileIdentity] = frozenset()
    architecture: str = ""
    dtype: str = ""
    content: str = ""

    @property
    def nbytes(self) -> int:
        return sum(self.sizes)

    @property
    def name(self) -> str:
        """For people: its file, the first of several, or without any what it is known by."""
        paths = sorted(file.path for file in self.files)
        if not paths:
            return self.id.replace("\0", " ").strip()
        return paths[0] if len(paths) == 1 else f"{paths[0]} and {len(paths) - 1} more"


@dataclass(eq=False)
class Part:
    """A virtual module of a skeleton. bound: what its weights' table knows it by."""

    weights: ModelWeights
    layers: Sequence[Layer]
    bound: Any


@dataclass(eq=False)
class Skeleton:
    """One loaded ModelFn. key: its model_key and its unit, which keeps it apart from others (see
    WeightStore). stale: its files have changed; nobody gets it any more. handles: of its hooks, while
    they are installed. is_compiled: torch compiles parts of it, hooks included. is_undivided: it runs with
    all its layers in memory, where they fit (see WeightStore.hold_all). parameters: the virtual
    ones; writes: how often they had been written to in place when this was last looked at."""

    key: str
    model_key: str
    label: str
    unit: str
    components: Mapping[str, Any]
    parts: list[Part] = field(default_factory=list)
    held: ModelWeights | None = None
    users: int = 0
    stale: bool = False
    is_compiled: bool = False
    is_undivided: bool = False
    handles: list[Any] = field(default_factory=list)
    parameters: list[Any] = field(default_factory=list)
    writes: int = 0

    @property
    def weights(self) -> list[ModelWeights]:
        return [part.weights for part in self.parts] + ([self.held] if self.held else [])

    def was_written(self) -> bool:
        """Whether model code has changed a virtual parameter in place since this was last asked. What
        it does through `.data` is not seen."""
        writes: int = sum(map(_version, self.parameters))
        written, self.writes = writes != self.writes, writes
        return written

    @property
    def files(self) -> frozenset[FileIdentity]:
        """Where its weights come from now."""
        return frozenset[FileIdentity]().union(*(part.weights.files for part in self.parts))


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
    for layers, where in _divided(_modules(components)):
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


def held_bytes(components: Mapping[str, Any], virtual: Sequence[Found]) -> int:
    """Bytes of the tensors of modules, pipelines, bare tensors and arrays that stay with the
    skeleton; shared ones once."""
    storages: dict[int, int] = {}
    for tensor in _held(components, virtual):
        storage = tensor.untyped_storage()
        storages[storage.data_ptr()] = storage.nbytes()
    for part in _parts(components):
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


def mark_taken(components: Mapping[str, Any]) -> None:
    """Parameters of these modules follow tables from now on; see `find_virtual`."""
    for module in _modules(components):
        module.__dict__[_TAKEN] = True


def move_held(components: Mapping[str, Any], device: str) -> None:
    """Move what is held to the device: modules in place, bare tensors in the mapping."""
    for name, value in components.items():
        if is_tensor(value):
            components[name] = value.to(device)  # type: ignore[index]
    for part in _parts(components):
        if not is_tensor(part) and hasattr(part, "to") and hasattr(part, "parameters"):
            part.to(device)  # placeholders are there already


def install_hooks(part: Part, enter: Hook, leave: Hook) -> list[Any]:
    """Call `enter` before and `leave` after every forward of a module that needs a layer; handles."""
    handles = []
    enter, leave = _untraced(enter), _untraced(leave)
    for number, layer in enumerate(part.layers):
        for module in layer.modules:

            def before(module: Any, args: Any, number: int = number) -> None:
                enter(part.weights, number)

            def after(module: Any, args: Any, output: Any, number: int = number) -> None:
                leave(part.weights, number)

            handles.append(module.register_forward_pre_hook(before, prepend=True))
            handles.append(module.register_forward_hook(after, always_call=True))
    return handles


#: By id of a parameter, where it lies.
_Places = dict[int, Stored | None]


def _divided(modules: Sequence[Any]) -> list[tuple[list[Layer], _Places]]:
    """The layers of each module; of modules that share parameters together, or one would evict what
    the other executes with."""
    groups: list[tuple[list[Layer], _Places]] = []
    for module in modules:
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
        mine = _parameter_ids([layer])
        sharing = [i for i, e in enumerate(joined) if not mine.isdisjoint(_parameter_ids([e]))]
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


def _parameter_ids(layers: Sequence[Layer]) -> set[int]:
    return {id(parameter) for layer in layers for _, parameter in layer.parameters}


def is_compiled(components: Mapping[str, Any]) -> bool:
    """Whether torch compiles any module of it."""
    return any(
        getattr(module, "_compiled_call_impl", None) is not None or hasattr(module, "_orig_mod")
        for part in _modules(components)
        for module in part.modules()
    )


def has_adapters(components: Mapping[str, Any]) -> bool:
    """Whether a module has adapters, which are small beside it but not the same in each skeleton."""
    return any(is_adapted(m) for part in _modules(components) for m in part.modules())


def release_adapters(components: Mapping[str, Any]) -> None:
    """Let go of the memory of adapters that nobody uses any more. Their modules may be parts of cycles
    (Diffusers' own hooks are), which wait for the garbage collector."""
    for part in _modules(components):
        for parameter in adapter_parameters(part):
            parameter.data = parameter.data.new_empty(0)


def _untraced(function: Any) -> Any:
    """Compiled modules run it as it is: tracing it would be work for nothing, and its state a reason
    to compile anew. Where nothing is compiled torch's compiler is not imported for it."""
    dynamo = sys.modules.get("torch._dynamo")
    return function if dynamo is None else dynamo.disable(function)


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


def _held(components: Mapping[str, Any], virtual: Sequence[Found]) -> list[Any]:
    """Tensors that no table has."""
    elsewhere = {i for found in virtual for i in _parameter_ids(found.layers)}
    return [t for part in _parts(components) for t in _tensors(part) if id(t) not in elsewhere]


def _mapped_spans() -> list[tuple[int, int]]:
    """Addresses where this process has safetensors files mapped. Linux; elsewhere none."""
    try:
        with open("/proc/self/maps") as maps:
            lines = [line.split(maxsplit=1)[0] for line in maps if SUFFIX in line]
    except OSError:
        return []
    return [(int(start, 16), int(end, 16)) for start, _, end in (e.partition("-") for e in lines)]


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
