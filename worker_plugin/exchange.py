"""Between Dask's transfers and the tensor store: results travel as tickets to whoever can reach them.

Dask decides what travels and when, and keeps its books as ever. Its answer to `get_data` is pickled
here with tickets in place of tensors if the asking worker can reach this worker's heap; it pulls while
it unpickles, and acknowledges after. Until then Dask's handler holds the result, and with it the
blocks: a reader never meets a freed one. A worker that cannot reach the heap, or a client, gets bytes.
"""

from __future__ import annotations

import asyncio
import logging
import time
import traceback
from collections.abc import Callable
from dataclasses import asdict, astuple
from typing import Any

from distributed.worker_state_machine import GatherDepNetworkFailureEvent, GatherDepSuccessEvent
from tornado.ioloop import PeriodicCallback

from st2i_dask.outputs import PackedTensor, TaskOutputs, packing

from .heap import HeapAddress
from .host_heap import HostHeap
from .tensor_store import TensorStore, receiving

logger = logging.getLogger(__name__)

#: How long another worker may take to say whether it reaches this worker's heap, seconds.
REACH_SECONDS = 5.0
#: How long an answer is taken for true, seconds. A worker that starts again at the same address need
#: not reach what the one before it did, and would be sent tickets that it cannot use for ever.
ASK_AGAIN_SECONDS = 30.0
#: How long a dead worker's memory stays mapped here at most, seconds.
FORGET_SECONDS = 2.0


class Exchange:
    """One per worker. Event loop only."""

    def __init__(self, worker: Any, store: TensorStore):
        self._worker = worker
        self._open_store: TensorStore | None = store
        # By address: whether it can reach our heap, and until when that is taken for true.
        self._reachable: dict[str, tuple[bool, float]] = {}
        self._asking: dict[str, asyncio.Future[bool]] = {}
        self._forgetting: PeriodicCallback | None = None

    def start(self) -> None:
        worker = self._worker
        self._plain_get_data = worker.handlers["get_data"]
        worker.handlers["get_data"] = self._get_data
        worker.handlers["st2i_reach"] = self._reach
        worker.handlers["st2i_data_plane"] = self._statistics
        # Dask's worker calls these two through the instance.
        self._plain_gather_dep = worker.gather_dep
        worker.gather_dep = self._gather_dep
        self._plain_update_data = worker.update_data
        worker.update_data = self._update_data
        # Nothing tells a worker that another one has gone. (A world of devices is told, and ends.)
        heap = self._store.arena.heap
        if isinstance(heap, HostHeap):
            self._forgetting = PeriodicCallback(heap.forget_lost, FORGET_SECONDS * 1000)
            self._forgetting.start()

    def stop(self) -> None:
        worker = self._worker
        if self._forgetting is not None:
            self._forgetting.stop()
            self._forgetting = None
        worker.handlers["get_data"] = self._plain_get_data
        for name in ("st2i_reach", "st2i_data_plane"):
            worker.handlers.pop(name, None)
        del worker.gather_dep, worker.update_data
        # Dask keeps handlers in a cache of the process: they must not keep the arena with them.
        self._open_store = None

    @property
    def _store(self) -> TensorStore:
        if self._open_store is None:
            raise OSError(f"the arena of {self._worker.address} was given up")
        return self._open_store

    async def packer(self, who: str | None) -> Callable[[Any], PackedTensor | None] | None:
        """How tensors travel to the worker at that address, counted; for a client (None), as bytes."""
        store = self._open_store
        if who is None or store is None:
            return None
        reaches, until = self._reachable.get(who, (False, 0.0))
        if time.monotonic() > until:
            reaches = await self._ask(who)

        def pack(tensor: Any) -> PackedTensor | None:
            packed = store.pack(tensor) if reaches else None
            if packed is None:
                store.transports.count("comm", tensor.numel() * tensor.element_size())
            return packed

        return pack

    # -- owner -------------------------------------------------------------------------------------

    async def _get_data(self, comm: Any, keys: Any, who: str | None = None, **options: Any) -> Any:
        with packing(await self.packer(who)):
            try:
                return await self._plain_get_data(comm, keys, who=who, **options)
            except OSError as error:
                # Dask's log keeps the error, with its frames and the tensors that they refer to.
                traceback.clear_frames(error.__traceback__)
                raise

    async def _ask(self, who: str) -> bool:
        """Whether that worker reaches our heap: one question at a time, whatever the number of keys."""
        asking = self._asking.get(who)
        if asking is None:
            asking = self._asking[who] = asyncio.ensure_future(self._asked(who))
        return await asyncio.shield(asking)

    async def _asked(self, who: str) -> bool:
        heap = self._store.arena.heap.address
        reaches = False
        try:
            reaches = await asyncio.wait_for(
                self._worker.rpc(who).st2i_reach(heap=astuple(heap)), REACH_SECONDS
            )
        except TimeoutError:
            # It is busy: what it said last.
            reaches, _ = self._reachable.get(who, (False, 0.0))
        except Exception as error:
            logger.info("%s does not say whether it reaches this heap: %s", who, error)
        finally:
            del self._asking[who]
        self._reachable[who] = reaches, time.monotonic() + ASK_AGAIN_SECONDS
        return reaches

    # -- receiver ----------------------------------------------------------------------------------

    def _reach(self, heap: tuple[Any, ...]) -> bool:
        """RPC `st2i_reach`: whether this worker can pull from that heap."""
        store = self._open_store
        return store is not None and store.arena.heap.reach(HeapAddress(*heap))

    async def _gather_dep(
        self, worker: str, to_gather: Any, total_nbytes: int, **options: Any
    ) -> Any:
        with receiving(self._open_store):
            event = await self._plain_gather_dep(worker, to_gather, total_nbytes, **options)
        if isinstance(event, GatherDepSuccessEvent) and _lost(event.data):
            logger.info("pulls from %s failed: %s", worker, _lost(event.data))
            return GatherDepNetworkFailureEvent(
                worker=worker,
                total_nbytes=total_nbytes,
                stimulus_id=f"st2i-pull-failed-{time.time()}",
            )
        return event

    def _update_data(self, data: dict[Any, Any], **options: Any) -> Any:
        lost = _lost(data)
        return self._plain_update_data(
            {key: value for key, value in data.items() if key not in lost}, **options
        )

    def _statistics(self) -> dict[str, Any]:
        """RPC `st2i_data_plane`."""
        return {
            "arena": asdict(self._store.arena.statistics()),
            "transports": self._store.transports.statistics(),
        }


def _lost(data: dict[Any, Any]) -> dict[Any, str]:
    """Why, by key, results have arrived without their values."""
    return {
        key: value.lost
        for key, value in data.items()
        if isinstance(value, TaskOutputs) and value.lost is not None
    }
