"""Where parameters lie that were converted when they were read: in a file all the same.

A checkpoint in another dtype than was asked for leaves no mapping behind. Its folder is known from the
model's configuration; a tensor of the parameter's name whose converted values equal the parameter is
where it can be read from again.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .configurations import read_from
from .file_identity import FileIdentity
from .mappings import SUFFIX, FileRange

#: As safetensors calls them.
_DTYPES = {"F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16"}
_LENGTH_BYTES = 8


@dataclass(frozen=True, slots=True)
class Stored:
    """A tensor in a file. dtype: torch's, as it is stored."""

    range: FileRange
    dtype: Any


def converted(module: Any, parameters: Sequence[tuple[str, Any]]) -> list[Stored | None]:
    """For each parameter of a model that was read from a folder, where its unconverted values are;
    None where there are none, or not the ones that it has. Reads all of them once, to compare."""
    folder = read_from(module)
    tensors = _tensors(folder) if folder is not None else {}
    return [_equal(tensors.get(name), parameter) for name, parameter in parameters]


@dataclass(frozen=True, slots=True)
class _Entry:
    stored: Stored
    shape: tuple[int, ...]


def _tensors(folder: Path) -> dict[str, _Entry]:
    import torch

    found = {}
    for path in sorted(folder.glob(f"*{SUFFIX}")):
        try:
            with open(path, "rb") as file:
                identity = FileIdentity.of_open(str(path.absolute()), file.fileno())
                length = int.from_bytes(file.read(_LENGTH_BYTES), "little")
                header = json.loads(file.read(min(length, identity.nbytes)))
            for name, entry in header.items():
                dtype = _DTYPES.get(entry.get("dtype"))
                if dtype is not None:
                    start, end = (_LENGTH_BYTES + length + at for at in entry["data_offsets"])
                    where = FileRange(identity, start, end - start)
                    found[name] = _Entry(
                        Stored(where, getattr(torch, dtype)), tuple(entry["shape"])
                    )
        except (OSError, ValueError, KeyError, TypeError, AttributeError):
            continue  # the library that read the model found it elsewhere
    return found


def _equal(entry: _Entry | None, parameter: Any) -> Stored | None:
    import torch

    if (
        entry is None
        or entry.shape != tuple(parameter.shape)
        or not parameter.is_floating_point()
        or not parameter.is_contiguous()
        or parameter.device.type != "cpu"
    ):
        return None
    at = entry.stored.range
    try:
        raw = bytearray(at.nbytes)
        with open(at.file.path, "rb") as file:
            if _changed(at.file, file.fileno()) or file.seek(at.offset) != at.offset:
                return None
            if file.readinto(raw) != at.nbytes:
                return None
    except OSError:
        return None
    values = torch.frombuffer(raw, dtype=entry.stored.dtype) if at.nbytes else torch.empty(0)
    same = torch.equal(values.to(parameter.dtype).view(parameter.shape), parameter.detach())
    return entry.stored if same else None


def _changed(file: FileIdentity, fd: int) -> bool:
    return FileIdentity.of_open(file.path, fd) != file
