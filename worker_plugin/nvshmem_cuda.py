"""The little of CUDA that the NVSHMEM heap needs: streams, events, copies, views. Through CuPy."""

from __future__ import annotations

import ctypes
import importlib
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

# How often a wait that is bounded looks whether the device is done: at first at once, then ever more
# slowly, seconds.
_FIRST_LOOKS = 50
_LOOK_S = 50e-6


class PinnedWord:
    """64 bits of host memory that the device can copy from and to without waiting."""

    def __init__(self, cupy: Any) -> None:
        self._memory = cupy.cuda.alloc_pinned_memory(8)
        self.address = int(self._memory.ptr)
        self._word = ctypes.c_uint64.from_address(self.address)

    @property
    def value(self) -> int:
        return self._word.value

    @value.setter
    def value(self, value: int) -> None:
        self._word.value = value


class Cuda:
    """One device. Streams are cudaStream_t as int. Any thread; every method selects the device.

    Methods raise CuPy's CUDARuntimeError (a RuntimeError) when the device does.
    """

    def __init__(self, device: int, cupy: Any = None) -> None:
        self.device = device
        self._cupy = cupy if cupy is not None else importlib.import_module("cupy")
        self._runtime = self._cupy.cuda.runtime
        self._streams: list[Any] = []

    @property
    def name(self) -> str:
        """torch's name of the device."""
        return f"cuda:{self.device}"

    @contextmanager
    def selected(self) -> Iterator[None]:
        """The device is the calling thread's current one, as getmem_on_stream needs it."""
        with self._cupy.cuda.Device(self.device):
            yield

    def new_stream(self) -> int:
        """A stream that does not wait for the default stream; lives as long as this object."""
        with self.selected():
            self._streams.append(self._cupy.cuda.Stream(non_blocking=True))
        return int(self._streams[-1].ptr)

    def torch_stream(self) -> int:
        """The calling thread's current torch stream."""
        import torch

        return int(torch.cuda.current_stream(self.device).cuda_stream)

    def pinned_word(self) -> PinnedWord:
        with self.selected():
            return PinnedWord(self._cupy)

    def record(self, streams: Iterable[int]) -> list[Any]:
        """Events that are done when all that is in the streams now is done."""
        events = []
        with self.selected():
            for stream in streams:
                event = self._cupy.cuda.Event(disable_timing=True)
                self._runtime.eventRecord(event.ptr, stream)
                events.append(event)
        return events

    def wait_in(self, stream: int, events: Iterable[Any]) -> None:
        """What enters the stream from now on starts after the events."""
        with self.selected():
            for event in events:
                self._runtime.streamWaitEvent(stream, event.ptr)

    def done(self, events: Iterable[Any]) -> bool:
        return all(event.done for event in events)

    def wait(self, events: Iterable[Any], seconds: float) -> bool:
        """Wait on the host. False when the events are not done in time."""
        events = list(events)
        deadline = time.monotonic() + seconds
        looks = 0
        while not self.done(events):
            if time.monotonic() > deadline:
                return False
            looks += 1
            time.sleep(0.0 if looks < _FIRST_LOOKS else min(_LOOK_S * looks / _FIRST_LOOKS, 1e-3))
        return True

    def copy(self, destination: int, source: int, nbytes: int, stream: int) -> None:
        """Enqueue a copy between two places of the device, or of it and pinned host memory."""
        with self.selected():
            kind = self._runtime.memcpyDefault
            self._runtime.memcpyAsync(destination, source, nbytes, kind, stream)

    def view(self, address: int, nbytes: int, owner: Any) -> Any:
        """Device memory as a torch.uint8 tensor (nbytes,) that keeps `owner` alive."""
        import torch

        return torch.as_tensor(_Exported(address, nbytes, owner), device=self.name)


class _Exported:
    """torch keeps this object, and so its owner, until the last view of the memory is gone."""

    def __init__(self, address: int, nbytes: int, owner: Any) -> None:
        self.owner = owner
        self.__cuda_array_interface__ = {
            "shape": (nbytes,),
            "typestr": "|u1",
            "data": (address, False),
            "version": 3,
        }
