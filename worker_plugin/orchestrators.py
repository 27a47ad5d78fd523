"""The orchestrators of a worker: threads that follow a pipeline's own code, outside of its executor.

A request's Dask task secedes at once, so that it holds no executor, and waits here for a place. Its
thread runs the glue and asks for component calls; while it waits for one it does nothing. Only one of
them runs at a time, and none while a model is being read: torch's defaults and its random generators
belong to the whole process.
"""

from __future__ import annotations

import asyncio
import logging
import pickle
from collections import Counter
from typing import Any

from distributed import Reschedule
from distributed.worker_state_machine import SecedeEvent

from .component_calls import CallChannel
from .executor import Executor
from .orchestration_thread import OrchestrationStopped, OrchestrationThread

logger = logging.getLogger(__name__)

#: Orchestrators at work at a time on a worker, of all tenants and of one.
PLACES = 64
PLACES_PER_TENANT = 4
#: States of a Dask task on a worker whose result is wanted here no more.
_OVER = frozenset({"cancelled", "released", "forgotten"})


class Orchestrators:
    """One per worker. Event loop only."""

    def __init__(self, worker: Any, executor: Executor):
        from st2i_dask.pipelines.shell import Shells

        self._worker = worker
        self._executor = executor
        self._shells = Shells()
        self._places = Places()
        self._stops: dict[str, asyncio.Event] = {}

    async def run(self, key: str, data: bytes) -> Any:
        """The request's result. Reschedule where it cannot go on here."""
        self._worker.handle_stimulus(
            SecedeEvent(key=key, compute_duration=1e-3, stimulus_id=f"st2i-orchestrates-{key}")
        )
        stop = self._stops[key] = asyncio.Event()
        stopped = asyncio.ensure_future(stop.wait())
        try:
            return await self._run(key, pickle.loads(data), stopped)
        except OrchestrationStopped:
            raise Reschedule from None
        finally:
            stopped.cancel()
            if self._stops.get(key) is stop:
                del self._stops[key]

    async def _run(self, key: str, request: Any, stopped: asyncio.Future[Any]) -> Any:
        place = asyncio.ensure_future(self._places.take(request.tenant))
        await asyncio.wait({place, stopped}, return_when=asyncio.FIRST_COMPLETED)
        if not place.done():
            place.cancel()
            raise OrchestrationStopped
        try:
            if stopped.done():
                raise OrchestrationStopped
            channel = CallChannel(self._worker, self._executor.store, key, request)
            await channel.open()
            thread = OrchestrationThread(
                key, request, self._shells, channel, self._executor, asyncio.get_running_loop()
            )
            thread.start()
            await asyncio.wait({thread.result, stopped}, return_when=asyncio.FIRST_COMPLETED)
            thread.stop()
            # The place is taken until the thread has really ended.
            return await thread.result
        finally:
            self._places.give_back(request.tenant)

    def transitioned(self, key: Any, finish: str) -> None:
        """Of any Dask task of this worker."""
        if finish in _OVER and key in self._stops:
            self._stops[key].set()

    def close(self) -> None:
        """Stop all; their tasks go back to the scheduler."""
        for stop in self._stops.values():
            stop.set()


class Places:
    """Who may orchestrate: those of the tenants that have fewest at work. Event loop only."""

    def __init__(self, total: int = PLACES, per_tenant: int = PLACES_PER_TENANT) -> None:
        self._total, self._per_tenant = total, per_tenant
        self._taken: Counter[str] = Counter()
        self._waiting: list[tuple[str, asyncio.Future[None]]] = []

    async def take(self, tenant: str) -> None:
        place = asyncio.get_running_loop().create_future()
        self._waiting.append((tenant, place))
        self._serve()
        try:
            await place
        except asyncio.CancelledError:
            if place.done() and not place.cancelled():
                self.give_back(tenant)
            raise

    def give_back(self, tenant: str) -> None:
        self._taken[tenant] -= 1
        if not self._taken[tenant]:
            del self._taken[tenant]
        self._serve()

    def _serve(self) -> None:
        self._waiting = [entry for entry in self._waiting if not entry[1].done()]
        while self._waiting and self._taken.total() < self._total:
            # min() keeps to the order of arrival among equals.
            entry = min(self._waiting, key=lambda waiting: self._taken[waiting[0]])
            tenant, place = entry
            if self._taken[tenant] >= self._per_tenant:
                return
            self._waiting.remove(entry)
            self._taken[tenant] += 1
            place.set_result(None)
