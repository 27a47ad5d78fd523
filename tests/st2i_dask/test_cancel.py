"""Cancelled at every stage, in every way: executors are free within a step, and charges are true."""

from __future__ import annotations

import contextlib
import gc
import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import httpx
import pytest
from distributed import Client

import st2i_dask as st2i

from ..scheduler_plugin.live import left_on_worker, standing, until
from .stages import SECONDS, stages

pytest.importorskip("fastapi")

from st2i_dask.serve.keys import Entry, Holder, KeyRing, digest_of
from st2i_dask.serve.limits import Limits
from st2i_dask.serve.models import Models
from st2i_dask.serve.server import application

from .serve.conftest import serving

STAGES = Path(__file__).parent / "stages.py"
TIMEOUT = 60
#: Seconds beside the models' own, on a busy machine: until somebody else has run, and in what is charged.
AROUND, CHARGED = 2.0, 0.5


@pytest.fixture(scope="module")
def cluster():
    import dask

    validate = {"distributed.scheduler.validate": True, "distributed.worker.validate": True}
    with dask.config.set(validate), st2i.local_cluster(2, dashboard_address=":0") as cluster:
        yield cluster


@pytest.fixture(scope="module")
def client(cluster):
    with Client(cluster, set_as_default=False) as client:
        st2i.attach(client)
        # Workers import what they need.
        warm = [stages.submit(client, prompt=str(n), seed=n) for n in range(4)]
        client.gather(warm)
        del warm
        yield client


class Request:
    """A request of a tenant of its own, slow at a stage."""

    number = 0

    def __init__(self, client, folder, stage):
        Request.number += 1
        self.client, self.stage = client, stage
        self.tenant = f"tenant-{Request.number}"
        self.journal = folder / f"{self.tenant}.jsonl"
        self.asked = {"stage": stage, "journal": str(self.journal), "num_steps": 8}

    def noted(self):
        if not self.journal.exists():
            return []
        return [json.loads(line) for line in self.journal.read_text().splitlines()]

    def begun(self, stage):
        return sum(found == stage and what == "begin" for found, what, _ in self.noted())

    def reached(self):
        """Whether it is in the middle of its stage."""
        if self.stage == "denoise":
            return self.begun("denoise") >= 3
        if self.stage == "control":  # the consumer waits, and its producer runs
            return self.begun("control") and self.begun("denoise")
        return self.begun(self.stage)

    def used_s(self):
        """Seconds of all calls, of those beside each other all."""
        begun, used = {}, 0.0
        for stage, what, when in self.noted():
            if what == "begin":
                begun[stage] = when
            else:
                used += when - begun.pop(stage)
        assert not begun, "something runs still"
        return used

    def charged_s(self):
        rows = {row["tenant"]: row["service_s"] for row in st2i.tenants(self.client)}
        return rows.get(self.tenant, 0.0)

    def place_is_known(self):
        return any(r["tenant"] == self.tenant and r["queued"] for r in st2i.tenants(self.client))


# The ways. Each gives a context in which the request is under way, and a function that cancels it.


@contextlib.contextmanager
def by_its_future(client, address, request, folder):
    future = stages.submit(client, tenant=request.tenant, **request.asked)
    yield future.cancel
    del future


@contextlib.contextmanager
def by_letting_go(client, address, request, folder):
    held = [stages.submit(client, tenant=request.tenant, **request.asked)]
    yield held.clear


@contextlib.contextmanager
def _server(address, request):
    models = Models(None, {})
    models.add("stages", f"{STAGES}:stages")
    ring = KeyRing([Entry(digest_of("st2i-key"), Holder(request.tenant))])
    limits = Limits()
    before = list(sys.path)
    app = application(address, models, ring, limits)
    with serving(app, limits) as url:
        yield url, app.state.service.jobs
    sys.path[:] = before
    app.state.service.jobs._check()


def _body(request, **more):
    parameters = {"stage": request.stage, "journal": str(request.journal)}
    return {"prompt": "x", "num_inference_steps": 8, "parameters": parameters, **more}


@contextlib.contextmanager
def by_delete(client, address, request, folder):
    headers = {"authorization": "Bearer st2i-key"}
    with (
        _server(address, request) as (url, _),
        httpx.Client(base_url=url, headers=headers, timeout=60) as http,
    ):
        made = http.post("/v1/images/generations", json=_body(request, detach=True))
        assert made.status_code == 202, made.text
        name = made.json()["id"]

        def cancel():
            answer = http.delete(f"/v1/requests/{name}")
            assert answer.json()["status"] == "cancelled"

        yield cancel


@contextlib.contextmanager
def by_leaving(client, address, request, folder):
    """An HTTP client that closes its connection."""
    body = json.dumps(_body(request)).encode()
    with _server(address, request) as (url, _):
        host, port = url.removeprefix("http://").split(":")
        with socket.create_connection((host, int(port))) as connection:
            connection.sendall(
                b"POST /v1/images/generations HTTP/1.1\r\nhost: x\r\n"
                b"content-type: application/json\r\nauthorization: Bearer st2i-key\r\n"
                b"content-length: %d\r\n\r\n%s" % (len(body), body)
            )
            yield connection.close


@contextlib.contextmanager
def _process(command, status):
    """Ctrl-C to a process of its own group."""
    process = subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
        env={**os.environ, "PYTHONPATH": str(STAGES.parents[2])},
    )
    try:
        yield lambda: os.killpg(process.pid, signal.SIGINT)
        out, err = process.communicate(timeout=TIMEOUT)
        assert process.returncode == status, (out, err)
    finally:
        process.kill()
        process.wait()


@contextlib.contextmanager
def by_ctrl_c_of_generate(client, address, request, folder):
    command = [sys.executable, "-m", "st2i_dask.cli", "generate", "--scheduler", address]
    command += ["--workflow", f"{STAGES}:stages", "--prompt", "x", "--steps", "8"]
    command += ["--param", f"stage={request.stage}", "--param", f"journal={request.journal}"]
    command += ["--tenant", request.tenant, "--out", str(folder / "out")]
    with _process(command, 130) as interrupt:
        yield interrupt


SCRIPT = """
import sys, st2i_dask as st2i
from distributed import Client
from tests.st2i_dask.stages import stages
address, tenant, stage, journal = sys.argv[1:]
with Client(address) as client:
    futures = [stages.submit(client, tenant=tenant, stage=stage, journal=journal, num_steps=8)]
    st2i.progress(futures)
"""


@contextlib.contextmanager
def by_ctrl_c_of_a_script(client, address, request, folder):
    """One that waits in st2i.progress. KeyboardInterrupt ends it, and its client with it."""
    command = [sys.executable, "-c", SCRIPT, address, request.tenant, request.stage]
    with _process([*command, str(request.journal)], -signal.SIGINT) as interrupt:
        yield interrupt


AT = ["encode", "load", "denoise", "control", "decode"]
QUICK = [by_its_future, by_delete]
SLOW = [by_letting_go, by_leaving, by_ctrl_c_of_generate, by_ctrl_c_of_a_script]
WAYS = [*QUICK, *(pytest.param(way, marks=pytest.mark.slow) for way in SLOW)]


def name_of(way):
    return way.__name__


def at_rest(client):
    """Every check holds, and nothing of any request is left anywhere."""
    found = {}

    def nothing():
        gc.collect()
        found.update(client.run_on_scheduler(standing))
        found.update(client.run(left_on_worker))
        found.update((a, row["arena"]["used"]) for a, row in st2i.data_plane(client).items())
        return not any(found.values())

    until(nothing, lambda: f"left behind: {found}")


@contextlib.contextmanager
def busy(client, folder, executors):
    """So many executors are held by another tenant, whose requests then end as they should."""
    go = folder / "go"
    asked = {"prompt": str(go), "stage": "hold", "tenant": "holder"}
    held = [stages.submit(client, **asked, seed=n) for n in range(executors)]
    until(lambda: running(client, "holder") == executors)
    try:
        yield go.touch
    finally:
        go.touch()
    client.gather(held)


def wait_for_end(futures):
    until(lambda: all(future.status == "finished" for future in futures))


def running(client, tenant):
    return sum(row["running"] for row in st2i.tenants(client) if row["tenant"] == tenant)


@pytest.mark.parametrize("way", WAYS, ids=name_of)
@pytest.mark.parametrize("stage", AT)
def test_while_it_runs(cluster, client, tmp_path, stage, way):
    request = Request(client, tmp_path, stage)
    with busy(client, tmp_path, 0 if stage == "control" else 1):
        with way(client, cluster.scheduler_address, request, tmp_path) as cancel:
            until(request.reached, seconds=TIMEOUT)
            cancel()
            begin = time.monotonic()
            before = request.noted()
            stages.submit(client, tenant="newcomer", seed=1).result(timeout=TIMEOUT)
            waited = time.monotonic() - begin
        # The call that runs ends first.
        assert waited < SECONDS[stage] + AROUND, waited
    at_rest(client)
    later = request.noted()[len(before) :]
    begun = [found for found, what, _ in later if what == "begin"]
    # News take a moment, in which one more may begin.
    assert len(begun) <= (stage == "denoise" or "ctrl_c" in way.__name__), begun
    used, charged = request.used_s(), request.charged_s()
    calls = sum(what == "begin" for _, what, _ in request.noted())
    assert used * 0.98 <= charged <= used + CHARGED + 0.05 * calls, (used, charged)


@pytest.mark.parametrize("way", WAYS, ids=name_of)
def test_while_it_waits_behind_others(cluster, client, tmp_path, way):
    request = Request(client, tmp_path, "denoise")
    with (
        busy(client, tmp_path, 2) as go_on,
        way(client, cluster.scheduler_address, request, tmp_path) as cancel,
    ):
        until(request.place_is_known, seconds=TIMEOUT)
        cancel()
        until(lambda: not request.place_is_known())
        go_on()
        stages.submit(client, tenant="newcomer", seed=2).result(timeout=TIMEOUT)
    at_rest(client)
    assert request.noted() == []
    assert request.charged_s() == 0.0


def test_when_it_is_done_and_nobody_has_fetched_it(client, tmp_path):
    request = Request(client, tmp_path, "quick")
    future = stages.submit(client, tenant=request.tenant, **request.asked)
    wait_for_end([future])
    before = request.charged_s()
    client.cancel([future])
    assert future.status == "cancelled"
    del future
    at_rest(client)
    assert request.charged_s() == before > 0


def test_when_it_is_done_a_delete_changes_nothing(cluster, client, tmp_path):
    request = Request(client, tmp_path, "quick")
    headers = {"authorization": "Bearer st2i-key"}
    with (
        _server(cluster.scheduler_address, request) as (url, _),
        httpx.Client(base_url=url, headers=headers, timeout=60) as http,
    ):
        made = http.post("/v1/images/generations", json=_body(request, detach=True)).json()
        path = f"/v1/requests/{made['id']}"
        until(lambda: http.get(path).json()["status"] == "completed")
        at_rest(client)  # though nobody has fetched it: the server has
        before = request.charged_s()
        assert http.delete(path).json()["status"] == "completed"
        assert http.get(path).json()["result"]["data"][0]["b64_json"]
    at_rest(client)
    assert request.charged_s() == before


OWN_CLUSTER = """
import st2i_dask as st2i
from distributed import Client
from tests.st2i_dask.stages import stages

if __name__ == "__main__":
    with st2i.local_cluster(2, dashboard_address=":0") as cluster, Client(cluster) as client:
        workers = set(client.scheduler_info()["workers"])
        futures = [stages.submit(client, stage="denoise", num_steps=10, seed=n) for n in range(2)]
        print("begun", flush=True)
        try:
            st2i.progress(futures)
        except KeyboardInterrupt:
            print("interrupted", len(st2i.progress(futures)), [f.status for f in futures])
            print(set(client.scheduler_info()["workers"]) == workers)
"""


@pytest.mark.slow
def test_ctrl_c_does_not_reach_the_workers_of_a_local_cluster(tmp_path):
    """In a terminal, and in a notebook, it goes to all processes; only the wait is interrupted."""
    script = tmp_path / "script.py"
    script.write_text(OWN_CLUSTER)
    process = subprocess.Popen(
        [sys.executable, str(script)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
        env={**os.environ, "PYTHONPATH": str(STAGES.parents[2])},
    )
    try:
        assert process.stdout.readline() == "begun\n"
        time.sleep(1.0)
        os.killpg(process.pid, signal.SIGINT)
        out, err = process.communicate(timeout=TIMEOUT)
    finally:
        process.kill()
        process.wait()
    assert out == "interrupted 2 ['finished', 'finished']\nTrue\n", err
    assert "Traceback" not in err
    assert process.returncode == 0
