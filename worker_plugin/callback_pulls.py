"""Fetching callback inputs from the worker that runs (or ran) their producer, when they are touched.

The consumer's thread waits here, at most `WAIT_SECONDS`. It is released at once when the producer is
gone: the scheduler says so (`st2i_unblock`), or the producer's worker does, or the connection breaks.
"""

from __future__ import annotations

import asyncio
from typing import Any

from distributed.utils import sync
from distributed.worker import get_data_from_worker

from st2i_dask.callback import Items
from st2i_dask.errors import ProducerLostError
from st2i_dask.invocation import Producer
from st2i_dask.outputs import TaskOutputs

#: Longest wait for one producer, seconds. A producer runs at most one step: far less in practice.
WAIT_SECONDS = 600.0
#: How often a worker looks whether a producer's result is in its memory, seconds.
_LOOK_SECONDS = 0.002
#: Pause before asking again a worker that sends to too many others already, seconds.
_BUSY_SECONDS = 0.02


class CallbackPulls:
    """One per worker: both sides, the consumer's and the producer's."""

    def __init__(self, worker: Any):
        self._worker = worker
        # Set once the producer is lost. By consumer (while it runs) and producer.
        self._lost: dict[str, dict[str, asyncio.Event]] = {}

    def start(self) -> None:
        self._worker.handlers["st2i_await"] = self._await_result
        self._worker.stream_handlers["st2i_unblock"] = self._unblock

    def stop(self) -> None:
        self._worker.handlers.pop("st2i_await", None)
        self._worker.stream_handlers.pop("st2i_unblock", None)

    def producer(self, consumer: str, producer: str) -> Producer:
        """The producer of a callback input, for the consumer's thread."""
        return _Producer(self, consumer, producer)

    def over(self, consumer: str) -> None:
        """The consumer's run has ended."""
        self._lost.pop(consumer, None)

    # -- consumer ----------------------------------------------------------------------------------

    async def _pull(self, consumer: str, producer: str) -> TaskOutputs:
        task = self._worker.state.tasks.get(consumer)
        annotation = (task.annotations or {}).get("st2i", {}) if task is not None else {}
        address = annotation.get("producers", {}).get(producer)
        if address is None:
            raise ProducerLostError(
                f"callback input {producer!r} of {consumer!r} has no producer; it runs again"
            )
        lost = self._loss(consumer, producer)
        pull = asyncio.ensure_future(self._pull_from(address, producer))
        told = asyncio.ensure_future(lost.wait())
        try:
            await asyncio.wait(
                {pull, told}, timeout=WAIT_SECONDS, return_when=asyncio.FIRST_COMPLETED
            )
            if pull.done():
                return pull.result()
            why = "is lost" if told.done() else f"gave nothing for {WAIT_SECONDS:g} s"
            raise ProducerLostError(f"callback input {producer!r} of {consumer!r} {why}")
        finally:
            for waiter in (pull, told):
                waiter.cancel()

    async def _pull_from(self, address: str, producer: str) -> TaskOutputs:
        worker = self._worker
        if producer not in worker.data:
            try:
                if address == worker.address:
                    there = await self._await_result(producer)
                else:
                    there = await worker.rpc(address).st2i_await(key=producer)
                if there and address != worker.address:
                    return await self._copy(address, producer)
            except (OSError, KeyError) as error:  # the other worker, or its copy, is gone
                raise ProducerLostError(f"callback input {producer!r} is lost: {error}") from error
            if not there:
                raise ProducerLostError(f"callback input {producer!r} is not being made any more")
        return worker.data[producer]  # type: ignore[no-any-return]

    async def _copy(self, address: str, producer: str) -> TaskOutputs:
        while True:
            answer: Any = await get_data_from_worker(
                self._worker.rpc, [producer], address, who=self._worker.address
            )
            if answer["status"] != "busy":
                outputs: TaskOutputs = answer["data"][producer]
                return outputs
            await asyncio.sleep(_BUSY_SECONDS)

    def _loss(self, consumer: str, producer: str) -> asyncio.Event:
        return self._lost.setdefault(consumer, {}).setdefault(producer, asyncio.Event())

    def _unblock(self, key: str, producer: str, **message: Any) -> None:
        """Stream message from the scheduler: that producer will not deliver.

        Kept for a consumer that has not touched the input yet: it would ask a worker that is gone.
        """
        tasks = self._worker.state.tasks
        for gone in [consumer for consumer in self._lost if consumer not in tasks]:
            del self._lost[gone]
        if key in tasks and tasks[key].state in _COMING:
            self._loss(key, producer).set()

    # -- producer ----------------------------------------------------------------------------------

    async def _await_result(self, key: str) -> bool:
        """RPC `st2i_await`: True once the key is in memory here, False when it will not be."""
        deadline = asyncio.get_running_loop().time() + WAIT_SECONDS
        while key not in self._worker.data:
            task = self._worker.state.tasks.get(key)
            coming = task is not None and task.state in _COMING
            if not coming or asyncio.get_running_loop().time() > deadline:
                return False
            await asyncio.sleep(_LOOK_SECONDS)
        return True


class _Producer:
    def __init__(self, pulls: CallbackPulls, consumer: str, producer: str):
        self._pulls, self._keys = pulls, (consumer, producer)

    def outputs(self) -> TaskOutputs:
        pulls = self._pulls
        outputs: TaskOutputs = sync(
            pulls._worker.loop, pulls._pull, *self._keys, callback_timeout=WAIT_SECONDS + 5
        )
        return outputs

    def items(self, export: int) -> Items | None:
        return None


# States of a task in Dask's worker from which it may still get into memory here.
_COMING = frozenset(
    {"waiting", "fetch", "flight", "ready", "constrained", "executing", "long-running", "memory"}
)
