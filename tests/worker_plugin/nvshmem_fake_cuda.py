"""CUDA without a device, as CuPy shows it. Streams are queues that run when somebody looks, or not at all
while they are `held`: the device is busy."""

from __future__ import annotations

import ctypes
import itertools
import threading
from collections import deque
from types import SimpleNamespace

import numpy as np
import torch

from worker_plugin.nvshmem_cuda import Cuda


class Misuse(Exception):
    """Against the rules of NVSHMEM or CUDA."""


class Stream:
    """A queue of things to do, in order. held: the device is busy with what is in front."""

    def __init__(self):
        self.held = False
        self._entered, self._left = 0, 0
        self._queue = deque()

    def put(self, work):
        """work: a function, or (stream, number) to wait until that many have left that stream."""
        self._queue.append(work)
        self._entered += 1

    def run(self):
        while self._queue and not self.held:
            work = self._queue[0]
            if isinstance(work, tuple):
                stream, number = work
                stream.run()
                if stream._left < number:
                    return
            else:
                work()
            self._queue.popleft()
            self._left += 1


class Event:
    def __init__(self, runtime, disable_timing):
        assert disable_timing, "timing makes events slow"
        self._runtime = runtime
        self.ptr = runtime.new(self)
        self.after = None

    @property
    def done(self):
        with self._runtime.lock:
            stream, number = self.after
            stream.run()
            return stream._left >= number


class Runtime:
    """cupy.cuda.runtime."""

    memcpyDefault = 4

    def __init__(self):
        self.lock = threading.RLock()
        self._handles = {}
        self._numbers = itertools.count(0x1000, 8)
        self.selected = threading.local()
        self._handles[0] = Stream()

    def new(self, thing):
        number = next(self._numbers)
        self._handles[number] = thing
        return number

    def stream(self, handle):
        stream = self._handles.get(handle)
        if not isinstance(stream, Stream):
            raise Misuse(f"{handle} is no stream")
        if getattr(self.selected, "depth", 0) < 1:
            raise Misuse("no device is selected in this thread")
        return stream

    def eventRecord(self, event, stream):
        with self.lock:
            lane = self.stream(stream)
            self._handles[event].after = (lane, lane._entered)

    def streamWaitEvent(self, stream, event, flags=0):
        with self.lock:
            self.stream(stream).put(self._handles[event].after)

    def memcpyAsync(self, dst, src, size, kind, stream):
        assert kind == self.memcpyDefault
        with self.lock:
            self.stream(stream).put(lambda: ctypes.memmove(dst, src, size))


class FakeCuda(Cuda):
    """One device whose memory is this process's."""

    name = "cpu"

    def __init__(self):
        self.runtime = Runtime()
        self.current = threading.local()  # .stream: the thread's torch stream
        super().__init__(0, SimpleNamespace(cuda=self))

    # What CuPy has, under its names.
    def Device(self, device):
        return _Selected(self.runtime.selected)

    def Stream(self, non_blocking):
        assert non_blocking, "would wait for the default stream"
        return SimpleNamespace(ptr=self.runtime.new(Stream()))

    def Event(self, disable_timing):
        return Event(self.runtime, disable_timing)

    def alloc_pinned_memory(self, size):
        array = np.zeros(size, np.uint8)
        return SimpleNamespace(ptr=array.ctypes.data, array=array)

    # What torch has only with a device.
    def torch_stream(self):
        return getattr(self.current, "stream", 0)

    def view(self, address, nbytes, owner):
        exported = SimpleNamespace(
            owner=owner,
            __array_interface__={
                "shape": (nbytes,),
                "typestr": "|u1",
                "data": (address, False),
                "version": 3,
            },
        )
        return torch.from_numpy(np.asarray(exported))

    def held(self, handle, held=True):
        with self.selected(), self.runtime.lock:
            self.runtime.stream(handle).held = held

    def put(self, handle, work):
        """A kernel."""
        with self.selected(), self.runtime.lock:
            self.runtime.stream(handle).put(work)


class _Selected:
    def __init__(self, local):
        self._local = local

    def __enter__(self):
        self._local.depth = getattr(self._local, "depth", 0) + 1

    def __exit__(self, *error):
        self._local.depth -= 1
