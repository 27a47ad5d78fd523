"""What a worker says of itself when asked for its health, and a pull on trial between two workers.

Both only look: a trial takes one small block of the two arenas, for a moment.
"""

from __future__ import annotations

import asyncio
import os
import pickle
import socket
import uuid
from dataclasses import astuple
from typing import Any

from st2i_dask.outputs import PackedTensor, TaskOutputs, packing

from .exchange import Exchange
from .heap import HeapAddress, Ticket
from .tensor_store import SMALL, TensorStore, receiving

#: Bytes of a trial: more than what travels inside messages.
TRIAL_BYTES = 4 * SMALL
#: How long the giver may take, and how long it keeps what it gives, seconds.
GIVE_SECONDS = 10.0


class Checkup:
    """One per worker. Event loop only. device: of the worker. nvshmem: whether it may be used."""

    def __init__(
        self, worker: Any, store: TensorStore, exchange: Exchange, *, device: str, nvshmem: bool
    ):
        self._worker = worker
        self._store: TensorStore | None = store
        self._exchange: Exchange | None = exchange
        self._device = device
        self._nvshmem = nvshmem
        self._given: dict[str, tuple[Any, asyncio.TimerHandle]] = {}
        self._handlers = {
            "st2i_checkup": self._checkup,
            "st2i_trial": self._trial,
            "st2i_trial_give": self._give,
            "st2i_trial_end": self._end,
        }

    def start(self) -> None:
        self._worker.handlers.update(self._handlers)

    def stop(self) -> None:
        for name in self._handlers:
            self._worker.handlers.pop(name, None)
        for key in list(self._given):
            self._end(key)
        # Dask keeps handlers in a cache of the process: they must not keep the arena with them.
        self._store = self._exchange = None

    async def _checkup(self) -> dict[str, Any]:
        """RPC: host, pid, device, arena (kind, nbytes), nvshmem ("off", "on", or what hinders it)."""
        assert self._store is not None
        arena = self._store.arena.statistics()
        return {
            "host": socket.gethostname(),
            "pid": os.getpid(),
            "device": await asyncio.to_thread(_describe, self._device),
            "arena": {"kind": arena.kind, "nbytes": arena.nbytes},
            "nvshmem": await asyncio.to_thread(self._hindrance, arena.kind),
        }

    def _hindrance(self, kind: str) -> str:
        if kind == "nvshmem":
            return "on"
        if self._device == "cpu" or not self._nvshmem:
            return "off"
        from .nvshmem_library import NvshmemError, Packages

        try:
            Packages.real()
        except NvshmemError as error:
            return str(error)
        return (
            "NVSHMEM is installed, but the workers' world did not come about; see this worker's log, "
            "set NVSHMEM_DEBUG=INFO and restart the workers"
        )

    async def _trial(self, owner: str) -> dict[str, Any]:
        """RPC: pull something from that worker's arena, as tensors are. `transport`, and whether it was
        `stored` in the arena; or `error`."""
        import torch

        store = self._store
        assert store is not None
        peer = self._worker.rpc(owner)
        try:
            given = await asyncio.wait_for(
                peer.st2i_trial_give(who=self._worker.address), GIVE_SECONDS
            )
        except (OSError, TimeoutError) as error:
            return {"error": f"it cannot be reached: {error or type(error).__name__}"}
        if given is None:
            return {"error": "it serves no more"}
        try:
            with receiving(store):
                outputs = pickle.loads(given["outputs"])
        finally:
            await peer.st2i_trial_end(key=given["key"])
        if outputs.lost is not None:
            return {"error": outputs.lost}
        if not torch.equal(outputs.values[0].cpu(), _pattern(torch)):
            return {"error": "other bytes arrived than were sent"}
        transport = "comm"
        if given["by_ticket"]:
            kind, heap, nbytes, place = given["heap"]
            address = HeapAddress(kind, heap, nbytes, tuple(place))
            transport = store._transport(Ticket(address, 0, TRIAL_BYTES, 1))
        return {"transport": transport, "stored": given["stored"]}

    async def _give(self, who: str) -> dict[str, Any]:
        """RPC: outputs pickled for that worker. What they refer to stays until `st2i_trial_end`."""
        import torch

        assert self._store is not None
        assert self._exchange is not None
        # A full arena makes it wait.
        tensor = await asyncio.to_thread(self._store.keep, _pattern(torch))
        tickets = []
        packer = await self._exchange.packer(who)

        def pack(tensor: Any) -> PackedTensor | None:
            packed = packer(tensor) if packer is not None else None
            tickets.append(packed is not None)
            return packed

        with packing(pack):
            outputs = pickle.dumps(TaskOutputs((tensor,)), protocol=5)
        key = uuid.uuid4().hex
        timer = asyncio.get_running_loop().call_later(GIVE_SECONDS, self._end, key)
        self._given[key] = tensor, timer
        return {
            "key": key,
            "outputs": outputs,
            "stored": self._store.holds(tensor),
            "by_ticket": tickets == [True],
            "heap": astuple(self._store.arena.heap.address),
        }

    def _end(self, key: str) -> None:
        """RPC: it has been pulled, or will not be."""
        _, timer = self._given.pop(key, (None, None))
        if timer is not None:
            timer.cancel()


def _pattern(torch: Any) -> Any:
    return torch.arange(TRIAL_BYTES // 8, dtype=torch.int64)


def _describe(device: str) -> dict[str, Any]:
    if device == "cpu":
        return {"name": "cpu", "nbytes": None, "uuid": None}
    import torch

    properties = torch.cuda.get_device_properties(device)
    return {
        "name": f"{device} ({properties.name})",
        "nbytes": int(properties.total_memory),
        "uuid": str(getattr(properties, "uuid", "")) or None,
    }
