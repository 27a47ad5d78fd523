"""Gangs: several executors that run one invocation together, each a share of it.

The leader is the executor that has the invocation; the others are its members. All of them call
`execute` with equal inputs, and find here which of them they are and how to exchange tensors. The
leader's outputs are the invocation's; a member's are dropped.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Protocol


class Gang(Protocol):
    """A gang as one of its executors sees it. Belongs to the thread that `execute` runs in.

    rank: which one this is, 0 (the leader) to size - 1.
    """

    @property
    def rank(self) -> int: ...
    @property
    def size(self) -> int: ...

    def publish(self, item: Any) -> None:
        """Offer a tensor, or a tuple, list or dict of tensors, to the others. All executors publish in
        the same order; each is followed by `collect`."""
        ...

    def collect(self) -> list[Any]:
        """What every executor has published last, by rank. Waits for it within a bound; raises when
        one of them is lost: a ModelFn must let that pass, it is then run again without that one."""
        ...


# Not a ContextVar: event loops keep copies of the context of whoever calls them.
_thread = threading.local()


def running_gang() -> Gang | None:
    """Inside `execute`: the gang of this invocation; None: this executor runs it alone."""
    return getattr(_thread, "gang", None)


@contextmanager
def in_gang(gang: Gang | None) -> Iterator[None]:
    """While the body runs in this thread, `running_gang` is that one."""
    before = running_gang()
    _thread.gang = gang
    try:
        yield
    finally:
        _thread.gang = before
