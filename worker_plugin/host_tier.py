"""Host tier: weights in safetensors files, in memory once per machine, from where layers are copied.

Files in use by models stay open. Of the others the least recently used are closed, and leave memory,
when all together are over the budget. The mapped pages that a worker has touched count in its resident
memory, by which Dask pauses and kills workers, although they are the machine's: so only so many bytes
stay mapped, and the ones touched longest ago go first. They remain in the page cache.
"""

from __future__ import annotations

import threading
import time
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from st2i_dask import _core
from st2i_dask.errors import LoadError

from .file_identity import FileIdentity
from .mapped_file import MappedFile, open_file
from .mappings import FileRange

#: Unit of copying and of staying mapped, bytes.
PIECE = 8 << 20
#: Mapped pages that a worker keeps, bytes.
WARM = 1 << 30


@dataclass(frozen=True, slots=True)
class Memory:
    """Bytes of this process, for weights that are in no file. owner: what keeps them in place."""

    address: int
    nbytes: int
    owner: Any


@dataclass(frozen=True, slots=True)
class Part:
    """One source of a copy, and where it goes: bytes from the start of the destination."""

    source: FileRange | Memory
    offset: int


@dataclass(frozen=True)
class HostTierStatistics:
    """Bytes, except files, used (files in use by models) and closed (files that went for the budget)."""

    files: int
    used: int
    nbytes: int
    warm: int
    copied: int
    closed: int


class HostTier:
    """The files of one worker. Thread-safe; copies run without the lock and without the GIL.

    budget: bytes of open files, in use and idle together; what is in use may exceed it. warm: bytes
    that stay mapped after a copy. bandwidth: at most so many bytes a second are copied, over any
    second and by all threads together; None: no limit. LoadError for values below 1.
    """

    def __init__(self, budget: int, *, warm: int = WARM, bandwidth: float | None = None) -> None:
        for name, value in (("budget", budget), ("warm", warm), ("bandwidth", bandwidth)):
            if value is not None and value < 1:
                raise LoadError(f"host tier: {name} {value} is below 1; give at least 1")
        self.budget = budget
        self._lock = threading.Lock()
        self._files: OrderedDict[FileIdentity, MappedFile] = OrderedDict()  # least recent first
        self._users: dict[FileIdentity, int] = {}
        self._warm = _Warm(warm)
        self._pace = _Pace(bandwidth)
        self._copied = self._closed = 0

    def acquire(self, files: Iterable[FileIdentity]) -> None:
        """A model uses these files from now on. LoadError, and nothing changed, if one of them is not
        there any more with the content that it had."""
        with self._lock:
            wanted = set(files)
            opened: dict[FileIdentity, MappedFile] = {}
            try:
                for file in wanted - self._files.keys():
                    opened[file] = open_file(file)
                for file in wanted & self._files.keys():
                    self._files[file].check()
            except LoadError:
                for mapped in opened.values():
                    mapped.close()
                raise
            self._files |= opened
            for file in wanted:
                self._users[file] = self._users.get(file, 0) + 1
                self._files.move_to_end(file)
            self._trim()

    def release(self, files: Iterable[FileIdentity]) -> None:
        """A model that acquired them does not use these files any more."""
        with self._lock:
            self._let_go(set(files))

    def _let_go(self, files: Iterable[FileIdentity]) -> None:
        for file in files:
            self._users[file] -= 1
            if not self._users[file]:
                del self._users[file]
                if not self._files[file].is_current():
                    self._close(file, drop=False)  # it serves nobody any more, and takes disk
        self._trim()

    def check(self, file: FileIdentity) -> None:
        """LoadError unless the file is unchanged since a model was read from it."""
        with self._using([file]) as mapped:
            mapped[file].check()

    def copy(self, parts: Sequence[Part], into: int) -> None:
        """Copy parts of files, which need not be acquired, or memory, to an address of this process.

        The caller answers for the destination, and owns it meanwhile. Its content is worth nothing
        after an error: LoadError when a file was changed, cut short, replaced or deleted.
        """
        parts = list(_joined(sorted(parts, key=lambda part: part.offset)))
        files = {part.source.file for part in parts if isinstance(part.source, FileRange)}
        with self._using(files) as mapped:
            for part in parts:
                source, at = part.source, into + part.offset
                if isinstance(source, Memory):
                    for start, nbytes in self._pace.pieces(0, source.nbytes):
                        _core.copy(at + start, source.address + start, nbytes)
                else:
                    self._copy_range(mapped[source.file], source, at)
            # What was written at any time would be part of the copy. Once, and not before it too: each
            # look lets go of the GIL, and whoever computes takes its time to give it back.
            for file in mapped.values():
                file.check()
        with self._lock:
            self._copied += sum(part.source.nbytes for part in parts)

    def _copy_range(self, file: MappedFile, source: FileRange, into: int) -> None:
        end = source.offset + source.nbytes
        if source.offset < 0 or end > file.file.nbytes:
            raise ValueError(f"{source} is outside of its file")
        for start, nbytes in self._pace.pieces(source.offset, source.nbytes):
            at = into + start - source.offset
            if self._warm.has(file, start, nbytes) or file.fill(start, nbytes):
                file.copy(at, start, nbytes)
                self._warm.touched(file, start, nbytes)
            else:
                file.read(at, start, nbytes)

    def statistics(self) -> HostTierStatistics:
        with self._lock:
            return HostTierStatistics(
                len(self._files),
                len(self._users),
                sum(file.nbytes for file in self._files),
                self._warm.nbytes,
                self._copied,
                self._closed,
            )

    def close(self) -> None:
        """Close every file; what is in memory of them stays in the page cache. Nothing may be copying."""
        with self._lock:
            for file in list(self._files):
                self._close(file, drop=False)
            self._users.clear()

    @contextmanager
    def _using(self, files: Iterable[FileIdentity]) -> Iterator[dict[FileIdentity, MappedFile]]:
        """The files, which stay mapped in the body, whatever the others do meanwhile."""
        with self._lock:
            mapped = {}
            try:
                for file in files:
                    if file not in self._files:
                        self._files[file] = open_file(file)
                    mapped[file] = self._files[file]
                    self._users[file] = self._users.get(file, 0) + 1
                    self._files.move_to_end(file)
            except LoadError:
                self._let_go(mapped)
                raise
        try:
            yield mapped
        finally:
            self.release(mapped)

    def _trim(self) -> None:
        """Close idle files until all are within the budget."""
        nbytes = sum(file.nbytes for file in self._files)
        for file in [file for file in self._files if file not in self._users]:
            if nbytes <= self.budget:
                return
            self._close(file, drop=True)
            self._closed += 1
            nbytes -= file.nbytes

    def _close(self, file: FileIdentity, drop: bool) -> None:
        mapped = self._files.pop(file)
        self._warm.forget(mapped)
        mapped.close(drop)

    def _check(self) -> None:
        with self._lock:
            assert self._users.keys() <= self._files.keys()
            assert all(users > 0 for users in self._users.values())
            assert all(mapped.users > 0 for mapped in self._files.values())
            idle = sum(file.nbytes for file in self._files if file not in self._users)
            assert not idle or sum(file.nbytes for file in self._files) <= self.budget
            self._warm._check(set(self._files.values()))


class _Warm:
    """The pieces of files that stay mapped, and what of them was asked for. Thread-safe."""

    def __init__(self, limit: int) -> None:
        self._limit = max(1, limit // PIECE)
        self._lock = threading.Lock()
        # Least recently touched first; ranges of each piece whose pages are mapped.
        self._pieces: OrderedDict[tuple[MappedFile, int], set[tuple[int, int]]] = OrderedDict()

    @property
    def nbytes(self) -> int:
        """As whole pieces."""
        return len(self._pieces) * PIECE

    def has(self, file: MappedFile, offset: int, nbytes: int) -> bool:
        """Whether just this range was touched and is mapped still. Its pages may be gone all the same,
        as the kernel takes them back when it must: who copies there waits for them, or gets an error."""
        with self._lock:
            return (offset, nbytes) in self._pieces.get((file, offset // PIECE), ())

    def touched(self, file: MappedFile, offset: int, nbytes: int) -> None:
        """A range within one piece."""
        key = file, offset // PIECE
        with self._lock:
            self._pieces.setdefault(key, set()).add((offset, nbytes))
            self._pieces.move_to_end(key)
            while len(self._pieces) > self._limit:
                (oldest, place), _ = self._pieces.popitem(last=False)
                oldest.unmap_pages(place * PIECE, min(PIECE, oldest.file.nbytes - place * PIECE))

    def forget(self, file: MappedFile) -> None:
        with self._lock:
            for piece in [piece for piece in self._pieces if piece[0] is file]:
                del self._pieces[piece]

    def _check(self, open_files: set[MappedFile]) -> None:
        with self._lock:
            assert len(self._pieces) <= self._limit
            assert {file for file, _ in self._pieces} <= open_files
            for (_, place), ranges in self._pieces.items():
                assert ranges
                for offset, nbytes in ranges:
                    assert place * PIECE <= offset < offset + nbytes <= (place + 1) * PIECE


class _Pace:
    """Cuts copies into pieces, and waits between them as a bandwidth asks. Thread-safe."""

    def __init__(self, bandwidth: float | None) -> None:
        self._bandwidth = bandwidth
        # Over any second at most one piece more than the bandwidth: so no piece is much of it.
        self._piece = PIECE if bandwidth is None else max(4096, min(PIECE, int(bandwidth / 64)))
        self._lock = threading.Lock()
        self._free_at = 0.0

    def pieces(self, offset: int, nbytes: int) -> Iterator[tuple[int, int]]:
        """Offset and bytes of each piece, which crosses no multiple of PIECE, when it may be copied."""
        end = offset + nbytes
        while offset < end:
            stop = min(end, offset + self._piece, (offset // PIECE + 1) * PIECE)
            self._wait(stop - offset)
            yield offset, stop - offset
            offset = stop

    def _wait(self, nbytes: int) -> None:
        if self._bandwidth is None:
            return
        with self._lock:
            now = time.monotonic()
            start = max(now, self._free_at)
            self._free_at = start + nbytes / self._bandwidth
        time.sleep(start - now)


def _joined(parts: Sequence[Part]) -> Iterator[Part]:
    """The same copies, with neighbours in a file that are neighbours in memory as one."""
    last: Part | None = None
    for part in parts:
        if last is not None and _continues(last, part):
            assert isinstance(last.source, FileRange)
            nbytes = last.source.nbytes + part.source.nbytes
            last = Part(FileRange(last.source.file, last.source.offset, nbytes), last.offset)
            continue
        if last is not None:
            yield last
        last = part
    if last is not None:
        yield last


def _continues(last: Part, part: Part) -> bool:
    before, after = last.source, part.source
    return (
        isinstance(before, FileRange)
        and isinstance(after, FileRange)
        and before.file == after.file
        and before.offset + before.nbytes == after.offset
        and last.offset + before.nbytes == part.offset
    )
