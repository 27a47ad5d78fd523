"""Where a model's parameters lie in safetensors files: read from this process's memory map.

Diffusers and Transformers map a safetensors file privately and point parameters into it when the dtype
matches. The kernel's list of mappings then says file and offset of every such parameter, whatever
library has loaded it.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import re
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from .file_identity import FileIdentity

SUFFIX = ".safetensors"
_HEADER = re.compile(
    r"(?P<start>[0-9a-f]+)-(?P<end>[0-9a-f]+) \S+ (?P<offset>[0-9a-f]+) "
    r"(?P<device>[0-9a-f]+:[0-9a-f]+) (?P<inode>\d+)\s*(?P<path>.*)"
)
_PRIVATE = re.compile(r"(?:Anonymous|Swap):\s+(\d+) kB")


@dataclass(frozen=True, slots=True)
class FileRange:
    """Bytes of a file."""

    file: FileIdentity
    offset: int
    nbytes: int


def file_ranges(parameters: Sequence[Any]) -> list[FileRange | None]:
    """For each tensor, where its bytes are on disk; None where they are this process's own memory.

    None too: for tensors that are not contiguous, and for all of a file that was changed through this
    mapping, deleted or replaced since it was mapped. The map is read once, whatever the number of
    parameters: milliseconds for a process with gigabytes mapped. Linux; elsewhere all are None.
    """
    mappings = _mappings()
    starts = [mapping.start for mapping in mappings]

    def find(tensor: Any) -> FileRange | None:
        nbytes = tensor.numel() * tensor.element_size()
        if tensor.device.type != "cpu" or not tensor.is_contiguous() or not nbytes:
            return None
        address = tensor.data_ptr()
        place = bisect_right(starts, address) - 1
        if place < 0 or address + nbytes > mappings[place].end:
            return None
        mapping = mappings[place]
        return FileRange(mapping.file, mapping.offset + address - mapping.start, nbytes)

    return [find(tensor) for tensor in parameters]


@dataclass(frozen=True, slots=True)
class _Mapping:
    """Of a file's bytes as they are on disk. start, end: addresses. offset: of the first byte."""

    start: int
    end: int
    offset: int
    file: FileIdentity


def _mappings() -> list[_Mapping]:
    """Those of unmodified safetensors files, by address."""
    found: list[_Mapping] = []
    identities: dict[tuple[str, str], FileIdentity | None] = {}
    try:
        # Not sooner than it is needed: for smaps the kernel walks all memory.
        with open("/proc/self/maps") as maps:
            if not any(line.rstrip("\n").endswith(SUFFIX) for line in maps):
                return []
        with open("/proc/self/smaps") as smaps:
            mapping: _Mapping | None = None
            for line in smaps:
                header = _HEADER.fullmatch(line.rstrip("\n"))
                if header is not None:
                    mapping = _of_file(header, identities)
                    if mapping is not None:
                        found.append(mapping)
                elif mapping is not None and _holds_private_pages(line):
                    found.remove(mapping)
                    mapping = None
    except OSError:
        return []
    return found


def _holds_private_pages(line: str) -> bool:
    match = _PRIVATE.match(line)
    return match is not None and int(match[1]) > 0


def _of_file(
    header: re.Match[str], identities: dict[tuple[str, str], FileIdentity | None]
) -> _Mapping | None:
    path = header["path"]
    if not path.endswith(SUFFIX):
        return None
    shown = f"{header['device']} {header['inode']}"
    if (path, shown) not in identities:
        identities[path, shown] = _identity(path, shown)
    file = identities[path, shown]
    if file is None:
        return None
    start, end = int(header["start"], 16), int(header["end"], 16)
    return _Mapping(start, end, int(header["offset"], 16), file)


def _identity(path: str, shown: str) -> FileIdentity | None:
    """Of the file that is at the path now; None unless it is the mapped one."""
    try:
        with open(path, "rb") as file:
            is_mapped = _is_shown_as(file.fileno(), shown)
            return FileIdentity.of_open(path, file.fileno()) if is_mapped else None
    except (OSError, ValueError):
        return None


def _is_shown_as(fd: int, shown: str) -> bool:
    """Whether the memory map would show an open file with that device and inode."""
    state = os.fstat(fd)
    device = f"{os.major(state.st_dev):02x}:{os.minor(state.st_dev):02x}"
    return shown == f"{device} {state.st_ino}" or shown == _shown(fd)


def _shown(fd: int) -> str | None:
    """Device and inode of an open file in the memory map: a page of it is mapped and looked up.

    Some file systems (overlay, btrfs) show others there than in `stat`.
    """
    with mmap.mmap(fd, mmap.PAGESIZE, access=mmap.ACCESS_COPY) as page:
        start = ctypes.addressof(ctypes.c_char.from_buffer(page))
        begins = f"{start:x}-"
        with open("/proc/self/maps") as maps:
            for line in maps:
                header = _HEADER.fullmatch(line.rstrip("\n"))
                if header is not None and line.startswith(begins):
                    return f"{header['device']} {header['inode']}"
    return None
