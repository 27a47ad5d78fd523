"""Which symmetric heap a worker gets: device memory over NVSHMEM where it can, host memory elsewhere."""

from __future__ import annotations

from importlib.util import find_spec
from typing import Any

from .heap import SymmetricHeap
from .host_heap import HostHeap

#: How long a worker waits to be in a world before it serves with its host heap, seconds.
ATTACH_SECONDS = 20.0


class WorkerHeap:
    """Opens a worker's heap and keeps its membership of an NVSHMEM world. Event loop only.

    nbytes: of the arena. allocator: "best_fit" or "buddy". nvshmem: False: never.
    """

    def __init__(self, worker: Any, device: str, nbytes: int, allocator: str, nvshmem: bool):
        self._worker = worker
        self._device = device
        self._nbytes = nbytes
        self._allocator = allocator
        self._nvshmem = nvshmem and device != "cpu" and find_spec("nvshmem") is not None
        self._member: Any = None

    async def open(self) -> SymmetricHeap:
        """The heap. An NVSHMEM world that does not come about in time is a warning in the log."""
        heap: SymmetricHeap | None = None
        if self._nvshmem:
            heap = await self._device_heap()
        return heap or HostHeap(self._nbytes, allocator=self._allocator)

    def leave(self) -> None:
        """The worker stops serving."""
        if self._member is not None:
            self._member.stop()
            self._member = None

    async def _device_heap(self) -> SymmetricHeap | None:
        import torch

        from .nvshmem_world import Member

        index = torch.device(self._device).index or 0
        self._member = Member(
            self._worker,
            device=index,
            nbytes=self._nbytes,
            kind=self._allocator,
        )
        self._member.start()
        heap: SymmetricHeap | None = await self._member.heap_within(ATTACH_SECONDS)
        if heap is None:
            await self._member.withdraw(f"no world in {ATTACH_SECONDS:g} s")
            self._member = None
        return heap
