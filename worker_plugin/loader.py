"""The thread that copies layers from the host tier into either region of an executor's memory.

It does what the policy's Load instructions say, one layer after the other, beside the thread that
computes; copying holds neither the GIL nor a lock.
"""

from __future__ import annotations

import mmap
import queue
import threading
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from contextvars import Context, copy_context
from dataclasses import dataclass
from typing import Any

from st2i_dask._core import GRANULE

from .arena import Arena
from .device_copier import DeviceCopier
from .host_tier import HostTier, Part
from .layer_table import ALIGNMENT, Slot
from .skeletons import ModelWeights
from .stored import Stored
from .weight_books import Load, Region

#: Layers of at least so many bytes have a mapping of their own: a process may have some 65,000.
MAPPED = 1 << 20


@dataclass(frozen=True, slots=True)
class Buffer:
    """Memory of one layer: torch.uint8 (nbytes,). arena_bytes: of the arena, which counts them
    as weights; 0: it is torch's own memory."""

    tensor: Any
    arena_bytes: int = 0

    def is_free(self) -> bool:
        """Whether another layer may have it: private memory that nothing else refers to. Model code
        may have kept a view of a weight."""
        import torch

        count = getattr(torch._C, "_storage_Use_Count", None)
        if self.arena_bytes or self.tensor.device.type != "cpu" or count is None:
            return False
        # The tensor's reference, and that of the storage asked for here.
        return bool(count(self.tensor.untyped_storage()._cdata) == 2)


#: What to load, of which weights, into which memory if that is given.
_Order = tuple[Context, Load, ModelWeights, Buffer | None]


class Loader:
    """One per worker; its thread starts with the first load. `submit` from any thread.

    loaded(load, buffer, seconds), no_room(load) and failed(load, error) are called from its thread.
    """

    def __init__(
        self,
        host: HostTier,
        device: str,
        arena: Arena | None,
        loaded: Callable[[Load, Buffer, float], None],
        no_room: Callable[[Load], None],
        failed: Callable[[Load, Exception], None],
    ):
        self._host = host
        self._device = device
        self._arena = arena
        self._loaded, self._no_room, self._failed = loaded, no_room, failed
        self._queue: queue.SimpleQueue[_Order | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._copier: DeviceCopier | None = None

    def submit(self, load: Load, weights: ModelWeights, into: Buffer | None = None) -> None:
        """into: memory to use, of a layer that has just gone; None: fresh memory."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="st2i-loader", daemon=True)
            self._thread.start()
        # What follows from it is logged as the submitter's (st2i_dask.logs.about).
        self._queue.put((copy_context(), load, weights, into))

    def close(self, timeout_s: float = 30.0) -> None:
        """Finish the layer at hand, bounded, and end the thread."""
        if self._thread is not None:
            self._queue.put(None)
            self._thread.join(timeout_s)
            self._thread = None
        # Its store refers to it: without these an arena goes with its last user, not with the
        # garbage collector.
        del self._loaded, self._no_room, self._failed
        self._arena = None

    def _run(self) -> None:
        while (item := self._queue.get()) is not None:
            context, load, weights, into = item
            context.run(self._carry_out, load, weights, into)
            del item, context, load, weights, into

    def _carry_out(self, load: Load, weights: ModelWeights, into: Buffer | None) -> None:
        start = time.perf_counter()
        try:
            buffer = self._filled(load, weights, into)
        except Exception as error:
            # Whoever keeps the error keeps its frames, and with them the layer's memory.
            traceback.clear_frames(error.__traceback__)
            self._failed(load, error)
            return
        if buffer is None:
            self._no_room(load)
        else:
            self._loaded(load, buffer, time.perf_counter() - start)

    def _filled(self, load: Load, weights: ModelWeights, into: Buffer | None) -> Buffer | None:
        """None: there is no room."""
        buffer = into or self._allocate(load.region, weights.sizes[load.layer])
        if buffer is not None:
            try:
                self._copy(weights, load.layer, buffer.tensor)
            except BaseException:
                self._count(-buffer.arena_bytes)
                raise
        return buffer

    def _count(self, arena_bytes: int) -> None:
        """As weights, from the start of the copy: nobody takes a layer for a tensor."""
        if arena_bytes and self._arena is not None:
            self._arena.count_weights(arena_bytes)

    def _copy(self, weights: ModelWeights, layer: int, into: Any) -> None:
        assert weights.table is not None
        slots = zip(weights.table.slots[layer], weights.sources[layer], strict=True)
        by_offset = {slot.offset: (slot, stored) for slot, stored in slots if slot.nbytes}.values()
        as_is = [Part(s.range, slot.offset) for slot, s in by_offset if s.dtype == slot.dtype]
        if self._device == "cpu":
            self._host.copy(as_is, into.data_ptr())
        else:
            self._device_copier().copy(as_is, into)
        for slot, stored in by_offset:
            if stored.dtype != slot.dtype:
                self._convert(slot, stored, into)

    def _convert(self, slot: Slot, stored: Stored, into: Any) -> None:
        """As it was when the model was read: a contiguous tensor in another dtype."""
        import torch

        values = torch.empty(stored.range.nbytes, dtype=torch.uint8)
        self._host.copy([Part(stored.range, 0)], values.data_ptr())
        place = into[slot.offset : slot.offset + slot.nbytes].view(slot.dtype)
        place.copy_(values.view(stored.dtype))

    def _device_copier(self) -> DeviceCopier:
        if self._copier is None:
            self._copier = DeviceCopier(self._host, self._device)
        return self._copier

    def _allocate(self, region: Region, nbytes: int) -> Buffer | None:
        if region == "arena":
            assert self._arena is not None
            arena_bytes = -(-nbytes // GRANULE) * GRANULE
            self._count(arena_bytes)  # first: mapping it takes milliseconds
            try:
                memory = self._arena.heap.allocate_weights(nbytes)
            except OSError:  # the system has no memory, or no mappings left
                memory = None
            if memory is None:
                self._count(-arena_bytes)
                return None
            return Buffer(memory, arena_bytes)
        if self._device != "cpu":
            import torch

            try:
                return Buffer(self._device_copier().empty(nbytes))
            except torch.OutOfMemoryError:
                return None
        return Buffer(aligned(nbytes))


def aligned(nbytes: int) -> Any:
    """A tensor of fresh memory in large pages where the system has them: faulting small ones takes as long
    as the copy. A layer's goes back to the system with it, whatever malloc does with what is freed."""
    import numpy as np
    import torch

    whole = (
        np.empty(nbytes + ALIGNMENT, np.uint8) if nbytes < MAPPED else _mapped(nbytes + ALIGNMENT)
    )
    start = -whole.ctypes.data % ALIGNMENT
    return torch.from_numpy(whole[start : start + nbytes])


def _mapped(nbytes: int) -> Any:
    """numpy.uint8 (nbytes,) in a mapping of its own."""
    import numpy as np

    # Python's default is shared memory, which has no large pages.
    memory = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with suppress(OSError):  # a kernel without large pages
        memory.madvise(mmap.MADV_HUGEPAGE)
    return np.frombuffer(memory, np.uint8)
