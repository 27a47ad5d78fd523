"""When a worker's messages to the scheduler leave: at once, but for the news that a result was let go.

Dask's worker says `release-worker-data` for every result that the scheduler had it free: a message of its
own per task, that nobody waits for. It rides with the next message; the order of messages stays.
"""

from __future__ import annotations

from typing import Any

from st2i_dask.messages import SendAtOnce

#: Longest wait of a message that nobody waits for, seconds.
HOLD_S = 0.005
_CAN_WAIT = "release-worker-data"


class RidingSend(SendAtOnce):
    """A worker's stream to the scheduler. Event loop only."""

    _held = False  # a look at what waits is on its way

    def send(self, *msgs: Any) -> None:
        closed = self.comm is not None and self.comm.closed()
        if closed or any(msg.get("op") != _CAN_WAIT for msg in msgs):
            super().send(*msgs)  # wakes the stream, or says that it is closed
            return
        self.message_count += len(msgs)
        self.buffer.extend(msgs)
        if not self._held:
            self._held = True
            self.loop.call_later(HOLD_S, self.let_go)

    def let_go(self) -> None:
        self._held = False
        if self.buffer:
            self.waker.set()
