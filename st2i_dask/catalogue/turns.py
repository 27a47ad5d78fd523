"""Taking turns between the processes of a node (or of all nodes that share a cache folder)."""

from __future__ import annotations

import errno
import logging
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from ..errors import LoadError

logger = logging.getLogger(__name__)

#: How often those who work and those who wait say so in the log, seconds.
LOG_SECONDS = 10.0
_READ_ONLY = (errno.EROFS, errno.EACCES, errno.EPERM)


@contextmanager
def turn(
    folder: Path, what: str, wait: float, cure: str, report: Callable[[], str]
) -> Iterator[None]:
    """Only one of those that name the same folder is in the body. It ends with its process.

    folder: made where it is missing. Where it cannot be, nobody takes turns: then the body cannot
    write beside it either.
    what, cure: for log and errors: "fetch a/b", and what to do about a wait that was too long.
    wait: LoadError after that many seconds.
    report: how far the body is. Called from a thread of its own.
    """
    lock = _acquire(folder, what, wait, cure)
    if lock is None:
        yield
        return
    try:
        with _reporting(folder / "st2i.holder", what, report):
            yield
    finally:
        lock.release()


def _acquire(folder: Path, what: str, wait: float, cure: str) -> Any:
    from filelock import FileLock, SoftFileLock, Timeout

    start = time.monotonic()
    try:
        folder.mkdir(parents=True, exist_ok=True)
        lock: Any = FileLock(folder / "st2i.lock", mode=0o664)
        while True:
            left = start + wait - time.monotonic()
            try:
                lock.acquire(timeout=max(min(LOG_SECONDS, left), 0))
                return lock
            except NotImplementedError:  # a file system without flock
                lock = SoftFileLock(folder / "st2i.soft.lock", mode=0o664)
            except Timeout:
                holder, waited = _read(folder / "st2i.holder"), time.monotonic() - start
                if waited >= wait:
                    raise LoadError(
                        f"{_me()} waited {wait:g} s, the limit, for {holder} to {what}; {cure}"
                    ) from None
                logger.info(
                    "waiting for %s to %s: %.0f of at most %.0f s", holder, what, waited, wait
                )
    except OSError as error:
        if error.errno in _READ_ONLY:
            return None
        raise


@contextmanager
def _reporting(file: Path, what: str, report: Callable[[], str]) -> Iterator[None]:
    """Say in the log how far the body is, and in a file, for those who wait."""
    done = threading.Event()

    def write(text: str) -> None:
        with suppress(OSError):  # who waits reads of an earlier state
            file.write_text(f"{_me()} ({text})")

    def repeat() -> None:
        while not done.wait(LOG_SECONDS):
            text = report()
            logger.info("%s: %s", what, text)
            write(text)

    write(report())
    thread = threading.Thread(target=repeat, name="st2i-turn", daemon=True)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()
        with suppress(OSError):
            file.unlink()


def _me() -> str:
    return f"process {os.getpid()} on {socket.gethostname()}"


def _read(holder: Path) -> str:
    try:
        return holder.read_text() or "another process"
    except (OSError, ValueError):
        return "another process"
