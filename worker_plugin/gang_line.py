"""One end of the connection between a leader and a member."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from typing import Any


class Line:
    """Messages leave whole and in order. Event loop only."""

    def __init__(self, comm: Any):
        self._comm = comm
        self._turn = asyncio.Lock()

    async def say(self, message: dict[str, Any]) -> None:
        """Nothing, once the connection is closed: the other end's reader tells."""
        async with self._turn:
            if not self._comm.closed():
                with suppress(OSError):
                    await self._comm.write(message)

    def close(self) -> None:
        self._comm.abort()
