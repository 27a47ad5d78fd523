"""When messages to workers leave: at once, and not up to 5 ms later to be merged with others.

Dask's BatchedSend pauses after each write (`interval`); a chain of dependent tasks would wait for that
at every hop. What is sent within one turn of the event loop still leaves together. Streams to clients
keep their 2 ms: only a result that follows another one so closely waits for it, in one message.
"""

from __future__ import annotations

from typing import Any

from distributed.batched import BatchedSend


class SendAtOnce(BatchedSend):
    """A BatchedSend without the pause, and so without a timer for each message."""

    @property
    def next_deadline(self) -> None:
        """Always None: the stream then waits for a message and for nothing else."""

    @next_deadline.setter
    def next_deadline(self, when: float | None) -> None:
        pass


def quicken(stream: Any) -> None:
    """Take the pause out of a stream, which may be in use already."""
    if type(stream) is BatchedSend:
        stream.__class__ = SendAtOnce


def restore(stream: Any) -> None:
    """Dask's own pause again, if `quicken` took it out."""
    if type(stream) is SendAtOnce:
        stream.__class__ = BatchedSend
        # A deadline set before `quicken` would keep the next message from waking the stream.
        stream.next_deadline = None
