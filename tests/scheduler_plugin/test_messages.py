"""When messages leave: at once to workers, with Dask's own pause to clients and after the plugin."""

from __future__ import annotations

import asyncio
from datetime import timedelta

from distributed.batched import BatchedSend

from st2i_dask.messages import SendAtOnce, quicken, restore

from .live import TIMEOUT, chain, serving, until

#: Far longer than a turn of the event loop, even on a busy machine.
PAUSE_S = 1.0


class Comm:
    """A connection that keeps what is written. Closed by the stream."""

    def __init__(self):
        self.written = []

    def closed(self):
        return False

    async def write(self, payload, **kwargs):
        self.written.append(list(payload))
        return 1

    async def close(self):
        pass


def written(*steps):
    """What a stream has written after each step; a step sends messages or changes the stream."""

    async def go():
        comm, stream = Comm(), BatchedSend(interval=f"{PAUSE_S}s")
        stream.start(comm)
        seen = []
        for step in steps:
            if callable(step):
                step(stream)
            else:
                stream.send(*step)
            for _ in range(20):
                await asyncio.sleep(0)
            seen.append([message for payload in comm.written for message in payload])
        await stream.close(timeout=timedelta(seconds=10))
        assert comm.written  # what was held back leaves when the stream is closed
        return [len(messages) for messages in seen], comm.written

    return asyncio.run(go())


def test_dask_holds_the_second_message_back():
    counts, payloads = written("a", "b", "c")
    assert counts == [1, 1, 1]
    assert payloads == [["a"], ["b", "c"]]


def test_a_quick_stream_sends_each_at_once_and_together_what_comes_together():
    counts, payloads = written(quicken, "a", "bc", "d")
    assert counts == [0, 1, 3, 4]
    assert payloads == [["a"], ["b", "c"], ["d"]]


def test_a_stream_in_its_pause_is_woken_by_the_next_message():
    counts, _ = written("a", "b", quicken, "c", "d")
    assert counts[0] == 1
    assert counts[-2:] == [3, 4]


def test_restored_it_pauses_again_and_no_message_is_forgotten():
    counts, payloads = written("a", quicken, "b", restore, "c", "d")
    assert counts == [1, 1, 2, 2, 3, 3]
    assert payloads[-1] == ["d"]


def test_foreign_streams_are_left_alone():
    class Other(BatchedSend):
        pass

    async def go():
        stream = Other(interval=f"{PAUSE_S}s")
        quicken(stream)
        assert type(stream) is Other
        restore(stream)
        assert type(stream) is Other

    asyncio.run(go())


def test_the_plugin_quickens_all_workers_and_puts_their_pause_back():
    def streams(dask_scheduler):
        workers, clients = dask_scheduler.stream_comms, dask_scheduler.client_comms
        return [
            sorted((type(s).__name__, s.interval) for s in group.values())
            for group in (workers, clients)
        ]

    with serving(1, at_rest=False) as client:
        plain = ("BatchedSend", 0.005)
        quick = (SendAtOnce.__name__, 0.005)
        assert client.run_on_scheduler(streams) == [[quick], [("BatchedSend", 0.002)]]
        client.cluster.scale(2)
        client.wait_for_workers(2, timeout=TIMEOUT)
        assert client.run_on_scheduler(streams)[0] == [quick, quick]
        client.unregister_scheduler_plugin("st2i-scheduler")
        until(lambda: client.run_on_scheduler(streams)[0] == [plain, plain])
        assert chain.submit(client, value=0.0).result(timeout=TIMEOUT) == 3.0
        assert client.gather(client.map(abs, range(-8, 0))) == list(range(8, 0, -1))


def test_workers_too_get_their_pause_back():
    def stream(dask_worker):
        return type(dask_worker.batched_stream).__name__, dask_worker.batched_stream.interval

    with serving(1, at_rest=False) as client:
        assert [kind for kind, _ in client.run(stream).values()] == ["RidingSend"]
        client.unregister_worker_plugin("st2i-worker")
        assert list(client.run(stream).values()) == [("BatchedSend", 0.002)]
        assert client.submit(abs, -1).result(timeout=TIMEOUT) == 1
