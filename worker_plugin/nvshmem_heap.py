"""A worker's part of the symmetric heap in device memory, over NVSHMEM.

The word of the granule where a block starts (nvshmem_layout.py) holds the block's generation. It is set
before the block is handed out and cleared before its memory can be used again, so whoever copies a
block and reads its word after that knows whether the copy is the block.
"""

from __future__ import annotations

import itertools
import threading
import weakref
from bisect import bisect_right
from collections import deque
from contextlib import suppress
from typing import Any

from st2i_dask._core import GRANULE, Allocator

from .heap import Block, HeapAddress, Ticket
from .nvshmem_cuda import Cuda
from .nvshmem_layout import SCRATCH, WORD, heap_uuid, payload_start, word_of
from .nvshmem_library import Library, NvshmemError

KIND = "nvshmem"

# Nothing that this module waits for takes longer unless a peer or the device is lost, seconds.
_WAIT_S = 30.0


class DeviceBlock:
    """Memory of the heap; freed with its last reference, views included."""

    __slots__ = ("__weakref__", "_heap", "_streams", "generation", "nbytes", "offset")

    def __init__(self, heap: NvshmemHeap, offset: int, nbytes: int, generation: int) -> None:
        self._heap = heap
        self.offset = offset
        self.nbytes = nbytes
        self.generation = generation
        self._streams: set[int] = set()  # where work on the block may have been put

    def __del__(self) -> None:
        self._heap._let_go(self)


class NvshmemHeap:
    """The heap of PE `pe` of a world of `n_pes`, once `library` has attached.

    name: the world's, for ever. generation: its number on this cluster. kind: of the allocator, see
    st2i_dask._core.Allocator.

    Memory that is freed can be allocated again when the device has done all that it was given up to
    then: where `allocate` found no gap it may find one a moment later. Before a ticket is sent,
    `settle` must have returned. ValueError when the arena is too small for one granule.
    """

    def __init__(
        self,
        library: Library,
        cuda: Cuda,
        *,
        name: str,
        generation: int,
        pe: int,
        n_pes: int,
        kind: str = "best_fit",
    ) -> None:
        self._library = library
        self._cuda = cuda
        self._name = name
        self._pe = pe
        self._n_pes = n_pes
        self._payload = payload_start(library.nbytes)
        self._allocator = Allocator(library.nbytes - self._payload, kind)
        self._generations = itertools.count(1)
        self._live: dict[int, weakref.ref[DeviceBlock]] = {}
        self._starts: list[int] = []  # the offsets in _live, sorted
        # Filled by __del__, which can run anywhere, also while this thread holds the lock.
        self._dead: deque[tuple[int, list[Any] | None]] = deque()
        self._cooling: list[tuple[int, list[Any]]] = []  # until the device is done with them
        self._lock = threading.Lock()
        self._word = cuda.pinned_word()
        self._words = cuda.new_stream()
        self._pulling = threading.Lock()  # one pull at a time: they share stream and scratch word
        self._found = cuda.pinned_word()
        self._pulls = cuda.new_stream()
        self._mapped: dict[int, bool] = {}
        self._severed = ""  # why no other heap is reached any more
        self._closed = False
        self._stuck: list[Any] = []  # what a copy that never ended may still write to
        self.address = HeapAddress(
            KIND, heap_uuid(name, pe), self._allocator.nbytes, (generation, pe)
        )

    # -- own memory --------------------------------------------------------------------------------

    @property
    def device(self) -> str:
        return self._cuda.name

    @property
    def used_bytes(self) -> int:
        with self._lock:
            self._sweep()
            return self._allocator.statistics()["used"]

    def allocate(self, nbytes: int) -> DeviceBlock | None:
        with self._lock:
            self._sweep()
            offset = self._allocator.alloc(nbytes)
            if offset is None:
                return None
            block = DeviceBlock(self, offset, nbytes, next(self._generations))
            self._live[offset] = weakref.ref(block)
            self._starts.insert(bisect_right(self._starts, offset), offset)
            self._set_words([offset], block.generation)
            return block

    def allocate_weights(self, nbytes: int) -> Any | None:
        """As `SymmetricHeap` says, in one block: the library's memory cannot be mapped at another
        address, so None also when the free bytes would do but no gap is large enough."""
        block = self.allocate(nbytes)
        return None if block is None else self.tensor(block)

    def tensor(self, block: Block) -> Any:
        assert isinstance(block, DeviceBlock)
        block._streams.add(self._cuda.torch_stream())
        return self._cuda.view(self._at(block.offset), block.nbytes, block)

    def block_of(self, tensor: Any) -> tuple[DeviceBlock, int] | None:
        import torch

        if tensor.layout is not torch.strided:
            return None
        # Not tensor.data_ptr(), which is 0 for an empty tensor.
        offset = int(tensor.untyped_storage().data_ptr()) - self._at(0)
        if not 0 <= offset < self._allocator.nbytes:
            return None
        with self._lock:
            place = bisect_right(self._starts, offset) - 1
            block = self._live[self._starts[place]]() if place >= 0 else None
        if block is None or offset >= block.offset + block.nbytes:
            return None
        first = offset + tensor.storage_offset() * tensor.element_size()
        return block, first - block.offset

    def settle(self) -> None:
        """Wait until all is written that the calling thread has given to its current torch stream.
        OSError when the device does not get done."""
        if not self._cuda.wait(self._cuda.record([self._cuda.torch_stream()]), _WAIT_S):
            raise NvshmemError(
                f"CUDA device {self._cuda.device} has not finished its work for {_WAIT_S:g} s; "
                "restart the worker if it hangs"
            )

    # Signal words are host memory; readers of this heap ask by message instead.

    def allocate_word(self) -> None:
        return None

    def free_word(self, word: int) -> None:
        raise AssertionError("this heap has no signal words")

    def signal(self, word: int, value: int) -> None:
        raise AssertionError("this heap has no signal words")

    def wait(self, other: HeapAddress, word: int, at_least: int, timeout_s: float) -> int | None:
        raise NvshmemError(f"heap {other.uuid} has no signal words")

    # -- other heaps -------------------------------------------------------------------------------

    def reach(self, other: HeapAddress) -> bool:
        return self._why_not(other) is None

    def pull(self, ticket: Ticket, into: Any) -> bool:
        if into.numel() != ticket.nbytes or into.element_size() != 1 or not into.is_contiguous():
            raise ValueError(
                f"into is {tuple(into.shape)} {into.dtype}; a ticket of {ticket.nbytes} bytes needs "
                f"a contiguous torch.uint8 tensor of ({ticket.nbytes},)"
            )
        why_not = self._why_not(ticket.heap)
        if why_not is not None:
            raise NvshmemError(why_not)
        end = ticket.offset + ticket.nbytes
        if ticket.offset % GRANULE or not 0 <= ticket.offset < end <= self._allocator.nbytes:
            return False
        if not self._pulling.acquire(timeout=_WAIT_S):
            raise NvshmemError(f"another pull has not ended for {_WAIT_S:g} s; see its error")
        try:
            # The memory of `into` may have been reused from a tensor that earlier work still reads.
            self._cuda.wait_in(self._pulls, self._cuda.record([self._cuda.torch_stream()]))
            if ticket.heap.uuid == self.address.uuid:
                return self._copy(ticket, into)
            return self._get(ticket, into)
        finally:
            self._pulling.release()

    def sever(self, why: str) -> None:
        """The world is no more: own memory stays, no other heap is reached. Any thread."""
        self._severed = self._severed or why

    def close(self) -> None:
        self._closed = True

    def reopen(self) -> None:
        """For the next who serves in this process: it cannot have another one."""
        self._closed = False

    # -- inside ------------------------------------------------------------------------------------

    def _why_not(self, other: HeapAddress) -> str | None:
        if other.uuid == self.address.uuid:
            return None
        if self._severed or self._closed:
            why = self._severed or "this heap is closed"
            return f"NVSHMEM heap {other.uuid} is out of reach: {why}"
        pe = other.place[1] if other.kind == KIND and len(other.place) == 2 else None
        if (
            not isinstance(pe, int)
            or not 0 <= pe < self._n_pes
            or other.uuid != heap_uuid(self._name, pe)
        ):
            return f"{other.kind} heap {other.uuid} is not in this worker's NVSHMEM world"
        return None

    def _copy(self, ticket: Ticket, into: Any) -> bool:
        with self._lock:
            known = self._live.get(ticket.offset)
            block = known() if known is not None else None
        if block is None or block.generation != ticket.generation:
            return False
        into_at = int(into.data_ptr())
        self._cuda.copy(into_at, self._at(block.offset), ticket.nbytes, self._pulls)
        self._finish((block, into))
        return True

    def _get(self, ticket: Ticket, into: Any) -> bool:
        pe, into_at = ticket.heap.place[1], int(into.data_ptr())
        landing, landing_at = into, into_at
        if not self._is_mapped(pe) and self.block_of(into) is None:
            # Over a network only the arena is known to the adapter.
            landing = self.allocate(ticket.nbytes)
            if landing is None:
                raise NvshmemError(
                    f"no gap of {ticket.nbytes:,} bytes to receive in; use another transport"
                )
            landing_at = self._at(landing.offset)
        with self._cuda.selected():
            source = self._payload + ticket.offset
            self._library.get(landing_at, source, ticket.nbytes, pe, self._pulls)
            # In stream order, so after the bytes: see the module's docstring.
            scratch = self._library.base + SCRATCH
            self._library.get(scratch, word_of(ticket.offset), WORD, pe, self._pulls)
        self._cuda.copy(self._found.address, scratch, WORD, self._pulls)
        if landing_at != into_at:
            self._cuda.copy(into_at, landing_at, ticket.nbytes, self._pulls)
        self._finish((landing, into))
        return self._found.value == ticket.generation

    def _finish(self, used: Any) -> None:
        if not self._cuda.wait(self._cuda.record([self._pulls]), _WAIT_S):
            self._stuck.append(used)
            self.sever(f"a pull has not ended after {_WAIT_S:g} s")
            raise NvshmemError(
                f"a pull over NVSHMEM has not ended after {_WAIT_S:g} s: its PE or the link is "
                "lost; other transports are used from now on, restart the workers to get it back"
            )

    def _is_mapped(self, pe: int) -> bool:
        if pe not in self._mapped:
            self._mapped[pe] = self._library.mapped(pe)
        return self._mapped[pe]

    def _at(self, offset: int) -> int:
        return self._library.base + self._payload + offset

    def _let_go(self, block: DeviceBlock) -> None:
        """From __del__: any thread, any moment. Takes no lock."""
        events: list[Any] | None = None
        with suppress(Exception):  # the process or the device is going; _sweep tries again
            # 0 is the default stream: whoever used the block without saying where used it there.
            events = self._cuda.record({0, self._cuda.torch_stream(), *block._streams})
        self._dead.append((block.offset, events))

    def _sweep(self) -> None:
        """Give back what has been let go of and what the device has done with. Under the lock."""
        while self._dead:
            offset, events = self._dead.popleft()
            del self._live[offset]
            self._starts.remove(offset)
            if events is None:
                events = self._cuda.record({0, self._cuda.torch_stream()})
            self._cooling.append((offset, events))
        cold = [offset for offset, events in self._cooling if self._cuda.done(events)]
        if cold:
            self._set_words(cold, 0)
            self._cooling = [entry for entry in self._cooling if entry[0] not in cold]
            for offset in cold:
                self._allocator.free(offset)

    def _set_words(self, offsets: list[int], value: int) -> None:
        self._word.value = value
        for offset in offsets:
            at = self._library.base + word_of(offset)
            self._cuda.copy(at, self._word.address, WORD, self._words)
        if not self._cuda.wait(self._cuda.record([self._words]), _WAIT_S):
            raise NvshmemError(
                f"CUDA device {self._cuda.device} has not copied a word in {_WAIT_S:g} s; "
                "restart the worker"
            )

    def _check(self) -> None:
        self._library._check()
        with self._lock:
            self._allocator._check()
            assert self._starts == sorted(self._live)
            cooling = [offset for offset, _ in self._cooling]
            assert len(set(cooling)) == len(cooling)
            assert not set(cooling) & set(self._live)
            assert self._allocator.statistics()["blocks"] == len(self._live) + len(cooling)
            blocks = [block for ref in self._live.values() if (block := ref()) is not None]
            ends = sorted((block.offset, block.offset + block.nbytes) for block in blocks)
            assert all(end <= start for (_, end), (start, _) in itertools.pairwise(ends))
            assert all(start >= 0 and end <= self._allocator.nbytes for start, end in ends)
