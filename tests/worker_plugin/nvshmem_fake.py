"""NVSHMEM without a device: several processes over files, with the manners of the real library.

What the real library does not forgive raises `Misuse` here (there it ends or hangs the process): calls
without the lock, two at a time, out of order, a second collective, addresses outside the arena, a stream
of no device. What hangs there hangs here.

The functions of `Core` and `Bindings` have the signatures of nvshmem4py's; test_nvshmem_contract.py
compares them.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import threading
import time
from dataclasses import dataclass
from enum import IntEnum
from pathlib import Path
from types import SimpleNamespace

import numpy as np

from worker_plugin.nvshmem_library import Library, Packages

try:
    from .nvshmem_fake_cuda import FakeCuda, Misuse
except ImportError:  # in a script beside it
    from nvshmem_fake_cuda import FakeCuda, Misuse


class NVSHMEMError(Exception):
    """As nvshmem.bindings raises it."""

    def __init__(self, status):
        super().__init__(f"Status code {status}")


@dataclass
class Faults:
    """What goes wrong. code: init's status. die: in "init" or "malloc", as by kill -9. bare: no
    device: init returns with only the bootstrap done. far: peers are not mapped."""

    code: int = 0
    die: str = ""
    bare: bool = False
    no_room: bool = False
    far: bool = False
    no_driver: bool = False


class InitStatus(IntEnum):
    STATUS_NOT_INITIALIZED = 0
    STATUS_IS_BOOTSTRAPPED = 1
    STATUS_IS_INITIALIZED = 2
    STATUS_LIMITED_MPG = 3
    STATUS_FULL_MPG = 4
    STATUS_INVALID = 32767


class World:
    """One process's view of the library. root: a directory that all processes share."""

    def __init__(self, root, cuda, faults=None):
        self.root, self.cuda, self.faults = Path(root), cuda, faults or Faults()
        self.status = InitStatus.STATUS_NOT_INITIALIZED
        self.lock = None  # that must be held in every call, when known
        self.abandoned = threading.Event()  # ends what hangs, for tests that want to go on
        self.calls = []
        self._inside = threading.Lock()
        self._place = self._rank = self._ranks = None
        self._arenas = []
        self._finalized = False

    def entered(self, name):
        if self.lock is not None and not self.lock.locked():
            raise Misuse(f"{name} without the lock")
        if self._finalized:
            raise Misuse(f"{name} after finalize")
        if not self._inside.acquire(blocking=False):
            raise Misuse(f"{name} while another call is in the library")
        self.calls.append(name)
        return _Leaving(self._inside)

    def barrier(self, name):
        """Returns when all have come; for ever if one does not."""
        (self._place / f"{name}-{self._rank}").touch()
        while len(list(self._place.glob(f"{name}-*"))) < self._ranks:
            if self.abandoned.is_set():
                raise Misuse("abandoned")
            time.sleep(0.002)

    def malloc(self, size):
        with self.entered("malloc"):
            if self.status < InitStatus.STATUS_IS_INITIALIZED:
                os._exit(139)  # a segmentation fault
            if self._arenas:
                raise Misuse("a second collective after attach")
            if self.faults.die == "malloc":
                os._exit(137)
            path = self._place / f"arena-{self._rank}.{size}"
            path.write_bytes(b"")
            os.truncate(path, size)
            self.barrier("malloc")
            if self.faults.no_room:
                return None
            for rank in range(self._ranks):
                (path,) = self._place.glob(f"arena-{rank}.*")
                if int(path.suffix[1:]) != size:
                    raise Misuse(f"sizes differ: {path.name}, here {size}")
                with path.open("r+b") as file:
                    self._arenas.append(np.frombuffer(mmap.mmap(file.fileno(), 0), np.uint8))
            return self._arenas[self._rank].ctypes.data

    def close(self):
        """The memory goes; nothing may use it any more."""
        self._finalized = True
        self._arenas.clear()

    @property
    def base(self):
        return self._arenas[self._rank].ctypes.data

    def within(self, address, nbytes):
        return self.base <= address and address + nbytes <= self.base + self._arenas[0].size


class _Leaving:
    def __init__(self, lock):
        self._lock = lock

    def __enter__(self):
        return self

    def __exit__(self, *error):
        self._lock.release()


class Core:
    """nvshmem.core."""

    def __init__(self, world):
        self._world = world

    def get_unique_id(self, empty=False):
        data = np.zeros(1, np.dtype([("version", np.int32), ("internal", np.int8, (124,))]))
        if not empty:
            with self._world.entered("get_unique_id"):
                data.view(np.int8)[4:20] = np.frombuffer(os.urandom(16), np.int8)
                self._place(data).mkdir()
        return SimpleNamespace(_data=data.view(np.recarray))

    def init(
        self, device=None, uid=None, rank=None, nranks=None, mpi_comm=None, initializer_method=""
    ):
        world, faults = self._world, self._world.faults
        with world.entered("init"):
            if initializer_method != "uid" or mpi_comm is not None or device is None:
                raise Misuse("only with a device and by a unique id")
            if world.status != InitStatus.STATUS_NOT_INITIALIZED:
                raise Misuse("a second init")
            if faults.die == "init":
                os._exit(137)
            if faults.code:
                raise NVSHMEMError(faults.code)
            world._place, world._rank, world._ranks = self._place(uid._data), rank, nranks
            if (world._place / f"init-{rank}").exists():
                raise Misuse(f"two processes are PE {rank}")
            world.barrier("init")
            full = InitStatus.STATUS_LIMITED_MPG
            world.status = InitStatus.STATUS_IS_BOOTSTRAPPED if faults.bare else full

    def finalize(self):
        with self._world.entered("finalize"):
            self._world.barrier("finalize")
            self._world._finalized = True

    def _place(self, data):
        return self._world.root / data.view(np.uint8)[4:20].tobytes().hex()


class Bindings:
    """nvshmem.bindings."""

    Init_status = InitStatus

    def __init__(self, world):
        self._world = world

    def init_status(self):
        with self._world.entered("init_status"):
            return int(self._world.status)

    def ptr(self, dest, pe):
        with self._world.entered("ptr"):
            if not self._world.within(dest, 1):
                raise Misuse("not in the arena")
            return 0 if self._world.faults.far else self._world._arenas[pe].ctypes.data

    def getmem_on_stream(self, dest, source, bytes, pe, cstrm):
        world = self._world
        with world.entered("getmem_on_stream"), world.cuda.runtime.lock:
            stream = world.cuda.runtime.stream(cstrm)
            if bytes < 1 or not world.within(source, bytes):
                raise Misuse(f"source {source - world.base:,} of {bytes:,} bytes is out of bounds")
            if world.faults.far and not world.within(dest, bytes):
                raise Misuse("over a network the destination must be in the arena")
            remote = world._arenas[pe].ctypes.data + source - world.base
            stream.put(lambda: ctypes.memmove(dest, remote, bytes))


class Device:
    """cuda.core.Device."""

    def __init__(self, world, device_id=None):
        self._world = world

    def set_current(self):
        if self._world.faults.no_driver:
            raise RuntimeError("CUDA_ERROR_NO_DEVICE")


def parts(root, faults=None):
    """(Packages, FakeCuda, World) of this process."""
    cuda = FakeCuda()
    world = World(root, cuda, faults)
    packages = Packages(
        Core(world),
        Bindings(world),
        SimpleNamespace(nvshmem_malloc=_Function(world.malloc)),
        lambda number: Device(world, number),
    )
    return packages, cuda, world


def pe(root, faults=None):
    """(Library, FakeCuda, World) of this process, as before `attach`."""
    packages, cuda, world = parts(root, faults)
    library = Library(packages)
    world.lock = library._lock
    return library, cuda, world


class _Function:
    """As ctypes has it."""

    def __init__(self, function):
        self._function = function
        self.restype = self.argtypes = None

    def __call__(self, *arguments):
        assert self.restype is ctypes.c_void_p, "the address would be cut to 32 bits"
        assert self.argtypes == [ctypes.c_size_t]
        return self._function(*arguments)
