"""Waits of leases, each with a bound, and what is said of one that was in vain."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from st2i_dask.errors import LoadError

from .lease import Lease
from .resident import ResidentLayers
from .weight_cache import WeightCache

#: Who waits looks so often whether tensors have left the arena, seconds: nobody tells of that.
LOOK_SECONDS = 0.02


class WeightWaits:
    """Methods are called with the lock held, `changed`; waiting lets go of it. wait_s: the bound, seconds."""

    def __init__(
        self,
        cache: WeightCache,
        layers: ResidentLayers,
        changed: threading.Condition,
        wait_s: float,
    ):
        self._cache = cache
        self._layers = layers
        self._changed = changed
        self._wait_s = wait_s

    def for_layers(self, lease: Lease, is_there: Callable[[], bool]) -> None:
        """Until what the lease waits for is resident. LoadError after `wait_s` seconds, or what
        the load of it raised."""
        if is_there():
            return
        start = time.perf_counter()
        lease.waits = True
        try:
            while lease.error is None and not is_there():
                left = start + self._wait_s - time.perf_counter()
                if left <= 0:
                    break
                if not self._changed.wait(min(left, LOOK_SECONDS)):
                    self._layers.look_again()
        finally:
            lease.waits = False
            lease.stall(start)
        if lease.error is not None:
            raise lease.error
        if not is_there():
            raise LoadError(
                f"no room for model {lease.skeleton.label}: what is in use left none for "
                f"{self._wait_s:g} s; raise the worker's memory with "
                "st2i.attach(client, memory_bytes=...) or run fewer threads per worker"
            )

    def for_room(self, lease: Lease) -> None:
        """Until its layers fit beside the tensors that the arena holds. LoadError when they do not fit an
        empty one, or not for `wait_s` seconds."""
        start = time.perf_counter()
        while True:
            self._layers.size_arena()
            why = self._cache.fits(*lease.ids)
            if why is None:
                return
            if not self._layers.is_arena_busy() or time.perf_counter() - start > self._wait_s:
                # What is held may be so because its file was replaced while it was read.
                lease.skeleton.stale |= lease.skeleton.held is not None
                held = lease.skeleton.held
                if held is not None:
                    why += (
                        f"; {held.nbytes:,} bytes of it are kept whole, as they do not come unchanged "
                        "from safetensors files"
                    )
                raise LoadError(
                    f"model {lease.skeleton.label} does not fit this worker: {why}; raise its "
                    "memory with st2i.attach(client, memory_bytes=...), give less of it to "
                    "arena_bytes, or use a smaller dtype"
                )
            self._changed.wait(LOOK_SECONDS)
