"""LoRA adapters as a parameter of a workflow: which ones, how strong, and whether they fit.

A workflow takes them in two lines: a parameter `loras: Annotated[Static[Any], Loras(folder)] = ()`, and
`**adapted(options, loras, part)` in place of the options of each part that is a text encoder or the
denoiser. The images are those of the unmodified pipeline after `load_lora_weights` of each adapter and
`set_adapters(names, scales)`.
"""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import PurePath
from typing import Any, NamedTuple

from ..errors import ComposeError, LoadError, ParameterError
from ..rules import NOTHING
from .folder import DiffusersFolder
from .lora_files import identity_of, locate
from .lora_fit import touched

#: Adapters of one request; each costs time in every layer that it changes.
MAX_LORAS = 8
MAX_SCALE = 10.0


class Adapter(NamedTuple):
    """source: as workers find it. identity: of the file's content. parts: which it changes."""

    source: str
    identity: str
    scale: float
    parts: tuple[str, ...]


class Adapters(tuple[Adapter, ...]):
    """The checked adapters of a request, in the order in which their shares are added.

    Printed, it is their number: what an invocation costs depends on that (see Workflow).
    """

    def __str__(self) -> str:
        return str(len(self))

    @property
    def about(self) -> str | None:
        """For an image's metadata: name, identity and scale of each."""
        said = (f"{PurePath(a.source).name} ({a.identity[:12]}) {a.scale:g}" for a in self)
        return ", ".join(said) or None


@dataclass(frozen=True)
class Loras:
    """Rule: adapters for the pipeline of a folder. A list of (source, scale), or one source.

    source: a safetensors file, a folder with exactly one, "owner/repository/file.safetensors" on the
    hub, or "owner/repository" of one that has exactly one; in any format that the pipeline's own loader
    reads. scale: 1.0 where it is left out.
    """

    folder: DiffusersFolder

    def check(self, name: str, value: Any, values: Mapping[str, Any] = NOTHING) -> None:
        self.carry(name, value, values)

    def carry(self, name: str, value: Any, values: Mapping[str, Any] = NOTHING) -> Adapters:
        if isinstance(value, Adapters):
            return value
        pairs = [_pair(name, item) for item in _items(name, value)]
        if len(pairs) > MAX_LORAS:
            raise ParameterError(
                f"{name} has {len(pairs)} adapters, limit {MAX_LORAS}; leave some out"
            )
        found: dict[str, Adapter] = {}
        for source, scale in pairs:
            try:
                where, path = locate(source)
                identity = identity_of(path)
                parts = touched(self.folder, path, identity)
            except LoadError as error:
                raise ParameterError(f"{name}: {error}") from error
            if identity in found:
                raise ParameterError(
                    f"{name} has the adapter {source!r} twice (also as {found[identity].source!r}); "
                    "name it once, with the sum of the scales"
                )
            found[identity] = Adapter(where, identity, scale, parts)
        return Adapters(found.values())

    def describe(self) -> str:
        return (
            f"at most {MAX_LORAS} adapters (safetensors file, scale), scale -{MAX_SCALE:g} to "
            f"{MAX_SCALE:g}"
        )


def adapted(options: Mapping[str, Any], loras: Any, part: str) -> dict[str, Any]:
    """The options of the ModelFn that runs `part` ("transformer", "text_encoder", ...) with adapters.

    A text encoder runs before the denoiser: its worker reads the other parts' adapters meanwhile, and
    puts the denoiser's into it.
    """
    if not loras:
        return dict(options)
    if not isinstance(loras, Adapters):
        raise ComposeError(
            "adapters were not checked: pass on the workflow's own parameter "
            "`loras: Annotated[Static[Any], Loras(folder)]`"
        )
    made = dict(options)
    if mine := _of(loras, part):
        made["adapters"] = mine
    ahead = [a.source for a in loras if set(a.parts) - {part}]
    if ahead and part.startswith("text_encoder"):
        made["ahead"] = ahead
        denoisers = {p for a in loras for p in a.parts if not p.startswith("text_encoder")}
        for denoiser in sorted(denoisers):  # there is one
            made["soon"] = {"part": denoiser, "adapters": _of(loras, denoiser)}
    return made


def _of(loras: Adapters, part: str) -> list[list[Any]]:
    return [[a.source, a.identity, a.scale] for a in loras if part in a.parts]


def _items(name: str, value: Any) -> list[Any]:
    if isinstance(value, (str, os.PathLike)):
        return [value]
    if not isinstance(value, (list, tuple)):
        raise ParameterError(
            f"{name}={value!r} is no list of adapters; give [(file, scale), ...] or one file"
        )
    return list(value)


def _pair(name: str, item: Any) -> tuple[str, float]:
    source, scale = item, 1.0
    if isinstance(item, (list, tuple)) and len(item) == 2:
        source, scale = item
    if not isinstance(source, (str, os.PathLike)) or not os.fspath(source):
        raise ParameterError(f"{name} has {item!r}; an adapter is a file, or (file, scale)")
    source = os.fsdecode(source)
    try:
        # A bool is a number to Python, and a scale to nobody.
        number = math.nan if isinstance(scale, (bool, str, bytes)) else float(scale)
    except (TypeError, ValueError, OverflowError):
        number = math.nan
    if not -MAX_SCALE <= number <= MAX_SCALE:
        raise ParameterError(
            f"{name}: the scale of {source!r} is {scale!r}; allowed: numbers from -{MAX_SCALE:g} to "
            f"{MAX_SCALE:g}"
        )
    return source, number
