"""A safetensors file, mapped shared and read-only: its bytes are in memory once per machine.

The pages are those of the kernel's page cache, so all workers of a machine read the same ones, and the
kernel takes them back when it must. A file that is cut short while it is mapped would kill whoever reads
there (SIGBUS): so pages are asked for before they are read, which gives an error instead, and what is
cut off between the two is an error too.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import mmap
import os
import threading

from st2i_dask import _core
from st2i_dask.errors import LoadError

from .file_identity import FileIdentity

# From linux/mman.h (Linux 5.14): fault pages in, and say so when one cannot be had.
_POPULATE_READ = 22

_libc = ctypes.CDLL(None, use_errno=True)  # its calls run without the GIL
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = (
    *(ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long),
)
_libc.munmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t)
_libc.madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
_MAP_FAILED = ctypes.c_void_p(-1).value

#: Files open in this process; each is mapped once, whatever number of workers it has.
_open: dict[tuple[int, int, int, int], MappedFile] = {}
_lock = threading.Lock()


class MappedFile:
    """Opened with `open_file`, which counts users; `close` it as often. Thread-safe.

    A user must not close the file while it reads there.
    """

    def __init__(self, file: FileIdentity) -> None:
        self.file = file
        self.users = 0
        self._fd = os.open(file.path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            self.check()
            _lock_file(self._fd, fcntl.LOCK_SH)
            address = _libc.mmap(None, file.nbytes, mmap.PROT_READ, mmap.MAP_SHARED, self._fd, 0)
            if address == _MAP_FAILED:
                raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()), file.path)
        except BaseException:
            os.close(self._fd)
            raise
        #: Of the first byte, in this process.
        self.address: int = address

    def check(self) -> None:
        """LoadError unless the file at the path is still the one that was read, unchanged."""
        file = self.file
        try:
            at_path, opened = os.stat(file.path), os.fstat(self._fd)
        except OSError as error:
            raise changed(file, "is gone") from error
        if (at_path.st_dev, at_path.st_ino) != (file.device, file.inode):
            raise changed(file, "was replaced by another file")
        for state in (opened, at_path):
            if state.st_size != file.nbytes:
                raise changed(file, f"has {state.st_size:,} bytes instead of {file.nbytes:,}")
            if state.st_mtime_ns != file.mtime_ns:
                raise changed(file, "was written to")

    def is_current(self) -> bool:
        """Whether `check` finds nothing."""
        try:
            self.check()
        except LoadError:
            return False
        return True

    def fill(self, offset: int, nbytes: int) -> bool:
        """Map the pages of a range, reading them from disk where they are not in memory.

        False: this kernel has no call for it. LoadError when they cannot be had. Without the GIL.
        """
        start = offset // mmap.PAGESIZE * mmap.PAGESIZE
        if _libc.madvise(self.address + start, offset + nbytes - start, _POPULATE_READ) == 0:
            return True
        number = ctypes.get_errno()
        if number == errno.EINVAL:
            return False
        self.check()
        raise changed(self.file, f"cannot be read at {offset:,} ({os.strerror(number)})")

    def copy(self, into: int, offset: int, nbytes: int) -> None:
        """Copy a range that is filled to an address of this process. LoadError as `fill`."""
        try:
            _core.copy(into, self.address + offset, nbytes)
        except OSError as error:
            self.check()
            raise changed(self.file, f"was cut short at or after {offset:,}") from error

    def read(self, into: int, offset: int, nbytes: int) -> None:
        """Copy a range to an address of this process without mapping it; slower. LoadError as `fill`."""
        view = memoryview((ctypes.c_char * nbytes).from_address(into)).cast("B")
        done = 0
        while done < nbytes:
            try:
                got = os.preadv(self._fd, [view[done:]], offset + done)
            except OSError as error:
                raise changed(self.file, f"cannot be read ({error.strerror})") from error
            if not got:
                raise changed(self.file, f"ends at {offset + done:,} of {self.file.nbytes:,} bytes")
            done += got

    def unmap_pages(self, offset: int, nbytes: int) -> None:
        """Take a range of whole pages out of this process's memory; it stays in the page cache."""
        _libc.madvise(self.address + offset, nbytes, mmap.MADV_DONTNEED)

    def close(self, drop: bool = False) -> None:
        """One user fewer; the last one unmaps. drop: the pages leave the page cache too, if this
        was the last user on this machine."""
        with _lock:
            self.users -= 1
            if self.users:
                return
            del _open[self.file.key]
        _libc.munmap(self.address, self.file.nbytes)
        if drop:
            _drop_pages(self._fd)
        os.close(self._fd)


def open_file(file: FileIdentity) -> MappedFile:
    """LoadError unless the file is still there with the content that it had."""
    with _lock:
        mapped = _open.get(file.key)
        if mapped is not None:
            mapped.check()
        else:
            try:
                mapped = _open[file.key] = MappedFile(file)
            except OSError as error:
                gone = isinstance(error, FileNotFoundError)
                what = "is gone" if gone else f"cannot be opened ({error.strerror})"
                raise changed(file, what) from error
        mapped.users += 1
        return mapped


def changed(file: FileIdentity, what: str) -> LoadError:
    return LoadError(
        f"{file.path} {what} since a model was read from it; submit again, and the model is read "
        "anew. Weights that are in use must not be overwritten: save others to another folder"
    )


def _lock_file(fd: int, kind: int) -> bool:
    try:
        fcntl.flock(fd, kind | fcntl.LOCK_NB)
    except OSError:  # held by others, or a file system without locks
        return False
    return True


def _drop_pages(fd: int) -> None:
    # Other processes that have it open hold the lock too: it is theirs as much as ours.
    if _lock_file(fd, fcntl.LOCK_EX):
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
