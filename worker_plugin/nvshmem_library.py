"""Every call of NVSHMEM that this package makes, in the only order and under the only lock allowed.

What the library does not forgive (it ends or hangs the process instead of raising): a call before the
device is attached, two calls at a time, a collective that not every PE makes. So there is one
allocation, right after `attach`, and nothing collective after it but `finalize`.
"""

from __future__ import annotations

import ctypes
import os
import threading
from dataclasses import dataclass
from enum import Enum
from typing import Any

import numpy as np

UID_BYTES = 128

# The world uses no collective, so nothing of them need be set up; with several PEs on one device
# neither would work.
_ENVIRONMENT = {"NVSHMEM_DISABLE_NVLS": "1", "NVSHMEM_DISABLE_NCCL": "1"}


class NvshmemError(OSError):
    """NVSHMEM is missing, or refused; the message says why and what to do."""


@dataclass(frozen=True, slots=True)
class Packages:
    """What is used of nvshmem4py. Imported by `real`, never by importing this module."""

    core: Any  # nvshmem.core
    bindings: Any  # nvshmem.bindings
    host: Any  # the library itself, as a ctypes.CDLL
    device: Any  # cuda.core.Device

    @classmethod
    def real(cls) -> Packages:
        """NvshmemError when nvshmem4py, or the library that it wraps, is not there."""
        try:
            from cuda.core import Device
            from cuda.pathfinder import load_nvidia_dynamic_lib
            from nvshmem import bindings, core

            host = ctypes.CDLL(load_nvidia_dynamic_lib("nvshmem_host").abs_path)
        except Exception as error:  # import errors, and pathfinder's own RuntimeErrors
            raise NvshmemError(
                f"NVSHMEM cannot be loaded ({type(error).__name__}: {error}); "
                "pip install 'st2i_dask[cuda13]', or [cuda12] with a torch built for CUDA 12"
            ) from error
        return cls(core, bindings, host, Device)


class _State(Enum):
    NEW = "not attached"
    ATTACHING = "attaching"
    ATTACHED = "attached"
    FINALIZED = "finalized"


class Library:
    """One process' part in one world. Thread-safe; `attach` and `finalize` may hang for ever."""

    def __init__(self, packages: Packages) -> None:
        for name, value in _ENVIRONMENT.items():
            os.environ.setdefault(name, value)
        self._packages = packages
        # nvshmem4py initialises the library for serialised calls.
        self._lock = threading.Lock()
        self._state = _State.NEW
        self.base = 0
        self.nbytes = 0

    def mint(self) -> bytes:
        """The unique id of a new world, to be made by PE 0. That process must live until all have
        attached: it answers their first calls."""
        with self._lock:
            self._expect(_State.NEW)
            uid = self._packages.core.get_unique_id()
            return bytes(uid._data.view(np.int8).tobytes())

    def attach(self, uid: bytes, pe: int, n_pes: int, device: int, nbytes: int) -> None:
        """Join the world and allocate `nbytes` in it: returns when every PE has done the same.

        device: index of the CUDA device that this process uses from now on. NvshmemError when the
        library refuses. Only once per process, successful or not.
        """
        if len(uid) != UID_BYTES or not 0 <= pe < n_pes or nbytes < 1:
            raise NvshmemError(
                f"attach(uid of {len(uid)} bytes, pe={pe}, n_pes={n_pes}, nbytes={nbytes}): need "
                f"{UID_BYTES} bytes, 0 <= pe < n_pes, nbytes >= 1"
            )
        core, bindings, host = self._packages.core, self._packages.bindings, self._packages.host
        with self._lock:
            self._expect(_State.NEW)
            self._state = _State.ATTACHING
            try:
                place = self._packages.device(device)
                place.set_current()
                own = core.get_unique_id(empty=True)
                own._data.view(np.int8)[:] = np.frombuffer(uid, np.int8)
                core.init(device=place, uid=own, rank=pe, nranks=n_pes, initializer_method="uid")
                status = bindings.init_status()
            except Exception as error:
                raise NvshmemError(
                    f"NVSHMEM did not start on CUDA device {device} "
                    f"({type(error).__name__}: {error}); see NVSHMEM_DEBUG=INFO"
                ) from error
            known = bindings.Init_status
            if not known.STATUS_IS_INITIALIZED <= status < known.STATUS_INVALID:
                # Without a usable device init can return and only the bootstrap is done; any
                # further call would be a segmentation fault.
                raise NvshmemError(
                    f"NVSHMEM started without CUDA device {device} (status {int(status)}); it "
                    "needs a data-centre GPU, Volta or newer"
                )
            # Not through nvshmem4py: its malloc holds the GIL until every PE has come.
            allocate = host.nvshmem_malloc
            allocate.restype, allocate.argtypes = ctypes.c_void_p, [ctypes.c_size_t]
            base = allocate(nbytes)
            if not base:
                raise NvshmemError(
                    f"NVSHMEM has no {nbytes:,} bytes on CUDA device {device}; make the arena "
                    "smaller or free device memory"
                )
            self.base, self.nbytes = int(base), nbytes
            self._state = _State.ATTACHED

    def mapped(self, pe: int) -> bool:
        """Whether the PE's memory is mapped here: a get is then a copy, into any memory."""
        with self._lock:
            self._expect(_State.ATTACHED)
            return bool(self._packages.bindings.ptr(self.base, pe))

    def get(self, destination: int, offset: int, nbytes: int, pe: int, stream: int) -> None:
        """Enqueue a copy of bytes [offset, offset + nbytes) of the PE's allocation.

        destination: a device address; within the own allocation unless the PE is `mapped`.
        stream: a cudaStream_t of the device given to `attach`. Returns before the copy is done.
        """
        assert nbytes > 0, nbytes
        assert offset >= 0, offset
        assert offset + nbytes <= self.nbytes, (offset, nbytes)
        with self._lock:
            self._expect(_State.ATTACHED)
            # The remote address is the local one of the same offset, and the PE.
            self._packages.bindings.getmem_on_stream(
                destination, self.base + offset, nbytes, pe, stream
            )

    def finalize(self) -> None:
        """Collective: hangs for ever unless every PE lives and calls it too."""
        with self._lock:
            self._expect(_State.ATTACHED)
            self._state = _State.FINALIZED
            self.base = self.nbytes = 0
            self._packages.core.finalize()

    def _expect(self, state: _State) -> None:
        if self._state is not state:
            raise NvshmemError(
                f"NVSHMEM is {self._state.value} in this process, this needs it {state.value}; "
                "a process attaches once, restart the worker to attach again"
            )

    def _check(self) -> None:
        attached = self._state is _State.ATTACHED
        assert (self.base != 0) == (self.nbytes != 0) == attached
