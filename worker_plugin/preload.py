"""`dask worker ADDRESS --preload worker_plugin.preload`: the worker serves workflows from its start.

Options, after the preload, are those of `st2i.attach`; the configuration `st2i.worker` says the same:

    dask worker tcp://scheduler:8786 --nthreads 1 --preload worker_plugin.preload --memory-bytes "40 GiB"

They hold for this node alone; its worker keeps them also when a client attaches without options.
"""

from __future__ import annotations

import asyncio
import logging
import pickle
from contextlib import suppress
from importlib.metadata import version
from typing import Any

import click
import dask.config

from st2i_dask import logs
from st2i_dask._core import GRANULE
from st2i_dask.config import ALLOCATORS, WEIGHTS, check_node, worker_options
from st2i_dask.errors import AttachError, St2iError
from st2i_dask.invocation import WORKER_PLUGIN

from .budget import default_arena, default_memory
from .plugin import ServingPlugin, default_device

# Not below this module's own name: Dask's configuration shows the logs of `distributed` alone.
logger = logging.getLogger("distributed.worker.st2i")

#: How often and how long apart the scheduler is asked whether it serves: it may be starting.
_ASKED, _APART_S = 2, 1.0

# Dask imports this module before it logs more than its name. What is wrong in the configuration is said
# when it parses the options.
with suppress(AttachError):
    logs.set_up()


class _Checked(click.Command):
    """Dask parses the options before it starts the worker, and logs what fails later: so options and
    configuration are checked while parsing."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        rest = super().parse_args(ctx, args)
        try:
            check_node()
            with dask.config.set(_configuration(ctx.params)):
                check_device(worker_options()["device"])
        except St2iError as error:
            raise click.UsageError(str(error)) from error
        return rest


@click.command(cls=_Checked)
@click.option("--memory-bytes", help="Budget for weights, tensors and activations.")
@click.option("--arena-bytes", help="The part of it that is the arena.")
@click.option("--allocator", type=click.Choice(ALLOCATORS), help="Of the arena.")
@click.option("--nvshmem/--no-nvshmem", default=None, help="Arenas in device memory, or not.")
@click.option("--weights", type=click.Choice(WEIGHTS), help="How models are kept.")
@click.option("--host-bytes", help="Files of models kept in the machine's memory.")
@click.option("--load-bandwidth", help="Bytes per second copied from host memory at most.")
@click.option("--device", help="cpu, cuda or cuda:N.")
async def dask_setup(worker: Any, **options: Any) -> None:
    dask.config.set(_configuration(options))
    serving = await _serving_version(worker)
    try:
        check_arena(worker)
        check_version(serving)
    except AttachError as error:
        # Dask goes on after other exceptions, with a worker that cannot serve.
        logger.error("%s", error)
        raise SystemExit(1) from error
    if worker.state.nthreads != 1:
        logger.warning(
            "this worker has %s threads; an executor has one: start it with --nthreads 1",
            worker.state.nthreads,
        )
    if serving is None:
        logger.warning(
            "the scheduler %s does not serve workflows; start it with --preload "
            "scheduler_plugin.preload, or call st2i.attach(client). This worker runs plain Dask "
            "tasks until then",
            worker.scheduler.address,
        )
        return
    # The scheduler hands it to this worker when it registers, and to workers without the preload. It
    # holds no options: every worker takes its own node's.
    plugin = ServingPlugin(**dict.fromkeys(worker_options()), expected=version("st2i_dask"))
    await worker.scheduler.register_worker_plugin(
        plugin=pickle.dumps(plugin), name=WORKER_PLUGIN, idempotent=True
    )


async def _serving_version(worker: Any) -> str | None:
    """Of the scheduler's plugin; None: it has none. Waits for a scheduler that is not there yet, as
    Dask's worker does."""
    for attempt in range(_ASKED):
        if attempt:
            await asyncio.sleep(_APART_S)
        # Dask answers None, and logs it, when it does not know the question.
        answer = await _settings(worker)
        if answer is not None:
            return str(answer.get("version"))
    return None


async def _settings(worker: Any) -> Any:
    while True:
        try:
            return await worker.scheduler.st2i_settings()
        except OSError as error:
            logger.info("waiting for the scheduler %s: %s", worker.scheduler.address, error)
            await asyncio.sleep(_APART_S)


def check_device(device: str | None) -> None:
    """AttachError when this machine has no such device."""
    if device in (None, "cpu"):
        return
    import torch

    try:
        torch.empty(1, device=device)
    except Exception as error:
        raise AttachError(
            f"device={device!r} is not there: {type(error).__name__}: {error}; leave it out, or use "
            "'cpu'"
        ) from error


def check_version(scheduler: str | None) -> None:
    """AttachError when the scheduler serves with another version of the package."""
    here = version("st2i_dask")
    if scheduler not in (None, here):
        raise AttachError(
            f"this worker has st2i_dask {here}, the scheduler {scheduler}; install the same version "
            "on both"
        )


def check_arena(worker: Any) -> None:
    """AttachError unless the arena leaves room for a tensor in its worker's budget."""
    options = worker_options()
    device = options["device"] or default_device()
    memory = options["memory_bytes"] or default_memory(worker, device)
    arena = options["arena_bytes"] or default_arena(memory)
    if not GRANULE <= arena <= memory - GRANULE:
        raise AttachError(
            f"an arena of {arena:,} bytes in a budget of {memory:,} bytes; an arena has {GRANULE:,} "
            f"bytes to the budget less {GRANULE:,}; set --memory-bytes and --arena-bytes, or leave "
            "them out"
        )


def _configuration(options: dict[str, Any]) -> dict[str, Any]:
    return {
        f"st2i.worker.{name.replace('_', '-')}": value
        for name, value in options.items()
        if value is not None
    }
