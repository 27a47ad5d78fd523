"""Freed memory stays with a worker: what is allocated again is not faulted in again."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
from distributed import Client

import st2i_dask as st2i

PAGES = (4 << 20) // 4096


def faults(blocks=50):
    """Page faults per block of 4 MiB that is written and freed, in this process."""
    import resource

    def now():
        return resource.getrusage(resource.RUSAGE_SELF).ru_minflt

    bytearray(4 << 20)
    before = now()
    for _ in range(blocks):
        bytearray(4 << 20)
    return (now() - before) / blocks


def run(environment):
    """Whether a process with this environment changes anything, and its faults before and after."""
    code = (
        "from tests.worker_plugin.test_freed_memory import faults\n"
        "from worker_plugin.freed_memory import keep_freed_memory\n"
        "print(faults(), keep_freed_memory(), faults())"
    )
    known = {k: v for k, v in os.environ.items() if not k.startswith("MALLOC_")}
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={**known, **environment},
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    before, changed, after = done.stdout.split()
    return float(before), changed == "True", float(after)


def test_it_is_kept_where_dask_gives_it_back():
    before, changed, after = run({"MALLOC_TRIM_THRESHOLD_": "65536"})
    assert changed
    assert before > 0.5 * PAGES
    assert after < 0.05 * PAGES


@pytest.mark.parametrize("environment", [{}, {"MALLOC_TRIM_THRESHOLD_": "131072"}])
def test_what_the_user_has_chosen_stays(environment):
    _, changed, _ = run(environment)
    assert not changed


def held_by_layers():
    """MiB of this process that stay when layers of 8 MiB have gone, with small objects between them."""
    import gc

    import psutil

    from worker_plugin.loader import aligned

    aligned(1)  # imports torch
    process, between, layers = psutil.Process(), [], []
    before = process.memory_info().rss
    for _ in range(20):
        layers.append(aligned(8 << 20).fill_(1))
        between.append(bytearray(100_000))
    most = process.memory_info().rss - before
    layers.clear()
    gc.collect()
    return (process.memory_info().rss - before) >> 20, most >> 20


def test_workers_keep_it():
    with st2i.local_cluster(1, dashboard_address=None) as cluster, Client(cluster) as client:
        st2i.attach(client, device="cpu")
        (found,) = client.run(faults).values()
        assert found < 0.05 * PAGES
        ((stay, most),) = client.run(held_by_layers).values()
        assert most >= 160
        assert stay < 20, "a layer's memory goes with it"
