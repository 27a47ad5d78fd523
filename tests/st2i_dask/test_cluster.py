"""Serving on a live cluster: attach, plain tasks beside, failures, cancellation, killed workers."""

from __future__ import annotations

import asyncio
import os
import signal
import threading
import time
import traceback

import numpy as np
import pytest
from distributed import Client, LocalCluster, wait

import st2i_dask as st2i
from st2i_dask import cluster as cluster_module

TIMEOUT = 60


class Add(st2i.ModelFn):
    """value + 1 after `seconds`; a stand-in for a model whose result is easy to know."""

    def setup_io(self):
        self.add_input("value")
        self.add_input("seconds", optional=True)
        self.add_output("sum")

    def load_model(self, model_path):
        return {"step": np.ones(self.options.get("kib", 1) * 1024, np.uint8)}

    def execute(self, model_components, value, seconds):
        time.sleep(seconds or 0)
        return {"sum": value + 1}


class Boom(st2i.ModelFn):
    def setup_io(self):
        self.add_input("value")
        self.add_output("never")

    def execute(self, model_components, value):
        raise ZeroDivisionError("the model's own words")


@st2i.workflow(name="test-cluster-chain", replace=True)
def chain(value: float, steps: int = 3, seconds: float = 0.0):
    add = Add()
    for _ in range(steps):
        value = add(value, seconds)
    return value


@st2i.workflow(name="test-cluster-boom", replace=True)
def boom(value: float):
    return Add()(Boom()(value))


@pytest.fixture(scope="module")
def cluster():
    import dask

    with (
        dask.config.set({"distributed.scheduler.validate": True}),
        st2i.local_cluster(2, dashboard_address=":0") as cluster,
    ):
        yield cluster


@pytest.fixture(scope="module")
def client(cluster):
    with Client(cluster) as client:
        st2i.attach(client)
        yield client


def usage(client):
    return client.sync(client.scheduler.st2i_usage)


def test_results_and_usage_by_tenant(client):
    futures = [chain.submit(client, value=v, steps=4, tenant="ann") for v in range(5)]
    assert client.gather(futures) == [4.0, 5.0, 6.0, 7.0, 8.0]
    assert usage(client)["ann"]["invocations"] == 20
    assert usage(client)["ann"]["device_seconds"] > 0


def test_map_gives_futures_in_order(client):
    @st2i.workflow(name="test-cluster-text", replace=True)
    def text(prompt: str, seed: int = 0):
        return Add()(join(prompt, seed))

    @st2i.glue
    def join(prompt, seed):
        return len(prompt) * 1000 + seed

    assert client.gather(text.map(client, ["a", "bb", "ccc"], seed=[1, 2, 3])) == [1002, 2003, 3004]
    assert client.gather(text.map(client, ["a", "bb"], seed=7)) == [1008, 2008]
    with pytest.raises(st2i.ParameterError, match="2 values of 'seed' for 3 prompts"):
        text.map(client, ["a", "b", "c"], seed=[1, 2])
    with pytest.raises(st2i.ParameterError, match=r"seed=1\.5"):
        text.map(client, ["a", "b"], seed=[1, 1.5])


def test_attach_is_idempotent_and_keeps_settings(cluster, client):
    st2i.attach(client, memory_bytes="3 MiB")
    st2i.attach(client)
    with Client(cluster) as second:  # another session of another person
        st2i.attach(second)
        assert chain.submit(second, value=1.0).result(timeout=TIMEOUT) == 4.0

    def budget(dask_worker):
        return dask_worker.plugins["st2i-worker"].executor.models.memory

    assert set(client.run(budget).values()) == {3 * 2**20}
    plugins = client.run_on_scheduler(lambda dask_scheduler: list(dask_scheduler.plugins))
    assert plugins.count("st2i-scheduler") == 1


@pytest.mark.parametrize("size", ["0", "-1", "lots", 0, "1 parsec"])
@pytest.mark.parametrize("option", ["memory_bytes", "arena_bytes", "host_bytes", "load_bandwidth"])
def test_attach_refuses_bad_sizes(client, option, size):
    with pytest.raises(st2i.AttachError, match=rf"{option}=.*not a positive size"):
        st2i.attach(client, **{option: size})


@pytest.mark.parametrize("size", ["1 kiB", 65_535, "1 PiB"])
def test_attach_refuses_arenas_beyond_one_tensor_and_memory(client, size):
    before = client.run(_heap)
    limits = r"arena_bytes=[\d,]+ on worker tcp.*65,536 bytes \(one tensor\) to [\d,]+ bytes"
    with pytest.raises(st2i.AttachError, match=limits):
        st2i.attach(client, arena_bytes=size)
    assert client.run(_heap) == before, "nothing has changed"


def test_attach_refuses_an_unknown_allocator(client):
    with pytest.raises(st2i.AttachError, match="'slab' is not known; use 'best_fit' or 'buddy'"):
        st2i.attach(client, allocator="slab")


def test_a_new_size_gives_new_arenas_and_work_goes_on(client):
    futures = [chain.submit(client, value=float(v)) for v in range(4)]
    st2i.attach(client, arena_bytes="2 MiB", allocator="buddy")
    assert [f.result(timeout=TIMEOUT) for f in futures] == [v + 3.0 for v in range(4)]
    assert {w["arena"]["nbytes"] for w in st2i.data_plane(client).values()} == {2 << 20}


def _heap(dask_worker):
    return dask_worker.plugins["st2i-worker"].store.arena.heap.address.uuid


def test_attach_says_who_lacks_the_package_or_differs(cluster, monkeypatch):
    with Client(cluster) as client:
        monkeypatch.setattr(cluster_module, "_versions", _by_source(_WITHOUT))
        with pytest.raises(st2i.AttachError, match=r"scheduler cannot import st2i_dask.*install"):
            st2i.attach(client)
        monkeypatch.setattr(cluster_module, "_versions", _by_source(_OLD))
        with pytest.raises(
            st2i.AttachError, match=r"scheduler has st2i_dask 0\.0\.1.*same version"
        ):
            st2i.attach(client)
        monkeypatch.setattr(cluster_module, "_versions", _by_source(_MIXED))
        with pytest.raises(st2i.AttachError, match=r"workers differ in torch"):
            st2i.attach(client)


_WITHOUT = "return dict.fromkeys(('st2i_dask', 'torch', 'diffusers', 'transformers'))"
_OLD = "return {'st2i_dask': '0.0.1', 'torch': '1', 'diffusers': '1', 'transformers': '1'}"
_MIXED = """
    import os
    from importlib.metadata import version
    here = {'st2i_dask': version('st2i_dask'), 'diffusers': '1', 'transformers': '1'}
    return {**here, 'torch': str(os.getpid())}
"""


def _by_source(body):
    """A probe with this body, as a node with other packages would answer."""
    space = {}
    exec(f"def probe():\n    {body.strip()}\n", space)
    return space["probe"]


def test_an_asynchronous_client_of_other_processes(cluster):
    async def use():
        async with Client(cluster.scheduler_address, asynchronous=True) as client:
            await st2i.attach(client)
            return await (await chain.submit(client, value=1.0))

    assert asyncio.run(use()) == 4.0


def test_plain_dask_tasks_work_before_during_and_after(cluster):
    with Client(cluster) as client:
        assert client.submit(sum, [1, 2]).result(timeout=TIMEOUT) == 3
        st2i.attach(client)
        ours = [chain.submit(client, value=v, steps=10, seconds=0.01) for v in range(4)]
        plain = client.map(lambda x: x * x, range(50))
        assert sum(client.gather(plain)) == sum(x * x for x in range(50))
        assert client.gather(ours) == [10.0, 11.0, 12.0, 13.0]
        assert client.submit(sum, [3, 4]).result(timeout=TIMEOUT) == 7


def test_a_future_of_ours_feeds_a_plain_task(client):
    future = chain.submit(client, value=1.0)
    assert client.submit(lambda x: x * 10, future).result(timeout=TIMEOUT) == 40.0


def test_a_model_that_raises_fails_its_request_alone(client):
    good = chain.submit(client, value=1.0, steps=20, seconds=0.01)
    bad = boom.submit(client, value=1.0)
    with pytest.raises(ZeroDivisionError, match="the model's own words"):
        bad.result(timeout=TIMEOUT)
    text = "".join(traceback.format_tb(bad.traceback(timeout=TIMEOUT)))
    assert "raise ZeroDivisionError" in text  # the line of the user's own execute
    assert good.result(timeout=TIMEOUT) == 21.0


def tenant_row(client, name):
    rows = client.sync(client.scheduler.st2i_tenants)
    return next((row for row in rows if row["tenant"] == name), {"queued": 0, "running": 0})


def until(condition, seconds=20.0):
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "not in time"
        time.sleep(0.02)


def test_cancel_stops_what_has_not_started(client):
    future = chain.submit(client, value=1.0, steps=400, seconds=0.05, tenant="late")
    until(lambda: tenant_row(client, "late")["running"] == 1)
    future.cancel()
    until(lambda: tenant_row(client, "late")["running"] == 0)
    assert tenant_row(client, "late")["queued"] == 0
    counted = usage(client).get("late", {}).get("invocations", 0)
    assert counted < 100
    time.sleep(0.5)  # ten more steps, if any were dispatched
    assert usage(client).get("late", {}).get("invocations", 0) == counted
    assert chain.submit(client, value=1.0).result(timeout=TIMEOUT) == 4.0


def test_killed_worker_requests_finish(client):
    futures = [chain.submit(client, value=v, steps=30, seconds=0.02) for v in range(4)]
    time.sleep(0.4)
    pids = client.run(os.getpid)
    os.kill(next(iter(pids.values())), signal.SIGKILL)
    assert not wait(futures, timeout=TIMEOUT).not_done
    assert client.gather(futures) == [30.0, 31.0, 32.0, 33.0]
    # The worker that replaces it serves too.
    client.wait_for_workers(2, timeout=TIMEOUT)
    assert len(client.run(lambda dask_worker: "st2i-worker" in dask_worker.plugins)) == 2


def test_models_are_loaded_once_per_worker_and_evicted_by_bytes(cluster):
    @st2i.workflow(name="test-cluster-models", replace=True)
    def models(value: float, which: int = 0):
        return Add(f"model-{which}", kib=1)(value)

    with Client(cluster) as client:
        st2i.attach(client, memory_bytes="1 GiB")
        client.gather([models.submit(client, value=1.0, which=w) for w in (0, 1, 0, 1, 0, 1)])

        def loads(dask_worker):
            rows = dask_worker.plugins["st2i-worker"].executor.models.models()
            return sum(row["runs"] - row["hits"] for row in rows)

        assert sum(client.run(loads).values()) <= 4  # two models, two workers


def test_undeclared_output_is_an_error_with_a_name(client):
    class Liar(Add):
        def execute(self, model_components, value, seconds):
            return {"total": value}

    @st2i.workflow(name="test-cluster-liar", replace=True)
    def liar(value: float):
        return Liar()(value)

    with pytest.raises(
        st2i.OutputError, match=r"Liar#1 returned \['total'\] but declares \['sum'\]"
    ):
        liar.submit(client, value=1.0).result(timeout=TIMEOUT)


def test_values_that_cannot_be_sent_are_an_error_not_a_hang(client):
    class Lock(Add):
        def execute(self, model_components, value, seconds):
            return {"sum": threading.Lock()}

    @st2i.workflow(name="test-cluster-lock", replace=True)
    def lock(value: float):
        return Add()(Lock()(value))

    with pytest.raises(st2i.OutputError, match=r"Lock#1 hands on values \(lock\)"):
        lock.submit(client, value=1.0).result(timeout=TIMEOUT)


def test_a_worker_of_another_version_refuses_to_serve():
    from worker_plugin.plugin import ServingPlugin

    with (
        LocalCluster(
            n_workers=1, threads_per_worker=1, processes=False, dashboard_address=None
        ) as cluster,
        Client(cluster) as client,
    ):
        plugin = ServingPlugin(
            memory_bytes=None,
            arena_bytes=None,
            allocator="buddy",
            nvshmem=True,
            weights="elastic",
            host_bytes=None,
            load_bandwidth=None,
            device=None,
            expected="9.9.9",
        )
        with pytest.raises(st2i.AttachError, match=r"the client 9\.9\.9"):
            client.register_plugin(plugin)


def test_progress_returns_the_futures_in_order(client, capsys):
    futures = chain.submit(client, value=1.0), boom.submit(client, value=1.0)
    assert st2i.progress(futures) == list(futures)
    assert [f.status for f in futures] == ["finished", "error"]
    assert "failed=1" in capsys.readouterr().err


def test_local_cluster_needs_a_worker():
    with pytest.raises(st2i.AttachError, match="n_workers=0"):
        st2i.local_cluster(0)


@pytest.mark.parametrize("device", ["gpu7", "cuda:x", ""])
def test_attach_refuses_devices_it_does_not_know(client, device):
    with pytest.raises(st2i.AttachError, match="use 'cpu', 'cuda' or 'cuda:N'"):
        st2i.attach(client, device=device)


def test_attach_with_a_device_that_workers_lack_changes_nothing(cluster, client):
    import torch

    if torch.cuda.is_available():
        pytest.skip("this machine has the device")
    with Client(cluster) as other, pytest.raises(st2i.AttachError, match="has no device 'cuda'"):
        st2i.attach(other, device="cuda")
    assert chain.submit(client, value=1.0).result(timeout=TIMEOUT) == 4.0


def test_attach_wants_a_connected_client(cluster):
    with pytest.raises(st2i.AttachError, match="is no Dask client"):
        st2i.attach(cluster.scheduler_address)
    closed = Client(cluster)
    closed.close()
    with pytest.raises(st2i.AttachError, match="the client is closed"):
        st2i.attach(closed)


def test_a_model_that_exits_fails_its_request_and_spares_the_worker(client):
    class Exit(Add):
        def execute(self, model_components, value, seconds):
            raise SystemExit(3)

    @st2i.workflow(name="test-cluster-exit", replace=True)
    def exits(value: float):
        return Exit()(value)

    before = client.run(os.getpid)
    with pytest.raises(st2i.OutputError, match="raised SystemExit; a ModelFn must not end"):
        exits.submit(client, value=1.0).result(timeout=TIMEOUT)
    assert client.run(os.getpid) == before
