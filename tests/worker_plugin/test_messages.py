"""When a worker's messages leave: at once, but for those that nobody waits for."""

from __future__ import annotations

import asyncio
from datetime import timedelta

import pytest
from distributed.batched import BatchedSend
from distributed.comm import CommClosedError

from st2i_dask.messages import quicken as quicken_into
from st2i_dask.messages import restore
from worker_plugin import messages
from worker_plugin.messages import RidingSend

#: Far longer than a turn of the event loop, even on a busy machine.
LONG_S = 1.0
RELEASED = {"op": "release-worker-data", "key": "a"}
DONE = {"op": "task-finished", "key": "b"}


def quicken(stream):
    quicken_into(stream, RidingSend)


class Comm:
    """A connection that keeps what is written. Closed by the stream."""

    def __init__(self):
        self.written = []
        self.broken = False

    def closed(self):
        return self.broken

    async def write(self, payload, **kwargs):
        self.written.append(list(payload))
        return 1

    async def close(self):
        pass


@pytest.fixture
def long_hold(monkeypatch):
    monkeypatch.setattr(messages, "HOLD_S", LONG_S)


def written(*steps):
    """The payloads written after each step; a step sends a message or changes the stream."""

    async def go():
        comm, stream = Comm(), BatchedSend(interval=f"{LONG_S}s")
        stream.start(comm)
        seen = []
        for step in steps:
            if isinstance(step, float):
                await asyncio.sleep(step)
            elif callable(step):
                step(stream)
            else:
                stream.send(step)
            for _ in range(20):
                await asyncio.sleep(0)
            seen.append(list(comm.written))
        await stream.close(timeout=timedelta(seconds=10))
        return seen, comm.written

    return asyncio.run(go())


def test_a_release_rides_with_the_next_message_and_before_it(long_hold):
    seen, _ = written(quicken, RELEASED, RELEASED, DONE, DONE)
    assert seen[1:3] == [[], []]
    assert seen[3] == [[RELEASED, RELEASED, DONE]]
    assert seen[4] == [[RELEASED, RELEASED, DONE], [DONE]]


def test_a_release_waits_for_a_bounded_time_each_time():
    seen, _ = written(quicken, RELEASED, 10 * messages.HOLD_S, RELEASED, 10 * messages.HOLD_S)
    assert seen[2] == [[RELEASED]]
    assert seen[4] == [[RELEASED], [RELEASED]]


def test_closed_it_loses_nothing(long_hold):
    _, payloads = written(quicken, RELEASED)
    assert payloads == [[RELEASED]]


def test_restored_what_was_held_leaves_and_dasks_pause_is_back(long_hold):
    def interval_by_hand(stream):
        stream.interval = 0

    def as_it_was(stream):
        assert type(stream) is BatchedSend
        assert stream.interval == LONG_S

    seen, payloads = written(
        DONE, quicken, interval_by_hand, RELEASED, restore, as_it_was, DONE, DONE
    )
    assert seen[3] == [[DONE]]
    assert seen[5] == [[DONE], [RELEASED]]
    assert seen[7] == seen[5]  # within the pause
    assert payloads[-1] == [DONE, DONE]


def test_a_closed_connection_is_told_as_by_dask(long_hold):
    async def go():
        stream, comm = BatchedSend(interval=f"{LONG_S}s"), Comm()
        quicken(stream)
        assert type(stream) is RidingSend
        stream.start(comm)
        comm.broken = True
        with pytest.raises(CommClosedError):
            stream.send(RELEASED)

    asyncio.run(go())
