"""Clients' requests: from the queue of the cluster to encoded images, and who may see them.

Every request is a task of its own on the event loop; whoever waits for it only watches. So a client
that leaves cancels it (or not), and nothing else depends on clients.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import logging
import secrets
import time
from collections import Counter, OrderedDict
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, Protocol

from ..request import Request, request_id
from .limits import Limits
from .pictures import MEDIA, encode
from .problems import RETRY_S, ApiError, of_exception, of_lost_scheduler
from .shelf import Shelf
from .wanted import Wanted

logger = logging.getLogger("st2i.serve")

# Seconds for which what the scheduler said of a request holds.
_FRESH_S = 0.25


class Cluster(Protocol):
    """What runs requests; `Link` is the real one. Futures can be awaited for their results."""

    @property
    def up(self) -> bool: ...

    async def submit(self, requests: Sequence[Request], also: Sequence[str] = ()) -> list[Any]: ...

    async def prospects(self, names: Sequence[str]) -> dict[str, dict[str, Any]]: ...

    async def cancel(self, futures: Sequence[Any]) -> None: ...


@dataclass(eq=False)
class Job:
    """One request of a client.

    names: what the scheduler calls its requests, one an image; calls: model calls of each.
    files: its images on the shelf, in order, once it is completed; sizes: their pixels.
    ended: set when it is completed, failed or cancelled. error: why it failed.
    """

    id: str
    tenant: str
    wanted: Wanted
    created: float
    names: list[str]
    calls: list[int]
    sent: bool = False
    ended: asyncio.Event = field(default_factory=asyncio.Event)
    files: list[str] | None = None
    sizes: list[tuple[int, int]] = field(default_factory=list)
    error: ApiError | None = None
    cancelled: bool = False
    task: asyncio.Task[None] | None = None
    ended_at: float = 0.0
    previews: asyncio.Queue[tuple[int, bytes]] = field(default_factory=asyncio.Queue)
    _seen: set[str] = field(default_factory=set)  # by the scheduler
    _said: dict[str, Any] = field(default_factory=dict)
    _said_at: float = 0.0

    @property
    def total(self) -> int:
        """Model calls in all."""
        return sum(self.calls)


class Jobs:
    """All requests that are open or were so a while ago. Event loop only.

    several: whether there is more than one tenant; then each may only take half of what is free.
    """

    def __init__(
        self,
        cluster: Cluster,
        limits: Limits,
        *,
        several: bool,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._cluster, self._limits, self._several, self._clock = cluster, limits, several, clock
        self.shelf = Shelf(limits.results_bytes, limits.keep_s, clock)
        self._jobs: OrderedDict[str, Job] = OrderedDict()
        self._open: Counter[str] = Counter()  # images by tenant
        self._encoders = ThreadPoolExecutor(2)

    @property
    def open_images(self) -> int:
        """Images that wait or run."""
        return self._open.total()

    def full(self) -> ApiError | None:
        """Why not even one more image can be taken; None: it can."""
        if not self._cluster.up:
            return of_lost_scheduler()
        return self._no_room(1)

    def _no_room(self, images: int) -> ApiError | None:
        if self.open_images + images <= self._limits.open_images:
            return None
        return ApiError(
            503,
            f"{self.open_images} images wait or run here, limit {self._limits.open_images}; "
            "try again later",
            code="overloaded",
            retry_after=RETRY_S,
        )

    def check_room(self, tenant: str, images: int) -> None:
        """ApiError 503 when there is no room, 429 when this tenant has enough of it."""
        why = self._no_room(images)
        if why is not None:
            raise why
        free = self._limits.open_images - self.open_images
        if self._several and self._open[tenant] + images > free:
            raise ApiError(
                429,
                f"{self._open[tenant]} images of yours wait or run and {free} more places are free; "
                "one tenant may take half of what is there; wait for some",
                code="rate_limit_exceeded",
                retry_after=RETRY_S,
            )

    def start(self, tenant: str, wanted: Wanted) -> Job:
        """Take a request in. ApiError when there is no room."""
        self.tidy()
        images = len(wanted.requests)
        self.check_room(tenant, images)
        job = Job(
            f"imgreq_{secrets.token_urlsafe(24)}",
            tenant,
            wanted,
            self._clock(),
            [request_id(request.key) for request in wanted.requests],
            [len(request.tasks) for request in wanted.requests],
        )
        self._jobs[job.id] = job
        self._open[tenant] += images
        job.task = asyncio.create_task(self._run(job))
        return job

    def get(self, tenant: str, name: str) -> Job:
        """The tenant's request. ApiError 404, the same for another tenant's and for none."""
        self.tidy()
        job = self._jobs.get(name)
        if job is None or job.tenant != tenant:
            raise ApiError(
                404,
                "there is no such request of yours; it may be too old",
                code="request_not_found",
                param="request_id",
            )
        return job

    def of(self, tenant: str, most: int = 100) -> list[Job]:
        """The tenant's newest requests, newest first."""
        self.tidy()
        found = [job for job in reversed(self._jobs.values()) if job.tenant == tenant]
        return found[:most]

    def cancel(self, job: Job) -> None:
        """Let it end at the next step; nothing happens when it is over."""
        if not job.ended.is_set() and not job.cancelled:
            job.cancelled = True
            assert job.task is not None
            job.task.cancel()

    def lost(self) -> None:
        """The scheduler is gone: everything that was sent there fails."""
        for job in self._jobs.values():
            if not job.ended.is_set() and job.sent and job.task is not None:
                job.error = of_lost_scheduler()
                job.task.cancel()

    async def state(self, job: Job) -> tuple[str, dict[str, Any]]:
        """Its status, and done, total, place and wait_s as far as they are known."""
        if job.ended.is_set():
            status = "cancelled" if job.cancelled else "failed" if job.error else "completed"
            done = job.total if status == "completed" else job._said.get("done", 0)
            return status, {"done": done, "total": job.total, "place": None, "wait_s": None}
        await self.refresh([job])
        return "running" if job._said["started"] else "queued", job._said

    async def refresh(self, jobs: Sequence[Job]) -> None:
        """Ask the scheduler about those that are open, unless it has just told; one message."""
        now = self._clock()
        stale = [job for job in jobs if not job.ended.is_set() and now - job._said_at >= _FRESH_S]
        if not stale:
            return
        for job in stale:
            job._said_at = now
            job._said = job._said or _together(job, {})
        found = await self._cluster.prospects([name for job in stale for name in job.names])
        for job in stale:
            job._said = _together(job, {n: found[n] for n in job.names if n in found})

    async def close(self) -> None:
        """Cancel everything."""
        jobs = [job for job in self._jobs.values() if not job.ended.is_set()]
        for job in jobs:
            self.cancel(job)
        tasks = [job.task for job in jobs if job.task is not None]
        if tasks:
            await asyncio.wait(tasks, timeout=20)
        self._encoders.shutdown(wait=True, cancel_futures=True)

    def drop(self, job: Job) -> None:
        """Let its images go."""
        for file in job.files or ():
            self.shelf.drop(file)

    def tidy(self) -> None:
        """Forget requests that are over and too old or too many."""
        horizon = self._clock() - self._limits.keep_s
        over = len(self._jobs) - self._limits.records - self._limits.open_images
        for job in list(self._jobs.values()):
            if not job.ended.is_set():
                continue
            if job.ended_at > horizon and over <= 0:
                break
            over -= 1
            del self._jobs[job.id]
            self.drop(job)

    async def _run(self, job: Job) -> None:
        futures: list[Any] = []
        try:
            async with asyncio.timeout(self._limits.request_s):
                shown = job.wanted.previews
                futures = await self._cluster.submit(
                    job.wanted.requests, [preview.key for preview in shown]
                )
                job.sent = True
                count = len(job.names)
                exports = [preview.export for preview in shown]
                showing = asyncio.create_task(self._show(job, futures[count:], exports))
                try:
                    images = await _all(futures[:count])
                    await showing
                finally:
                    showing.cancel()
                job.sizes = [getattr(image, "size", (0, 0)) for image in images]
                made = await asyncio.gather(*(self._encode(job, image) for image in images))
                kind = job.wanted.output_format
                job.files = [self.shelf.put(data, kind, MEDIA[kind]) for data in made]
        except asyncio.CancelledError:
            if not job.cancelled and job.error is None:
                job.error = of_lost_scheduler()  # the event loop ends
        except concurrent.futures.CancelledError:
            # Dask's own: the scheduler has lost it, or somebody cancelled it there.
            job.error = of_lost_scheduler()
        except Exception as error:
            job.error = of_exception(error)
            if job.error.status_code >= 500:
                logger.info("request %s failed: %s", job.id, job.error.detail)
        finally:
            if job.files is None and futures:
                await _quietly(self._cluster.cancel(futures))
            futures.clear()
            job.wanted.requests.clear()  # they hold uploaded images
            self._open[job.tenant] -= len(job.names)
            if not self._open[job.tenant]:
                del self._open[job.tenant]
            job.ended_at = self._clock()
            job.ended.set()

    async def _show(self, job: Job, previews: Sequence[Any], exports: Sequence[int]) -> None:
        """Encode the previews in order for who watches. One that fails is left out: its request fails
        or not."""
        for future, export in zip(previews, exports, strict=True):
            try:
                outputs = await future
                preview = outputs.values[export]
                data = await self._encode(job, preview.image)
                job.previews.put_nowait((preview.number, data))
            except (Exception, concurrent.futures.CancelledError) as error:
                logger.info("no preview of %s: %r", job.id, error)

    def _encode(self, job: Job, image: Any) -> asyncio.Future[bytes]:
        wanted = job.wanted
        loop = asyncio.get_running_loop()
        return loop.run_in_executor(
            self._encoders, encode, image, wanted.output_format, wanted.compression
        )

    def _check(self) -> None:
        counted: Counter[str] = Counter()
        for job in self._jobs.values():
            if not job.ended.is_set():
                counted[job.tenant] += len(job.names)
        assert counted == self._open


async def _all(futures: Sequence[Any]) -> list[Any]:
    """All results, or the first failure."""
    waiting = [asyncio.ensure_future(_result(future)) for future in futures]
    try:
        return list(await asyncio.gather(*waiting))
    finally:
        for one in waiting:
            one.cancel()
        await asyncio.gather(*waiting, return_exceptions=True)


async def _result(future: Any) -> Any:
    return await future


async def _quietly(work: Any) -> None:
    """Do it, whatever comes of it; also when this task is being cancelled."""
    try:
        await asyncio.shield(work)
    except (Exception, asyncio.CancelledError) as error:
        logger.info("cancelling on the cluster failed: %r", error)


def _together(job: Job, found: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """Of the requests of several images: what has been done of all, the last place and wait."""
    done, places, waits, started = 0, [], [], False
    job._seen.update(found)
    for name, calls in zip(job.names, job.calls, strict=True):
        row = found.get(name)
        if row is None:  # over, or not yet there
            over = name in job._seen
            done += calls if over else 0
            started = started or over
            continue
        done += row["done"]
        started = started or row["place"] is None
        if row["place"] is not None:
            places.append(row["place"])
        if row["wait_s"] is not None:
            waits.append(row["wait_s"])
    return {
        "done": min(done, job.total),
        "total": job.total,
        "place": max(places) if places and not started else None,
        "started": started,
        "wait_s": max(waits, default=None),
    }
