"""Identity of weights by content: copies of a file are the same weights wherever they lie.

An id begins with the *quick key*: a digest of the parameters' names, dtypes, shapes and sizes and of a
4 KiB sample from the middle of each. It costs a few reads of pages that loading touches anyway. Only
when weights with the same quick key turn up in other files are both read whole and compared by digest.

What ids are good for. The first weights with a quick key get the quick key itself as id, before anybody
knows whether a second will come; if a second with other content comes, that one gets the quick key and
an ordinal. So an id that was given stays valid, and in one process equal ids mean equal content. In
other processes the same content has the same id unless weights that differ only outside the samples
were met in another order: good enough for a key of measurements, not for sharing memory.
"""

from __future__ import annotations

import hashlib
import logging
import os
from collections.abc import Iterable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from threading import Lock
from typing import Any

from st2i_dask.errors import LoadError

from .digests import DigestStore
from .file_identity import FileIdentity

logger = logging.getLogger(__name__)

#: Bytes of every parameter that the quick key looks at.
SAMPLE = 4096
#: Bytes read at a time for a full digest: stays in the cache of a core.
PIECE = 1 << 20


@dataclass(frozen=True, slots=True)
class Source:
    """A parameter and where its bytes lie: `nbytes` bytes at `offset` of the file."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    file: FileIdentity
    offset: int
    nbytes: int


@dataclass(slots=True)
class _Content:
    """Weights of one quick key that differ from the others of it."""

    # Of the first copy that was met; None: the digest is known, or the files are gone and it never
    # will be.
    sources: tuple[Source, ...] | None
    place: str
    digest: str | None = None


@dataclass(slots=True)
class _Group:
    """What was met under one quick key. The index of a content is its ordinal."""

    # Held while files are read. `known` is read without it: entries never change.
    lock: Lock = field(default_factory=Lock)
    contents: list[_Content] = field(default_factory=list)
    #: Ordinal by place.
    known: dict[str, int] = field(default_factory=dict)


class ContentIds:
    """Gives ids. Thread-safe; two threads wait for each other only if both bring the same quick key
    from files that were not compared yet.

    store: keeps full digests over restarts; None: they are kept only in this object.
    """

    def __init__(self, store: DigestStore | None = None):
        self._store = store
        self._lock = Lock()
        self._groups: dict[str, _Group] = {}

    def id(self, sources: Iterable[Source]) -> str:
        """The id of the weights with these parameters, in order.

        LoadError when a file is not there any more, was changed since its identity was taken, or
        does not hold the bytes. Costs one small read per parameter, and reading both copies whole
        (about a second per GiB) the first time that weights are met in other files.
        """
        sources = tuple(sources)
        with _OpenFiles(sources) as files:
            quick, place = files.quick_key(), _place(sources)
            with self._lock:
                group = self._groups.setdefault(quick, _Group())
            ordinal = group.known.get(place)
            if ordinal is None:
                with group.lock:
                    ordinal = group.known.get(place)
                    if ordinal is None:
                        ordinal = self._ordinal(group, quick, place, sources)
                        group.known[place] = ordinal
        return f"{quick}-{ordinal}" if ordinal else quick

    def _ordinal(self, group: _Group, quick: str, place: str, sources: tuple[Source, ...]) -> int:
        if not group.contents:
            group.contents.append(_Content(sources, place))
            return 0
        digest = self._digest(quick, place, sources)
        for ordinal, content in enumerate(group.contents):
            if content.sources is not None:
                try:
                    content.digest = self._digest(quick, content.place, content.sources)
                except LoadError as error:
                    # Its id is in use, so nothing else may get it: a copy met now is taken for
                    # other weights, which costs memory and is never wrong.
                    # The words only: who keeps log records must not keep the frames of the error.
                    logger.warning("weights %s cannot be compared any more: %s", quick, str(error))
                content.sources = None
            if content.digest == digest:
                return ordinal
        group.contents.append(_Content(None, place, digest))
        return len(group.contents) - 1

    def _digest(self, quick: str, place: str, sources: tuple[Source, ...]) -> str:
        # The quick key is part of it: a file that was replaced by one with the same inode, size
        # and time does not get its predecessor's digest.
        key = f"{quick}-{place}"
        digest = self._store.get(key) if self._store is not None else None
        if digest is None:
            with _OpenFiles(sources) as files:
                digest = files.digest()
            if self._store is not None:
                self._store.put(key, digest)
        return digest

    def _check(self) -> None:
        with self._lock:
            groups = list(self._groups.values())
        for group in groups:
            with group.lock:
                digests = [content.digest for content in group.contents if content.digest]
                assert len(digests) == len(set(digests)), "one content has two ids"
                assert set(group.known.values()) == set(range(len(group.contents)))
                for ordinal, content in enumerate(group.contents):
                    assert group.known[content.place] == ordinal
                    assert content.sources is None or content.digest is None
                    assert ordinal == 0 or content.digest, "only the first needs no digest"


class _OpenFiles:
    """The files of some sources, open and unchanged; a context. LoadError if one is another now."""

    def __init__(self, sources: Sequence[Source]):
        self._sources = sources
        self._stack = ExitStack()
        self._numbers: dict[FileIdentity, int] = {}

    def __enter__(self) -> _OpenFiles:
        with ExitStack() as stack:
            for file in dict.fromkeys(source.file for source in self._sources):
                try:
                    number = os.open(file.path, os.O_RDONLY | os.O_CLOEXEC)
                except OSError as error:
                    raise LoadError(
                        f"{file.path} cannot be read any more ({error.strerror}); load the model "
                        "again from a folder that stays where it is"
                    ) from error
                stack.callback(os.close, number)
                self._numbers[file] = number
            self._check_unchanged()
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *_: Any) -> None:
        self._stack.close()

    def quick_key(self) -> str:
        digest = hashlib.sha256()
        for source in self._sources:
            digest.update(
                repr((source.name, source.dtype, source.shape, source.nbytes)).encode() + b"\n"
            )
            size = min(source.nbytes, SAMPLE)
            start = source.offset + (source.nbytes - size) // 2
            sample = os.pread(self._numbers[source.file], size, start)
            if len(sample) != size:
                raise _short(source)
            digest.update(sample)
        self._check_unchanged()
        return digest.hexdigest()[:32]

    def digest(self) -> str:
        """Of all bytes of all parameters, in order. Neither reading nor digesting holds the GIL."""
        digest, piece = hashlib.sha256(), memoryview(bytearray(PIECE))
        for source in self._sources:
            position, end = source.offset, source.offset + source.nbytes
            while position < end:
                part = piece[: min(PIECE, end - position)]
                count = os.preadv(self._numbers[source.file], [part], position)
                if count == 0:
                    raise _short(source)
                digest.update(part[:count])
                position += count
        self._check_unchanged()
        return digest.hexdigest()

    def _check_unchanged(self) -> None:
        for file, number in self._numbers.items():
            if FileIdentity.of_open(file.path, number).key != file.key:
                raise LoadError(
                    f"{file.path} was changed or replaced while its weights were in use; load the "
                    "model again, and give a new version a new folder"
                )


def _place(sources: Sequence[Source]) -> str:
    """Equal for the same bytes of the same files, whatever their paths are."""
    where = [(source.file.key, source.offset, source.nbytes) for source in sources]
    return hashlib.sha256(repr(where).encode()).hexdigest()[:32]


def _short(source: Source) -> LoadError:
    return LoadError(
        f"{source.file.path} has {source.file.nbytes} bytes, but {source.name} is said to be the "
        f"{source.nbytes} bytes at {source.offset}; copy or fetch the file again"
    )
