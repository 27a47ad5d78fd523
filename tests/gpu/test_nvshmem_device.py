"""The NVSHMEM heap on a device: two PEs on one GPU, and figures.

Two PEs on one device without MPS may only attach, allocate and get, which is all that the heap does.
"""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

import cloudpickle
import pytest
from distributed import Client, LocalCluster, SchedulerPlugin, WorkerPlugin

from scheduler_plugin.world_service import WorldService
from worker_plugin.nvshmem_library import NvshmemError, Packages
from worker_plugin.nvshmem_world import Member

from ..worker_plugin.nvshmem_pe import Pe, digest, pattern

pytestmark = pytest.mark.gpu

MIB = 1 << 20
ARENA = 512 * MIB
SCRIPT = str(Path(__file__).parent / "device_pe.py")


@pytest.fixture(scope="module", autouse=True)
def library():
    try:
        Packages.real()
    except NvshmemError as error:
        pytest.skip(str(error))


@pytest.fixture(scope="module")
def pair(library, tmp_path_factory):
    """Two PEs of one world, attached to the same device."""
    root = tmp_path_factory.mktemp("world")
    with Pe(root, SCRIPT) as one, Pe(root, SCRIPT) as two:
        one.tell("mint")
        uid = one.answer(90)
        for number, child in enumerate((one, two)):
            child.tell("attach", uid, number, 2, ARENA, 60)
        answers = [child.answer(90) for child in (one, two)]
        assert [said for said, _ in answers] == ["attached", "attached"]
        print(f"\nattach, two PEs on one device: {max(s for _, s in answers):.2f} s")
        print(f"peer mapped: {one.ask('mapped', 1)}")
        yield one, two
        # Collective: both at once, and nothing after it.
        for child in (one, two):
            child.tell("drop")
            child.answer()
        for child in (one, two):
            child.tell("finalize")
        assert [child.answer(60) for child in (one, two)] == [True, True]


def written(child, pe, seed, nbytes):
    """What `pull` and others take as a ticket."""
    uuid, size, *rest = child.ask("write", seed, nbytes)
    return uuid, size, pe, *rest


@pytest.mark.parametrize("nbytes", [1, 1000, 64 * 1024, 24 * MIB + 3])
def test_bytes_come_from_the_other_pe(pair, nbytes):
    one, two = pair
    expected = digest(pattern(nbytes, nbytes))
    assert one.ask("pull", *written(two, 1, nbytes, nbytes)) == [True, expected]
    assert two.ask("pull", *written(one, 0, nbytes, nbytes)) == [True, expected]
    # from the own heap: a copy on the device
    assert one.ask("pull", *written(one, 0, nbytes, nbytes)) == [True, expected]


def test_a_freed_block_is_a_loss(pair):
    one, two = pair
    ticket = written(two, 1, 1, 2 * MIB)
    assert one.ask("pull", *ticket)[0]
    assert two.ask("drop") == 0
    assert not one.ask("pull", *ticket)[0]
    again = written(two, 1, 2, 2 * MIB)
    assert not one.ask("pull", *ticket)[0]
    assert one.ask("pull", *again) == [True, digest(pattern(2, 2 * MIB))]


def test_memory_is_reused_only_when_kernels_are_done(pair):
    one, _ = pair
    one.ask("drop")
    assert one.ask("reuse") == [True, True]


def test_a_pull_waits_for_kernels_that_read_its_destination(pair):
    one, two = pair
    ticket = written(two, 1, 3, 4 * MIB)
    assert one.ask("order", *ticket) == [0, digest(pattern(3, 4 * MIB))]
    assert one.ask("other_stream", *ticket) == digest(pattern(3, 4 * MIB))


def test_a_block_lives_as_long_as_its_last_view(pair):
    one, _ = pair
    one.ask("drop")
    assert one.ask("views") == [True, MIB, 0]


def test_figures(pair):
    one, two = pair
    for child in pair:
        child.ask("drop")
    print(f"\nallocate and free: {one.ask('allocation', 200) * 1e6:.0f} us")
    print("      bytes   get us  get GB/s   copy us  copy GB/s   get/copy")
    for nbytes in (64 * 1024, MIB, 4 * MIB, 24 * MIB, 128 * MIB):
        get, copy = one.ask("measure", 30, *written(two, 1, 1, nbytes))
        two.ask("drop")
        print(
            f"{nbytes:11,} {get * 1e6:8.1f} {nbytes / get / 1e9:9.1f} {copy * 1e6:9.1f} "
            f"{nbytes / copy / 1e9:10.1f} {get / copy:10.2f}"
        )
        # A get that goes through the host is slower than that by far.
        assert nbytes < 24 * MIB or nbytes / get > 30e9


# ---------------------------------------------------------------- on a Dask cluster


class Forms(SchedulerPlugin):
    name = "forms-worlds"

    async def start(self, scheduler):
        self.service = WorldService(lambda: 2)
        scheduler.handlers.update(self.service.handlers)

    def remove_worker(self, scheduler, worker, **kwargs):
        self.service.left(worker)

    async def close(self):
        self.service.stop()


class Joins(WorkerPlugin):
    name = "joins"

    def setup(self, worker):
        self.member = Member(worker, device=0, nbytes=64 * MIB)
        self.member.start()

    def teardown(self, worker):
        self.member.stop()


async def outcome(dask_worker):
    heap = await dask_worker.plugins["joins"].member.heap_within(90)
    return None if heap is None else heap.address.place


def severed(dask_worker):
    return dask_worker.plugins["joins"].member._process.heap._severed


def test_workers_of_a_cluster_join_and_hear_of_a_loss():
    cloudpickle.register_pickle_by_value(sys.modules[__name__])
    try:
        with (
            LocalCluster(
                n_workers=2, threads_per_worker=1, processes=True, dashboard_address=":0"
            ) as cluster,
            Client(cluster) as client,
        ):
            client.register_plugin(Forms())
            client.register_plugin(Joins())
            places = client.run(outcome)
            assert set(places.values()) == {(1, 0), (1, 1)}
            gone, left = places
            client.retire_workers([gone], close_workers=True)

            async def told():
                while not (await client._run(severed, workers=[left]))[left]:
                    await asyncio.sleep(0.1)

            client.sync(lambda: asyncio.wait_for(told(), 30))
    finally:
        cloudpickle.unregister_pickle_by_value(sys.modules[__name__])
