"""Streamed outputs: a producer hands over the items of a sequence one by one, while it still runs."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping
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
        self.length = length
        self._sink = sink

    def append(self, item: Any) -> None:
        """Publish the next item: a tensor, or a tuple, list or dict of tensors."""
        index = len(self.items)
        if index == self.length:
            raise OutputError(
                f"output {self.output!r} was announced with {self.length} items and gets one "
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
    running: _Running | None = getattr(_thread, "running", None)
    if running is None:
        return OutputStream(output, length, None)
    return running.open(output, length)


class _Running:
    """The streams of the invocation that runs in a thread."""

    def __init__(self, opener: Opener):
        self._opener = opener
        self.streams: dict[str, OutputStream] = {}

    def open(self, output: str, length: int) -> OutputStream:
        if output in self.streams:
            raise OutputError(
                f"output {output!r} is streamed twice; call st2i.stream once and append to it"
            )
        made = self.streams[output] = OutputStream(output, length, self._opener(output, length))
        return made


@contextmanager
def streaming(opener: Opener) -> Iterator[dict[str, OutputStream]]:
    """While the body runs in this thread, `stream` opens its sinks with `opener`. The streams that
    it opens, by output."""
    before = getattr(_thread, "running", None)
    _thread.running = running = _Running(opener)
    try:
        yield running.streams
    finally:
        _thread.running = before


def check_streams(streams: Mapping[str, OutputStream], result: Mapping[str, Any]) -> None:
    """OutputError unless every stream is complete and is what was returned: readers have its items."""
    for output, stream in streams.items():
        if len(stream.items) != stream.length:
            raise OutputError(
                f"output {output!r} was announced with {stream.length} items and got "
                f"{len(stream.items)}; append them all, or give st2i.stream the right length"
            )
        value = result[output]
        same = isinstance(value, (list, tuple)) and len(value) == stream.length
        if not same or any(a is not b for a, b in zip(value, stream.items, strict=True)):
            raise OutputError(
                f"output {output!r} was streamed but something else was returned for it; return "
                "the stream's items: return {..., " + repr(output) + ": stream.items}"
            )
