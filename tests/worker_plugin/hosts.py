"""Two hosts that share nothing but a network, as Linux namespaces: network, processes, /proc.

A host's first process reads a pipe that only its maker holds. However the maker ends, the kernel then
ends all of the host's processes, and with its network goes the cable.
"""

from __future__ import annotations

import os
import subprocess
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

ROOT = Path(__file__).parents[2]
ADDRESSES = ("198.18.0.1", "198.18.0.2")  # set aside for tests of networks (RFC 2544)
CABLE = ("st2i0", "st2i1")
QUIET = {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
HOST = ("unshare", "--net", "--mount", "--pid", "--fork", "--kill-child", "--mount-proc")


@contextmanager
def two_hosts() -> Iterator[list[int]]:
    """The pids, as seen here, of the first process of each. OSError where they are not permitted."""
    with ExitStack() as stack:
        hosts = [stack.enter_context(_host()) for _ in ADDRESSES]
        ends = [("name", end, "netns", str(host)) for end, host in zip(CABLE, hosts, strict=True)]
        _run("ip", "link", "add", *ends[0], "type", "veth", "peer", *ends[1])
        for host, end, address in zip(hosts, CABLE, ADDRESSES, strict=True):
            for command in (
                ("addr", "add", f"{address}/24", "dev", end),
                ("link", "set", end, "up"),
                ("link", "set", "lo", "up"),
            ):
                _run("nsenter", "-t", str(host), "-n", "ip", *command)
        yield hosts


def start(host: int, *command: str, log: Path) -> subprocess.Popen[bytes]:
    """Run a command on a host; the process here whose only child it is."""
    path = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
    with open(log, "ab") as output:
        return subprocess.Popen(
            ["nsenter", "-t", str(host), "-n", "-m", "-p", *command],
            cwd=log.parent,
            env={**os.environ, "PYTHONPATH": path, **QUIET},
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
        )


def child_of(process: subprocess.Popen[bytes]) -> int:
    """Of a command that forks once: the pid as seen here, once it is there."""
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children")
    deadline = time.monotonic() + 10
    while not (found := children.read_text().split()):
        if process.poll() is not None or time.monotonic() > deadline:
            raise OSError(f"{process.args!r} started nothing")
        time.sleep(0.01)
    return int(found[0])


def network_of(pid: int | str) -> str:
    """A name of a process's network namespace."""
    return os.readlink(f"/proc/{pid}/ns/net")


def left_of(networks: set[str]) -> list[int]:
    """Threads of any process that are in one of those networks."""
    found = []
    for threads in Path("/proc").glob("[0-9]*/task"):
        with suppress(OSError):
            found += [int(t) for t in os.listdir(threads) if network_of(t) in networks]
    return found


@contextmanager
def _host() -> Iterator[int]:
    with subprocess.Popen(
        [*HOST, "sh", "-c", "echo there; exec cat"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    ) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        assert process.stderr is not None
        if not process.stdout.readline():
            raise OSError(f"unshare: {process.stderr.read().decode().strip()}")
        try:
            yield child_of(process)
        finally:
            process.stdin.close()
            process.wait(20)


def _run(*command: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True, timeout=20)
    if done.returncode:
        raise OSError(f"{' '.join(command)}: {done.stderr.strip()}")
