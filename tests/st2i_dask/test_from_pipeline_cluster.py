"""Pipelines as workflows on a cluster: orchestrators hold no executor, and survive what they must."""

from __future__ import annotations

import os
import signal
import time

import pytest
import torch
from distributed import Client, wait

import st2i_dask as st2i

from .odd_pipelines import save
from .test_from_pipeline import CASES, classic

TIMEOUT = 120
# Large enough for tensors that travel as keys of their own.
NAMES = ("FluxPipeline", "StableDiffusionPipeline", "StableDiffusion3ControlNetPipeline")
FLUX = dict(CASES["FluxPipeline"], height=96, width=96)


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    root = tmp_path_factory.mktemp("pipelines")
    return {name: save(name, root / name) for name in NAMES}


@pytest.fixture(scope="module")
def cluster():
    with st2i.local_cluster(2, dashboard_address=None) as cluster:
        yield cluster


@pytest.fixture(scope="module")
def client(cluster):
    with Client(cluster) as client:
        st2i.attach(client)
        yield client


def books(client):
    """Tasks, clients in name only, and open requests of the policy on the scheduler."""

    def look(dask_scheduler):
        plugin = dask_scheduler.plugins["st2i-scheduler"]
        names = [name for name in dask_scheduler.clients if name.startswith("st2i-request-")]
        return {
            "tasks": len(dask_scheduler.tasks),
            "clients": names,
            "requests": len(plugin.policy._book.requests),
            "owners": len(plugin.calls._owners),
            "calls": len(plugin.calls._owner_of),
        }

    return client.run_on_scheduler(look)


def kept(client):
    """Per worker, keys in memory, arena bytes of tensors, and orchestrator threads."""

    def look(dask_worker):
        import threading

        names = [t.name for t in threading.enumerate() if t.name.startswith("st2i-orchestrator")]
        store = dask_worker.plugins["st2i-worker"].store
        return len(dask_worker.data), store.arena.statistics().used, names

    return client.run(look)


def nothing_is_left(client):
    nothing = {"tasks": 0, "clients": [], "requests": 0, "owners": 0, "calls": 0}
    deadline = time.monotonic() + 20
    while True:
        left = books(client), kept(client)
        if left[0] == nothing and all(k == (0, 0, []) for k in left[1].values()):
            return
        assert time.monotonic() < deadline, left
        time.sleep(0.1)


def test_images_equal_the_classic_calls_and_nothing_is_left(client, folders):
    for name in NAMES:  # the last one draws from torch's global generator, three at a time here
        arguments = FLUX if name == "FluxPipeline" else CASES[name]
        workflow = st2i.from_pipeline(folders[name])
        futures = [
            workflow.submit(client, tenant="ann", seed=seed, output_type="pt", **arguments)
            for seed in (1, 2, 3)
        ]
        for seed, future in zip((1, 2, 3), futures, strict=True):
            theirs = classic(folders[name], "float32", seed, **arguments)
            ours = future.result(timeout=TIMEOUT)
            assert torch.equal(ours, theirs if len(theirs) > 1 else theirs[0])
        del futures, future
        nothing_is_left(client)
    service = {row["tenant"]: row["service_s"] for row in st2i.tenants(client)}
    assert service["ann"] > 0


def test_large_arguments_go_from_worker_to_worker(client, folders):
    """What is passed again in each step is one key, and pulled at most once."""
    seen = client.run_on_scheduler(_watch_arguments)
    assert seen == 0
    workflow = st2i.from_pipeline(folders["FluxPipeline"])
    steps = 8
    workflow.submit(
        client, **{**FLUX, "num_inference_steps": steps, "max_sequence_length": 256}
    ).result(timeout=TIMEOUT)
    # Latents of each step and of the decoder, and the embeddings once (256 x 32 x 4 bytes).
    assert client.run_on_scheduler(_argument_count) == steps + 1 + 1


def _watch_arguments(dask_scheduler):
    dask_scheduler.st2i_seen = seen = []
    plain = type(dask_scheduler).update_data

    def update_data(*, who_has, **options):
        seen.extend(who_has)
        plain(dask_scheduler, who_has=who_has, **options)

    dask_scheduler.update_data = update_data
    return len(seen)


def _argument_count(dask_scheduler):
    del dask_scheduler.update_data
    return len(dask_scheduler.st2i_seen)


def long_request(client, folders, tenant, **more):
    arguments = {**FLUX, "num_inference_steps": 200, "output_type": "pt", **more}
    return st2i.from_pipeline(folders["FluxPipeline"]).submit(client, tenant=tenant, **arguments)


def calls_made(client, at_least):
    deadline = time.monotonic() + TIMEOUT
    while books(client)["calls"] < at_least:
        assert time.monotonic() < deadline, books(client)
        time.sleep(0.02)


def test_a_cancelled_future_stops_it_and_leaves_nothing(client, folders):
    future = long_request(client, folders, "bob")
    calls_made(client, 5)
    future.cancel()
    nothing_is_left(client)


def test_its_calls_are_told_while_it_runs(client, folders):
    workflow = st2i.from_pipeline(folders["FluxPipeline"])
    told = []
    future = workflow.submit(client, tenant="ann", **{**FLUX, "num_inference_steps": 60})
    st2i.progress(future, on_progress=told.append, disable=True)
    done = [update.done for update in told]
    assert done == sorted(done)
    assert any(0 < update.done < done[-1] and update.state == "running" for update in told)
    assert done[-1] >= 14  # encoders, steps: not of each is heard
    assert {update.total for update in told} == {None}  # nobody knows before
    assert told[-1].state == "finished"
    del future
    nothing_is_left(client)


def test_an_orchestrator_holds_no_executor(client, folders):
    """More of them than executors, and others' work goes on."""
    futures = [long_request(client, folders, f"t{i}", seed=i) for i in range(6)]
    calls_made(client, 12)
    assert client.submit(pow, 2, 5).result(timeout=TIMEOUT) == 32
    deadline = time.monotonic() + TIMEOUT
    tenants = {f"t{i}" for i in range(6)}
    while tenants:  # all of them get their turns while the first are at work
        assert time.monotonic() < deadline, tenants
        tenants -= {row["tenant"] for row in st2i.tenants(client) if row["service_s"] > 0}
    assert not any(future.done() for future in futures)
    client.cancel(futures)
    del futures
    nothing_is_left(client)


def test_an_error_of_the_pipeline_is_the_futures(client, folders, caplog):
    workflow = st2i.from_pipeline(folders["FluxPipeline"])
    future = workflow.submit(client, **{**FLUX, "prompt": None})
    error = future.exception(timeout=TIMEOUT)
    assert isinstance(error, ValueError)
    assert "Provide either `prompt` or `prompt_embeds`" in str(error)
    del future
    nothing_is_left(client)
    # It made no call; the scheduler, which is in this process, takes that for nothing unusual.
    assert not [record for record in caplog.records if record.name == "tornado.application"]


@pytest.mark.slow
def test_a_tenant_at_its_cap_is_refused(client, folders):
    st2i.settings(client, caps={"carl": 1})
    futures = [long_request(client, folders, "dora", seed=i) for i in range(8)]
    calls_made(client, 8)

    def submit_many():  # places are few for one tenant, and those who wait for one count
        for _ in range(30):
            futures.append(long_request(client, folders, "carl"))

    with pytest.raises(st2i.LimitError, match="carl"):
        submit_many()
    client.cancel(futures)
    futures.clear()
    st2i.settings(client, caps={"carl": None})
    nothing_is_left(client)


# ---------------------------------------------------------------- the loss of workers


def orchestrating(client, future):
    """The worker where the request's orchestrator is."""
    key = future.key
    return client.run_on_scheduler(
        lambda dask_scheduler: dask_scheduler.tasks[key].processing_on.address
    )


def kill(client, address):
    pids = client.run(os.getpid)
    os.kill(pids[address], signal.SIGKILL)


def calls_kept(client):
    def look(dask_scheduler):
        plugin = dask_scheduler.plugins["st2i-scheduler"]
        return {
            key: [ws.address for ws in dask_scheduler.tasks[key].who_has or ()]
            for key in plugin.calls._owner_of
            if key in dask_scheduler.tasks
        }

    return client.run_on_scheduler(look)


def invocations(client, tenant):
    """Component calls that have run for the tenant."""
    return client.run_on_scheduler(
        lambda dask_scheduler: (
            found.invocations
            if (found := dask_scheduler.plugins["st2i-scheduler"].usage.tenants.get(tenant))
            else 0
        )
    )


def forget_arguments(dask_scheduler):
    """As when the only worker that Dask has kept them on is gone."""
    keys = [k for k, ts in dask_scheduler.tasks.items() if ts.run_spec is None and ts.who_has]
    dask_scheduler.transitions(dict.fromkeys(keys, "forgotten"), "test")
    return len(keys)


def test_arguments_that_are_lost_are_sent_again(client, folders):
    arguments = {**FLUX, "num_inference_steps": 40}
    theirs = classic(folders["FluxPipeline"], "float32", 3, **arguments)[0]
    future = long_request(client, folders, "gus", num_inference_steps=40, seed=3)
    calls_made(client, 4)
    assert client.run_on_scheduler(forget_arguments) > 0
    assert torch.equal(future.result(timeout=TIMEOUT), theirs)
    del future
    nothing_is_left(client)


@pytest.mark.parametrize("whose", ["orchestrator", pytest.param("other", marks=pytest.mark.slow)])
def test_after_the_loss_of_a_worker_the_image_is_equal(client, folders, whose):
    steps = 80
    arguments = {**FLUX, "num_inference_steps": steps}
    theirs = classic(folders["FluxPipeline"], "float32", 7, **arguments)[0]
    # Company, so that calls run on both workers, and both have their models.
    wait([long_request(client, folders, "eve", num_inference_steps=4, seed=i) for i in range(4)])
    others = [
        long_request(client, folders, f"eve{i}", num_inference_steps=steps, seed=i)
        for i in range(2)
    ]
    earlier = invocations(client, "fay")
    future = long_request(client, folders, "fay", seed=7, num_inference_steps=steps)
    mine = future.key.rpartition("-")[2]
    calls_made(client, 10)
    here = orchestrating(client, future)
    victim = here if whose == "orchestrator" else next(a for a in kept(client) if a != here)
    kept_elsewhere, deadline = 0, time.monotonic() + TIMEOUT
    while kept_elsewhere < 6:
        assert time.monotonic() < deadline
        held = [at for key, at in calls_kept(client).items() if key.endswith(mine)]
        kept_elsewhere = sum(any(where != victim for where in at) for at in held)
    before, whole = (
        invocations(client, "fay") - earlier,
        steps + 3,
    )  # two text encoders and the decoder
    kill(client, victim)
    assert torch.equal(future.result(timeout=TIMEOUT), theirs)
    # What the other worker holds is not made again; between looking and killing a few may be made.
    again = invocations(client, "fay") - earlier - whole
    assert again <= before - kept_elsewhere + 6
    wait(others, timeout=TIMEOUT)
    assert all(other.status == "finished" for other in others)
    del future, others
    client.wait_for_workers(2, timeout=TIMEOUT)
    nothing_is_left(client)
