"""Callback inputs: values that are needed only midway, and are fetched when they are touched."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from typing import Any


class CallbackFuture:
    """What a ModelFn gets for an input declared with `callback=True`.

    `result()` waits, at most a bounded time, for the producer and returns its value. A sequence value
    can be indexed, iterated and measured as it is: the first touch fetches it. Raises
    ProducerLostError when the producer was lost; a ModelFn should let that pass. Any thread.
    """

    def __init__(self, fetch: Callable[[], Any]):
        self._fetch: Callable[[], Any] | None = fetch
        self._value: Any = None
        self._lock = threading.Lock()

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
        """A future of `function(value)`; nothing is fetched before it is touched."""
        return CallbackFuture(lambda: function(self.result()))

    def __len__(self) -> int:
        return len(self.result())

    def __getitem__(self, index: Any) -> Any:
        return self.result()[index]

    def __iter__(self) -> Iterator[Any]:
        return iter(self.result())

    def __repr__(self) -> str:
        return f"<callback input, {'not fetched' if self._fetch else 'fetched'}>"
