"""Pull: a one-sided get from another process against a plain copy, and against a Dask comm.

The rivals: `numpy.copyto` of as many bytes within the process, which a bare get must match; and one
request over Dask's TCP comm for a torch tensor as a task's output, which a pull with everything that
belongs to it replaces. All memory was touched before, and no byte is in a cache when a clock starts.
Rounds alternate, medians are compared.
"""

from __future__ import annotations

import asyncio
import multiprocessing
import statistics
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from multiprocessing.connection import Connection
from typing import Any

import numpy as np

from st2i_dask import _core
from st2i_dask.outputs import TaskOutputs
from worker_plugin.heap import Ticket
from worker_plugin.host_heap import HostHeap

KIB, MIB = 1 << 10, 1 << 20
SIZES = (64 * KIB, MIB, 24 * MIB, 128 * MIB)
ROUNDS = 31
#: More than the caches of most machines hold, bytes.
SWEEP = 128 * MIB


def run(sizes: Sequence[int] = SIZES, rounds: int = ROUNDS) -> dict[str, Any]:
    """Per size in bytes: milliseconds of a get and of a pull, and ratios; below 1 is faster.

    `worst_vs_copy`, `worst_vs_dask`: the largest of these.
    """
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    owner = context.Process(target=_serve, args=(theirs, tuple(sizes)), daemon=True)
    owner.start()
    theirs.close()
    try:
        address, tickets = ours.recv()
        figures: dict[str, Any] = asyncio.run(_measure(address, tickets, rounds))
    finally:
        ours.close()  # ends the owner
        owner.join(20)
        owner.kill()
    for rival in ("vs_copy", "vs_dask"):
        figures[f"worst_{rival}"] = max(figures[rival])
    return figures


async def _measure(address: str, tickets: list[Ticket], rounds: int) -> dict[str, list[Any]]:
    import torch
    from distributed.comm import connect

    names = ("sizes", "get_ms", "pull_ms", "vs_copy", "vs_dask")
    figures: dict[str, list[Any]] = {name: [] for name in names}
    heap = HostHeap(MIB)
    where = tickets[0].heap
    pid, fd = where.place
    peer = _core.Peer(pid, fd, f"st2i-arena-{where.uuid}")
    comm = await connect(address)
    try:
        for index, ticket in enumerate(tickets):
            clock = _Clock()
            into = torch.zeros(ticket.nbytes, dtype=torch.uint8)
            array, at = into.numpy(), into.data_ptr()
            source = np.full(ticket.nbytes, 1, np.uint8)
            for _ in range(rounds + 1):
                with clock("copy"):
                    np.copyto(array, source)
                with clock("get"):
                    there = peer.get(ticket.offset, ticket.generation, ticket.nbytes, at)
                with clock("pull"):
                    there &= heap.pull(ticket, into)
                with clock("dask"):
                    await comm.write(index)
                    sent = await comm.read()
                assert there
                assert torch.equal(sent["data"].values[0], into)
            ms = clock.medians()
            figures["sizes"].append(ticket.nbytes)
            figures["get_ms"].append(round(ms["get"], 4))
            figures["pull_ms"].append(round(ms["pull"], 4))
            figures["vs_copy"].append(round(ms["get"] / ms["copy"], 3))
            figures["vs_dask"].append(round(ms["pull"] / ms["dask"], 3))
    finally:
        await comm.close()
        heap.close()
    return figures


class _Clock:
    """Times blocks of code by name, each from cold caches."""

    def __init__(self) -> None:
        self._times: dict[str, list[float]] = {}
        self._sweep = np.zeros(SWEEP, np.uint8)

    @contextmanager
    def __call__(self, name: str) -> Iterator[None]:
        self._sweep += 1
        time.sleep(0.005)  # a whole time slice ahead: a busy machine would end this one soon
        start = time.perf_counter()
        yield
        self._times.setdefault(name, []).append(time.perf_counter() - start)

    def medians(self) -> dict[str, float]:
        """Milliseconds. Without the first round, which connects and maps."""
        return {name: 1e3 * statistics.median(times[1:]) for name, times in self._times.items()}


def _serve(pipe: Connection, sizes: tuple[int, ...]) -> None:
    """The other process: a heap with a block of each size, and the same bytes over a comm."""
    asyncio.run(_answer(pipe, sizes))


async def _answer(pipe: Connection, sizes: tuple[int, ...]) -> None:
    from distributed.comm import CommClosedError, listen
    from distributed.protocol import to_serialize

    heap = HostHeap(sum(sizes) + len(sizes) * MIB)
    tickets, outputs = [], []
    for number, nbytes in enumerate(sizes):
        block = heap.allocate(nbytes)
        assert block is not None
        tensor = heap.tensor(block).fill_(number + 2)
        tickets.append(Ticket(heap.address, block.offset, nbytes, block.generation))
        outputs.append((tensor, TaskOutputs((tensor.clone(),))))

    async def handle(comm: Any) -> None:
        try:
            while True:
                wanted = await comm.read()
                await comm.write({"status": "OK", "data": to_serialize(outputs[wanted][1])})
        except CommClosedError:
            pass

    async with listen("tcp://127.0.0.1", handle) as listener:
        pipe.send((listener.contact_address, tickets))
        # Until the measuring process closes its end, or dies.
        await asyncio.to_thread(pipe.poll, None)
