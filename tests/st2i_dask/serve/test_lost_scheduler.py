"""The scheduler is killed under the server, and another one starts at its address."""

from __future__ import annotations

import contextlib
import socket
import subprocess
import sys
import threading

import openai
import pytest

from .conftest import ALICE
from .test_cluster import front
from .test_generations import error, picture
from .test_requests import detached, state, until


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


@contextlib.contextmanager
def process(*arguments):
    """Runs until the end of the context, or `kill()`."""
    started = subprocess.Popen(
        [sys.executable, "-m", "distributed.cli." + arguments[0], *arguments[1:]],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        yield started
    finally:
        started.kill()
        started.wait(20)


def scheduler(port):
    return process(
        "dask_scheduler", "--host", "127.0.0.1", "--port", str(port), "--dashboard-address", ":0"
    )


def worker(port):
    address = f"tcp://127.0.0.1:{port}"
    return process("dask_worker", address, "--nthreads", "1", "--no-dashboard", "--no-nanny")


def listening(port):
    def yes():
        with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), 1):
            return True
        return False

    until(yes, 30)


@pytest.mark.slow
def test_requests_in_flight_fail_to_be_sent_again_and_the_server_connects_again(
    tmp_path, path_as_before
):
    port = free_port()
    with contextlib.ExitStack() as stack:
        first = stack.enter_context(scheduler(port))
        stack.enter_context(worker(port))
        listening(port)
        served = stack.enter_context(front(f"tcp://127.0.0.1:{port}"))
        assert picture(served.draw(seed=1))

        go = tmp_path / "go"
        waiting = detached(served, prompt=f"wait {go}")
        answers = []
        thread = threading.Thread(target=lambda: answers.append(served.draw(prompt=f"wait {go}")))
        thread.start()
        until(lambda: state(served, waiting)["status"] == "running")
        until(lambda: served.jobs.open_images == 2)
        first.kill()
        first.wait()
        thread.join(20)
        assert error(answers[0], 503)["code"] == "scheduler_lost"
        assert int(answers[0].headers["retry-after"]) >= 1
        until(lambda: state(served, waiting)["status"] == "failed")
        assert state(served, waiting)["error"]["code"] == "scheduler_lost"
        assert error(served.draw(), 503)["code"] == "scheduler_lost"
        assert served.get("/healthz", key=None).status_code == 503
        go.touch()

        stack.enter_context(scheduler(port))
        stack.enter_context(worker(port))
        until(lambda: served.get("/healthz", key=None).status_code == 200, 120)
        with openai.OpenAI(base_url=f"{served.url}/v1", api_key=ALICE, timeout=60) as client:
            assert client.images.generate(prompt="a star", model="sketch").data
        # The new scheduler knows the keys' caps.
        answer = served.draw(n=5)
        assert error(answer, 429)["code"] == "rate_limit_exceeded"
        assert served.jobs.open_images == 0
