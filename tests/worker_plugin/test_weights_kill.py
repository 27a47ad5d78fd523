"""kill -9 of a worker that is copying weights: requests finish, images equal, nothing stays in the way."""

from __future__ import annotations

import fcntl
import os
import signal
import time
from pathlib import Path

import pytest

import st2i_dask as st2i

from .pipelines import MIB, TIMEOUT, Pipeline, check_stores, cluster, pids, rows
from .tensors import arena_files

#: Copying a transformer of 10 MB takes a second.
pytestmark = pytest.mark.slow

BANDWIDTH = 10_000_000


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("pipelines")


@pytest.fixture(scope="module")
def pipeline(folder):
    return Pipeline(folder / "p", layers=(4, 8), heads=6)


@pytest.fixture(scope="module")
def client(folder):
    with cluster(folder / "cache") as client:
        yield client


def loading(client, pipeline):
    """Address of a worker that has copied a part of the transformer, and not all of it."""
    deadline = time.monotonic() + TIMEOUT
    while time.monotonic() < deadline:
        for row in rows(client):
            if 0 < row["resident_bytes"] < 0.6 * pipeline.nbytes:
                return row["worker"]
        time.sleep(0.01)
    raise AssertionError("no worker loads")


def shared_memory():
    """Entries that are not those of Python's own processes and locks, such as Dask's nannies have."""
    return sorted(name for name in os.listdir("/dev/shm") if not name.startswith("sem.mp-"))


def can_lock(path):
    with open(path) as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            return False
        return True


@pytest.mark.parametrize(
    "budget",
    [
        pytest.param(64 * MIB, marks=pytest.mark.slow, id="whole"),
        pytest.param(4 * MIB, id="streamed"),
    ],
)
def test_kill_9_during_a_load(client, folder, pipeline, budget):
    st2i.attach(client, memory_bytes=budget, arena_bytes=MIB, load_bandwidth=BANDWIDTH)
    before = shared_memory()
    workers = pids(client)
    future = pipeline.submit(client)
    victim = loading(client, pipeline)
    os.kill(workers[victim], signal.SIGKILL)
    pipeline.check(future)
    assert sum(row["runs"] for row in rows(client)) >= 1
    client.wait_for_workers(2, timeout=TIMEOUT)
    (survivor,) = set(pids(client).values()) & set(workers.values())
    assert shared_memory() == before
    # The next worker begins with nothing, and serves.
    (fresh,) = set(pids(client).values()) - set(workers.values())
    seed, deadline = 1, time.monotonic() + TIMEOUT
    while {row["worker"] for row in rows(client)} != set(pids(client)):
        assert time.monotonic() < deadline
        futures = [pipeline.submit(client, seed), pipeline.submit(client, seed + 1)]
        pipeline.check(futures[0], seed)
        pipeline.check(futures[1], seed + 1)
        seed += 2
    check_stores(client)
    for pid in (survivor, fresh):
        # Own segment (file, mapping) and the other's mapping; no dead worker's memory.
        assert arena_files(pid) <= 3


@pytest.mark.slow
def test_kill_9_of_all_workers_during_loads(client, folder, pipeline):
    st2i.attach(client, memory_bytes=4 * MIB, arena_bytes=MIB, load_bandwidth=BANDWIDTH)
    before = shared_memory()
    futures = [pipeline.submit(client, seed) for seed in range(3)]
    loading(client, pipeline)
    killed = set(pids(client).values())
    for pid in killed:
        os.kill(pid, signal.SIGKILL)
    for seed, future in enumerate(futures):
        pipeline.check(future, seed)
    assert not killed & set(pids(client).values())
    assert shared_memory() == before
    check_stores(client)


def test_nothing_is_left_of_the_killed(client, folder, pipeline):
    """No lock of a weights' file, no lock or half written file among digests and profiles."""
    st2i.attach(
        client, memory_bytes=64 * MIB, arena_bytes=MIB
    )  # stores begin anew, with no file open
    files = sorted(pipeline.path.rglob("*.safetensors"))
    assert len(files) == 4
    assert all(can_lock(file) for file in files)
    left = [path for path in Path(folder / "cache").rglob("*") if path.is_file()]
    assert left, "digests or profiles were kept"
    for path in left:
        assert path.suffix == ".json", path
        assert can_lock(path)
