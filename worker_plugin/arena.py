"""A worker's arena: its part of the symmetric heap, with patience and a record of what did not fit.

Tensors come first: weights that are cached in it make room for them.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

from .heap import Block, SymmetricHeap

#: How long an output waits for room, seconds. Readers hold blocks for milliseconds.
WAIT_SECONDS = 0.05
_LOOK_SECONDS = 0.001


@dataclass(frozen=True)
class ArenaStatistics:
    """Bytes, except counts. used, peak: of tensors. weights: of cached layers. fallbacks: tensors that
    found no room and went to torch's own memory."""

    kind: str
    nbytes: int
    used: int
    peak: int
    weights: int
    fallbacks: int
    fallback_bytes: int


class Arena:
    """Thread-safe."""

    def __init__(self, heap: SymmetricHeap):
        self.heap = heap
        #: Gives up cached weights for a tensor of so many bytes; False: there is nothing to give.
        self.reclaim: Callable[[int], bool] | None = None
        self._lock = threading.Lock()
        self._weights = 0
        self._peak = self._fallbacks = self._fallback_bytes = 0
        # Bytes in use when somebody last waited in vain; None since then there was room.
        self._stuck: int | None = None

    def allocate(self, nbytes: int, wait_s: float = 0.0) -> Block | None:
        """A block; None, and a fallback on record, when there is no room for `wait_s` seconds.

        Where a wait was in vain the next one waits only once something was freed: an arena that
        stays full costs the bound once, not for every tensor.
        """
        block = self._allocate(nbytes)
        if block is None and wait_s and nbytes <= self.heap.address.nbytes:
            block = self._wait(nbytes, wait_s)
        with self._lock:
            if block is None:
                self._fallbacks += 1
                self._fallback_bytes += nbytes
            else:
                self._stuck = None
                self._peak = max(self._peak, self._tensors())
        return block

    def count_weights(self, nbytes: int) -> None:
        """So many bytes of blocks more (or less) hold weights."""
        with self._lock:
            self._weights += nbytes

    def tensor_bytes(self) -> int:
        """Bytes of blocks that hold tensors, now."""
        with self._lock:
            return self._tensors()

    def _tensors(self) -> int:
        # Blocks and the count of them change one after the other.
        return max(0, self.heap.used_bytes - self._weights)

    def _allocate(self, nbytes: int) -> Block | None:
        block = self.heap.allocate(nbytes)
        if block is None and nbytes <= self.heap.address.nbytes:
            while block is None and self.reclaim is not None and self.reclaim(nbytes):
                block = self.heap.allocate(nbytes)
        return block

    def _wait(self, nbytes: int, wait_s: float) -> Block | None:
        with self._lock:
            if self._stuck is not None and self.heap.used_bytes >= self._stuck:
                return None
        deadline = time.monotonic() + wait_s
        block = None
        while block is None and time.monotonic() < deadline:
            time.sleep(_LOOK_SECONDS)
            block = self._allocate(nbytes)
        with self._lock:
            self._stuck = self.heap.used_bytes if block is None else None
        return block

    def statistics(self) -> ArenaStatistics:
        address = self.heap.address
        with self._lock:
            return ArenaStatistics(
                address.kind,
                address.nbytes,
                self._tensors(),
                self._peak,
                self._weights,
                self._fallbacks,
                self._fallback_bytes,
            )
