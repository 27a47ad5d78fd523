"""What the dashboard costs the scheduler: 200 executors, 1,000 tenants, all four pages open.

A scheduler process with a real policy and real pages; 200 invocations end and are dispatched each second.
In another process, all executors answer what they hold and four viewers receive the pages. `share` is the
CPU seconds of recording and pages per second of wall time: the scheduler has one thread. Recording is timed
where it is called. For pages, phases with and without them take turns, and what the scheduler's process
used beside policy and recording is compared.
"""

from __future__ import annotations

import asyncio
import multiprocessing
import re
import statistics
import time
from collections.abc import Callable, Coroutine
from multiprocessing.connection import Connection
from typing import Any

from ._crowd import Crowd, holdings

EXECUTORS = 200
TENANTS = 1000
ROUNDS = 5
SECONDS = 8.0
#: Within which Bokeh drops the sessions of closed pages.
SETTLE_SECONDS = 3.0
_SESSIONS = "distributed.scheduler.dashboard.bokeh-application.unused_session_lifetime_milliseconds"
#: How often the synthetic cluster is brought up to date.
TURN_SECONDS = 0.05
START_SECONDS = 120.0

PAGES = ("st2i-tenants", "st2i-executors", "st2i-requests", "st2i-models")


def run(
    executors: int = EXECUTORS,
    tenants: int = TENANTS,
    rounds: int = ROUNDS,
    seconds: float = SECONDS,
) -> dict[str, float]:
    """`share`, and of it `recording_share` and `pages_share`; `dispatch_share`, the policy's own CPU time per
    second of the same run; `opening_s`: CPU seconds to build and first draw all four pages; `closing_s`: to
    drop them, in which Bokeh collects garbage twice for each; `kib_s` received by the
    viewers; `ended_s`, `answers_s`: invocations that ended, and answers of executors, per second.
    """
    return asyncio.run(_run(executors, tenants, rounds, seconds))


async def _run(executors: int, tenants: int, rounds: int, seconds: float) -> dict[str, float]:
    from distributed.core import Server

    server = Server({"st2i_holdings": lambda: holdings("any")})
    addresses = []
    for _ in range(executors):
        await server.listen("tcp://127.0.0.1:0")
        addresses.append(server.listeners[-1].contact_address)
    here, there = multiprocessing.Pipe()
    context = multiprocessing.get_context("spawn")
    process = context.Process(target=_scheduler, args=(there, addresses, tenants), daemon=True)
    process.start()
    try:
        address = await _answer(here, START_SECONDS)
        found: dict[str, list[float]] = {}
        for _ in range(rounds):
            for phase, figures in (await _round(here, address, seconds)).items():
                found.setdefault(phase, []).append(figures)
        here.send(None)
        await asyncio.to_thread(process.join, 30)
    finally:
        process.kill()
        await server.close()
    middle = {name: statistics.median(values) for name, values in found.items()}
    pages = middle["open"] - middle["closed"]
    return {
        "share": round(middle["recording"] + pages, 4),
        "recording_share": round(middle["recording"], 4),
        "pages_share": round(pages, 4),
        "dispatch_share": round(middle["dispatch"], 4),
        "opening_s": round(middle["opening"], 3),
        "closing_s": round(middle["closing"], 3),
        "kib_s": round(middle["kib_s"], 1),
        "ended_s": round(middle["ended_s"], 1),
        "answers_s": round(middle["answers_s"], 1),
    }


async def _round(pipe: Connection, address: str, seconds: float) -> dict[str, float]:
    """CPU seconds per second of each kind, and the other figures."""
    closed, _ = await _phase(pipe, asyncio.sleep(seconds))
    viewers = [_Viewer(f"{address}/{page}") for page in PAGES]
    watching = [asyncio.create_task(viewer.watch()) for viewer in viewers]
    first, opening_s = await _phase(pipe, _all_drawn(viewers, watching))
    received = sum(viewer.received for viewer in viewers)
    shown, shown_s = await _phase(pipe, asyncio.sleep(seconds))
    received = sum(viewer.received for viewer in viewers) - received
    for task in watching:
        task.cancel()
    ends = await asyncio.gather(*watching, return_exceptions=True)
    for viewer, end in zip(viewers, ends, strict=True):
        assert isinstance(end, asyncio.CancelledError), f"{viewer.page}: {end!r}"
    last, closing_s = await _phase(pipe, asyncio.sleep(SETTLE_SECONDS))
    return {
        "closed": closed["other"],
        "open": shown["other"],
        "recording": shown["recording"],
        "dispatch": shown["dispatch"],
        "opening": opening_s * (first["other"] - closed["other"]),
        "closing": closing_s * (last["other"] - closed["other"]),
        "kib_s": received / 1024 / shown_s,
        "ended_s": shown["ended"],
        "answers_s": shown["answers"],
    }


async def _all_drawn(viewers: list[_Viewer], watching: list[asyncio.Task[None]]) -> None:
    """Until every page has been brought up to date."""
    end = time.monotonic() + START_SECONDS
    while any(viewer.messages < 2 for viewer in viewers):
        for task in watching:
            if task.done():
                task.result()  # it failed
        assert time.monotonic() < end, f"pages are not drawn within {START_SECONDS:g} s"
        await asyncio.sleep(0.1)


async def _phase(
    pipe: Connection, meanwhile: Coroutine[Any, Any, None]
) -> tuple[dict[str, float], float]:
    """What the scheduler's process did meanwhile, per second, and how many seconds that took."""
    pipe.send("figures")
    before = await _answer(pipe)
    await meanwhile
    pipe.send("figures")
    after = await _answer(pipe)
    wall_s = after["wall"] - before["wall"]
    return {name: (after[name] - before[name]) / wall_s for name in after}, wall_s


async def _answer(pipe: Connection, timeout: float = 60.0) -> Any:
    if not await asyncio.to_thread(pipe.poll, timeout):
        raise RuntimeError(f"the scheduler's process does not answer within {timeout:g} s")
    return pipe.recv()


class _Viewer:
    """A browser as the server sees it: loads a page, opens its web socket and takes what comes."""

    def __init__(self, page: str) -> None:
        self.page = page
        self.received = self.messages = 0

    async def watch(self) -> None:
        from tornado.httpclient import AsyncHTTPClient, HTTPRequest
        from tornado.websocket import websocket_connect

        response = await AsyncHTTPClient().fetch(self.page, request_timeout=60)
        found = re.search(r'"token":\s*"([^"]+)"', response.body.decode())
        assert found is not None, f"{self.page} has no session"
        request = HTTPRequest(
            self.page.replace("http", "ws", 1) + "/ws", connect_timeout=60, request_timeout=60
        )
        socket = await websocket_connect(request, subprotocols=["bokeh", found[1]])
        try:
            while (message := await socket.read_message()) is not None:
                self.received += len(message)
                self.messages += 1
        finally:
            socket.close()


def _scheduler(pipe: Connection, executors: list[str], tenants: int) -> None:
    """The other process."""
    asyncio.run(_serve(pipe, executors, tenants))


async def _serve(pipe: Connection, executors: list[str], tenants: int) -> None:
    import dask
    from distributed import Scheduler

    from scheduler_plugin.dashboard import open_board

    dask.config.set({_SESSIONS: 500})
    async with Scheduler(dashboard_address="127.0.0.1:0", port=0) as scheduler:
        crowd = Crowd(executors, tenants, now=time.monotonic())
        board = open_board(scheduler, crowd.policy, time.monotonic)
        assert board is not None, "bokeh is missing: pip install 'st2i_dask[dashboard]'"
        load = _Load(crowd, board)
        turning = asyncio.create_task(load.turn())
        pipe.send(f"http://127.0.0.1:{scheduler.http_server.port}")
        while await asyncio.to_thread(pipe.recv) is not None:
            pipe.send(load.figures())
        turning.cancel()
        board.close()


class _Load:
    """Drives the synthetic cluster in real time, and times what it calls."""

    def __init__(self, crowd: Crowd, board: Any) -> None:
        self._crowd = crowd
        self._recording_s = self._driving_s = 0.0
        self._ended = self._answers = 0
        self._answer = board.watch.facts.answer
        board.watch.facts.answer = self._counted
        crowd.journal.watch(board.watch)
        for name in ("happened", "dispatched"):
            setattr(crowd.journal, name, self._timed(getattr(crowd.journal, name)))
        board.sampler.callback = self._timed(board.sample)

    def _timed(self, function: Callable[..., None]) -> Callable[..., None]:
        def timed(*args: Any) -> None:
            started = time.thread_time()
            function(*args)
            self._recording_s += time.thread_time() - started

        return timed

    def _counted(self, *args: Any) -> None:
        self._answers += 1
        self._answer(*args)

    async def turn(self) -> None:
        while True:
            started, recording_s = time.thread_time(), self._recording_s
            self._ended += self._crowd.advance(time.monotonic())
            recording_s = self._recording_s - recording_s
            self._driving_s += time.thread_time() - started - recording_s
            await asyncio.sleep(TURN_SECONDS)

    def figures(self) -> dict[str, float]:
        """CPU seconds up to now, by what they were for."""
        return {
            "wall": time.monotonic(),
            "recording": self._recording_s,
            "dispatch": self._driving_s,
            "other": time.process_time() - self._recording_s - self._driving_s,
            "ended": self._ended,
            "answers": self._answers,
        }
