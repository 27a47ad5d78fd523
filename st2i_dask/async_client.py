"""Functions that wait for the cluster, called in the event loop of an asynchronous client."""

from __future__ import annotations

import asyncio
import functools
import weakref
from collections.abc import Callable
from typing import Any, TypeVar, cast

F = TypeVar("F", bound=Callable[..., Any])

# One call of a client at a time, in order, as in a program that waits for each.
_turns: weakref.WeakKeyDictionary[Any, asyncio.Lock] = weakref.WeakKeyDictionary()


def awaitable(function: F) -> F:
    """There it gives an awaitable of its result, everywhere else the result.

    function: takes the client first. For an asynchronous client it runs in a thread: outside of its
    event loop such a client is one like any other, whose calls wait. So nothing here is written twice.
    Whoever stops awaiting it stops nothing that has begun; futures that nobody got are released.
    """

    @functools.wraps(function)
    def call(client: Any, *args: Any, **kwargs: Any) -> Any:
        if getattr(client, "asynchronous", False):
            return _in_turn(client, functools.partial(function, client, *args, **kwargs))
        return function(client, *args, **kwargs)

    return cast(F, call)


async def _in_turn(client: Any, work: Callable[[], Any]) -> Any:
    async with _turns.setdefault(client, asyncio.Lock()):
        return await asyncio.to_thread(work)
