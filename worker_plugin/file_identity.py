"""Which file, with which content: as far as the file system tells without reading it."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class FileIdentity:
    """A file as it was when it was looked at. What the path leads to later may be another file.

    path: absolute where others than this thread use it. nbytes: its size. mtime_ns: of its content.
    """

    path: str
    device: int
    inode: int
    nbytes: int
    mtime_ns: int

    @classmethod
    def of(cls, path: str | Path) -> FileIdentity:
        """Links are followed. OSError if it is not there."""
        return cls._from(str(path), os.stat(path))

    @classmethod
    def of_open(cls, path: str, number: int) -> FileIdentity:
        """Of an open file descriptor; the path is only its name."""
        return cls._from(path, os.fstat(number))

    @classmethod
    def _from(cls, path: str, state: os.stat_result) -> FileIdentity:
        return cls(path, state.st_dev, state.st_ino, state.st_size, state.st_mtime_ns)

    @property
    def key(self) -> tuple[int, int, int, int]:
        """Equal for the same file under any path."""
        return self.device, self.inode, self.nbytes, self.mtime_ns
