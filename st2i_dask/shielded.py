"""Processes that do not see Ctrl-C, which a terminal, or a notebook's kernel, sends to its whole group."""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Iterator
from multiprocessing import resource_tracker


@contextlib.contextmanager
def shielded_children() -> Iterator[None]:
    """Processes started within do not see SIGINT.

    Here it is only delayed until the context ends. The mask is inherited by threads and processes.
    """
    # Starting this helper of multiprocessing unblocks SIGINT in the thread that does it.
    resource_tracker.ensure_running()
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
