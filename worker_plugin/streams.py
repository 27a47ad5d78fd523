"""Streamed outputs between two workers: published while the producer runs, read as they are touched.

Where the reader reaches the producer's heap, an item is a few bytes on a *board*, a block of that heap,
and a signal word counts them: the reader's thread waits on the word and pulls, with no event loop and
no message in between. Elsewhere it asks the producer's worker for the item. Every wait looks at the
news of a lost producer ten times a second.
"""

from __future__ import annotations

import pickle
import time
import weakref
from collections.abc import Callable
from dataclasses import astuple
from typing import Any, NamedTuple
from weakref import WeakValueDictionary

from st2i_dask.errors import ProducerLostError
from st2i_dask.outputs import TaskOutputs, is_tensor, map_values, packing

from .heap import HeapAddress, Ticket
from .tensor_store import TensorStore, receiving

#: Longest wait for an item, seconds. A producer runs at most one step: far less in practice.
WAIT_SECONDS = 600.0
#: How often a waiting thread looks whether its producer is lost, seconds.
SLICE_SECONDS = 0.1
# An item's place on the board, bytes: a ticket takes about 400. What takes more is asked for.
_SLOT = 1024


class OutputBoard:
    """The items of one output that is being made. `put` from the producer's thread."""

    def __init__(self, store: TensorStore, length: int):
        self.length = length
        self.items: list[Any] = []
        self._store = store
        heap = store.arena.heap
        self._block = heap.allocate(length * _SLOT)
        self._word = heap.allocate_word() if self._block is not None else None
        if self._word is not None:
            self._slots = heap.tensor(self._block).view(length, _SLOT)  # type: ignore[arg-type]
            # A late reader finds another generation on the board, whatever the word then counts.
            weakref.finalize(self, heap.free_word, self._word).atexit = False

    def put(self, index: int, item: Any) -> Any:
        """Publish an item; as it is stored."""
        assert index == len(self.items) < self.length
        item = map_values(item, is_tensor, self._store.keep)
        self._store.arena.heap.settle()
        self.items.append(item)
        if self._word is not None:
            self._write(index, item)
            self._store.arena.heap.signal(self._word, index + 1)
        return item

    def address(self) -> tuple[Any, ...] | None:
        """The board's ticket and word for readers, as plain values; None: they must ask."""
        if self._word is None or self._block is None:
            return None
        block = self._block
        ticket = Ticket(
            self._store.arena.heap.address, block.offset, block.nbytes, block.generation
        )
        return (*astuple(ticket), self._word)

    def _write(self, index: int, item: Any) -> None:
        import torch

        with packing(self._store.pack):
            entry = pickle.dumps(TaskOutputs((item,)), protocol=5)
        if len(entry) > _SLOT - 4:
            entry = b""  # ask
        raw = len(entry).to_bytes(4, "little") + entry
        self._slots[index, : len(raw)] = torch.frombuffer(bytearray(raw), dtype=torch.uint8)


class Boards:
    """The boards of one worker by task and export, as long as their results live."""

    def __init__(self, store: TensorStore | None):
        """store: None once the worker's arena was given up."""
        self._store = store
        self._boards: WeakValueDictionary[tuple[str, int], OutputBoard] = WeakValueDictionary()

    def open(self, key: str, held: list[OutputBoard], export: int, length: int) -> OutputBoard:
        """A new board, in place of one of an earlier run. `held` keeps it."""
        if self._store is None:
            raise ProducerLostError("this worker's arena was given up; the task runs again")
        board = OutputBoard(self._store, length)
        held.append(board)
        self._boards[key, export] = board
        return board

    def get(self, key: str, export: int) -> OutputBoard | None:
        return self._boards.get((key, export))


class Opened(NamedTuple):
    """A board as its reader knows it."""

    length: int
    ticket: Ticket | None
    word: int

    @classmethod
    def parse(cls, length: int, address: Any) -> Opened:
        if address is None:
            return cls(length, None, 0)
        heap, offset, nbytes, generation, word = address
        kind, uuid, size, place = heap
        where = HeapAddress(kind, uuid, size, tuple(place))
        return cls(length, Ticket(where, offset, nbytes, generation), word)


class StreamReader:
    """A callback input that arrives item by item (`Items`). Consumer's thread."""

    def __init__(
        self,
        store: TensorStore,
        ask_open: Callable[[], Opened | None],
        ask_item: Callable[[int], TaskOutputs],
        check: Callable[[], None],
    ):
        """ask_open, ask_item: questions to the producer's worker. check: raises if it is lost."""
        self._store = store
        self._ask_open, self._ask_item, self._check_lost = ask_open, ask_item, check
        self._opened: Opened | None = None

    def length(self) -> int | None:
        self._opened = self._ask_open()
        return self._opened.length if self._opened is not None else None

    def item(self, index: int) -> Any:
        assert self._opened is not None
        try:
            outputs = self._from_board(self._opened, index) or self._ask_item(index)
        except OSError as error:
            raise ProducerLostError(f"item {index} of a callback input is lost: {error}") from error
        if outputs.lost is not None:
            raise ProducerLostError(f"item {index} of a callback input is lost: {outputs.lost}")
        return outputs.values[0]

    def _from_board(self, opened: Opened, index: int) -> TaskOutputs | None:
        """None: the producer's worker must be asked."""
        if opened.ticket is None or not self._store.arena.heap.reach(opened.ticket.heap):
            return None
        self._await(opened.ticket.heap, opened.word, index + 1)
        entry = self._entry(opened.ticket, index)
        if not entry:
            return None
        with receiving(self._store):
            outputs: TaskOutputs = pickle.loads(entry)
        return outputs

    def _await(self, heap: HeapAddress, word: int, count: int) -> None:
        deadline = time.monotonic() + WAIT_SECONDS
        while self._store.arena.heap.wait(heap, word, count, SLICE_SECONDS) is None:
            self._check_lost()
            if time.monotonic() > deadline:
                raise ProducerLostError(f"a callback input gave nothing for {WAIT_SECONDS:g} s")

    def _entry(self, board: Ticket, index: int) -> bytes:
        import torch

        upto = Ticket(board.heap, board.offset, (index + 1) * _SLOT, board.generation)
        slots = torch.empty(upto.nbytes, dtype=torch.uint8)
        if not self._store.arena.heap.pull(upto, slots):
            raise ProducerLostError("a callback input is lost: its board is not there any more")
        slot: bytes = slots[index * _SLOT :].numpy().tobytes()
        return slot[4 : 4 + int.from_bytes(slot[:4], "little")]
