"""How the executors of a gang exchange tensors: each has a ring that it publishes on and the others read.

Who publishes item n has collected all items n - 1, and whoever published those had collected all items
n - 2. So nobody needs an item before the last two any more, and a ring keeps two.
"""

from __future__ import annotations

import uuid
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from st2i_dask.outputs import TaskOutputs, is_tensor, map_values

from .boards import Board, BoardAddress, BoardReader
from .tensor_store import TensorStore

#: How long an executor may take for an item, seconds: a layer, and what is still to load of it.
ITEM_SECONDS = 60.0
_PLACES = 2
# An entry's place, bytes: the inputs of a step, whose small tensors are in it.
_PLACE_BYTES = 16 * 1024


class GangBroken(Exception):
    """A gang cannot go on. rank: of the executor that it cannot go on with, if it is known."""

    def __init__(self, why: str, rank: int | None = None):
        super().__init__(why)
        self.rank = rank


class Ring:
    """The last items that one executor has published. `put` from its thread, `item` from any."""

    def __init__(self, store: TensorStore):
        #: Names it for who must ask for items.
        self.name = uuid.uuid4().hex
        self._store = store
        self._board = Board(store, _PLACES, _PLACE_BYTES)
        self._next = 0
        self._items: dict[int, Any] = {}

    def put(self, item: Any) -> None:
        index = self._next
        # Replaced, not changed: another thread may be looking.
        self._items = {n: kept for n, kept in self._items.items() if n > index - _PLACES}
        item = map_values(item, is_tensor, self._store.keep)
        self._store.arena.heap.settle()
        self._items = {**self._items, index: item}
        self._next = index + 1
        self._board.write(index % _PLACES, item)
        self._board.count(self._next)

    def item(self, index: int) -> TaskOutputs | None:
        """None: it was not published yet. LookupError: it is gone."""
        items = self._items
        if index in items:
            return TaskOutputs((items[index],))
        if index >= self._next:
            return None
        raise LookupError(index)

    def address(self) -> RingAddress:
        return RingAddress(self.name, self._board.address())


class RingAddress(NamedTuple):
    """Plain values: it travels. board: see `Board.address`."""

    name: str
    board: Any


class RingReader:
    """The ring of another executor, item after item."""

    def __init__(
        self,
        store: TensorStore,
        address: RingAddress,
        ask: Callable[[int, float], TaskOutputs],
        check: Callable[[], None],
    ):
        """ask: for an item, by message, within so many seconds; LookupError or OSError when it is not
        to be had. check: raises GangBroken at news of a loss."""
        self._ask, self._check = ask, check
        self._next = 0
        self._board: BoardReader | None = None
        where = BoardAddress.parse(address.board)
        if where is not None:
            board = BoardReader(store, where)
            self._board = board if board.is_within_reach() else None

    def take(self, timeout_s: float) -> Any:
        """The next item. OSError or LookupError: it is lost. TimeoutError: it does not come."""
        index, self._next = self._next, self._next + 1
        outputs = None
        if self._board is not None:
            self._board.wait(index + 1, self._check, timeout_s)
            outputs = self._board.read(index % _PLACES)
        if outputs is None:
            outputs = self._ask(index, timeout_s)
        if outputs.lost is not None:
            raise OSError(outputs.lost)
        return outputs.values[0]


class Circle:
    """`st2i_dask.gang.Gang` over rings. One thread."""

    def __init__(
        self,
        rank: int,
        own: Ring,
        others: Sequence[RingReader],
        number: int = 1,
        on_device: Callable[[Any], Any] = lambda item: item,
    ):
        """others: those of the other executors, by rank. number: which one of its leader's it is.
        on_device: the item with its tensors where the model is; a heap may lie in host memory."""
        self.rank = rank
        self.number = number
        self.size = len(others) + 1
        self._own = own
        self._others = others
        self._on_device = on_device
        self._item: Any = None

    def publish(self, item: Any) -> None:
        self._item = item
        self._own.put(item)

    def collect(self, timeout_s: float = ITEM_SECONDS) -> list[Any]:
        """GangBroken: an item is lost, or does not come in time."""
        found = []
        for number, reader in enumerate(self._others):
            rank = number + (number >= self.rank)
            try:
                found.append(self._on_device(reader.take(timeout_s)))
            except TimeoutError:
                raise GangBroken(f"nothing for {timeout_s:g} s", rank) from None
            except (OSError, LookupError) as error:
                raise GangBroken(f"what it published is lost: {error}", rank) from error
        found.insert(self.rank, self._item)
        self._item = None
        return found
