"""Which heap a worker gets: host memory on a CPU, device memory where a world comes about in time."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from types import SimpleNamespace

import pytest

from worker_plugin import heaps, nvshmem_world
from worker_plugin.heaps import WorkerHeap
from worker_plugin.host_heap import HostHeap

MIB = 1 << 20


def worker(memory_limit=64 * MIB):
    return SimpleNamespace(memory_manager=SimpleNamespace(memory_limit=memory_limit))


def open_heap(heap):
    return asyncio.run(heap.open())


class Member:
    """Stands in for `nvshmem_world.Member`: `outcome` is its heap."""

    outcome: object = None

    def __init__(self, worker, **options):
        self.options, self.calls = options, []
        Member.made = self

    def start(self):
        self.calls.append("start")

    async def heap_within(self, seconds):
        self.calls.append("heap_within")
        return self.outcome

    async def withdraw(self, why):
        self.calls.append("withdraw")

    def stop(self):
        self.calls.append("stop")


@pytest.fixture
def device(monkeypatch):
    """A machine that looks as if it had a CUDA device and NVSHMEM."""
    monkeypatch.setattr(heaps, "find_spec", lambda name: object())
    monkeypatch.setattr(nvshmem_world, "Member", Member)
    monkeypatch.setattr(Member, "outcome", None)


def test_on_a_cpu_the_heap_is_in_host_memory(device):
    heap = open_heap(WorkerHeap(worker(), "cpu", 3 * MIB, "buddy", True))
    assert isinstance(heap, HostHeap)
    assert heap.address.nbytes == 3 * MIB
    heap.close()


def test_a_world_that_comes_about_gives_the_heap(device, monkeypatch):
    monkeypatch.setattr(Member, "outcome", object())
    worker_heap = WorkerHeap(worker(), "cuda:3", 20 * MIB, "buddy", True)
    assert open_heap(worker_heap) is Member.outcome
    assert Member.made.options == {"device": 3, "nbytes": 20 * MIB, "kind": "buddy"}
    assert Member.made.calls == ["start", "heap_within"]
    worker_heap.leave()
    assert Member.made.calls[-1] == "stop"


def test_without_a_world_in_time_the_worker_withdraws_and_serves_from_host_memory(device):
    worker_heap = WorkerHeap(worker(), "cuda", MIB, "best_fit", True)
    heap = open_heap(worker_heap)
    assert isinstance(heap, HostHeap)
    assert Member.made.calls == ["start", "heap_within", "withdraw"]
    worker_heap.leave()
    heap.close()


@pytest.mark.parametrize("why", ["switched off", "not installed"])
def test_no_world_is_tried(device, monkeypatch, why):
    if why == "not installed":
        monkeypatch.setattr(heaps, "find_spec", lambda name: None)
    Member.made = None
    heap = open_heap(WorkerHeap(worker(), "cuda", MIB, "best_fit", why != "switched off"))
    assert isinstance(heap, HostHeap)
    assert Member.made is None
    heap.close()


def test_nothing_of_cuda_is_imported_for_a_cpu():
    program = (
        "import asyncio, sys; from types import SimpleNamespace as S\n"
        "from worker_plugin.heaps import WorkerHeap\n"
        "import worker_plugin.plugin\n"
        "w = S(memory_manager=S(memory_limit=2**26))\n"
        "asyncio.run(WorkerHeap(w, 'cpu', 2**20, 'best_fit', True).open())\n"
        "print([m for m in sys.modules if m.split('.')[0] in ('nvshmem', 'cupy', 'cuda', 'torch')])\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=60
    )
    assert done.stdout.strip() == "[]", done.stderr
