"""Checking a component's folder before its weights are read: headers and sizes, never the data.

A file whose copy was cut short is found here, with its name, and not as a crash in the middle of a
load or (when it is mapped) of a request. Layout of a safetensors file: 8 bytes length of the header,
little endian; the header, a JSON object of tensors; their data, without gaps.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from math import prod
from pathlib import Path
from typing import Any

from ..errors import LoadError

#: Bits of one element. Tensors of other dtypes are left to the reader, sizes apart.
BITS = {
    **dict.fromkeys(("BOOL", "U8", "I8", "F8_E4M3", "F8_E5M2", "F8_E8M0"), 8),
    **dict.fromkeys(("F8_E4M3FNUZ", "F8_E5M2FNUZ"), 8),
    **dict.fromkeys(("U16", "I16", "F16", "BF16"), 16),
    **dict.fromkeys(("U32", "I32", "F32"), 32),
    **dict.fromkeys(("U64", "I64", "F64", "C64"), 64),
    "F4": 4,
    "F6_E2M3": 6,
    "F6_E3M2": 6,
}
INTEGER = frozenset({"BOOL", "U8", "I8", "U16", "I16", "U32", "I32", "U64", "I64"})
#: Bytes; the limit of the safetensors library.
LONGEST_HEADER = 100_000_000
#: Formats that the model's own library reads without help from here.
OTHER_FORMATS = frozenset({".bin", ".pt", ".pth", ".ckpt", ".gguf", ".h5", ".msgpack"})
# Integers under other names are buffers: position_ids, num_batches_tracked, a mask called bias.
_PARAMETER = re.compile(r"weight|embed(ding)?s?$|table$|kernel$|gamma$|beta$|scale$|^w\d*$")
_AGAIN = "copy or fetch the file again"


@dataclass(frozen=True, slots=True)
class Fault:
    """Why a folder's weights cannot be read. `damaged`: the same file fetched again may be whole."""

    file: Path
    what: str
    cure: str = _AGAIN
    damaged: bool = True

    def __str__(self) -> str:
        return f"{self.file} {self.what}; {self.cure}"


def check_checkpoint(folder: Path, source: str, name: str | None = None) -> None:
    """LoadError if the weights in a component's folder cannot be whole or are no weights.

    source, name: what the error calls the model and its component (default: the folder's name).
    Costs one stat per file, and reading its header when it is new or changed.
    """
    fault = find_fault(folder)
    if fault is not None:
        raise LoadError(
            f"{source!r}: {name or folder.name} cannot be loaded: {fault}; "
            "check that the folder is whole and visible on every worker"
        )


def find_fault(folder: Path) -> Fault | None:
    """The first one in the order of file names, indexes last."""
    try:
        names = sorted(os.listdir(folder))
        files = [folder / name for name in names if name.endswith(".safetensors")]
        indexes = [folder / name for name in names if re.search(r"\.safetensors\.index\b", name)]
        if not files and not indexes:
            if any(os.path.splitext(name)[1] in OTHER_FORMATS for name in names):
                return None
            return Fault(folder, "has no weights", "copy the whole folder again", damaged=False)
        headers = {file.name: _header(file) for file in files}
        for index in indexes:
            _check_index(index, headers)
        for file in files:
            integer = headers[file.name].integer
            if integer is not None and not _is_quantized(folder / "config.json"):
                name, dtype = integer
                return Fault(
                    file,
                    f"stores {name!r} as {dtype}, but a floating-point dtype is expected where "
                    "config.json has no quantization_config",
                    "use a checkpoint that is not quantized, or one with its own config.json",
                    damaged=False,
                )
    except _Faulty as faulty:
        return faulty.fault
    except OSError as error:
        where = Path(error.filename or folder)
        return Fault(where, f"cannot be read ({error.strerror})", damaged=False)
    return None


def find_file_fault(file: Path) -> Fault | None:
    """Of one safetensors file, whatever it lies beside."""
    try:
        _header(file)
    except _Faulty as faulty:
        return faulty.fault
    except OSError as error:
        return Fault(file, f"cannot be read ({error.strerror})", damaged=False)
    return None


def stored_elements(folder: Path) -> int | None:
    """How many numbers a component's safetensors files hold. None: there are none, they are damaged, or
    quantized, which packs several into one."""
    try:
        files = sorted(folder.glob("*.safetensors"))
        if not files or _is_quantized(folder / "config.json"):
            return None
        return sum(_header(file).elements for file in files)
    except (_Faulty, OSError):
        return None


def stored_shapes(folder: Path, name: str) -> dict[str, tuple[int, ...]] | None:
    """By name, of the tensors in a component's safetensors file of that name, or in all those that the
    index of that name (.json) tells of. None: not all are here, or they are damaged or quantized."""
    path = folder / name
    try:
        if _is_quantized(folder / "config.json"):
            return None
        files = {name}
        if path.suffix == ".json":
            status = os.stat(path)
            files = set(_read_index(path, status.st_size, status.st_mtime_ns).values())
        return {
            tensor: shape
            for file in sorted(files)
            for tensor, shape in _header(folder / file).shapes.items()
        }
    except (_Faulty, OSError):
        return None


class _Faulty(Exception):
    def __init__(self, fault: Fault):
        super().__init__(str(fault))
        self.fault = fault


@dataclass(frozen=True, slots=True)
class _Header:
    #: By name, in the order of the file.
    shapes: Mapping[str, tuple[int, ...]]
    #: Of all tensors.
    elements: int
    #: Name and dtype of a parameter that holds integers.
    integer: tuple[str, str] | None


def _header(file: Path) -> _Header:
    status = os.stat(file)
    return _read_header(file, status.st_size, status.st_mtime_ns)


@lru_cache(maxsize=1024)
def _read_header(file: Path, size: int, mtime_ns: int) -> _Header:
    with open(file, "rb", buffering=0) as stream:
        length = int.from_bytes(stream.read(8), "little")
        if size < 8 or length > size - 8:
            # Random bytes make a length beyond any file: cut short and overwritten look the same.
            raise _Faulty(Fault(file, f"ends inside its header, after {size} bytes"))
        if length > LONGEST_HEADER:
            raise _Faulty(
                Fault(file, f"has a header of {length} bytes; at most {LONGEST_HEADER} are allowed")
            )
        text = stream.read(length)
    header = _json_object(file, text, "a header")
    header.pop("__metadata__", None)
    spans, shapes = [], {}
    integer, elements = None, 0
    for name, entry in header.items():
        dtype, shape, start, end = _entry(file, name, entry)
        expected = prod(shape) * BITS.get(dtype, 0) / 8
        if dtype in BITS and end - start != expected:
            raise _Faulty(
                Fault(
                    file,
                    f"gives {end - start} bytes to {name!r}, but {dtype} of shape {shape} needs "
                    f"{expected:g}",
                )
            )
        spans.append((start, end, name))
        shapes[name] = tuple(shape)
        elements += prod(shape)
        if dtype in INTEGER and integer is None and _is_parameter(name, shape):
            integer = (name, dtype)
    position = 0
    for start, end, name in sorted(spans):
        if start != position:
            raise _Faulty(
                Fault(file, f"has {name!r} at byte {start} of its data, {position} is expected")
            )
        position = end
    whole = 8 + length + position
    if size < whole:
        raise _Faulty(Fault(file, f"ends after {size} of {whole} bytes"))
    if size > whole:
        raise _Faulty(Fault(file, f"has {size - whole} bytes after its end at {whole}"))
    return _Header(shapes, elements, integer)


def _entry(file: Path, name: str, entry: Any) -> tuple[str, list[int], int, int]:
    try:
        dtype, shape, (start, end) = entry["dtype"], entry["shape"], entry["data_offsets"]
        if type(dtype) is str and type(shape) is list and _are_sizes(shape, start, end):
            return dtype, shape, start, end
    except (TypeError, KeyError, ValueError):
        pass  # refused with those of wrong types
    raise _Faulty(Fault(file, f"describes {name!r} wrongly in its header: {str(entry)[:100]}"))


def _are_sizes(shape: list[Any], start: Any, end: Any) -> bool:
    for size in shape:
        if type(size) is not int or size < 0:
            return False
    return type(start) is type(end) is int and 0 <= start <= end


def _is_parameter(name: str, shape: list[int]) -> bool:
    last = name.rpartition(".")[2]
    return bool(_PARAMETER.search(last)) or (last == "bias" and len(shape) == 1)


def _check_index(index: Path, headers: Mapping[str, _Header]) -> None:
    status = os.stat(index)
    for tensor, shard in _read_index(index, status.st_size, status.st_mtime_ns).items():
        header = headers.get(shard)
        if header is None:
            raise _Faulty(
                Fault(index, f"names {shard!r}, which is not there", "copy or fetch both again")
            )
        if tensor not in header.shapes:
            raise _Faulty(
                Fault(
                    index,
                    f"says that {tensor!r} is in {shard!r}, which does not have it",
                    "both must be of one version, copy or fetch both again",
                )
            )


@lru_cache(maxsize=256)
def _read_index(index: Path, size: int, mtime_ns: int) -> dict[str, str]:
    found = _json_object(index, index.read_bytes(), "an index").get("weight_map")
    if not isinstance(found, dict) or not all(isinstance(shard, str) for shard in found.values()):
        raise _Faulty(Fault(index, "has no weight_map of tensors to files"))
    return found


def _is_quantized(config: Path) -> bool:
    if not config.is_file():
        return False
    return bool(
        _json_object(config, config.read_bytes(), "a configuration").get("quantization_config")
    )


def _json_object(file: Path, text: bytes, what: str) -> dict[str, Any]:
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise _Faulty(Fault(file, f"does not hold {what}, which is JSON ({error})")) from error
    if not isinstance(value, dict):
        raise _Faulty(Fault(file, f"does not hold {what}, which is a JSON object"))
    return value
