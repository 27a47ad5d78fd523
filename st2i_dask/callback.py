"""Callback inputs: values that are needed only midway, and are fetched when they are touched."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from typing import Any, Protocol


class Items(Protocol):
    """A sequence that arrives item by item. Each call waits, within a bound, for what it returns.

    Raises ProducerLostError when the producer is gone. Any thread.
    """

    def length(self) -> int | None:
        """How many items there will be, known before they are all made; None: the producer hands
        its value over in one piece."""
        ...

    def item(self, index: int) -> Any:
        """One item, 0 <= index < length(); waits for no later one."""
        ...


class CallbackFuture:
    """What a ModelFn gets for an input declared with `callback=True`.

    `result()` waits, at most a bounded time, for the producer and returns its value. A sequence can
    be measured, indexed and iterated as it is: an item is fetched when it is first touched, and
    waits only for what the producer has not made yet. Raises ProducerLostError when the producer
    was lost; a ModelFn should let that pass. Any thread.
    """

    def __init__(self, fetch: Callable[[], Any], items: Items | None = None):
        self._fetch: Callable[[], Any] | None = fetch
        self._value: Any = None
        self._items = items
        self._fetched: dict[int, Any] = {}
        self._length: int | None = None
        self._lock = threading.RLock()

    @classmethod
    def of(cls, value: Any) -> CallbackFuture:
        """A future whose value is there already."""
        return cls(lambda: value)

    def result(self) -> Any:
        with self._lock:
            if self._fetch is not None:
                self._value = self._fetch()
                self._fetch = None
            return self._value

    def then(self, function: Callable[[Any], Any]) -> CallbackFuture:
        """A future of `function(value)`; nothing is fetched before it is touched.

        Of a sequence that arrives item by item, `function` gets the items.
        """
        items = _MappedItems(self, function) if self._items is not None else None
        return CallbackFuture(lambda: function(self.result()), items)

    def _arrives_in_items(self) -> bool:
        if self._items is None or self._fetch is None:
            return False
        if self._length is None:
            self._length = self._items.length()
            if self._length is None:
                self._items = None
        return self._items is not None

    def __len__(self) -> int:
        with self._lock:
            if self._arrives_in_items():
                assert self._length is not None
                return self._length
            return len(self.result())

    def __getitem__(self, index: Any) -> Any:
        with self._lock:
            if type(index) is not int or not self._arrives_in_items():
                return self.result()[index]
            assert self._items is not None
            assert self._length is not None
            position = index + self._length if index < 0 else index
            if not 0 <= position < self._length:
                raise IndexError(f"index {index} of a callback input with {self._length} items")
            if position not in self._fetched:
                self._fetched[position] = self._items.item(position)
            return self._fetched[position]

    def __iter__(self) -> Iterator[Any]:
        with self._lock:
            if not self._arrives_in_items():
                return iter(self.result())
        return (self[index] for index in range(len(self)))

    def __contains__(self, value: object) -> bool:
        return value in self.result()

    def __repr__(self) -> str:
        return f"<callback input, {'not ' if self._fetch else ''}fetched>"


class _MappedItems:
    def __init__(self, future: CallbackFuture, function: Callable[[Any], Any]):
        self._future, self._function = future, function

    def length(self) -> int | None:
        return len(self._future) if self._future._arrives_in_items() else None

    def item(self, index: int) -> Any:
        return self._function(self._future[index])
