"""What docs/deploy.md says: TLS, adaptive scaling, draining a worker, and the files in deploy/."""

from __future__ import annotations

import shutil
import subprocess
import time

import dask.config
import pytest
from click.testing import CliRunner
from distributed import Client, LocalCluster, Security

import st2i_dask as st2i
from st2i_dask.cli import main

SECONDS = 60


class Wait(st2i.ModelFn):
    def setup_io(self):
        self.add_input("value")
        self.add_input("seconds")
        self.add_output("sum")

    def execute(self, model_components, value, seconds):
        time.sleep(seconds)
        return {"sum": value + 1}


@st2i.workflow(name="test-deploy-chain", replace=True)
def chain(value: float, seconds: float = 0.0):
    return Wait()(Wait()(value, seconds), seconds)


def until(condition, seconds=SECONDS):
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "not in time"
        time.sleep(0.05)


@pytest.mark.skipif(shutil.which("openssl") is None, reason="needs openssl")
def test_tls_serves_a_request_and_the_command_line(tmp_path, monkeypatch):
    certificate, key = tmp_path / "node.pem", tmp_path / "node.key"
    subprocess.run(
        ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2", "-subj", "/CN=st2i",
         "-keyout", key, "-out", certificate],
        check=True, capture_output=True,
    )  # fmt: skip
    # As files or DASK_DISTRIBUTED__COMM__TLS__... say it, for every node and command alike.
    tls = {"distributed.comm.require-encryption": True}
    tls["distributed.comm.tls.ca-file"] = str(certificate)
    for role in ("scheduler", "worker", "client"):
        tls[f"distributed.comm.tls.{role}.key"] = str(key)
        tls[f"distributed.comm.tls.{role}.cert"] = str(certificate)
    with (
        dask.config.set(tls),
        LocalCluster(
            n_workers=2, threads_per_worker=1, protocol="tls", processes=False, security=Security(),
            dashboard_address=":0",
        ) as cluster,
        Client(cluster, set_as_default=False) as client,
    ):  # fmt: skip
        assert cluster.scheduler_address.startswith("tls://")
        st2i.attach(client)
        assert chain.submit(client, value=1.0).result(timeout=SECONDS) == 3.0
        result = CliRunner().invoke(main, ["doctor", "--scheduler", cluster.scheduler_address])
        assert result.exit_code == 0, result.output
        assert result.output.count("pulled by transport process") == 2
        stranger = Security(tls_ca_file=str(certificate), require_encryption=True)
        stranger.tls_client_key = stranger.tls_client_cert = None
        with pytest.raises((OSError, TypeError)):
            Client(cluster.scheduler_address, security=stranger, timeout=1, set_as_default=False)


def test_adaptive_scaling_sees_queued_requests_and_a_drained_worker_loses_none():
    with (
        LocalCluster(
            n_workers=1, threads_per_worker=1, processes=False, dashboard_address=None
        ) as cluster,
        Client(cluster, set_as_default=False) as client,
    ):
        st2i.attach(client)
        chain.submit(client, value=0.0, seconds=0.1).result(timeout=SECONDS)  # a cost is known
        futures = [chain.submit(client, value=float(v), seconds=0.1) for v in range(60)]

        def wanted(dask_scheduler):
            ours = [ts for ts in dask_scheduler.queued if "st2i" in (ts.annotations or {})]
            return len(ours), dask_scheduler.adaptive_target("1s")

        def sees_them():  # the question may overtake the requests
            queued, target = client.run_on_scheduler(wanted)
            return queued > 30 and target > 3

        until(sees_them)
        cluster.adapt(minimum=1, maximum=3, interval="100ms", target_duration="1s", wait_count=3)
        until(lambda: len(client.scheduler_info(-1)["workers"]) == 3)
        # Draining: the worker finishes what it runs, its results go to others.
        leaving = next(iter(client.scheduler_info(-1)["workers"]))
        client.retire_workers([leaving])
        assert client.gather(futures) == [v + 2.0 for v in range(60)]
        del futures
        until(lambda: len(client.scheduler_info(-1)["workers"]) == 1)
        assert chain.submit(client, value=1.0).result(timeout=SECONDS) == 3.0
