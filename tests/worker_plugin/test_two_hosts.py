"""Workers that do not see each other's memory. What a client on one of the hosts sees: on_two_hosts.py."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from .hosts import CABLE, QUIET, ROOT, child_of, left_of, network_of, start, two_hosts


@pytest.fixture(scope="module", autouse=True)
def permitted():
    try:
        with two_hosts():
            pass
    except OSError as error:
        pytest.skip(f"hosts are namespaces and need root, util-linux and iproute2: {error}")


def check_nothing_left(networks):
    deadline = time.monotonic() + 10
    while left_of(networks) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert left_of(networks) == []
    assert not set(CABLE) & set(os.listdir("/sys/class/net"))


def test_results_are_equal_whichever_way_tensors_travel(tmp_path):
    with two_hosts() as hosts:
        networks = {network_of(host) for host in hosts}
        # The client's process is on the first host by its network only: it kills and starts others.
        network = ("nsenter", "-t", str(hosts[0]), "-n")
        test = Path(__file__).parent / "on_two_hosts.py"
        # Its process is on the first host by its network only: it kills workers, and starts one.
        done = subprocess.run(
            [
                *network,
                sys.executable,
                "-m",
                "pytest",
                "-x",
                "-s",
                "-p",
                "no:cacheprovider",
                str(test),
            ],
            cwd=ROOT,
            env={
                **os.environ,
                **QUIET,
                "ST2I_TEST_HOSTS": " ".join(map(str, hosts)),
                "ST2I_TEST_LOGS": str(tmp_path),
            },
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=200,
        )
    logs = "".join(f"{log.name}:\n{log.read_text()[-3000:]}\n" for log in tmp_path.glob("*.log"))
    assert done.returncode == 0, f"{logs}\n{done.stdout[-6000:]}"
    print(done.stdout)
    check_nothing_left(networks)


def test_nothing_is_left_after_a_failure(tmp_path):
    networks, started = set(), []

    def fail():
        with two_hosts() as hosts:
            networks.update(network_of(host) for host in hosts)
            started.append(start(hosts[0], "sleep", "600", log=tmp_path / "sleep.log"))
            assert child_of(started[0]) in left_of(networks)
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail()
    assert len(networks) == 2
    assert started[0].wait(10) != 0
    check_nothing_left(networks)
