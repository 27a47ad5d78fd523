"""The link to the cluster, with a client in place of Dask's where its timing matters."""

from __future__ import annotations

import asyncio
import contextlib

from st2i_dask.serve.link import Link


class Client:
    """Of a scheduler that went away. Its `close` swallows a cancellation, as Dask's does."""

    status = "closed"

    def __init__(self):
        self.closing = asyncio.Event()

    async def close(self, timeout):
        if not self.closing.is_set():
            self.closing.set()
            with contextlib.suppress(asyncio.CancelledError):
                await asyncio.sleep(60)


def test_it_closes_while_it_gives_up_a_lost_client(monkeypatch):
    async def main():
        client = Client()

        async def connect(link):
            return client

        monkeypatch.setattr(Link, "_connect", connect)
        link = Link("tcp://127.0.0.1:1", {})
        await link.open(lambda: None)
        await asyncio.wait_for(client.closing.wait(), 10)
        await asyncio.wait_for(link.close(), 10)
        assert not link.up

    asyncio.run(main())
