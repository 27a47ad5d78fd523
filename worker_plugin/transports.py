"""Which way tensors came to this worker, counted."""

from __future__ import annotations

import threading
from typing import Literal, get_args

Transport = Literal["process", "host", "nvshmem", "comm"]
"""The ladder, fastest first: process: the same process. host: shared memory of one machine.
nvshmem: device to device. comm: inside a message of the owner's worker, which counts it."""

TRANSPORTS: tuple[Transport, ...] = get_args(Transport)


class Transports:
    """Tensors and bytes by transport, since the worker began. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._pulls: dict[Transport, int] = dict.fromkeys(TRANSPORTS, 0)
        self._bytes: dict[Transport, int] = dict.fromkeys(TRANSPORTS, 0)

    def count(self, transport: Transport, nbytes: int) -> None:
        with self._lock:
            self._pulls[transport] += 1
            self._bytes[transport] += nbytes

    def statistics(self) -> dict[Transport, tuple[int, int]]:
        """(pulls, bytes) of every transport."""
        with self._lock:
            return {t: (self._pulls[t], self._bytes[t]) for t in TRANSPORTS}
