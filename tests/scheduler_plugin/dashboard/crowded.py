"""A scheduler with a dashboard whose pages show a synthetic cluster. Runs in its own thread."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

from distributed import Scheduler

from scheduler_plugin.dashboard import open_board
from scheduler_plugin.policy import FairPolicy
from st2i_dask.bench._crowd import Crowd, holdings

SILENT = 2


class Shown(NamedTuple):
    """address: of the dashboard. on_loop: runs a function on the scheduler's event loop."""

    address: str
    board: Any
    scheduler: Any
    on_loop: Any


class Clock:
    """The test's time. It goes on in steps, so that minutes are over at once."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


@contextmanager
def showing(executors: int, tenants: int, seconds: int = 65) -> Iterator[Shown]:
    """Pages of a cluster with so many executors and tenants, after so many seconds; none: an empty one."""
    clock = Clock()
    crowd = Crowd(executors, tenants, now=clock.now, mean_s=3.0) if executors else None
    policy = crowd.policy if crowd is not None else FairPolicy()
    ready, stop = threading.Event(), None
    made: dict[str, Any] = {}

    async def serve() -> None:
        nonlocal stop
        stop = asyncio.Event()
        made["loop"] = asyncio.get_running_loop()
        async with Scheduler(dashboard_address="127.0.0.1:0", port=0, validate=True) as scheduler:
            board = open_board(scheduler, policy, clock)
            assert board is not None
            if crowd is not None:
                _live(board, crowd, clock, seconds)
            made.update(scheduler=scheduler, board=board)
            ready.set()
            await stop.wait()
            board.close()
            await scheduler.http_server.close_all_connections()

    def run() -> None:
        try:
            asyncio.run(serve())
        finally:
            ready.set()

    thread = threading.Thread(target=run)
    thread.start()
    assert ready.wait(120)
    assert "board" in made, "the scheduler did not start"

    def on_loop(function: Any) -> Any:
        async def call() -> Any:
            return function()

        return asyncio.run_coroutine_threadsafe(call(), made["loop"]).result(60)

    try:
        port = made["scheduler"].http_server.port
        yield Shown(f"http://127.0.0.1:{port}", made["board"], made["scheduler"], on_loop)
    finally:
        made["loop"].call_soon_threadsafe(stop.set)
        thread.join(60)
        assert not thread.is_alive()


def _live(board: Any, crowd: Crowd, clock: Clock, seconds: int) -> None:
    crowd.journal.watch(board.watch)
    board.sampler.stop()
    for _ in range(seconds):
        clock.now += 1.0
        crowd.advance(clock.now)
        board.sample()
    board.asking._due = lambda executors: []  # nobody is there to be asked
    facts = board.watch.facts
    for executor in crowd.executors[SILENT:]:
        facts.answer(clock.now, executor, holdings(executor))
    for executor in crowd.executors[:SILENT]:
        facts.no_answer(executor, "no answer within 2 s")
