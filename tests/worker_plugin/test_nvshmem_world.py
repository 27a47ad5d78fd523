"""Workers on a Dask cluster join an NVSHMEM world, and what happens when something does not. On a fake
of the library; connections and, where said, processes are real."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import sys
from contextlib import asynccontextmanager

import cloudpickle
import pytest
import torch
from distributed import Client, LocalCluster, SchedulerPlugin, WorkerPlugin

from scheduler_plugin.world_service import WorldService
from st2i_dask._core import GRANULE
from worker_plugin.heap import Ticket
from worker_plugin.nvshmem_world import Member, Process

from . import nvshmem_fake, nvshmem_fake_cuda, nvshmem_pe
from .nvshmem_fake import Faults
from .nvshmem_pe import pattern

ARENA = 16 * GRANULE
BOUND = 20.0


class Forms(SchedulerPlugin):
    """What the serving plugin of the scheduler is to do."""

    name = "forms-worlds"

    def __init__(self, expected, **bounds):
        self.expected, self.bounds = expected, bounds

    async def start(self, scheduler):
        self.service = WorldService(lambda: self.expected, **self.bounds)
        scheduler.handlers.update(self.service.handlers)

    def remove_worker(self, scheduler, worker, **kwargs):
        self.service.left(worker)

    async def close(self):
        self.service._check()
        self.service.stop()


@asynccontextmanager
async def cluster_of(n_workers, *, expected=None, **bounds):
    async with (
        LocalCluster(
            n_workers=n_workers,
            processes=False,
            threads_per_worker=1,
            dashboard_address=":0",
            asynchronous=True,
        ) as cluster,
        Client(cluster, asynchronous=True) as client,
    ):
        await client.register_plugin(Forms(expected or n_workers, **bounds))
        yield cluster


class Joined:
    """A worker's member over a fake, as if the worker were a process."""

    def __init__(self, worker, root, faults=None, process=None, **options):
        packages, self.cuda, self.world = nvshmem_fake.parts(root, faults)
        self.process = process or Process()
        self.member = Member(
            worker,
            device=0,
            **{"nbytes": ARENA, **options},
            process=self.process,
            packages=lambda: packages,
            cuda=lambda device: self.cuda,
        )
        self.member.start()

    async def heap(self, seconds=BOUND):
        return await self.member.heap_within(seconds)

    async def close(self):
        self.member._check()
        self.member.stop()
        self.member._check()
        self.world.abandoned.set()
        for thread in self.process.threads:
            await asyncio.to_thread(thread.join, BOUND)
            assert not thread.is_alive()


def run(test):
    asyncio.run(asyncio.wait_for(test(), 60))


def warnings(caplog):
    return [r.getMessage() for r in caplog.records if r.name == "worker_plugin.nvshmem_world"]


async def until(condition, seconds=BOUND):
    for _ in range(int(seconds / 0.02)):
        if condition():
            return
        await asyncio.sleep(0.02)
    raise AssertionError("not in time")


def test_two_workers_attach_and_pull_from_each_other(tmp_path, caplog):
    async def test():
        async with cluster_of(2) as cluster:
            workers = list(cluster.workers.values())
            sizes = (ARENA, ARENA + 5 * GRANULE)
            joined = [
                Joined(worker, tmp_path, nbytes=nbytes)
                for worker, nbytes in zip(workers, sizes, strict=True)
            ]
            one, two = [await part.heap() for part in joined]
            assert one.address.nbytes == two.address.nbytes == ARENA - GRANULE
            assert one.address.uuid != two.address.uuid
            assert {one.address.place, two.address.place} == {(1, 0), (1, 1)}
            assert one.reach(two.address)
            block = two.allocate(1000)
            two.tensor(block).copy_(pattern(1, 1000))
            two.settle()
            into = torch.zeros(1000, dtype=torch.uint8)
            ticket = Ticket(two.address, block.offset, 1000, block.generation)
            assert one.pull(ticket, into)
            assert torch.equal(into, pattern(1, 1000))
            world = cluster.scheduler.plugins["forms-worlds"].service.world
            await until(lambda: world.standing(joined[0].process.name).phase == "up")
            assert warnings(caplog) == []
            # a lost PE: the other one hears of it and says so once
            await workers[1].close()
            await until(lambda: not one.reach(two.address))
            assert one.allocate(1) is not None
            (said,) = warnings(caplog)
            assert (
                f"world has ended and it uses other transports: worker {workers[1].address}" in said
            )
            assert "client.restart()" in said
            for part in joined:
                await part.close()

    run(test)


def test_a_late_worker_is_in_no_world_and_waits(tmp_path, caplog):
    async def test():
        async with cluster_of(3, expected=2) as cluster:
            workers = list(cluster.workers.values())
            joined = [Joined(worker, tmp_path) for worker in workers[:2]]
            heaps = [await part.heap() for part in joined]
            late = Joined(workers[2], tmp_path)
            assert await late.heap(0.3) is None
            assert all(heaps)
            assert warnings(caplog) == []  # nothing has gone wrong
            await late.member.withdraw("enough")
            world = cluster.scheduler.plugins["forms-worlds"].service.world
            assert world.standing(late.process.name).phase == "unknown"
            assert await late.heap() is None
            for part in (*joined, late):
                await part.close()

    run(test)


@pytest.mark.parametrize(
    ("faults", "reason"),
    [
        (Faults(code=7), "Status code 7"),
        (Faults(no_driver=True), "CUDA_ERROR_NO_DEVICE"),
        (Faults(bare=True), None),
    ],
)
def test_one_that_cannot_attach_takes_nobody_with_it(tmp_path, caplog, faults, reason):
    """`bare`: init returns and what comes next would crash; the other has passed init already."""

    async def test():
        async with cluster_of(2) as cluster:
            joined = [
                Joined(worker, tmp_path, fault)
                for worker, fault in zip(cluster.workers.values(), (faults, Faults()), strict=True)
            ]
            assert [await part.heap() for part in joined] == [None, None]
            said = warnings(caplog)
            assert len(said) == 2
            assert all("has no NVSHMEM heap and uses other transports" in text for text in said)
            assert all((reason or "started without CUDA device") in text for text in said)
            assert any("restart the workers" in text for text in said)
            for part in joined:
                await part.close()

    run(test)


@pytest.mark.parametrize("minting", [False, True])
def test_a_pe_that_never_comes_is_given_up(tmp_path, caplog, minting):
    """The third is told to attach, or to mint, and does not. Others hang in the library, not their
    workers."""

    async def test():
        async with cluster_of(3, attach_s=0.5) as cluster:
            workers = list(cluster.workers.values())
            joined = [Joined(worker, tmp_path) for worker in workers[:2]]
            scheduler = workers[2].scheduler
            if not minting:
                await asyncio.sleep(0.2)  # they become PE 0 and 1
            await scheduler.st2i_world_join(process="idle", worker=workers[2].address, nbytes=ARENA)
            assert [await part.heap() for part in joined] == [None, None]
            for part in joined:
                assert any(t.is_alive() for t in part.process.threads) != minting
            said = warnings(caplog)
            assert len(said) == 2
            assert all("not attached within 0.5 s" in text for text in said)
            for part in joined:
                await part.close()

    run(test)


def test_a_worker_gives_up_by_itself_when_the_scheduler_does_not(tmp_path, caplog):
    async def test():
        async with cluster_of(2, attach_s=600) as cluster:
            workers = list(cluster.workers.values())
            part = Joined(workers[0], tmp_path, attach_s=0.3)
            await asyncio.sleep(0.1)
            await workers[1].scheduler.st2i_world_join(
                process="idle", worker=workers[1].address, nbytes=ARENA
            )
            assert await part.heap() is None
            (said,) = warnings(caplog)
            assert "was not done in 0.3 s" in said
            assert "NVSHMEM_BOOTSTRAP_UID_SOCK_IFNAME" in said
            world = cluster.scheduler.plugins["forms-worlds"].service.world
            await until(lambda: world.standing("idle").phase == "ended")
            await part.close()

    run(test)


def test_a_process_attaches_once(tmp_path, caplog):
    """A plugin that is registered anew finds the heap; one that failed is not tried again."""

    async def test():
        async with cluster_of(2) as cluster:
            workers = list(cluster.workers.values())
            joined = [Joined(worker, tmp_path) for worker in workers]
            one, two = [await part.heap() for part in joined]
            joined[0].member.stop()
            one.close()
            assert not one.reach(two.address)
            again = Joined(workers[0], tmp_path, process=joined[0].process)
            assert await again.heap() is one
            assert one.reach(two.address)
            await joined[1].member.withdraw("test")
            await until(lambda: not one.reach(two.address))
            failed = Process()
            failed.tried = True
            third = Joined(workers[1], tmp_path, process=failed)
            assert await third.heap() is None
            assert "this process has tried before" in warnings(caplog)[-1]
            for part in (*joined, again, third):
                await part.close()

    run(test)


def test_a_scheduler_without_the_service_is_no_error(tmp_path, caplog):
    async def test():
        async with LocalCluster(
            n_workers=1, processes=False, dashboard_address=":0", asynchronous=True
        ) as cluster:
            part = Joined(next(iter(cluster.workers.values())), tmp_path)
            assert await part.heap() is None
            assert "has no NVSHMEM heap" in warnings(caplog)[0]
            await part.close()

    run(test)


# ---------------------------------------------------------------- in processes of their own


class Joins(WorkerPlugin):
    """The worker's side, in the worker's process. victim: the name of the worker that dies."""

    name = "joins"

    def __init__(self, root, victim=None, die=""):
        self.root, self.victim, self.die = root, victim, die

    def setup(self, worker):
        fault = Faults(die=self.die) if worker.name == self.victim else Faults()
        packages, cuda, _ = nvshmem_fake.parts(self.root, fault)
        self.member = Member(
            worker,
            device=0,
            nbytes=ARENA,
            packages=lambda: packages,
            cuda=lambda device: cuda,
        )
        self.member.start()

    def teardown(self, worker):
        self.member.stop()


async def state(dask_worker):
    """ "none", "reaches" or "alone", once that is decided."""
    member = dask_worker.plugins["joins"].member
    heap = await member.heap_within(20)
    if heap is None:
        return "none"
    return "alone" if heap._severed else "reaches"


@pytest.fixture
def processes(tmp_path):
    """A client of two workers with a nanny each, and a plugin on the scheduler."""
    here = sys.modules[__name__]
    for module in (here, nvshmem_fake, nvshmem_fake_cuda, nvshmem_pe):
        cloudpickle.register_pickle_by_value(module)
    logging.getLogger("distributed.nanny").setLevel(logging.ERROR)
    try:
        with (
            LocalCluster(n_workers=2, threads_per_worker=1, dashboard_address=":0") as cluster,
            Client(cluster) as client,
        ):
            client.register_plugin(Forms(2))
            yield client
    finally:
        for module in (here, nvshmem_fake, nvshmem_fake_cuda, nvshmem_pe):
            cloudpickle.unregister_pickle_by_value(module)


def states(client):
    return client.run(state)


def test_a_killed_worker_ends_the_world_of_the_others(processes, tmp_path):
    client = processes
    client.register_plugin(Joins(str(tmp_path)))
    assert set(states(client).values()) == {"reaches"}
    pids = client.run(os.getpid)
    (victim, pid), (other, _) = pids.items()
    os.kill(pid, signal.SIGKILL)

    async def severed():
        while await _state_of(client, other) != "alone":
            await asyncio.sleep(0.05)

    client.sync(lambda: asyncio.wait_for(severed(), BOUND))
    assert client.submit(sum, [1, 2], workers=[other]).result(BOUND) == 3
    assert victim != other


async def _state_of(client, worker):
    found = await client._run(state, workers=[worker])
    return found[worker]


def test_a_worker_that_dies_while_attaching_leaves_the_other_serving(processes, tmp_path):
    client = processes
    names = client.run(lambda dask_worker: dask_worker.name)
    (_, victim), (other, _) = names.items()
    # The victim's answer to the registration may be lost with it.
    client.register_plugin(Joins(str(tmp_path), victim, "malloc"))

    async def given_up():
        while await _state_of(client, other) != "none":
            await asyncio.sleep(0.05)

    client.sync(lambda: asyncio.wait_for(given_up(), BOUND))
    assert client.submit(sum, [1, 2], workers=[other]).result(BOUND) == 3
