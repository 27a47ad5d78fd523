"""How many bytes of its device an executor may use, and which part of them is its arena."""

from __future__ import annotations

from typing import Any

from st2i_dask._core import GRANULE

#: A budget that nobody set: this share of the worker's memory limit, or of its CUDA device.
CPU_SHARE = 0.5
DEVICE_SHARE = 0.8

#: Of the machine's memory, for files of models.
HOST_SHARE = 0.5

#: An arena that nobody sized: this share of the budget, at most so many bytes.
ARENA_SHARE = 0.25
ARENA_LIMIT = 1 << 30


def default_memory(worker: Any, device: str) -> int:
    """Budget of an executor for weights, tensors and activations, bytes."""
    if device != "cpu":
        import torch

        return int(torch.cuda.get_device_properties(device).total_memory * DEVICE_SHARE)
    return int(memory_limit(worker) * CPU_SHARE)


def default_arena(memory: int) -> int:
    """Size of the arena of an executor with such a budget, bytes."""
    return max(GRANULE, min(int(memory * ARENA_SHARE), ARENA_LIMIT))


def default_host() -> int:
    """Budget of the host tier: files of models in the machine's memory, bytes."""
    import psutil

    return int(psutil.virtual_memory().total * HOST_SHARE)


def memory_limit(worker: Any) -> int:
    """The worker's own limit, or the machine's memory, bytes."""
    limit = worker.memory_manager.memory_limit
    if limit:
        return int(limit)
    import psutil

    return int(psutil.virtual_memory().total)
