"""Heaps of PEs in one process, over the fake."""

from __future__ import annotations

import threading

import torch

from st2i_dask._core import GRANULE
from worker_plugin.heap import Ticket
from worker_plugin.nvshmem_heap import NvshmemHeap

from .nvshmem_pe import pattern

ARENA = 64 * GRANULE
NAME = "a-world"


def attach_all(parts, nbytes=ARENA):
    """All PEs of one process attach, each in its thread as they wait for each other."""
    uid = parts[0][0].mint()
    threads = [
        threading.Thread(target=library.attach, args=(uid, number, len(parts), 0, nbytes))
        for number, (library, _, _) in enumerate(parts)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
        assert not thread.is_alive()
    return [
        NvshmemHeap(library, cuda, name=NAME, generation=3, pe=number, n_pes=len(parts))
        for number, (library, cuda, _) in enumerate(parts)
    ]


def written(heap, seed, nbytes):
    """(tensor, ticket) of a new block with a pattern."""
    block = heap.allocate(nbytes)
    tensor = heap.tensor(block)
    tensor.copy_(pattern(seed, nbytes))
    heap.settle()
    return tensor, Ticket(heap.address, block.offset, block.nbytes, block.generation)


def pulled(heap, ticket):
    into = torch.zeros(ticket.nbytes, dtype=torch.uint8)
    return into if heap.pull(ticket, into) else None
