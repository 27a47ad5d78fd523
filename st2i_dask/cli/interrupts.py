"""Ctrl-C and SIGTERM as a request to stop in order, instead of an exception anywhere."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from types import FrameType
from typing import Any


class Interrupts:
    """Within the context, the first SIGINT or SIGTERM is only noted; a second one acts as usual.

    received: the signal's number, 0 while there was none. Outside the main thread it does nothing.
    """

    def __init__(self) -> None:
        self.received = 0
        self._before: dict[int, Any] = {}

    def __enter__(self) -> Interrupts:
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGINT, signal.SIGTERM):
                self._before[number] = signal.signal(number, self._note)
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._restore()

    @property
    def exit_status(self) -> int:
        """What a shell reports for a command ended by this signal: 130 for Ctrl-C."""
        return 128 + self.received

    def _note(self, number: int, frame: FrameType | None) -> None:
        self.received = number
        self._restore()
        # print() may not be entered twice; a handler can interrupt it.
        with contextlib.suppress(OSError):
            os.write(2, b"\nstopping; once more to quit at once\n")

    def _restore(self) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)
        self._before = {}
