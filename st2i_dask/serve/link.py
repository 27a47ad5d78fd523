"""The link to the Dask cluster: one asynchronous client, made anew when the scheduler went away."""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import logging
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from distributed import Client, Future

from ..cli.clusters import check_reachable
from ..cluster import attach
from ..errors import LimitError, St2iError
from ..request import Request
from ..submission import send
from .problems import of_lost_scheduler

logger = logging.getLogger("st2i.serve")

# Seconds: between looks at the client, for one RPC, for a connection, and the longest pause between
# attempts to connect.
_LOOK_S, _RPC_S, _CONNECT_S, _PAUSE_S = 0.25, 10.0, 10.0, 5.0
# Longer than a client takes to close.
_CLOSE_S = 3.0


class Link:
    """settings: what the scheduler is told of tenants whenever a connection is made."""

    def __init__(self, address: str, settings: Mapping[str, Any]) -> None:
        self._address, self._settings = address, dict(settings)
        self._client: Client | None = None
        self._keeper: asyncio.Task[None] | None = None
        self._lost: Callable[[], None] = lambda: None
        # One: an attempt that waits for the cluster cannot be broken off.
        self._thread = ThreadPoolExecutor(1)
        self._preparing: concurrent.futures.Future[None] | None = None

    @property
    def up(self) -> bool:
        """Whether requests can be sent now."""
        return self._client is not None and self._client.status == "running"

    async def open(self, lost: Callable[[], None]) -> None:
        """Connect, and stay connected. lost: called when what was in flight is gone.

        AttachError or OSError when the first connection fails.
        """
        self._lost = lost
        self._client = await self._connect()
        self._keeper = asyncio.create_task(self._keep())

    async def close(self) -> None:
        while self._keeper is not None and not self._keeper.done():
            self._keeper.cancel()  # maybe again: a Dask client that is being closed swallows it
            await asyncio.wait([self._keeper], timeout=_CLOSE_S)
        await self._drop()
        self._thread.shutdown(wait=False, cancel_futures=True)

    async def submit(self, requests: Sequence[Request], also: Sequence[str] = ()) -> list[Future]:
        """Send requests; futures of their results, and of the tasks with the keys `also`. LimitError over a tenant's cap; ApiError 503 while there is no scheduler."""
        counts = Counter(request.tenant for request in requests)
        refused = await self._ask("st2i_refusals", requests=dict(counts))
        if refused:
            raise LimitError("; ".join(refused.values()))
        return send(self._running(), requests, also)

    async def prospects(self, names: Sequence[str]) -> dict[str, dict[str, Any]]:
        """Where requests stand, see `scheduler_plugin.prospects`; those that are over are left out."""
        found: dict[str, dict[str, Any]] = await self._ask("st2i_prospects", requests=list(names))
        return found

    async def cancel(self, futures: Sequence[Future]) -> None:
        """Let nothing more of them run. Nothing happens when the scheduler is gone."""
        client = self._client
        if client is None or client.status != "running":
            return
        with contextlib.suppress(OSError, TimeoutError):
            async with asyncio.timeout(_RPC_S):
                await client.cancel(list(futures), asynchronous=True, force=True)

    def _running(self) -> Client:
        if self._client is None or self._client.status != "running":
            raise of_lost_scheduler()
        return self._client

    async def _ask(self, name: str, **arguments: Any) -> Any:
        try:
            async with asyncio.timeout(_RPC_S):
                return await getattr(self._running().scheduler, name)(**arguments)
        except (OSError, TimeoutError) as error:
            raise of_lost_scheduler() from error

    async def _keep(self) -> None:
        pause = _LOOK_S
        while True:
            await asyncio.sleep(pause)
            if self.up:
                pause = _LOOK_S
                continue
            if self._client is not None:
                logger.warning("the scheduler %s went away", self._address)
                self._lost()
                await self._drop()
            try:
                self._client = await self._connect()
                logger.warning("connected to the scheduler %s again", self._address)
            except (OSError, St2iError) as error:
                pause = min(_PAUSE_S, pause * 2)
                logger.info("no connection to %s: %s", self._address, error)
            except Exception:
                pause = _PAUSE_S
                logger.exception("no connection to %s", self._address)

    async def _connect(self) -> Client:
        if self._preparing is not None and not self._preparing.done():
            raise TimeoutError("the last attempt still waits for the cluster's workers")
        self._preparing = self._thread.submit(_prepare, self._address)
        async with asyncio.timeout(6 * _CONNECT_S):
            await asyncio.wrap_future(self._preparing)
        client = Client(self._address, asynchronous=True, timeout=_CONNECT_S, set_as_default=False)
        try:
            client = await client
            if self._settings:
                await client.scheduler.st2i_settings(changes=self._settings)
        except BaseException:
            await client.close(timeout=1)
            raise
        return client

    async def _drop(self) -> None:
        client, self._client = self._client, None
        if client is not None:
            with contextlib.suppress(Exception):
                async with asyncio.timeout(_CONNECT_S):
                    await client.close(timeout=2)


def _prepare(address: str) -> None:
    """Make the cluster serve. In a thread: `attach` waits."""
    check_reachable(address)
    with Client(address, timeout=_CONNECT_S, set_as_default=False) as client:
        attach(client)
