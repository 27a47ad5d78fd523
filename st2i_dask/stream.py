"""Streamed outputs: a producer hands over the items of a sequence one by one, while it still runs."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Protocol

from .errors import OutputError


class Sink(Protocol):
    """Where the items of one streamed output go. Called from the producer's thread."""

    def put(self, index: int, item: Any) -> Any:
        """Publish an item; the item as it is stored, to be used in its place from now on."""
        ...


#: Opens the sink of an output (by name, with its length) of the invocation that runs in this thread;
#: None: nobody listens.
Opener = Callable[[str, int], Sink | None]

# Not a ContextVar: event loops keep copies of the context of whoever calls them, and with it what an
# opener refers to, for as long as a connection lives.
_thread = threading.local()


class OutputStream:
    """The items of one output, in order. One thread."""

    def __init__(self, output: str, length: int, sink: Sink | None):
        self.output = output
        self.items: list[Any] = []
        self._length = length
        self._sink = sink

    def append(self, item: Any) -> None:
        """Publish the next item: a tensor, or a tuple, list or dict of tensors."""
        index = len(self.items)
        if index == self._length:
            raise OutputError(
                f"output {self.output!r} was announced with {self._length} items and gets one "
                "more; give st2i.stream the right length"
            )
        self.items.append(item if self._sink is None else self._sink.put(index, item))


def stream(output: str, length: int) -> OutputStream:
    """Inside `execute`: publish `output`, a sequence of `length` items, item by item.

    Who has the output as a callback input gets each item as soon as it is appended. `execute` must
    still return the whole sequence: return `stream.items`. Where nobody listens it only collects.
    """
    if type(length) is not int or length < 1:
        raise OutputError(
            f"st2i.stream({output!r}, {length!r}): the length must be a whole number >= 1"
        )
    opener: Opener | None = getattr(_thread, "opener", None)
    return OutputStream(output, length, opener(output, length) if opener is not None else None)


@contextmanager
def streaming(opener: Opener) -> Iterator[None]:
    """While the body runs in this thread, `stream` opens its sinks with `opener`."""
    before = getattr(_thread, "opener", None)
    _thread.opener = opener
    try:
        yield
    finally:
        _thread.opener = before
