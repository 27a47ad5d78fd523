"""Boards: places for short entries in a worker's heap, and a signal word that says how many are there.

Whoever reaches the heap waits on the word and reads an entry, with no event loop and no message in
between. An entry is a pickled result whose large tensors are tickets.
"""

from __future__ import annotations

import pickle
import time
import weakref
from collections.abc import Callable
from dataclasses import astuple
from typing import Any, NamedTuple

from st2i_dask import _core
from st2i_dask.outputs import TaskOutputs, packing

from .heap import HeapAddress, Ticket
from .tensor_store import TensorStore, receiving

#: How often a waiting thread looks for news of a lost peer, seconds.
SLICE_SECONDS = 0.1
#: An entry's place, bytes: a ticket takes about 400.
PLACE_BYTES = 1024


class BoardLost(OSError):
    """The board is not there any more."""


class Board:
    """`places` of `place_bytes` each, at most a granule. Freed with this object. Publisher's thread.

    Where the heap has no room or no words, it has no address: readers must ask by message.
    """

    def __init__(self, store: TensorStore, places: int, place_bytes: int = PLACE_BYTES):
        self._store = store
        self._place_bytes = place_bytes
        self._per_block = _core.GRANULE // place_bytes
        heap = store.arena.heap
        blocks = []
        for start in range(0, places, self._per_block):
            block = heap.allocate(min(self._per_block, places - start) * place_bytes)
            if block is None:
                break
            blocks.append(block)
        else:
            self.word = heap.allocate_word()
            if self.word is not None:
                self._blocks = blocks
                self._places = [heap.tensor(block).view(-1, place_bytes) for block in blocks]
                # A late reader finds another generation, whatever the word then counts.
                weakref.finalize(self, heap.free_word, self.word).atexit = False
            return
        self.word = None

    def write(self, place: int, value: Any) -> None:
        """An entry, in place of the one before. One that is too long says that it must be asked for."""
        if self.word is None:
            return
        import torch

        with packing(self._store.pack):
            entry = pickle.dumps(TaskOutputs((value,)), protocol=5)
        if len(entry) > self._place_bytes - 4:
            entry = b""
        raw = len(entry).to_bytes(4, "little") + entry
        block, row = divmod(place, self._per_block)
        self._places[block][row, : len(raw)] = torch.frombuffer(bytearray(raw), dtype=torch.uint8)

    def count(self, entries: int) -> None:
        """So many have been written so far."""
        if self.word is not None:
            self._store.arena.heap.signal(self.word, entries)

    def address(self) -> tuple[Any, ...] | None:
        """For `BoardAddress.parse`, as plain values; None: readers must ask."""
        if self.word is None:
            return None
        blocks = [(b.offset, b.nbytes, b.generation) for b in self._blocks]
        return astuple(self._store.arena.heap.address), self._place_bytes, blocks, self.word


class BoardAddress(NamedTuple):
    """Where a board is. Its blocks are full but for the last."""

    heap: HeapAddress
    place_bytes: int
    blocks: tuple[Ticket, ...]
    word: int

    @classmethod
    def parse(cls, address: Any) -> BoardAddress | None:
        if address is None:
            return None
        (kind, uuid, nbytes, place), place_bytes, blocks, word = address
        heap = HeapAddress(kind, uuid, nbytes, tuple(place))
        return cls(heap, place_bytes, tuple(Ticket(heap, *block) for block in blocks), word)


class BoardReader:
    """Another worker's board. Reader's thread."""

    def __init__(self, store: TensorStore, address: BoardAddress):
        self._store, self._address = store, address

    def is_within_reach(self) -> bool:
        return self._store.arena.heap.reach(self._address.heap)

    def wait(self, entries: int, check: Callable[[], None], timeout_s: float) -> None:
        """Until so many were written. check: raises at news that they will not be; asked ten times a
        second. TimeoutError: not in that time. BoardLost."""
        deadline = time.monotonic() + timeout_s
        while not self._has(entries):
            check()
            if time.monotonic() > deadline:
                raise TimeoutError

    def _has(self, entries: int) -> bool:
        """Waits a little for it."""
        address, heap = self._address, self._store.arena.heap
        try:
            return heap.wait(address.heap, address.word, entries, SLICE_SECONDS) is not None
        except ValueError as error:  # a free word of this process's own heap
            raise BoardLost("its board is not there any more") from error

    def read(self, place: int) -> TaskOutputs | None:
        """The entry, with its tensors pulled; None: it must be asked for. BoardLost."""
        import torch

        size = self._address.place_bytes
        block, row = divmod(place, _core.GRANULE // size)
        whole = self._address.blocks[block]
        # A pull begins at the start of a block, and a block is short.
        upto = Ticket(whole.heap, whole.offset, (row + 1) * size, whole.generation)
        raw = torch.empty(upto.nbytes, dtype=torch.uint8)
        if not self._store.arena.heap.pull(upto, raw):
            raise BoardLost("its board is not there any more")
        last = raw[row * size :].numpy()
        length = int.from_bytes(last[:4].tobytes(), "little")
        if not length:
            return None
        with receiving(self._store):
            outputs: TaskOutputs = pickle.loads(last[4 : 4 + length].tobytes())
        return outputs
