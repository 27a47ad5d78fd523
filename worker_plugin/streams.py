"""Streamed outputs between two workers: published while the producer runs, read as they are touched.

Where the reader reaches the producer's heap, an item is a few bytes on a *board*, a block of that heap,
and a signal word counts them: the reader's thread waits on the word and pulls, with no event loop and
no message in between. Elsewhere it asks the producer's worker for the item. Every wait looks at the
news of a lost producer ten times a second.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple
from weakref import WeakValueDictionary

from st2i_dask.errors import ProducerLostError
from st2i_dask.outputs import TaskOutputs, is_tensor, map_values

from .boards import Board, BoardAddress, BoardReader
from .tensor_store import TensorStore

#: Longest wait for an item, seconds. A producer runs at most one step: far less in practice.
WAIT_SECONDS = 600.0


class OutputBoard:
    """The items of one output that is being made. `put` from the producer's thread."""

    def __init__(self, store: TensorStore, length: int):
        self.length = length
        self.items: list[Any] = []
        self._store = store
        self._board = Board(store, length)

    def put(self, index: int, item: Any) -> Any:
        """Publish an item; as it is stored."""
        assert index == len(self.items) < self.length
        item = map_values(item, is_tensor, self._store.keep)
        self._store.arena.heap.settle()
        self.items.append(item)
        self._board.write(index, item)
        self._board.count(index + 1)
        return item

    def address(self) -> tuple[Any, ...] | None:
        """The board's, for readers; None: they must ask."""
        return self._board.address()


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
    """A stream as its reader knows it. board: None: items must be asked for."""

    length: int
    board: BoardAddress | None

    @classmethod
    def parse(cls, length: int, address: Any) -> Opened:
        return cls(length, BoardAddress.parse(address))


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
        self._board: BoardReader | None = None

    def length(self) -> int | None:
        opened = self._ask_open()
        if opened is None:
            return None
        if opened.board is not None:
            board = BoardReader(self._store, opened.board)
            self._board = board if board.is_within_reach() else None
        return opened.length

    def item(self, index: int) -> Any:
        try:
            outputs = self._from_board(index) or self._ask_item(index)
        except OSError as error:
            raise ProducerLostError(f"item {index} of a callback input is lost: {error}") from error
        if outputs.lost is not None:
            raise ProducerLostError(f"item {index} of a callback input is lost: {outputs.lost}")
        return outputs.values[0]

    def _from_board(self, index: int) -> TaskOutputs | None:
        """None: the producer's worker must be asked."""
        if self._board is None:
            return None
        try:
            self._board.wait(index + 1, self._check_lost, WAIT_SECONDS)
        except TimeoutError:
            raise ProducerLostError(
                f"a callback input gave nothing for {WAIT_SECONDS:g} s"
            ) from None
        return self._board.read(index)
