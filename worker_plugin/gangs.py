"""The gangs that a worker leads or is a member of, and the rings that it publishes on.

A leader asks for help over a connection of its own (`st2i_assist`). As long as that is open, the member
takes part in the runs of the leader's task, in its own task thread; the end of either side closes it.
Tensors go from ring to ring. An item that a reader cannot get from the heap it asks for by message
(`st2i_share`).
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any
from weakref import WeakValueDictionary

from distributed import Status
from distributed.protocol import to_serialize
from distributed.utils import sync

from st2i_dask.model_fn import ModelFn
from st2i_dask.outputs import TaskOutputs, packing

from .boards import SLICE_SECONDS
from .exchange import Exchange
from .executor import Executor
from .gang_leader import Leader
from .gang_line import Line
from .gang_member import Member
from .rings import ITEM_SECONDS, Ring, RingAddress, RingReader
from .tensor_store import TensorStore, receiving

logger = logging.getLogger(__name__)

# How often to look whether an item that was asked for is there, seconds.
_LOOK_SECONDS = 0.002


class Gangs:
    """One per worker."""

    def __init__(
        self, worker: Any, executor: Executor, exchange: Exchange, announce: Callable[[], None]
    ):
        """announce: tells the scheduler what is resident here. Event loop."""
        self.worker = worker
        self._open: Executor | None = executor
        self._exchange = exchange
        self._announce = announce
        self._rings: WeakValueDictionary[str, Ring] = WeakValueDictionary()
        self._leaders: set[Leader] = set()
        self._members: set[Member] = set()

    def start(self) -> None:
        self.worker.handlers["st2i_assist"] = self._assist
        self.worker.handlers["st2i_share"] = self._share

    def stop(self) -> None:
        """Leaders go on alone; members' parts end. Event loop."""
        for name in ("st2i_assist", "st2i_share"):
            self.worker.handlers.pop(name, None)
        for leader in list(self._leaders):
            leader.dissolve("this worker is attached anew, or closes")
        for member in list(self._members):
            member.end("this worker is attached anew, or closes")
        # Dask keeps handlers in a cache of the process: they must not keep the arena with them.
        self._open = None
        self._rings = WeakValueDictionary()

    @property
    def _executor(self) -> Executor:
        if self._open is None:
            raise OSError(f"{self.worker.address} was attached anew, or closes")
        return self._open

    @property
    def _store(self) -> TensorStore:
        return self._executor.store

    # -- leader ------------------------------------------------------------------------------------

    def lead(self, addresses: Sequence[str], model_fn: ModelFn, names: dict[str, str]) -> Leader:
        """A gang with those workers, for the runs of one task; enter it in the task's thread.

        names: workflow, request and bucket, as a lease takes them.
        """
        return Leader(self, addresses, model_fn, names)

    def leads(self, leader: Leader) -> None:
        """Event loop, as `led`."""
        self._leaders.add(leader)

    def led(self, leader: Leader) -> None:
        self._leaders.discard(leader)

    # -- member ------------------------------------------------------------------------------------

    async def _assist(self, comm: Any, model_fn: bytes, names: dict[str, str], who: str) -> Any:
        """RPC `st2i_assist`: take part in the runs of the worker `who` until the connection ends."""
        line = Line(comm)
        member = Member(self, self._executor, line, model_fn, names, who)
        self._members.add(member)
        try:
            member.start()
            while True:
                member.heard(await comm.read())
        except (OSError, RuntimeError) as error:
            member.end(str(error) or type(error).__name__)
        finally:
            member.end("its leader has ended")
            if member.has_ended:
                self._members.discard(member)
        return Status.dont_reply

    def left(self, member: Member, has_changed: bool) -> None:
        """Its thread is done. Event loop. has_changed: other weights may be resident than before."""
        self._members.discard(member)
        if has_changed and self._open is not None:
            self._announce()

    # -- rings -------------------------------------------------------------------------------------

    def ring(self) -> Ring:
        """A new one. Any thread. OSError: the worker is attached anew, or closes."""
        ring = Ring(self._store)
        self._rings[ring.name] = ring
        return ring

    def on_device(self, item: Any) -> Any:
        """See `Executor.on_device`. Any thread."""
        return self._executor.on_device(item)

    def reader(self, address: str, ring: RingAddress, check: Callable[[], None]) -> RingReader:
        """Of a ring on the worker at that address. check: see `RingReader`."""
        ask = partial(self._ask, address, ring.name, check)
        return RingReader(self._store, ring, ask, check)

    def _ask(
        self, address: str, ring: str, check: Callable[[], None], index: int, timeout_s: float
    ) -> TaskOutputs:
        """For an item, by message. Reader's thread."""
        outputs: TaskOutputs = sync(
            self.worker.loop,
            self._asked,
            address,
            ring,
            check,
            index,
            timeout_s,
            callback_timeout=timeout_s + 5,
        )
        return outputs

    async def _asked(
        self, address: str, ring: str, check: Callable[[], None], index: int, timeout_s: float
    ) -> TaskOutputs:
        rpc = self.worker.rpc(address)
        with receiving(self._store):
            question = rpc.st2i_share(ring=ring, index=index, who=self.worker.address)
            asking = asyncio.ensure_future(question)
        try:
            deadline = asyncio.get_running_loop().time() + timeout_s
            while not asking.done():
                await asyncio.wait({asking}, timeout=SLICE_SECONDS)
                if not asking.done():
                    check()
                    if asyncio.get_running_loop().time() > deadline:
                        raise TimeoutError
            answer = asking.result()
        finally:
            asking.cancel()
        if not isinstance(answer, TaskOutputs):
            raise LookupError(f"{address} has item {index} no more")
        return answer

    async def _share(self, comm: Any, ring: str, index: int, who: str) -> Any:
        """RPC `st2i_share`: an item of a ring, once it was published; False when it is gone."""
        deadline = asyncio.get_running_loop().time() + ITEM_SECONDS
        outputs = None
        while outputs is None:
            found = self._rings.get(ring)
            if found is None or asyncio.get_running_loop().time() > deadline:
                return False
            try:
                outputs = found.item(index)
            except LookupError:
                return False
            del found
            if outputs is None:
                await asyncio.sleep(_LOOK_SECONDS)
        with packing(await self._exchange.packer(who)):
            await comm.write(to_serialize(outputs))
        return Status.dont_reply

    def _check(self) -> None:
        """Nothing is left once nothing runs. Event loop."""
        for member in self._members:
            assert not member.has_ended
