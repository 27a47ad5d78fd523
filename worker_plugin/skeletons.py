"""Models without their weights: what `load_model` returned, its parameters left to layer tables.

Every module whose parameters lie in safetensors files is *virtual* (`virtual_modules`): its weights come
and go layer by layer. Everything else is *held* (`held`).
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from operator import attrgetter
from typing import Any

from .configurations import Configurations
from .file_identity import FileIdentity
from .layer_table import LayerTable
from .layers import Layer
from .stored import Stored

#: Called with the weights and the layer that a module is about to need, or has needed.
Hook = Callable[["ModelWeights", int], None]

_version = attrgetter("_version")


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
    ones; writes: how often they had been written to in place when this was last looked at.
    configurations: the files that it was made with beside those of its weights."""

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
    configurations: Configurations = field(default_factory=Configurations)

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

    @property
    def version(self) -> str:
        """Which content its files have; the same on every worker. "" where it comes of none."""
        contents = [part.weights.content for part in self.parts]
        return " ".join(filter(None, [*contents, self.configurations.digest]))


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


def _untraced(function: Any) -> Any:
    """Compiled modules run it as it is: tracing it would be work for nothing, and its state a reason
    to compile anew. Where nothing is compiled torch's compiler is not imported for it."""
    dynamo = sys.modules.get("torch._dynamo")
    return function if dynamo is None else dynamo.disable(function)
