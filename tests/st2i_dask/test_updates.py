"""What is told of requests while they wait and run, on clusters that check themselves."""

from __future__ import annotations

import asyncio
import threading
import time
from typing import Any

import numpy as np
import pytest
from distributed import Client, LocalCluster, wait

import st2i_dask as st2i
from st2i_dask.submission import send

from ..scheduler_plugin.live import chain, hooks, learn, plugin_of, serving, standing, until
from .watched import TIMEOUT, gate, open_gates, submit


def watching(futures):
    """What is told, in a list that grows, and the thread that listens: with an event loop of its own."""
    told: list[st2i.Update] = []

    async def listen():
        async for update in st2i.updates(futures):
            told.append(update)

    thread = threading.Thread(target=lambda: asyncio.run(listen()))
    thread.start()
    return told, thread


def newest(told, number):
    return next(update for update in reversed(told) if update.number == number)


def ended(thread):
    thread.join(TIMEOUT)
    assert not thread.is_alive()


@pytest.fixture(scope="module")
def client():
    # tcp: one test has a client with another event loop, where inproc does not reach.
    with serving(1, cluster_options={"protocol": "tcp"}) as client:
        learn(client, seconds=0.01)
        yield client


@pytest.fixture(autouse=True)
def nothing_left(request):
    yield
    open_gates(request)


def test_from_the_queue_to_the_result(client):
    go, later = gate("ann", 0.0), gate("bob", 1.0)
    first = submit(client, "ann", steps=1)
    mine = submit(client, "bob", 2, steps=2)
    told, thread = watching(mine)
    until(lambda: any(update.place for update in told if update.number == 1))
    queued = [u for u in told if u.place]
    assert {(u.number, u.place, u.state, u.done, u.total) for u in queued} == {
        (0, 1, "queued", 0, 2),
        (1, 2, "queued", 0, 2),
    }
    assert all(u.wait_s > 0 for u in queued)
    assert all(u.request == mine[u.number].key for u in told)
    go.set()
    until(lambda: (newest(told, 0).state, newest(told, 0).done) == ("running", 1))
    assert newest(told, 0).place is None
    assert not newest(told, 0).over
    later.set()
    ended(thread)
    last = {u.number: u for u in told}
    assert [last[n].state for n in (0, 1)] == ["finished", "finished"]
    assert [(last[n].done, last[n].total) for n in (0, 1)] == [(2, 2)] * 2
    assert [u.number for u in told if u.over] == [0, 1]
    for n in (0, 1):
        done = [u.done for u in told if u.number == n]
        assert done == sorted(done)
    del first, mine


def test_steps_of_a_task_that_runs_several_are_told_while_it_runs(client):
    go = gate("ann", 5.0)
    mine = submit(client, "ann", steps=8, seconds=0.0)
    told, thread = watching(mine)
    until(lambda: told and told[-1].done == 5)
    runs = plugin_of(client).policy._fleet.multi_step.values()
    assert [invocation.run.dispatch.steps for invocation in runs] == [8]
    go.set()
    ended(thread)
    assert (told[-1].done, told[-1].state) == (8, "finished")
    del mine


def test_one_that_is_over_before_anybody_asks_has_its_steps(client):
    mine = submit(client, "ann", steps=3)
    wait(mine, timeout=TIMEOUT)
    told, thread = watching(mine)
    ended(thread)
    assert [(u.state, u.done, u.total) for u in told] == [("finished", 3, 3)]
    del mine


def test_a_worker_that_does_not_answer_holds_nobody_up(client):
    go = gate("ann", 5.0)
    mine = submit(client, "ann", steps=8, seconds=0.0)
    key = mine[0].key.replace("-007-", "-000-")
    worker = next(iter(client.cluster.workers.values()))
    until(lambda: worker.plugins["st2i-worker"].runner._steps == {key: 5})

    async def never():
        await asyncio.sleep(TIMEOUT)

    before = worker.handlers["st2i_steps"]
    worker.handlers["st2i_steps"] = never
    try:
        told, thread = watching(mine)
        until(lambda: told and told[-1].state == "running", seconds=5)
        assert told[-1].done == 0
        go.set()
        ended(thread)
    finally:
        worker.handlers["st2i_steps"] = before
    assert told[-1].done == 8
    del mine


def test_one_question_for_all_and_few_of_them(client):
    go = gate("ann", 0.0)
    mine = submit(client, "ann", 150, steps=1)
    handlers, asked = client.cluster.scheduler.handlers, []
    answer = handlers["st2i_prospects"]

    async def counting(requests):
        asked.append(len(requests))
        return await answer(requests=requests)

    handlers["st2i_prospects"] = counting
    try:
        begin = time.monotonic()
        told, thread = watching(mine)
        until(lambda: len({u.number for u in told if u.place}) == 99)  # one of 100 runs
        time.sleep(1.0)
        assert max(asked) == 100
        assert len(asked) <= (time.monotonic() - begin) / 0.25 + 2
        go.set()
        ended(thread)
    finally:
        handlers["st2i_prospects"] = answer
    assert sorted(u.number for u in told if u.over) == list(range(150))
    del mine


def test_a_dear_question_is_asked_seldom(client):
    go = gate("ann", 0.0)
    mine = submit(client, "ann", steps=1)
    handlers, asked = client.cluster.scheduler.handlers, []
    answer = handlers["st2i_prospects"]

    async def slow(requests):
        asked.append(time.monotonic())
        await asyncio.sleep(0.04)
        return await answer(requests=requests)

    handlers["st2i_prospects"] = slow
    try:
        _, thread = watching(mine)
        until(lambda: len(asked) == 2)
        assert asked[1] - asked[0] > 2.0  # fifty times the time that it took
        go.set()
        ended(thread)
    finally:
        handlers["st2i_prospects"] = answer
    del mine


def test_a_failure_and_a_cancel_are_ends(client):
    def fail(value):
        raise ZeroDivisionError

    hooks["ann"] = fail
    go = gate("bob", 0.0)
    failing, mine = submit(client, "ann"), submit(client, "bob", 2)
    told, thread = watching([*failing, *mine])
    until(lambda: any(u.state == "running" for u in told if u.number == 1))
    client.cancel(mine[1:])
    until(lambda: [u.state for u in told if u.number == 2][-1] == "cancelled")
    go.set()
    ended(thread)
    ends = {u.number: u.state for u in told if u.over}
    assert ends == {0: "error", 1: "finished", 2: "cancelled"}
    failing[0].release()
    del failing, mine


def test_whoever_stops_listening_holds_nothing(client):
    gate("ann", 0.0)
    mine = submit(client, "ann")

    async def once(futures):
        async for update in st2i.updates(futures):
            return update

    assert asyncio.run(once(mine)).number == 0
    del mine
    until(lambda: client.run_on_scheduler(standing)["requests"] == 0)  # nobody wants it: cancelled


def test_in_the_loop_of_an_asynchronous_client(client):
    async def main():
        address = client.cluster.scheduler_address
        async with Client(address, asynchronous=True, set_as_default=False) as other:
            request = chain.request("ann", value=0.0, label="ann", steps=3)
            (future,) = send(other, [request])
            states = [update.state async for update in st2i.updates(future)]
            with pytest.raises(st2i.ParameterError, match="async for"):
                st2i.progress(future)
            return states, await future

    states, result = asyncio.run(main())
    assert states[-1] == "finished"
    assert result == 3.0


def test_what_are_no_futures_of_one_client_is_refused(client):
    async def first(futures):
        async for update in st2i.updates(futures):
            return update

    for given, said in [(7, "7"), ([7], "7"), (None, "None"), ([None], "None")]:
        with pytest.raises(st2i.ParameterError, match=f"got {said}; give futures"):
            asyncio.run(first(given))
        with pytest.raises(st2i.ParameterError, match=f"got {said}; give futures"):
            st2i.progress(given)
    with Client(client.scheduler.address, set_as_default=False) as other:
        mine = [c.submit(int, pure=False) for c in (client, other)]
        with pytest.raises(st2i.ParameterError, match="got 2 of several clients"):
            st2i.progress(mine)


def test_of_no_futures_there_is_nothing_to_wait_for():
    async def all_of(futures):
        return [update async for update in st2i.updates(futures)]

    assert asyncio.run(all_of([])) == []
    assert asyncio.run(all_of(iter(()))) == []
    assert st2i.progress(iter(())) == []


def test_futures_of_a_cluster_that_serves_no_workflows():
    options = {"n_workers": 1, "processes": False, "dashboard_address": ":0"}
    with LocalCluster(**options) as cluster, Client(cluster) as client:
        told, thread = watching([client.submit(time.sleep, 0.3)])
        ended(thread)
        assert [u.state for u in told] == ["queued", "finished"]


# Previews


class Blur(st2i.ModelFn):
    """A step of an image: half as bright."""

    def setup_io(self):
        self.add_input("latents")
        self.add_input("label")
        self.add_output("blurred")

    def execute(self, model_components, latents, label):
        if label in hooks:
            hooks[label](float(latents.max()))
        time.sleep(0.02)  # dearer than a preview
        return {"blurred": latents / 2}


class Decode(st2i.ModelFn):
    def setup_io(self):
        self.add_input("latents")
        self.add_output("pixels")

    def execute(self, model_components, latents):
        return {"pixels": np.full((3, 8, 8), latents, np.float32)}


@st2i.workflow(name="fading", replace=True)
def fading(label: str = "", num_steps: int = 4) -> Any:
    blur, decode = Blur(), Decode()
    latents = white()
    for _ in range(num_steps):
        latents = blur(latents, label)
    return st2i.to_image(decode(latents))


@st2i.glue
def white():
    return np.ones((), np.float32)


def test_previews_come_while_it_runs_and_the_result_is_the_same(client):
    for _ in range(2):  # until it is known what a preview costs
        plain = fading.submit(client, tenant="ann").result()
    go = gate("ann", 0.125)  # before the last step
    mine = fading.submit(client, label="ann", tenant="ann", previews=3)
    told, thread = watching(mine)
    until(lambda: told and told[-1].preview is not None)
    assert told[-1].state == "running"
    go.set()
    ended(thread)
    assert mine.result().getpixel((0, 0)) == (16, 16, 16)
    assert mine.result().tobytes() == plain.tobytes()
    assert mine.result().metadata["version"] == plain.metadata["version"]
    shown = [u.preview.getpixel((0, 0))[0] for u in told if u.preview is not None]
    assert set(shown) <= {128, 64, 32}
    assert shown == sorted(shown, reverse=True)
    del mine


def test_cancelled_with_its_previews_on_their_way(client):
    """Nobody waits for it or its previews any more: no further step is run."""
    go = gate("ann", 1.0)
    mine = fading.submit(client, label="ann", tenant="ann", previews=3, num_steps=6)
    told, thread = watching(mine)
    until(lambda: told and told[-1].state == "running")
    mine.cancel()
    ended(thread)
    assert told[-1].state == "cancelled"
    until(lambda: client.run_on_scheduler(standing)["requests"] == 0)
    go.set()


@pytest.mark.parametrize("count", [-1, 21, 1.0, "all", True])
def test_a_wrong_number_of_previews_is_refused(client, count):
    with pytest.raises(st2i.ParameterError, match="previews="):
        fading.submit(client, previews=count)


def test_nothing_to_preview(client):
    with pytest.raises(st2i.ComposeError, match="repeats no step"):
        fading.submit(client, previews=1, num_steps=1)
