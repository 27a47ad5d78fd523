"""Fetching callback inputs from the worker that runs (or ran) their producer, when they are touched.

The consumer's thread waits here, at most `WAIT_SECONDS`. It is released at once when the producer is
gone: the scheduler says so (`st2i_unblock`), or the producer's worker does, or the connection breaks.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

from distributed import Status
from distributed.protocol import to_serialize
from distributed.utils import sync
from distributed.worker import get_data_from_worker

from st2i_dask.callback import Items
from st2i_dask.errors import ProducerLostError
from st2i_dask.invocation import Producer
from st2i_dask.outputs import TaskOutputs, packing

from .boards import SLICE_SECONDS
from .exchange import Exchange
from .streams import WAIT_SECONDS, Boards, Opened, StreamReader
from .tensor_store import TensorStore, receiving

#: How often a worker looks whether a producer has come further, seconds.
_LOOK_SECONDS = 0.002
#: Pause before asking again a worker that sends to too many others already, seconds.
_BUSY_SECONDS = 0.02


class CallbackPulls:
    """One per worker: both sides, the consumer's and the producer's."""

    def __init__(self, worker: Any, store: TensorStore, exchange: Exchange):
        self._worker = worker
        self._open_store: TensorStore | None = store
        self._exchange = exchange
        self.boards = Boards(store)
        # Set once the producer is lost. By consumer (while it runs) and producer.
        self._lost: dict[str, dict[str, asyncio.Event]] = {}

    def start(self) -> None:
        self._worker.handlers["st2i_await"] = self._await_result
        self._worker.handlers["st2i_stream"] = self._await_stream
        self._worker.handlers["st2i_item"] = self._send_item
        self._worker.stream_handlers["st2i_unblock"] = self._unblock

    def stop(self) -> None:
        for name in ("st2i_await", "st2i_stream", "st2i_item"):
            self._worker.handlers.pop(name, None)
        self._worker.stream_handlers.pop("st2i_unblock", None)
        # Dask keeps handlers in a cache of the process: they must not keep the arena with them.
        self._open_store = None
        self.boards = Boards(None)

    @property
    def _store(self) -> TensorStore:
        if self._open_store is None:
            raise ProducerLostError("this worker's arena was given up; the task runs again")
        return self._open_store

    def producer(self, consumer: str, producer: str) -> Producer:
        """The producer of a callback input, for the consumer's thread."""
        return _Producer(self, consumer, producer)

    def over(self, consumer: str) -> None:
        """The consumer's run has ended."""
        self._lost.pop(consumer, None)

    # -- consumer ----------------------------------------------------------------------------------

    async def pull(self, consumer: str, producer: str) -> TaskOutputs:
        """The producer's outputs, once it is done."""
        address = self.address(consumer, producer)
        return await self._unless_lost(consumer, producer, self._pull_from(address, producer))

    async def ask_stream(self, consumer: str, producer: str, export: int) -> Opened | None:
        """Where the producer streams that export; None: it is done, or comes in one piece."""
        address = self.address(consumer, producer)
        if producer in self._worker.data or address == self._worker.address:
            return None
        asked = self._ask(address, producer, "st2i_stream", export=export)
        answer = await self._unless_lost(consumer, producer, asked)
        return Opened.parse(*answer) if answer else None

    async def ask_item(self, consumer: str, producer: str, export: int, index: int) -> TaskOutputs:
        """One item, by message."""
        address = self.address(consumer, producer)
        asked = self._ask(address, producer, "st2i_item", export=export, index=index)
        return await self._unless_lost(consumer, producer, asked)  # type: ignore[no-any-return]

    def address(self, consumer: str, producer: str) -> str:
        """The worker that runs or ran the producer."""
        task = self._worker.state.tasks.get(consumer)
        annotation = (task.annotations or {}).get("st2i", {}) if task is not None else {}
        address: str | None = annotation.get("producers", {}).get(producer)
        if address is None:
            raise ProducerLostError(
                f"callback input {producer!r} of {consumer!r} has no producer; it runs again"
            )
        return address

    def check_lost(self, consumer: str, producer: str) -> None:
        """ProducerLostError if the producer is known to be lost, or the consumer's result is wanted
        no more: the scheduler then tells nothing. Any thread."""
        told = self._lost.get(consumer, {}).get(producer)
        task = self._worker.state.tasks.get(consumer)
        unwanted = task is None or task.state not in ("executing", "long-running")
        if unwanted or (told is not None and told.is_set()):
            raise ProducerLostError(f"callback input {producer!r} of {consumer!r} is lost")

    async def _unless_lost(self, consumer: str, producer: str, work: Awaitable[Any]) -> Any:
        """The result of `work`, unless news of a lost producer comes first."""
        lost = self._loss(consumer, producer)
        doing = asyncio.ensure_future(work)
        told = asyncio.ensure_future(lost.wait())
        try:
            deadline = asyncio.get_running_loop().time() + WAIT_SECONDS
            while asyncio.get_running_loop().time() < deadline:
                await asyncio.wait(
                    {doing, told}, timeout=SLICE_SECONDS, return_when=asyncio.FIRST_COMPLETED
                )
                if doing.done():
                    return doing.result()
                self.check_lost(consumer, producer)
            raise ProducerLostError(
                f"callback input {producer!r} of {consumer!r} gave nothing for {WAIT_SECONDS:g} s"
            )
        finally:
            for waiter in (doing, told):
                waiter.cancel()

    async def _ask(self, address: str, producer: str, question: str, **about: Any) -> Any:
        """The answer of the producer's worker; ProducerLostError if it does not make it any more."""
        rpc = self._worker.rpc(address)
        try:
            with receiving(self._store):
                answer = await getattr(rpc, question)(
                    key=producer, who=self._worker.address, **about
                )
        except OSError as error:
            raise ProducerLostError(f"callback input {producer!r} is lost: {error}") from error
        if answer is False:
            raise ProducerLostError(f"callback input {producer!r} is not being made any more")
        return answer

    async def _pull_from(self, address: str, producer: str) -> TaskOutputs:
        if producer in self._worker.data:
            return self._worker.data[producer]  # type: ignore[no-any-return]
        if address == self._worker.address:
            if not await self._await_result(producer):
                raise ProducerLostError(f"callback input {producer!r} is not being made any more")
            return self._worker.data[producer]  # type: ignore[no-any-return]
        await self._ask(address, producer, "st2i_await")
        try:
            return await self._copy(address, producer)
        except (OSError, KeyError) as error:  # the other worker, or its copy, is gone
            raise ProducerLostError(f"callback input {producer!r} is lost: {error}") from error

    async def _copy(self, address: str, producer: str) -> TaskOutputs:
        while True:
            with receiving(self._store):
                answer: Any = await get_data_from_worker(
                    self._worker.rpc, [producer], address, who=self._worker.address
                )
            if answer["status"] != "busy":
                outputs: TaskOutputs = answer["data"][producer]
                if outputs.lost is not None:
                    raise OSError(outputs.lost)
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

    async def _await_result(self, key: str, who: str = "") -> bool:
        """RPC `st2i_await`: True once the key is in memory here, False when it will not be."""
        return await self._await(key, lambda: False)

    async def _await_stream(self, key: str, export: int, who: str) -> tuple[Any, ...] | bool | None:
        """RPC `st2i_stream`: length and address of that export's board; None: the whole is in
        memory; False: it will not be made."""
        boards = self.boards
        if not await self._await(key, lambda: boards.get(key, export) is not None):
            return False
        board = boards.get(key, export)
        if board is None or key in self._worker.data:
            return None
        return board.length, board.address()

    async def _send_item(self, comm: Any, key: str, export: int, index: int, who: str) -> Any:
        """RPC `st2i_item`: the item, once it is made; False when it will not be."""
        board = self.boards.get(key, export)
        if board is None or not await self._await(key, lambda: len(board.items) > index):
            return False
        if len(board.items) <= index:
            return False
        with packing(await self._exchange.packer(who)):
            await comm.write(to_serialize(TaskOutputs((board.items[index],))))
        return Status.dont_reply

    async def _await(self, key: str, there: Callable[[], bool]) -> bool:
        """Wait until `there()` or the key is in memory; False when neither is to be expected."""
        deadline = asyncio.get_running_loop().time() + WAIT_SECONDS
        while key not in self._worker.data and not there():
            task = self._worker.state.tasks.get(key)
            coming = task is not None and task.state in _COMING
            if not coming or asyncio.get_running_loop().time() > deadline:
                return False
            await asyncio.sleep(_LOOK_SECONDS)
        return True


class _Producer:
    """`invocation.Producer` for the consumer's thread."""

    def __init__(self, pulls: CallbackPulls, consumer: str, producer: str):
        self._pulls, self._consumer, self._producer = pulls, consumer, producer

    def outputs(self) -> TaskOutputs:
        return self._sync(self._pulls.pull)  # type: ignore[no-any-return]

    def items(self, export: int) -> Items:
        pulls, names = self._pulls, (self._consumer, self._producer)
        return StreamReader(
            pulls._store,
            lambda: self._sync(pulls.ask_stream, export),
            lambda index: self._sync(pulls.ask_item, export, index),
            lambda: pulls.check_lost(*names),
        )

    def _sync(self, question: Callable[..., Any], *about: Any) -> Any:
        return sync(
            self._pulls._worker.loop,
            question,
            self._consumer,
            self._producer,
            *about,
            callback_timeout=WAIT_SECONDS + 5,
        )


# States of a task in Dask's worker from which it may still get into memory here.
_COMING = frozenset(
    {"waiting", "fetch", "flight", "ready", "constrained", "executing", "long-running", "memory"}
)
