"""What routes work with: one object for an application."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

from starlette.requests import Request

from .jobs import Cluster, Jobs
from .limits import Limits
from .models import Models
from .problems import RETRY_S, ApiError

T = TypeVar("T")

# Seconds that checking a request, or loading a workflow's configuration, may take.
_CHECK_S, LOAD_S = 60.0, 600.0


class Service:
    """The parts of the front end, and the threads in which it does what takes its time."""

    def __init__(
        self,
        cluster: Cluster,
        models: Models,
        limits: Limits,
        jobs: Jobs,
        public_url: str | None,
    ) -> None:
        self.cluster, self.models, self.limits = cluster, models, limits
        self.jobs = jobs
        self._public_url = public_url.rstrip("/") if public_url else None
        # One: tokenizers are not safe in several threads.
        self._checker = ThreadPoolExecutor(1)
        self._loader = ThreadPoolExecutor(1)
        self._decoder = ThreadPoolExecutor(2)
        self._uploads = 0
        self._checking = 0

    async def check(self, function: Callable[[], T], seconds: float = _CHECK_S) -> T:
        """Run what composes in the thread for that. ApiError 503 when too many wait."""
        if self._checking >= self.limits.open_images:
            raise ApiError(503, "too many requests are being checked", code="overloaded",
                           retry_after=2)  # fmt: skip
        self._checking += 1
        try:
            return await self._in(self._checker, function, seconds)
        finally:
            self._checking -= 1

    @contextlib.asynccontextmanager
    async def upload(self) -> AsyncIterator[None]:
        """Held while files of a client are read and decoded. ApiError 503 when too many are."""
        if self._uploads >= self.limits.uploads_at_once:
            raise ApiError(
                503,
                f"{self._uploads} requests with files are being read, the limit; try again",
                code="overloaded",
                retry_after=RETRY_S,
                closing=True,
            )
        self._uploads += 1
        try:
            yield
        finally:
            self._uploads -= 1

    async def decode(self, function: Callable[[], T]) -> T:
        """Run what decodes a client's files."""
        return await self._in(self._decoder, function, _CHECK_S)

    async def load(self, function: Callable[[], T]) -> T:
        """Run what loads a workflow."""
        return await self._in(self._loader, function, LOAD_S)

    async def _in(
        self, executor: ThreadPoolExecutor, function: Callable[[], T], seconds: float
    ) -> T:
        future = asyncio.get_running_loop().run_in_executor(executor, function)
        try:
            async with asyncio.timeout(seconds):
                return await future
        except TimeoutError:
            raise ApiError(503, f"the server did not get to it within {seconds:g} s; try again",
                           code="overloaded", retry_after=5) from None  # fmt: skip

    def url(self, request: Request, name: str) -> str:
        """Where a file of the shelf is fetched."""
        base = self._public_url or str(request.base_url).rstrip("/")
        return f"{base}/images/{name}"

    async def close(self) -> None:
        await self.jobs.close()
        for executor in (self._checker, self._loader, self._decoder):
            executor.shutdown(wait=False, cancel_futures=True)


def tenant_of(request: Request) -> Any:
    """Who holds the key of this request."""
    return request.scope["state"]["holder"]
