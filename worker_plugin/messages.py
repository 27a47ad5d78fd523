"""When a worker's messages to the scheduler leave: at once, but for the news that a result was let go.

Dask's worker says `release-worker-data` for every result that the scheduler had it free: a message of its
own per task, that nobody waits for. It rides with the next message; the order of messages stays.
"""

from __future__ import annotations

from typing import Any

from distributed.batched import BatchedSend

#: Longest wait of a message that nobody waits for, seconds.
HOLD_S = 0.005
_CAN_WAIT = "release-worker-data"


class RidingSend(BatchedSend):
    """A BatchedSend without its pause, and so without a timer for each message. Event loop only."""

    pause_s: float  # Dask's own
    _held = False  # a look at what waits is on its way

    @property
    def next_deadline(self) -> None:
        """Always None: the stream then waits for a message and for nothing else."""

    @next_deadline.setter
    def next_deadline(self, when: float | None) -> None:
        pass

    def send(self, *msgs: Any) -> None:
        closed = self.comm is not None and self.comm.closed()
        if closed or any(msg.get("op") != _CAN_WAIT for msg in msgs):
            super().send(*msgs)  # wakes the stream, or says that it is closed
            return
        self.message_count += len(msgs)
        self.buffer.extend(msgs)
        if not self._held:
            self._held = True
            self.loop.call_later(HOLD_S, self._flush)

    def _flush(self) -> None:
        self._held = False
        if self.buffer:
            self.waker.set()


def quicken(stream: Any) -> None:
    """Take the pause out of a worker's stream to the scheduler, which may be in use already."""
    if type(stream) is BatchedSend:
        stream.__class__ = RidingSend
        stream.pause_s = stream.interval


def restore(stream: Any) -> None:
    """Dask's own pause again, if `quicken` took it out; what was held back leaves."""
    if type(stream) is RidingSend:
        stream._flush()
        stream.__class__ = BatchedSend
        stream.interval = stream.pause_s
        # A deadline set before `quicken` would keep the next message from waking the stream.
        stream.next_deadline = None
