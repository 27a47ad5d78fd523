"""`dask scheduler` and `dask worker` with the preloads serve, configured by options and environment."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from importlib.metadata import version
from types import SimpleNamespace

import click
import dask.config
import pytest
from distributed import Client

import st2i_dask as st2i
from scheduler_plugin import preload as scheduler_preload
from st2i_dask.config import DEFAULTS
from worker_plugin import preload as worker_preload

SCHEDULER, WORKER = "scheduler_plugin.preload", "worker_plugin.preload"
SECONDS = 50


class Inc(st2i.ModelFn):
    def setup_io(self):
        self.add_input("value")
        self.add_output("sum")

    def execute(self, model_components, value):
        return {"sum": value + 1}


@st2i.workflow(name="test-preload-chain", replace=True)
def chain(value: float):
    return Inc()(Inc()(value))


def start(*args, log, environment=None):
    """`dask ...` in a process of its own."""
    return subprocess.Popen(
        [sys.executable, "-m", "dask", *args],
        env={**os.environ, **(environment or {})},
        stdout=subprocess.DEVNULL,
        stderr=log,
    )


def refused(tmp_path, *args, environment=None, statuses=(1, 2)):
    """What the command says when it ends at once with an error. Status 2: before anything starts."""
    tmp_path.mkdir(exist_ok=True)
    with open(tmp_path / "log", "w+") as log:
        process = start(*args, log=log, environment=environment)
        try:
            assert process.wait(SECONDS) in statuses
        finally:
            process.kill()
            process.wait()
        log.seek(0)
        return " ".join(log.read().replace("\u2502", "").split())


@contextlib.contextmanager
def running(folder, scheduler, *workers):
    """A client of a scheduler and workers from the command line. workers: (arguments, environment)."""
    file = folder / "scheduler.json"
    local = ["--nthreads", "1", "--local-directory", str(folder), "--host", "127.0.0.1"]
    own = ["--host", "127.0.0.1", "--port", "0", "--scheduler-file", str(file)]
    processes = []
    with open(folder / "log", "w") as log:
        try:
            processes.append(start("scheduler", *own, "--no-dashboard", *scheduler, log=log))
            deadline = time.monotonic() + SECONDS
            while not file.exists() or not file.read_text().endswith("}"):
                assert processes[0].poll() is None, (folder / "log").read_text()
                assert time.monotonic() < deadline, (folder / "log").read_text()
                time.sleep(0.1)
            address = json.loads(file.read_text())["address"]
            for arguments, environment in workers:
                processes.append(
                    start("worker", address, *local, "--no-dashboard", *arguments, log=log,
                         environment=environment)
                )  # fmt: skip
            with Client(address, set_as_default=False, timeout=SECONDS) as client:
                client.wait_for_workers(len(workers), timeout=SECONDS)
                yield client
        finally:
            for process in reversed(processes):
                process.send_signal(signal.SIGINT)
            for process in processes:
                try:
                    process.wait(20)
                except subprocess.TimeoutExpired:
                    process.kill()
                    process.wait()


def test_a_node_with_the_preload_prints_json_lines_from_its_start(tmp_path):
    file, environment = tmp_path / "scheduler.json", {"DASK_ST2I__LOGS__JSON": "true"}
    own = ["--host", "127.0.0.1", "--port", "0", "--no-dashboard", "--scheduler-file", str(file)]
    own += ["--dashboard-address", "127.0.0.1:0"]  # Python warns, plainly, of a port that is taken
    with open(tmp_path / "log", "w") as log:
        process = start("scheduler", *own, "--preload", SCHEDULER, log=log, environment=environment)
        try:
            deadline = time.monotonic() + SECONDS
            while not file.exists() and process.poll() is None and time.monotonic() < deadline:
                time.sleep(0.1)
        finally:
            process.terminate()
            process.wait(SECONDS)
    said = [json.loads(line) for line in (tmp_path / "log").read_text().splitlines()]
    assert any(line["message"].lstrip().startswith("Scheduler at:") for line in said)


def options(client):
    """By worker name, what its plugin uses."""

    def found(dask_worker):
        plugin = dask_worker.plugins["st2i-worker"]
        models, heap = plugin.executor.models, plugin.store.arena.heap
        return {
            "memory": models.memory,
            "arena": heap.address.nbytes,
            "uuid": str(heap.address.uuid),
        }

    names = {address: w["name"] for address, w in client.scheduler_info(-1)["workers"].items()}
    return {names[address]: seen for address, seen in client.run(found).items()}


def settings(client):
    return {name: value for name, value, _ in client.sync(client.scheduler.st2i_settings)["rows"]}


def test_a_preloaded_cluster_serves_without_attach_and_keeps_its_options(tmp_path):
    one = [
        "--name",
        "one",
        "--preload",
        WORKER,
        "--memory-bytes",
        "64 MiB",
        "--arena-bytes",
        "1 MiB",
    ]
    two = ["--name", "two", "--no-nanny", "--preload", WORKER]
    environment = {"DASK_ST2I__WORKER__MEMORY_BYTES": "32 MiB"}
    scheduler = ["--preload", SCHEDULER, "--slack-s", "2.5"]
    with running(tmp_path, scheduler, (one, None), (two, environment)) as client:
        # Before anything attaches.
        assert settings(client)["slack_s"] == "2.5"
        before = options(client)
        assert before["one"]["memory"] == 64 << 20
        assert before["one"]["arena"] == 1 << 20
        assert before["two"]["memory"] == 32 << 20
        graph = chain.submit(client, value=1.0)  # attaches without options
        assert graph.result(timeout=SECONDS) == 3.0
        assert options(client) == before, "the same arenas: nothing was set up again"
        assert settings(client)["slack_s"] == "2.5"
        # Options given to attach go first; the rest is the node's own.
        st2i.attach(client, arena_bytes="2 MiB")
        after = options(client)
        assert {name: seen["arena"] for name, seen in after.items()} == dict(
            one=2 << 20, two=2 << 20
        )
        assert {name: seen["memory"] for name, seen in after.items()} == dict(
            one=64 << 20, two=32 << 20
        )


def test_a_preloaded_worker_of_a_plain_scheduler_waits_for_attach(tmp_path):
    worker = ["--no-nanny", "--name", "w", "--preload", WORKER, "--memory-bytes", "48 MiB"]
    with running(tmp_path, [], (worker, None)) as client:
        assert client.submit(sum, [1, 2]).result(timeout=SECONDS) == 3
        assert "does not serve workflows; start it with --preload" in (tmp_path / "log").read_text()
        large = [
            "--nthreads=1",
            "--no-nanny",
            "--no-dashboard",
            "--preload",
            WORKER,
            "--arena-bytes=1 PiB",
        ]
        text = refused(tmp_path / "large", "worker", client.scheduler.address, *large)
        assert "an arena of 1,125,899,906,842,624 bytes in a budget of" in text
        assert [w["name"] for w in client.scheduler_info(-1)["workers"].values()] == ["w"]
        st2i.attach(client)
        assert options(client)["w"]["memory"] == 48 << 20
        assert chain.submit(client, value=1.0).result(timeout=SECONDS) == 3.0


def test_a_node_with_a_bad_option_ends(tmp_path):
    text = refused(tmp_path, "scheduler", "--preload", SCHEDULER, "--slack-s=nought")
    assert "Invalid value for '--slack-s'" in text


@pytest.mark.parametrize(
    ("preload", "arguments", "said"),
    [
        (worker_preload, ["--memory-bytes", "none"], r"memory_bytes='none' is not a positive size"),
        (worker_preload, ["--device", "tpu"], "device='tpu' is not known"),
        (worker_preload, ["--device", "cuda:99"], "device='cuda:99' is not there"),
        (worker_preload, ["--slab", "3"], "No such option.*--slab"),
        (
            scheduler_preload,
            ["--slack-s", "-1"],
            "slack_s is -1.0; give a finite number at least 0",
        ),
        (scheduler_preload, ["--steps-per-task", "0"], "steps_per_task is 0; give a whole number"),
    ],
)
def test_options_are_checked_when_they_are_parsed(preload, arguments, said):
    with pytest.raises(click.UsageError, match=said):
        preload.dask_setup.make_context("dask_setup", arguments)


def test_the_configuration_is_checked_when_options_are_parsed():
    with (
        dask.config.set({"st2i.worker.memry-bytes": "1 GiB"}),
        pytest.raises(
            click.UsageError, match="memry-bytes is not known; did you mean memory-bytes"
        ),
    ):
        worker_preload.dask_setup.make_context("dask_setup", [])
    worker_preload.dask_setup.make_context("dask_setup", [])


@pytest.mark.parametrize("preload", [scheduler_preload, worker_preload])
@pytest.mark.parametrize(
    ("key", "value", "said"),
    [
        ("st2i.logs.level", "loud", r"configuration st2i\.logs\.level: level='loud' is not known"),
        ("st2i.logs.json", "yes", r"configuration st2i\.logs\.json: json='yes' is not known"),
        ("st2i.traces.enabled", 2, r"configuration st2i\.traces\.enabled: enabled=2 is not known"),
        ("st2i.scheduler.weights", "studio=3", "weights is 'studio=3'; it gives tenants"),
        ("st2i.scheduler", 5, "st2i.scheduler is 5; it is a section"),
        ("st2i.worker", 5, "st2i.worker is 5; it is a section"),
    ],
)
def test_every_section_is_checked_when_options_are_parsed(preload, key, value, said):
    option = ["--slack-s", "1"] if preload is scheduler_preload else ["--arena-bytes", "1 MiB"]
    with dask.config.set({key: value}), pytest.raises(click.UsageError, match=said):
        preload.dask_setup.make_context("dask_setup", option)


@pytest.mark.parametrize(
    "node",
    [("scheduler", "--preload", SCHEDULER), ("worker", "tcp://127.0.0.1:9", "--preload", WORKER)],
)
def test_a_bad_level_of_logs_ends_a_node_before_it_starts(tmp_path, node):
    loud = {"DASK_ST2I__LOGS__LEVEL": "loud"}
    text = refused(tmp_path, *node, environment=loud, statuses=(2,))
    assert "level='loud' is not known; use one of debug, info" in text
    assert "Traceback" not in text
    assert "Scheduler at" not in text
    assert "Start" not in text


def test_both_preloads_take_what_attach_and_settings_take():
    def names(command):
        return {parameter.name.replace("_", "-") for parameter in command.params}

    assert names(worker_preload.dask_setup) == set(DEFAULTS["worker"])
    scheduler = set(DEFAULTS["scheduler"]) - {"weights", "caps"}  # by tenant: in a file
    assert names(scheduler_preload.dask_setup) == scheduler


class _Worker:
    """As far as the preload looks at one: its scheduler serves with this version."""

    def __init__(self, version):
        self.version, self.registered = version, []
        self.scheduler = self
        self.state = SimpleNamespace(nthreads=1)
        self.memory_manager = SimpleNamespace(memory_limit=1 << 30)

    async def st2i_settings(self):
        return {"rows": [], "version": self.version}

    async def register_worker_plugin(self, **message):
        self.registered.append(message["name"])


def test_a_worker_of_another_version_ends():
    here = _Worker(version("st2i_dask"))
    asyncio.run(worker_preload.dask_setup.callback(here))
    assert here.registered == ["st2i-worker"]
    other = _Worker("9.9.9")
    with pytest.raises(SystemExit):
        asyncio.run(worker_preload.dask_setup.callback(other))
    assert other.registered == []
    with pytest.raises(st2i.AttachError, match=r"the scheduler 9\.9\.9; install the same version"):
        worker_preload.check_version("9.9.9")
