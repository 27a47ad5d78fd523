"""The symmetric heap in shared memory of one machine: the default, no device needed.

A heap is an anonymous file (memfd) that other processes of the same user open through /proc. It has no
name in any file system, so nothing is left behind however a process ends.
"""

from __future__ import annotations

import os
import threading
import uuid
from typing import Any
from weakref import WeakValueDictionary

from st2i_dask import _core
from st2i_dask.errors import AttachError

from .heap import Block, HeapAddress, Ticket

KIND = "host"

#: Heaps of this process by uuid; their blocks are read in place. Not kept alive by it.
_own: WeakValueDictionary[str, HostHeap] = WeakValueDictionary()


class HostHeap:
    """A `SymmetricHeap` (heap.py) in host memory. Thread-safe.

    nbytes: at least `_core.GRANULE`, at most the machine's memory; taken as it is used. allocator:
    "best_fit" or "buddy". poison: overwrite freed blocks. AttachError for others or when the system
    refuses.
    """

    def __init__(self, nbytes: int, *, allocator: str = "best_fit", poison: bool = False) -> None:
        name = uuid.uuid4().hex
        try:
            self._heap = _core.Heap(nbytes, _segment_name(name), allocator, poison)
        except (ValueError, OSError) as error:
            raise AttachError(f"no host arena on this worker: {error}") from error
        self._address = HeapAddress(
            KIND, name, self._heap.nbytes, place=(self._heap.pid, self._heap.fd)
        )
        self._lock = threading.Lock()  # _peers, _unreachable, _closed
        self._peers: dict[str, tuple[HeapAddress, _core.Peer]] = {}
        self._unreachable: set[str] = set()
        self._closed = False
        _own[name] = self

    @property
    def address(self) -> HeapAddress:
        return self._address

    @property
    def device(self) -> str:
        return "cpu"

    @property
    def used_bytes(self) -> int:
        return self._heap.statistics()["used"]

    def statistics(self) -> _core.HeapStatistics:
        return self._heap.statistics()

    def allocate(self, nbytes: int) -> _core.Block | None:
        return self._heap.allocate(nbytes)

    def allocate_weights(self, nbytes: int) -> Any | None:
        """As `SymmetricHeap` says; None only when the free bytes of the heap are too few. It is one
        range of addresses, in several blocks where no gap is large enough. OSError when the system
        has no memory or no mappings left."""
        import torch

        scattered = self._heap.allocate_scattered(nbytes)
        return None if scattered is None else torch.from_dlpack(scattered.array())

    def tensor(self, block: Block) -> Any:
        import torch

        assert isinstance(block, _core.Block)
        return torch.from_dlpack(block.array())

    def block_of(self, tensor: Any) -> tuple[_core.Block, int] | None:
        import torch

        if tensor.device.type != "cpu" or tensor.layout is not torch.strided:
            return None
        storage = tensor.untyped_storage().data_ptr()
        block = self._heap.find(storage)
        if block is None:
            return None
        # Not tensor.data_ptr(), which is 0 for an empty tensor.
        first = storage + tensor.storage_offset() * tensor.element_size()
        return block, first - self._heap.base - block.offset

    def reach(self, other: HeapAddress) -> bool:
        try:
            return other.uuid in _own or self._peer(other) is not None
        except Exception:
            return False

    def pull(self, ticket: Ticket, into: Any) -> bool:
        _check_destination(ticket, into)
        own = _own.get(ticket.heap.uuid)
        if own is not None:
            return own._copy(ticket, into)
        peer = self._peer(ticket.heap)
        return peer.get(ticket.offset, ticket.generation, ticket.nbytes, into.data_ptr())

    def settle(self) -> None:
        pass  # a copy on the CPU is done when it returns

    def allocate_word(self) -> int | None:
        try:
            return self._heap.allocate_word()
        except RuntimeError:  # all are in use
            return None

    def free_word(self, word: int) -> None:
        self._heap.free_word(word)

    def signal(self, word: int, value: int) -> None:
        self._heap.signal(word, value)

    def wait(self, other: HeapAddress, word: int, at_least: int, timeout_s: float) -> int | None:
        own = _own.get(other.uuid)
        waits = own._heap if own is not None else self._peer(other)
        return waits.wait(word, at_least, timeout_s)

    def forget_lost(self) -> None:
        """Let go of heaps whose processes have ended: their memory stays taken until then."""
        with self._lock:
            lost = [name for name, (where, _) in self._peers.items() if not _is_there(where)]
            for name in lost:
                del self._peers[name]
                self._unreachable.add(name)

    def close(self) -> None:
        with self._lock:
            self._closed = True
            self._peers.clear()

    def _copy(self, ticket: Ticket, into: Any) -> bool:
        """From this heap, within the process. Holding the block keeps it from being reused."""
        block = self._heap.find(self._heap.base + ticket.offset)
        if block is None or block.generation != ticket.generation:
            return False
        into.copy_(self.tensor(block)[: ticket.nbytes])
        return True

    def _peer(self, other: HeapAddress) -> _core.Peer:
        """OSError if it cannot be reached, now or at an earlier try."""
        with self._lock:
            known = self._peers.get(other.uuid)
            if known is not None:
                return known[1]
            if self._closed or other.kind != KIND or other.uuid in self._unreachable:
                state = "is closed" if self._closed else "cannot reach it"
                raise OSError(f"{other.kind} heap {other.uuid}: the heap of this worker {state}")
            try:
                pid, fd = other.place
                peer = _core.Peer(pid, fd, _segment_name(other.uuid))
            except Exception as error:
                self._unreachable.add(other.uuid)
                if isinstance(error, OSError):
                    raise
                raise OSError(f"host heap {other.uuid} has no such place: {other.place}") from error
            self._peers[other.uuid] = (other, peer)
        self.forget_lost()
        return peer

    def _check(self) -> None:
        self._heap._check()
        with self._lock:
            assert not self._unreachable & self._peers.keys()
            assert not (self._closed and self._peers)


def _segment_name(name: str) -> str:
    return f"st2i-arena-{name}"


def _is_there(where: HeapAddress) -> bool:
    pid, fd = where.place
    try:
        target = os.readlink(f"/proc/{pid}/fd/{fd}")
    except OSError:
        return False
    return target == f"/memfd:{_segment_name(where.uuid)} (deleted)"


def _check_destination(ticket: Ticket, into: Any) -> None:
    import torch

    if into.dtype != torch.uint8 or into.device.type != "cpu" or not into.is_contiguous():
        raise ValueError(
            f"a pull goes into a contiguous uint8 CPU tensor; got {into.dtype} on {into.device}"
        )
    if into.numel() != ticket.nbytes:
        raise ValueError(f"a ticket of {ticket.nbytes} bytes does not fit {into.numel()} bytes")
