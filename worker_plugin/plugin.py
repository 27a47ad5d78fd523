"""The Dask WorkerPlugin: gives a worker its executor."""

from __future__ import annotations

import logging
from importlib.metadata import version
from typing import Any

from distributed import WorkerPlugin

from st2i_dask import logs
from st2i_dask.config import worker_options
from st2i_dask.errors import AttachError
from st2i_dask.invocation import WORKER_PLUGIN
from st2i_dask.metrics_page import MetricsPage

from .arena import Arena
from .budget import default_arena, default_host, default_memory
from .callback_pulls import CallbackPulls
from .checkup import Checkup
from .content import ContentIds
from .digests import DigestStore
from .exchange import Exchange
from .executor import Executor
from .freed_memory import keep_freed_memory
from .gangs import Gangs
from .heaps import WorkerHeap
from .holdings import holdings
from .metrics import WorkerCollector
from .node_cache import node_cache
from .orchestrators import Orchestrators
from .profiles import Profiles
from .runner import StepRunner
from .tensor_store import TensorStore
from .weights import WeightStore

logger = logging.getLogger(__name__)


class ServingPlugin(WorkerPlugin):
    """Installed on every worker, also on those that join later.

    What is None is taken from the configuration of the worker's node, see st2i_dask.config.

    memory_bytes: budget for weights, tensors and activations; else budget.default_memory.
    arena_bytes: the part of it that is the arena; else budget.default_arena.
    allocator, nvshmem: see heaps.WorkerHeap. weights (its `mode`), host_bytes, load_bandwidth: see
        weights.WeightStore.
    device: a torch device name; else the first CUDA device if there is one, else the CPU.
    expected: version of st2i_dask at the client; a worker with another one refuses to serve.
    """

    name = WORKER_PLUGIN

    def __init__(
        self,
        *,
        memory_bytes: int | None,
        arena_bytes: int | None,
        allocator: str | None,
        nvshmem: bool | None,
        weights: str | None,
        host_bytes: int | None,
        load_bandwidth: int | None,
        device: str | None,
        expected: str,
    ):
        self.memory_bytes = memory_bytes
        self.arena_bytes = arena_bytes
        self.allocator = allocator
        self.nvshmem = nvshmem
        self.weights = weights
        self.host_bytes = host_bytes
        self.load_bandwidth = load_bandwidth
        self.device = device
        self.expected = expected
        #: Whether `setup` has still to end, one way or the other.
        self.starting = True
        self.heap: WorkerHeap | None = None
        self.executor: Executor | None = None
        self.runner: StepRunner | None = None
        self.store: TensorStore | None = None
        self.exchange: Exchange | None = None
        self.pulls: CallbackPulls | None = None
        self.gangs: Gangs | None = None
        self.orchestrators: Orchestrators | None = None
        self.checkup: Checkup | None = None
        self.metrics: MetricsPage | None = None

    def __getstate__(self) -> dict[str, Any]:
        on_worker = ("heap", "executor", "runner", "store", "exchange", "pulls", "orchestrators")
        on_worker += ("gangs", "checkup", "metrics")
        return {**self.__dict__, **dict.fromkeys(on_worker)}

    async def setup(self, worker: Any) -> None:
        try:
            await self._start(worker)
        finally:
            self.starting = False

    async def _start(self, worker: Any) -> None:
        here = version("st2i_dask")
        if here != self.expected:
            raise AttachError(
                f"worker {worker.address} has st2i_dask {here}, the client {self.expected}; "
                "install the same version on both"
            )
        logs.set_up()
        options = worker_options()
        options.update(
            {name: value for name in options if (value := getattr(self, name)) is not None}
        )
        device = options["device"] or default_device()
        if device == "cpu":
            keep_freed_memory()
        nvshmem = options["nvshmem"] is not False
        cache = node_cache()
        memory = options["memory_bytes"] or default_memory(worker, device)
        arena_bytes = options["arena_bytes"] or default_arena(memory)
        self.heap = WorkerHeap(worker, device, arena_bytes, options["allocator"], nvshmem)
        heap = await self.heap.open()
        try:
            arena = Arena(heap)
            models = WeightStore(
                memory=memory,
                device=device,
                arena=arena,
                mode=options["weights"],
                host_bytes=options["host_bytes"] or default_host(),
                bandwidth=options["load_bandwidth"],
                profiles=Profiles(cache / "profiles" if cache is not None else None),
                ids=ContentIds(DigestStore(cache) if cache is not None else None),
            )
        except BaseException:
            self.heap.leave()
            heap.close()
            raise
        self.store = TensorStore(arena)
        self.executor = Executor(models, self.store)
        worker.handlers["st2i_models"] = self._models
        worker.handlers["st2i_holdings"] = self._holdings
        self.exchange = Exchange(worker, self.store)
        self.exchange.start()
        self.pulls = CallbackPulls(worker, self.store, self.exchange)
        self.pulls.start()
        self.gangs = Gangs(worker, self.executor, self.exchange, self._announce)
        self.gangs.start()
        self.runner = StepRunner(worker, self.executor, self.pulls, self.gangs)
        self.runner.start()
        self.runner.announce()
        self.orchestrators = Orchestrators(worker, self.executor)
        self.checkup = Checkup(worker, self.store, self.exchange, device=device, nvshmem=nvshmem)
        self.checkup.start()
        self.metrics = MetricsPage(worker, WorkerCollector(worker.address, self.store, models))
        self.metrics.open()
        logger.info(
            "st2i worker: device %s, budget of %s bytes, %s arena of %s of them",
            device,
            f"{memory:,}",
            heap.address.kind,
            f"{heap.address.nbytes:,}",
        )

    def teardown(self, worker: Any) -> None:
        if self.executor is None or self.runner is None:
            return
        assert self.exchange is not None
        assert self.pulls is not None
        assert self.gangs is not None
        assert self.store is not None
        assert self.heap is not None
        assert self.orchestrators is not None
        assert self.checkup is not None
        assert self.metrics is not None
        self.metrics.close()
        self.checkup.stop()
        self.orchestrators.close()
        self.runner.stop()
        self.gangs.stop()
        self.pulls.stop()
        self.exchange.stop()
        for name in ("st2i_models", "st2i_holdings"):
            worker.handlers.pop(name, None)
        self.executor.close()
        self.heap.leave()
        self.store.arena.heap.close()
        self.heap = self.executor = self.runner = self.pulls = self.exchange = self.store = None
        self.orchestrators = self.checkup = self.metrics = self.gangs = None

    def transition(self, key: Any, start: str, finish: str, **message: Any) -> None:
        if self.orchestrators is not None:
            self.orchestrators.transitioned(key, finish)
        if self.runner is not None:
            self.runner.log.transitioned(key, start, finish)

    def _announce(self) -> None:
        if self.runner is not None:
            self.runner.announce()

    def _models(self) -> list[dict[str, Any]]:
        """RPC `st2i_models`."""
        return self.executor.models.models() if self.executor is not None else []

    def _holdings(self) -> dict[str, Any] | None:
        """RPC `st2i_holdings`; None while it does not serve."""
        if self.executor is None or self.store is None:
            return None
        return holdings(self.store.arena, self.executor.models)


def default_device() -> str:
    """'cuda' where the driver shows a device. torch is imported only if it might."""
    from pathlib import Path

    if not Path("/dev/nvidiactl").exists():
        return "cpu"
    import torch

    return "cuda" if torch.cuda.is_available() else "cpu"
