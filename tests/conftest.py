"""Fixtures for all tests: leaks are errors, and test workflows do not outlive their test."""

from __future__ import annotations

import gc
import os
import sys
import threading
import time

import pytest

# Threads that libraries start once and keep: Dask's offload and profiler threads, its event loop for
# synchronous clients, executors that asyncio and tornado make on demand, tqdm's monitor.
LINGERING = (
    "Dask-Offload",
    "Dask-Callback",
    "Dask-Default",
    "Dask-Actor",
    "Profile",
    "TCP-Executor",
    "IO loop",
    "AsyncProcess",
    "ThreadPoolExecutor",
    "asyncio_",
    "tqdm",
    "TMonitor",
    "pydevd",
    "Process Pool",
)
# How long what a module has used may take to go away, seconds.
PATIENCE = 10.0


@pytest.fixture
def fresh_registry():
    """The registered and loaded workflows are the same after the test as before it."""
    from st2i_dask import catalogue
    from st2i_dask.workflow import workflows

    registered, loaded = dict(workflows._workflows), dict(catalogue._loaded)
    yield workflows
    workflows._workflows.clear()
    workflows._workflows.update(registered)
    catalogue._loaded.clear()
    catalogue._loaded.update(loaded)


@pytest.fixture(autouse=True, scope="module")
def no_leaks():
    """Fail the module if threads it started still run, or files and sockets it opened are open."""
    # What modules before have left for good (libraries, what pytest keeps) is not looked through again by
    # every collection: there are millions of it, and seconds each time.
    gc.collect()
    gc.freeze()
    threads, files = set(threading.enumerate()), _open_files()
    yield
    deadline = time.monotonic() + PATIENCE
    while True:
        left_threads = _left_threads(threads)
        left_files = _left_files(files)
        if not left_threads and not left_files:
            return
        if time.monotonic() > deadline:
            pytest.fail(f"left behind: threads {left_threads}, open files {left_files}")
        gc.collect()
        time.sleep(0.1)


def _left_threads(before: set[threading.Thread]) -> list[str]:
    return [
        thread.name
        for thread in threading.enumerate()
        if thread not in before and not thread.name.startswith(LINGERING)
    ]


def _open_files() -> dict[str, str]:
    """What every file descriptor of this process is open on (Linux; elsewhere nothing)."""
    found = {}
    if sys.platform == "linux":
        for number in os.listdir("/proc/self/fd"):
            try:
                found[number] = os.readlink(f"/proc/self/fd/{number}")
            except OSError:  # the listing's own descriptor
                continue
    return found


def _left_files(before: dict[str, str]) -> list[str]:
    """New files and TCP sockets. Pipes, event descriptors and the socket pairs that wake a loop
    belong to lingering threads and helper processes."""
    return [
        target
        for number, target in _open_files().items()
        if before.get(number) != target
        and not target.startswith(("pipe:", "anon_inode:", "/dev/", "/proc/"))
        and not (target.startswith("socket:") and _is_unix_socket(target))
    ]


def _is_unix_socket(target: str) -> bool:
    inode = target.removeprefix("socket:[").removesuffix("]")
    with open("/proc/net/unix") as table:
        return any(line.split()[6:7] == [inode] for line in table)
