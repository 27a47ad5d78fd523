"""Thousands of requests, some cancelled: workers take no more memory, files or threads than before."""

from __future__ import annotations

import ctypes
import gc
import os
import random
import time
from collections import Counter
from concurrent.futures import CancelledError
from pathlib import Path

import dask
import numpy as np
import psutil
import pytest

import st2i_dask as st2i
from worker_plugin.tensor_store import SMALL

from .tensors import TIMEOUT, cluster, fork, forked, moved, read_in_order, streamed, used

REQUESTS = 2000
WAVE = 64
CANCELLED = 0.1
ROWS = 8  # of 1024 float32: 32 KiB, twice what goes into the arena
TENSOR = ROWS * 1024 * 4
ARENA = 64 << 20
#: Bytes per request, each of which makes 8 to 17 tensors. About 3 KB were measured, part of which came
#: as one step of 2 MiB; the number of Python's objects stayed the same.
LIMIT = TENSOR / 4
#: Requests until memory pools, caches and Dask's logs are full.
WARM = 600
#: Dask's logs of transfers and its profiles grow until they hold 1,000 entries.
SHORT_LOGS = {
    "distributed.admin.low-level-log-length": 100,
    "distributed.worker.profile.enabled": False,
}


def tidy() -> None:
    """Dask remembers the names of the last 100,000 tasks: 3 KB per request until then. The C library
    keeps what was freed."""
    from dask.utils import key_split

    key_split.cache_clear()
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)


def resident(pid: int) -> tuple[int, int]:
    """Bytes: its own memory, and what it has touched of arenas (bounded by their size)."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    found = {
        name: rest.split()[0]
        for name, rest in (line.split(":", 1) for line in lines if "kB" in line)
    }
    return int(found["RssAnon"]) << 10, int(found["RssShmem"]) << 10


def growth(samples: list[tuple[int, int]]) -> float:
    """Bytes per request: the slope of the line through (requests, bytes) with the least squares."""
    requests, nbytes = np.array(samples, dtype=float).T
    return float(np.polyfit(requests, nbytes, 1)[0])


def state(pid: int) -> Counter[str]:
    """What a worker has open: by kind, the number."""
    process = psutil.Process(pid)
    found: Counter[str] = Counter(threads=process.num_threads())
    for name in os.listdir(f"/proc/{pid}/fd"):
        try:
            target = os.readlink(f"/proc/{pid}/fd/{name}")
        except OSError:
            continue
        # Connections between workers are made and dropped as Dask likes.
        if not target.startswith("socket:"):
            found["arena files" if "st2i-arena" in target else "files"] += 1
    maps = Path(f"/proc/{pid}/maps").read_text().splitlines()
    found["arena mappings"] = sum("st2i-arena" in line for line in maps)
    return found


def wave(client, first: int, number: int, chance: random.Random) -> int:
    """That many requests at once; the number of those that were cancelled."""
    submitted = []
    for seed in range(first, first + number):
        if seed % 2:
            future = streamed.submit(client, seed=seed, items=3, seconds=0.0, rows=ROWS)
        else:
            future = fork.submit(client, seed=seed, rows=ROWS)
        submitted.append((seed, future))
    time.sleep(chance.uniform(0.0, 0.3))
    doomed = chance.sample(submitted, round(number * CANCELLED))
    for _, future in doomed:
        future.cancel()
    for seed, future in submitted:
        try:
            result = future.result(timeout=TIMEOUT)
        except CancelledError:
            assert (seed, future) in doomed
            continue
        if seed % 2:
            np.testing.assert_array_equal(result[0], read_in_order(seed, items=3, rows=ROWS))
        else:
            np.testing.assert_array_equal(result, forked(seed, rows=ROWS))
    return len(doomed)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_workers_do_not_grow():
    chance = random.Random(0)
    with dask.config.set(SHORT_LOGS), cluster(2, arena_bytes=ARENA) as client:
        pids = sorted(client.run(os.getpid).values())
        samples: dict[int, list[tuple[int, int]]] = {pid: [] for pid in pids}
        done = cancelled = 0
        before: dict[int, Counter[str]] = {}
        while done < REQUESTS:
            number = min(WAVE, REQUESTS - done)
            cancelled += wave(client, done, number, chance)
            done += number
            client.run(tidy)
            if done >= WARM:
                before = before or {pid: state(pid) for pid in pids}
                for pid in pids:
                    samples[pid].append((done, resident(pid)[0]))
        assert set(used(client).values()) == {0}
        assert sorted(client.run(os.getpid).values()) == pids, "no worker was restarted"
        assert TENSOR > SMALL
        assert moved(client, "host") > REQUESTS // 4 * TENSOR
        assert all(w["arena"]["peak"] > TENSOR for w in st2i.data_plane(client).values())
        for pid in pids:
            first, last = samples[pid][0][1], samples[pid][-1][1]
            print(
                f"\nworker {pid}: {growth(samples[pid]):+.0f} bytes per request over "
                f"{REQUESTS - WARM} requests, {cancelled} of all cancelled; {first / 2**20:.1f} MiB "
                f"at first, {last / 2**20:.1f} MiB at last, and {resident(pid)[1] / 2**20:.1f} MiB "
                f"of arenas; {dict(state(pid))}"
            )
        for pid in pids:
            assert growth(samples[pid]) < LIMIT
            assert resident(pid)[1] < 2 * ARENA
            grown = state(pid) - before[pid]
            assert not grown, f"more than after {WARM} requests: {grown}"
