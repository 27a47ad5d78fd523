"""The Dask WorkerPlugin: gives a worker its executor."""

from __future__ import annotations

import logging
from importlib.metadata import version
from typing import Any

from distributed import WorkerPlugin

from st2i_dask.errors import AttachError
from st2i_dask.invocation import WORKER_PLUGIN

from .arena import Arena
from .callback_pulls import CallbackPulls
from .exchange import Exchange
from .executor import CacheExecutor
from .heaps import WorkerHeap, memory_limit
from .model_cache import ModelCache
from .runner import StepRunner
from .tensor_store import TensorStore

logger = logging.getLogger(__name__)


class ServingPlugin(WorkerPlugin):
    """Installed on every worker, also on those that join later.

    model_bytes: budget for loaded models in bytes; None: half of the worker's memory limit, or 80 %
        of a CUDA device's memory.
    arena_bytes, allocator, nvshmem: see heaps.WorkerHeap.
    device: a torch device name; None: the first CUDA device if there is one, else the CPU.
    expected: version of st2i_dask at the client; a worker with another one refuses to serve.
    """

    name = WORKER_PLUGIN

    def __init__(
        self,
        *,
        model_bytes: int | None,
        arena_bytes: int | None,
        allocator: str,
        nvshmem: bool,
        device: str | None,
        expected: str,
    ):
        self.model_bytes = model_bytes
        self.arena_bytes = arena_bytes
        self.allocator = allocator
        self.nvshmem = nvshmem
        self.device = device
        self.expected = expected
        self.heap: WorkerHeap | None = None
        self.executor: CacheExecutor | None = None
        self.runner: StepRunner | None = None
        self.store: TensorStore | None = None
        self.exchange: Exchange | None = None
        self.pulls: CallbackPulls | None = None

    def __getstate__(self) -> dict[str, Any]:
        on_worker = ("heap", "executor", "runner", "store", "exchange", "pulls")
        return {**self.__dict__, **dict.fromkeys(on_worker)}

    async def setup(self, worker: Any) -> None:
        here = version("st2i_dask")
        if here != self.expected:
            raise AttachError(
                f"worker {worker.address} has st2i_dask {here}, the client {self.expected}; "
                "install the same version on both"
            )
        device = self.device or _default_device()
        budget = self.model_bytes or _default_budget(worker, device)
        self.heap = WorkerHeap(worker, device, self.arena_bytes, self.allocator, self.nvshmem)
        heap = await self.heap.open()
        self.store = TensorStore(Arena(heap))
        self.executor = CacheExecutor(ModelCache(budget), device, self.store)
        self.exchange = Exchange(worker, self.store)
        self.exchange.start()
        self.pulls = CallbackPulls(worker, self.store, self.exchange)
        self.pulls.start()
        self.runner = StepRunner(worker, self.executor, self.pulls)
        self.runner.start()
        logger.info(
            "st2i worker: device %s, %s bytes for models, %s arena of %s bytes",
            device,
            f"{budget:,}",
            heap.address.kind,
            f"{heap.address.nbytes:,}",
        )

    def teardown(self, worker: Any) -> None:
        if self.executor is None or self.runner is None:
            return
        assert self.exchange is not None
        assert self.pulls is not None
        assert self.store is not None
        assert self.heap is not None
        self.runner.stop()
        self.pulls.stop()
        self.exchange.stop()
        self.executor.models.clear()
        self.heap.leave()
        self.store.arena.heap.close()
        self.heap = self.executor = self.runner = self.pulls = self.exchange = self.store = None


def _default_device() -> str:
    """'cuda' where the driver shows a device. torch is imported only if it might."""
    from pathlib import Path

    if not Path("/dev/nvidiactl").exists():
        return "cpu"
    import torch

    return "cuda" if torch.cuda.is_available() else "cpu"


def _default_budget(worker: Any, device: str) -> int:
    if device != "cpu":
        import torch

        return int(torch.cuda.get_device_properties(device).total_memory * 0.8)
    return memory_limit(worker) // 2
