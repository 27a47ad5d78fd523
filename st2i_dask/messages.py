"""When messages of a Dask stream leave: at once, and not up to 5 ms later to be merged with others.

Dask's BatchedSend pauses after each write (`interval`); a chain of dependent tasks would wait for that
at every hop. What is sent within one turn of the event loop still leaves together.
"""

from __future__ import annotations

from typing import Any

from distributed.batched import BatchedSend


class SendAtOnce(BatchedSend):
    """A BatchedSend without the pause, and so without a timer for each message. Event loop only."""

    pause_s: float  # Dask's own

    def let_go(self) -> None:
        """The stream is about to be Dask's own again: what it holds back must leave."""

    @property
    def next_deadline(self) -> None:
        """Always None: the stream then waits for a message and for nothing else."""

    @next_deadline.setter
    def next_deadline(self, when: float | None) -> None:
        pass


def quicken(stream: Any, into: type[SendAtOnce] = SendAtOnce) -> None:
    """Take the pause out of a stream, which may be in use already."""
    if type(stream) is BatchedSend:
        stream.__class__ = into
        stream.pause_s = stream.interval


def restore(stream: Any) -> None:
    """Dask's own pause again, if `quicken` took it out."""
    if isinstance(stream, SendAtOnce):
        stream.let_go()
        stream.__class__ = BatchedSend
        stream.interval = stream.pause_s
        # A deadline set before `quicken` would keep the next message from waking the stream.
        stream.next_deadline = None
