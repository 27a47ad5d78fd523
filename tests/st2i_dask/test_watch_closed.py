"""A client that is closed while somebody waits for its requests: the wait ends, and they are cancelled."""

from __future__ import annotations

import asyncio
import concurrent.futures
import io
import threading

import pytest
from distributed import Client
from distributed.comm import CommClosedError

import st2i_dask as st2i
from st2i_dask.submission import previews_of
from st2i_dask.updates import Watch

from ..scheduler_plugin.live import chain, serving, until
from .test_updates import fading
from .watched import TIMEOUT, gate, open_gates


@pytest.fixture(scope="module")
def client():
    # tcp: its event loop is its cluster's; the clients that are closed have their own.
    with serving(1, cluster_options={"protocol": "tcp"}) as client:
        yield client


@pytest.fixture
def mine(client, request):
    """Two requests that never end, of a client that nobody else needs."""
    gate("ann", 0.0)
    other = Client(client.cluster.scheduler_address, set_as_default=False)
    futures = [chain.submit(other, value=0.0, label="ann") for _ in range(2)]
    yield futures
    other.close()
    del futures
    open_gates(request)


def with_progress(futures, told):
    assert st2i.progress(futures, on_progress=told, file=io.StringIO()) == futures


def with_updates(futures, told):
    async def main():
        async for update in st2i.updates(futures):
            told(update)

    asyncio.run(main())


WAYS = pytest.mark.parametrize("wait", [with_progress, with_updates])


def ends(wait, futures, told=None):
    """Last states by number, of a wait in a thread of its own."""
    states: dict[int, str] = {}
    failed: list[BaseException] = []

    def tell(update):
        states[update.number] = update.state
        if told is not None:
            told(update)

    def run():
        try:
            wait(futures, tell)
        except BaseException as error:
            failed.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    return states, failed, thread


def check(states, failed, thread):
    thread.join(TIMEOUT)
    assert not thread.is_alive()
    assert not failed
    assert states == {0: "cancelled", 1: "cancelled"}


@WAYS
def test_between_two_looks(mine, wait):
    """When it asks again, there is no event loop to ask."""
    check(*ends(wait, mine, lambda update: mine[0].client.close()))


@WAYS
def test_after_its_end(mine, wait):
    mine[0].client.close()
    check(*ends(wait, mine))


@WAYS
def test_while_it_looks(mine, wait, monkeypatch):
    """The event loop cancels what runs there when it ends."""
    looking = threading.Event()

    async def changes(self):
        looking.set()
        await asyncio.Event().wait()

    monkeypatch.setattr(Watch, "changes", changes)
    ended = ends(wait, mine)
    assert looking.wait(TIMEOUT)
    mine[0].client.close()
    check(*ended)


@WAYS
def test_a_preview_that_does_not_come_any_more(client, wait, monkeypatch):
    async def gather(*args, **kwargs):
        raise CommClosedError

    def tell(update):
        told.append((update.state, update.preview))

    told = []
    go = gate("ann", 0.25)
    mine = fading.submit(client, label="ann", previews=2)
    first = previews_of(mine)[0].future
    until(lambda: first.status == "finished")
    monkeypatch.setattr(client, "gather", gather)
    go.set()
    wait([mine], tell)
    assert told[-1] == ("finished", None)


@WAYS
def test_as_it_begins_to_look(mine, wait, monkeypatch):
    """What is handed to an event loop after its last turn is never begun."""
    asked = threading.Event()

    def begin(self):
        asked.set()
        return concurrent.futures.Future()

    monkeypatch.setattr(Watch, "_begin", begin)
    ended = ends(wait, mine)
    assert asked.wait(TIMEOUT)
    mine[0].client.close()
    check(*ended)
