"""Attaching to a Dask cluster: the one place that puts scheduler and worker plugins together."""

from __future__ import annotations

import builtins
import types
import weakref
from collections.abc import Callable
from importlib.metadata import version
from typing import TYPE_CHECKING, Any

from . import _core
from .async_client import awaitable
from .config import ALLOCATORS as ALLOCATORS
from .config import WEIGHTS as WEIGHTS
from .config import checked_option, worker_options
from .errors import AttachError
from .shielded import shielded_children

if TYPE_CHECKING:
    from distributed import Client, LocalCluster

# Packages whose version decides the pixels: they must agree between workers.
PIXEL_PACKAGES = ("torch", "diffusers", "transformers")

_attached: weakref.WeakSet[Client] = weakref.WeakSet()


@awaitable
def attach(
    client: Client,
    *,
    memory_bytes: int | str | None = None,
    arena_bytes: int | str | None = None,
    allocator: str | None = None,
    nvshmem: bool | None = None,
    weights: str | None = None,
    host_bytes: int | str | None = None,
    load_bandwidth: int | str | None = None,
    device: str | None = None,
) -> None:
    """Make the client's cluster serve workflows. Idempotent; `submit` calls it when needed.

    memory_bytes: budget of each worker for weights, tensors and activations ("8 GiB" or bytes).
        Default: half of the worker's memory limit, or 80 % of its CUDA device.
    arena_bytes: the part of it that is the worker's arena, where tensors wait for who needs them and
        weights lie that leave room for them. Default: a quarter, at most 1 GiB. Host memory is taken
        as it is used.
    allocator: of the arena: "best_fit" (default) or "buddy".
    nvshmem: False keeps arenas in host memory also on CUDA devices. Default: in device memory where
        nvshmem4py is installed and the workers' world comes about in time.
    weights: how models are kept: "elastic" (default: layer by layer, first layers longest), or, to
        compare, "pipelined" (nothing kept between invocations), "mcache" (whole models), "wcache"
        (whole workflows), "nocache" (the current request's models).
    host_bytes: files of models kept in each machine's memory, those not in use included. Default: half
        of it.
    load_bandwidth: bytes a second ("2 GiB") that a worker copies from host memory at most, so that
        loads leave the rest to what runs on the same machine. Default: no limit.
    device: torch device of the workers. Default: CUDA where there is one.

    What is not given here is taken from the configuration of each worker's node (`st2i.worker`), else
    it is the default; settings of the scheduler are taken from its node's (`st2i.scheduler`).

    Without options, a cluster that is attached already keeps its settings; with options, workers
    start anew with these, and those that are not given go back to what is configured. AttachError says
    which node lacks the package or has another version. An asynchronous client awaits it.
    """
    if not hasattr(client, "asynchronous") or not hasattr(client, "run_on_scheduler"):
        raise AttachError(
            f"{type(client).__name__} is no Dask client; make one: distributed.Client(address)"
        )
    if client.status != "running":
        raise AttachError(
            f"the client is {client.status}; connect a new distributed.Client, and await one that is "
            "asynchronous"
        )
    given = {
        "memory_bytes": memory_bytes,
        "arena_bytes": arena_bytes,
        "allocator": allocator,
        "nvshmem": nvshmem,
        "weights": weights,
        "host_bytes": host_bytes,
        "load_bandwidth": load_bandwidth,
        "device": device,
    }
    options = {name: checked_option(name, value) for name, value in given.items()}
    budget, arena = options["memory_bytes"], options["arena_bytes"]
    configured = any(option is not None for option in options.values())
    if client in _attached and not configured:
        return
    worker_options()  # an unknown key here is said here
    _check_versions(client)
    if device is not None and device != "cpu":
        _check_device(client, device)
    if arena is not None or budget is not None:
        _check_memory(client, budget, arena, device)

    from scheduler_plugin.plugin import ServingSchedulerPlugin
    from worker_plugin.plugin import ServingPlugin

    client.register_plugin(ServingSchedulerPlugin())
    plugin = ServingPlugin(**options, expected=version("st2i_dask"))
    plugin.idempotent = not configured
    results = client.register_plugin(plugin)
    for address, result in (results or {}).items():
        if isinstance(result, dict) and result.get("status") == "error":
            raise AttachError(
                f"worker {address} could not start serving: {result.get('text', result)}; "
                "see its log"
            )
    _attached.add(client)


def local_cluster(n_workers: int = 2, **options: Any) -> LocalCluster:
    """A Dask cluster on this machine: one process and one thread per worker.

    Ctrl-C, and interrupting a notebook's kernel, reaches this process and not the workers.

    options: further `distributed.LocalCluster` arguments (memory_limit, dashboard_address, ...).
    """
    from distributed import LocalCluster

    if n_workers < 1:
        raise AttachError(f"n_workers={n_workers}; a cluster needs at least 1 worker")
    with shielded_children():
        return LocalCluster(
            n_workers=n_workers, **{"threads_per_worker": 1, "processes": True, **options}
        )


def _check_versions(client: Client) -> None:
    probe = by_value(_versions)
    here = version("st2i_dask")
    nodes = {"scheduler": client.run_on_scheduler(probe), **client.run(probe)}
    for node, found in nodes.items():
        where = node if node == "scheduler" else f"worker {node}"
        if found["st2i_dask"] is None:
            raise AttachError(
                f"the {where} cannot import st2i_dask; install st2i_dask {here} there "
                "(pip install st2i_dask) and restart it"
            )
        if found["st2i_dask"] != here:
            raise AttachError(
                f"the {where} has st2i_dask {found['st2i_dask']}, this client {here}; "
                "install the same version on client, scheduler and workers"
            )
    workers = {node: found for node, found in nodes.items() if node != "scheduler"}
    for package in PIXEL_PACKAGES:
        seen = {found[package]: node for node, found in workers.items()}
        if len(seen) > 1:
            listing = ", ".join(f"{v or 'none'} on {node}" for v, node in seen.items())
            raise AttachError(
                f"workers differ in {package} ({listing}); images would depend on where they "
                "run; install one version everywhere"
            )


def _check_device(client: Client, device: str) -> None:
    """Before anything is registered: a plugin that cannot start would stop the workers."""
    for worker, problem in client.run(by_value(_device_problem), device).items():
        if problem:
            raise AttachError(
                f"worker {worker} has no device {device!r}: {problem}; leave device out, or use "
                "'cpu'"
            )


def _device_problem(device: str) -> str | None:
    import torch

    try:
        torch.empty(1, device=device)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return None


def _check_memory(
    client: Client, memory: int | None, arena: int | None, device: str | None
) -> None:
    """Before anything is registered: a tensor must fit the arena, the arena its budget, with room for
    as much beside it."""
    smallest = _core.GRANULE
    if memory is not None and memory < 2 * smallest:
        raise AttachError(
            f"memory_bytes={memory:,}; a worker needs at least {2 * smallest:,} bytes (a tensor in "
            "its arena and as much beside it); leave it out for the default"
        )
    if arena is None:
        return
    whose = "the worker's budget" if memory is None else "memory_bytes"
    for worker, budget in client.run(by_value(_budget), device).items():
        limit = (memory or budget) - smallest
        if not smallest <= arena <= limit:
            raise AttachError(
                f"arena_bytes={arena:,} on worker {worker}; an arena has {smallest:,} bytes (one "
                f"tensor) to {limit:,} bytes ({whose} less one tensor); leave it out for the default"
            )


def _budget(device: str | None, dask_worker: Any) -> int:
    from st2i_dask.config import worker_options
    from worker_plugin.budget import default_memory
    from worker_plugin.plugin import default_device

    own = worker_options()
    device = device or own["device"] or default_device()
    return own["memory_bytes"] or default_memory(dask_worker, device)


def _versions() -> dict[str, str | None]:
    from importlib.metadata import PackageNotFoundError, version

    found: dict[str, str | None] = {}
    for package in ("st2i_dask", "torch", "diffusers", "transformers"):
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            found[package] = None
    return found


def by_value(function: Callable[..., Any]) -> Callable[..., Any]:
    """A copy that pickles with its code: the other side may lack this package."""
    copy = types.FunctionType(function.__code__, {"__builtins__": builtins}, function.__name__)
    copy.__module__ = "__main__"
    return copy
