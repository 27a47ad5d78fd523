"""A worker's arena: its part of the symmetric heap, with patience and a record of what did not fit."""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass

from .heap import Block, SymmetricHeap

#: How long an output waits for room, seconds. Readers hold blocks for milliseconds.
WAIT_SECONDS = 0.05
_LOOK_SECONDS = 0.001

#: An arena that nobody sized: this share of the worker's memory limit, at most so many bytes.
DEFAULT_SHARE = 8
DEFAULT_LIMIT = 1 << 30


@dataclass(frozen=True)
class ArenaStatistics:
    """Bytes, except counts. fallbacks: tensors that found no room and went to torch's own memory."""

    kind: str
    nbytes: int
    used: int
    peak: int
    fallbacks: int
    fallback_bytes: int


class Arena:
    """Thread-safe."""

    def __init__(self, heap: SymmetricHeap):
        self.heap = heap
        self._lock = threading.Lock()
        self._peak = self._fallbacks = self._fallback_bytes = 0

    def allocate(self, nbytes: int, wait_s: float = 0.0) -> Block | None:
        """A block; None, and a fallback on record, when there is no room for `wait_s` seconds."""
        block = self.heap.allocate(nbytes)
        if block is None and nbytes <= self.heap.address.nbytes:
            deadline = time.monotonic() + wait_s
            while block is None and time.monotonic() < deadline:
                time.sleep(_LOOK_SECONDS)
                block = self.heap.allocate(nbytes)
        with self._lock:
            if block is None:
                self._fallbacks += 1
                self._fallback_bytes += nbytes
            else:
                self._peak = max(self._peak, self.heap.used_bytes)
        return block

    def statistics(self) -> ArenaStatistics:
        address = self.heap.address
        with self._lock:
            return ArenaStatistics(
                address.kind,
                address.nbytes,
                self.heap.used_bytes,
                self._peak,
                self._fallbacks,
                self._fallback_bytes,
            )


def default_bytes(memory_limit: int) -> int:
    """Size of an arena on a worker with so much memory, bytes."""
    return min(memory_limit // DEFAULT_SHARE, DEFAULT_LIMIT)
