"""An asynchronous client: whatever waits for the cluster is awaited, in the same event loop."""

from __future__ import annotations

import asyncio
import gc
import threading

import pytest
from distributed import Client, LocalCluster

import st2i_dask as st2i
from st2i_dask import async_client
from st2i_dask.submission import submit_requests

from ..scheduler_plugin.live import chain, until
from .odd_pipelines import save
from .test_from_pipeline import CASES
from .test_updates import fading

TIMEOUT = 60


@pytest.fixture(scope="module", autouse=True)
def nothing_kept():
    yield

    def nothing():
        gc.collect()
        return not async_client._turns

    until(nothing)


def with_client(use, n_workers=1):
    """What a coroutine makes of an asynchronous client of a cluster in the same event loop."""
    options = {"n_workers": n_workers, "processes": False, "dashboard_address": ":0"}

    async def main():
        async with (
            LocalCluster(asynchronous=True, **options) as cluster,
            Client(cluster, asynchronous=True) as client,
        ):
            return await asyncio.wait_for(use(client), TIMEOUT)

    return asyncio.run(main())


def test_the_first_requests_attach_and_come_in_the_order_of_their_calls():
    async def use(client):
        futures = await asyncio.gather(*(chain.submit(client, value=float(v)) for v in range(8)))
        results = await asyncio.gather(*futures)
        known = await client.run_on_scheduler(lambda dask_scheduler: list(dask_scheduler.tasks))
        keys = [future.key for future in futures]
        assert [key for key in known if key in keys] == keys
        return results

    assert with_client(use, 2) == [float(v + 3) for v in range(8)]


def test_many_in_one_message_and_what_becomes_of_them():
    async def use(client):
        @st2i.workflow(name="test-async-prompts", replace=True)
        def prompts(prompt: str, seed: int = 0):
            return chain(1.0)

        futures = await prompts.map(client, ["a", "b"], seed=range(2), tenant="ann")
        states = {}
        async for update in st2i.updates(futures):
            states[update.number] = update.state
        assert states == {0: "finished", 1: "finished"}
        rows = await st2i.tenants(client)
        return await client.gather(futures), [row["tenant"] for row in rows]

    assert with_client(use) == ([4.0, 4.0], ["ann"])


def test_previews():
    async def use(client):
        future = await fading.submit(client, previews=3)
        last = None
        async for update in st2i.updates(future):
            last = update
        assert last.state == "finished"
        assert last.preview is not None
        return (await future).getpixel((0, 0))

    assert with_client(use) == (16, 16, 16)


def test_a_whole_pipeline(tmp_path):
    name = "StableDiffusionPipeline"
    workflow = st2i.from_pipeline(save(name, tmp_path / "sd"), dtype="float32")

    async def use(client):
        one = await workflow.submit(client, seed=1, output_type="np", **CASES[name])
        case = {key: value for key, value in CASES[name].items() if key != "prompt"}
        (other,) = await workflow.map(
            client, [CASES[name]["prompt"]], seed=1, output_type="np", **case
        )
        first, second = await client.gather([one, other])
        return (first == second).all()

    assert with_client(use)


def test_values_between_invocations_are_fetched_in_a_thread():
    async def use(client):
        future = await chain.submit(client, value=1.0)
        with pytest.raises(st2i.ParameterError, match="to_thread"):
            st2i.fetch(future, 1)
        return await asyncio.to_thread(st2i.fetch, future, 1), await future

    assert with_client(use) == ((3.0,), 4.0)


def test_what_is_wrong_is_said_before_there_is_anything_to_await():
    async def use(client):
        with pytest.raises(st2i.ParameterError, match="no parameter 'valu'"):
            chain.submit(client, valu=1.0)
        with pytest.raises(st2i.ParameterError, match="has type str"):
            chain.submit(client, value=1.0, steps="many")

    with_client(use)


def test_refusals_of_the_cluster_are_raised_where_it_is_awaited():
    async def use(client):
        await st2i.attach(client, memory_bytes="1 GiB")
        await st2i.settings(client, caps={"greedy": 1})
        two = [chain.request("greedy", value=0.0) for _ in range(2)]
        with pytest.raises(st2i.LimitError, match="greedy"):
            await submit_requests(client, two)
        with pytest.raises(st2i.PolicyError):
            await st2i.settings(client, slack_s=-1)
        with pytest.raises(st2i.AttachError, match="memory_bytes"):
            await st2i.attach(client, memory_bytes="many")
        assert len(await st2i.data_plane(client)) == 1

    with_client(use)


def test_a_client_that_nobody_awaited():
    async def use(client):
        other = Client(client.scheduler.address, asynchronous=True, set_as_default=False)
        with pytest.raises(st2i.AttachError, match="and await one that is asynchronous"):
            await chain.submit(other, value=1.0)
        await other
        assert await (await chain.submit(other, value=1.0)) == 4.0
        await other.close()
        with pytest.raises(st2i.AttachError, match="the client is closed"):
            await chain.submit(other, value=1.0)

    with_client(use)


def test_whoever_stops_awaiting_holds_nothing():
    """The request is released once it was sent, and the next one has its turn."""

    async def use(client):
        await st2i.attach(client)
        begun, go = threading.Event(), threading.Event()

        @async_client.awaitable
        def slowly(client):
            begun.set()
            go.wait(TIMEOUT)
            return client.submit(int, pure=False)

        task = asyncio.create_task(slowly(client))
        while not begun.is_set():
            await asyncio.sleep(0.01)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        go.set()
        del task
        assert await (await chain.submit(client, value=1.0)) == 4.0
        for _ in range(500):
            if not client.futures:
                return
            await asyncio.sleep(0.01)
        raise AssertionError(client.futures)

    with_client(use)
