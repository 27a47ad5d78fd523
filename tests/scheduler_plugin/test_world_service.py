"""Forming a world over Dask's RPC, with real connections: who is answered what, and when."""

from __future__ import annotations

import asyncio
import logging
from contextlib import asynccontextmanager

from distributed.core import Server, rpc

from scheduler_plugin.world_service import WorldService

UID = b"u" * 128
BOUND = 10.0


@asynccontextmanager
async def serving(expected=2, **bounds):
    """(service, connect): a server with the handlers; connect() gives a new RPC."""
    service = WorldService(lambda: expected, **bounds)
    server = Server(service.handlers)
    opened = []

    def connect():
        opened.append(rpc(server.address))
        return opened[-1]

    await server.listen("tcp://127.0.0.1:0")
    try:
        yield service, connect
        service._check()
    finally:
        service.stop()
        for connection in opened:
            await connection.close_rpc()
        await server.close()
        service._check()


async def joining(connect):
    """(a, b, a's question, b's question): connections of two processes that join, a first."""
    a, b = connect(), connect()
    first = asyncio.create_task(a.st2i_world_join(process="a", worker="tcp://a", nbytes=1))
    await asyncio.sleep(0.05)
    second = asyncio.create_task(b.st2i_world_join(process="b", worker="tcp://b", nbytes=1))
    return a, b, first, second


def run(test):
    asyncio.run(asyncio.wait_for(test, 30))


def test_two_workers_form_a_world_over_rpc():
    async def test():
        async with serving() as (_, connect):
            a, b = connect(), connect()
            waiting = asyncio.create_task(
                a.st2i_world_join(process="a", worker="tcp://a", nbytes=500)
            )
            await asyncio.sleep(0.1)
            assert not waiting.done()
            joining = asyncio.create_task(
                b.st2i_world_join(process="b", worker="tcp://b", nbytes=300)
            )
            first = await asyncio.wait_for(waiting, BOUND)
            assert first["phase"] == "attaching"
            assert (first["generation"], first["pe"], first["n_pes"]) == (1, 0, 2)
            assert (first["mints"], first["uid"], first["nbytes"]) == (True, None, 300)
            await asyncio.sleep(0.1)
            assert not joining.done()  # until there is a unique id
            own = await a.st2i_world_minted(process="a", generation=1, uid=UID)
            second = await asyncio.wait_for(joining, BOUND)
            assert (own["uid"], second["uid"]) == (UID, UID)
            assert (second["pe"], second["mints"]) == (1, False)
            await a.st2i_world_attached(process="a", generation=1)
            done = await b.st2i_world_attached(process="b", generation=1)
            assert done["phase"] == "up"

    run(test())


def test_members_hear_at_once_that_one_is_lost():
    async def test():
        async with serving(expected=2) as (service, connect):
            a, b, first, second = await joining(connect)
            assert (await first)["mints"]
            await a.st2i_world_minted(process="a", generation=1, uid=UID)
            await second
            await a.st2i_world_attached(process="a", generation=1)
            await b.st2i_world_attached(process="b", generation=1)
            watch = asyncio.create_task(a.st2i_world_watch(process="a"))
            await asyncio.sleep(0.1)
            assert not watch.done()
            service.left("tcp://b")
            ended = await asyncio.wait_for(watch, 1.0)
            assert (ended["phase"], ended["why"]) == ("ended", "worker tcp://b is gone")

    run(test())


def test_a_failure_reaches_the_others():
    async def test():
        async with serving() as (_, connect):
            a, _b, first, second = await joining(connect)
            await first
            # PE 0 cannot even mint: whoever waits for the unique id hears it
            await a.st2i_world_failed(process="a", generation=1, why="no device")
            ended = await asyncio.wait_for(second, 1.0)
            assert (ended["phase"], ended["why"]) == ("ended", "PE 0 on tcp://a: no device")

    run(test())


def test_an_attach_that_does_not_end_is_given_up_for_all():
    async def test():
        async with serving(attach_s=0.3) as (_, connect):
            a, _b, first, second = await joining(connect)
            await first
            await a.st2i_world_minted(process="a", generation=1, uid=UID)
            await second
            await a.st2i_world_attached(process="a", generation=1)
            ended = await asyncio.wait_for(a.st2i_world_watch(process="a"), BOUND)
            assert ended["why"] == "not attached within 0.3 s: tcp://b"

    run(test())


def test_a_world_forms_without_those_who_never_offer():
    async def test():
        async with serving(expected=9, gather_s=0.3) as (_, connect):
            _a, _b, first, second = await joining(connect)
            standing = await asyncio.wait_for(first, BOUND)
            assert standing["n_pes"] == 2
            second.cancel()

    run(test())


def test_a_question_is_answered_in_time_even_if_nothing_happens():
    async def test():
        async with serving(hold_s=0.2) as (_, connect):
            a = connect()
            for _ in range(2):
                standing = await asyncio.wait_for(
                    a.st2i_world_join(process="a", worker="tcp://a", nbytes=1), BOUND
                )
                assert standing["phase"] == "waiting"
            watched = await asyncio.wait_for(a.st2i_world_watch(process="stranger"), BOUND)
            assert watched["phase"] == "unknown"

    run(test())


def test_whoever_waits_is_answered_when_the_service_stops():
    async def test():
        async with serving() as (service, connect):
            a = connect()
            waiting = asyncio.create_task(
                a.st2i_world_join(process="a", worker="tcp://a", nbytes=1)
            )
            await asyncio.sleep(0.1)
            service.stop()
            assert (await asyncio.wait_for(waiting, 1.0))["phase"] == "ended"

    run(test())


def test_a_new_generation_is_logged(caplog):
    async def test():
        async with serving(expected=2) as (_, connect):
            _, _, first, second = await joining(connect)
            await first
            second.cancel()

    with caplog.at_level(logging.INFO, logger="scheduler_plugin.world_service"):
        run(test())
    assert "generation 1 forms with 2 processes" in caplog.text
