"""The Dask WorkerPlugin: gives a worker its executor."""

from __future__ import annotations

import logging
from importlib.metadata import version
from typing import Any

from distributed import WorkerPlugin

from st2i_dask.errors import AttachError
from st2i_dask.invocation import WORKER_PLUGIN

from .executor import CacheExecutor
from .model_cache import ModelCache
from .runner import StepRunner

logger = logging.getLogger(__name__)


class ServingPlugin(WorkerPlugin):
    """Installed on every worker, also on those that join later.

    model_bytes: budget for loaded models in bytes; None: half of the worker's memory limit, or 80 %
        of a CUDA device's memory.
    device: a torch device name; None: the first CUDA device if there is one, else the CPU.
    expected: version of st2i_dask at the client; a worker with another one refuses to serve.
    """

    name = WORKER_PLUGIN

    def __init__(self, *, model_bytes: int | None, device: str | None, expected: str):
        self.model_bytes = model_bytes
        self.device = device
        self.expected = expected
        self.executor: CacheExecutor | None = None
        self.runner: StepRunner | None = None

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "executor": None, "runner": None}

    def setup(self, worker: Any) -> None:
        here = version("st2i_dask")
        if here != self.expected:
            raise AttachError(
                f"worker {worker.address} has st2i_dask {here}, the client {self.expected}; "
                "install the same version on both"
            )
        device = self.device or _default_device()
        budget = self.model_bytes or _default_budget(worker, device)
        self.executor = CacheExecutor(ModelCache(budget), device)
        self.runner = StepRunner(worker, self.executor)
        self.runner.start()
        # Dask holds messages back for some milliseconds to batch them; a chain of short tasks
        # spends most of its time there.
        worker.batched_stream.interval = 0
        logger.info("st2i worker: device %s, %s bytes for models", device, f"{budget:,}")

    def teardown(self, worker: Any) -> None:
        if self.executor is not None and self.runner is not None:
            self.runner.stop()
            self.executor.models.clear()
            self.executor = self.runner = None


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
    limit = worker.memory_manager.memory_limit
    if limit:
        return int(limit // 2)
    import psutil

    return int(psutil.virtual_memory().total // 2)
