"""Requests on two hosts: bytes between them, shared memory within one. Run by test_two_hosts.py in the
network of the first host, whose processes (as that of the second) see only themselves."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from distributed import Client

import st2i_dask as st2i

from .gang_models import alone, shared
from .hosts import ADDRESSES, child_of, start
from .tensors import TIMEOUT, fork, forked, moved, read_in_order, streamed, used

MIB = 1 << 20
SCHEDULER = f"tcp://{ADDRESSES[0]}:8786"
PROMPTS = [
    ("a small yellow star on a purple background", 7),
    ("a large red ring on a white background", 0),
]


class Hosts:
    """Starts what runs there."""

    def __init__(self) -> None:
        self.pids = list(map(int, os.environ["ST2I_TEST_HOSTS"].split()))
        self.logs = Path(os.environ["ST2I_TEST_LOGS"])
        self.started: list[subprocess.Popen[bytes]] = []

    def start_scheduler(self) -> None:
        options = ("--host", ADDRESSES[0], "--port", "8786", "--no-dashboard")
        self._start(0, "scheduler", *options)

    def start_worker(self, host: int) -> subprocess.Popen[bytes]:
        options = ("--host", ADDRESSES[host], "--nthreads", "1", "--no-nanny", "--no-dashboard")
        scratch = ("--local-directory", str(self.logs))
        return self._start(host, "worker", SCHEDULER, *options, *scratch)

    def _start(self, host: int, what: str, *options: str) -> subprocess.Popen[bytes]:
        command = (sys.executable, "-m", f"distributed.cli.dask_{what}", *options)
        log = self.logs / f"{len(self.started)}-{what}.log"
        process = start(self.pids[host], *command, log=log)
        self.started.append(process)
        child_of(process)
        return process


@pytest.fixture(scope="module")
def served():
    """Client, hosts and their workers: one on each."""
    hosts = Hosts()
    try:
        workers = [hosts.start_worker(0), hosts.start_worker(1)]
        hosts.start_scheduler()  # after the workers: each is the first process on its host
        with Client(SCHEDULER, timeout=TIMEOUT) as client:
            client.wait_for_workers(2, timeout=TIMEOUT)
            st2i.attach(client, arena_bytes=256 * MIB)
            yield client, hosts, workers
    finally:
        for process in hosts.started:
            if process.poll() is None:
                os.kill(child_of(process), signal.SIGKILL)
            process.wait(20)


@pytest.fixture(scope="module")
def pictures():
    """What the unmodified pipeline draws."""
    from diffusers import FluxPipeline

    from st2i_dask.shapes import DEFAULT_SIZE, DEFAULT_STEPS, MAX_PROMPT_TOKENS, PIPELINE

    pipeline = FluxPipeline.from_pretrained(PIPELINE, dtype=torch.float32)
    pipeline.set_progress_bar_config(disable=True)
    return [
        pipeline(
            prompt=prompt,
            height=DEFAULT_SIZE,
            width=DEFAULT_SIZE,
            num_inference_steps=DEFAULT_STEPS,
            max_sequence_length=MAX_PROMPT_TOKENS,
            guidance_scale=0.0,
            output_type="pt",
            generator=torch.Generator("cpu").manual_seed(seed),
        ).images[0]
        for prompt, seed in PROMPTS
    ]


def check_mix(client, pictures, seconds=0.01, meanwhile=None):
    """Requests of three workflows at once; `meanwhile()` is called while they run."""
    shapes = st2i.load("shapes", dtype="float32")
    forks = [fork.submit(client, seed=s, seconds=seconds) for s in range(4)]
    streams = [streamed.submit(client, seed=s, seconds=seconds) for s in range(3)]
    drawn = [
        shapes.submit(client, prompt=prompt, seed=seed, output_type="pt")
        for prompt, seed in PROMPTS
    ]
    if meanwhile is not None:
        meanwhile()
        assert not all(future.done() for future in forks + streams + drawn)
    for seed, future in enumerate(forks):
        np.testing.assert_array_equal(future.result(timeout=TIMEOUT), forked(seed))
    for seed, future in enumerate(streams):
        image, _ = future.result(timeout=TIMEOUT)
        np.testing.assert_array_equal(image, read_in_order(seed))
    for picture, future in zip(pictures, drawn, strict=True):
        assert torch.equal(future.result(timeout=TIMEOUT), picture)


def mix_until(client, pictures, enough):
    """What runs where, and so what travels, is left to chance: a worker may be busy loading."""
    deadline = time.monotonic() + TIMEOUT
    check_mix(client, pictures)
    while not enough() and time.monotonic() < deadline:
        check_mix(client, pictures)


def by_shared_memory(client):
    """Bytes that came that way to the workers of each host, and how many workers it has."""
    found = []
    for address in ADDRESSES:
        here = [w for name, w in st2i.data_plane(client).items() if f"//{address}:" in name]
        found.append((sum(w["transports"]["host"]["bytes"] for w in here), len(here)))
    return found


def test_between_hosts_tensors_travel_as_bytes(served, pictures):
    client, _, _ = served

    def place(dask_worker):
        return dask_worker.plugins["st2i-worker"].store.arena.heap.address.place

    (one, _), (other, _) = client.run(place).values()
    assert one == other, "where the other one says that its heap is, each finds a process: itself"
    mix_until(client, pictures, lambda: moved(client, "comm") >= 4 * MIB)
    assert moved(client, "host") == moved(client, "process") == 0
    assert moved(client, "comm") >= 4 * MIB
    assert set(used(client).values()) == {0}


def test_a_gang_of_both_hosts_exchanges_bytes(served):
    client, _, _ = served
    before = moved(client, "comm")
    for seed in range(2):  # the first one imports
        x, sizes = shared.submit(client, seed=seed).result(timeout=TIMEOUT)
        np.testing.assert_array_equal(x, alone(seed))
    assert sizes == [2, 2, 2, 2]
    assert moved(client, "host") == 0
    assert moved(client, "comm") - before >= 10 * MIB
    assert set(used(client).values()) == {0}


def test_within_a_host_shared_memory_is_used_at_the_same_time(served, pictures):
    client, hosts, _ = served
    hosts.start_worker(0)
    client.wait_for_workers(3, timeout=TIMEOUT)
    before = moved(client, "comm")

    def bytes_moved():
        return by_shared_memory(client)[0][0], moved(client, "comm") - before

    mix_until(client, pictures, lambda: min(bytes_moved()) >= MIB)
    print("bytes by shared memory and between hosts:", bytes_moved())
    (first, workers), other = by_shared_memory(client)
    assert workers == 2
    assert first >= MIB
    assert moved(client, "comm") - before >= MIB
    assert other == (0, 1), "the second host's only worker has nobody to share memory with"
    assert set(used(client).values()) == {0}


def test_requests_outlive_a_host(served, pictures):
    client, _, workers = served

    def kill():
        time.sleep(0.3)
        os.kill(child_of(workers[1]), signal.SIGKILL)

    check_mix(client, pictures, seconds=0.05, meanwhile=kill)
    assert by_shared_memory(client)[1] == (0, 0)
    assert set(used(client).values()) == {0}
