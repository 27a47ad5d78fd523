"""A real HTTP server in a thread, over a cluster in this process."""

from __future__ import annotations

import asyncio
import contextlib
import sys
import threading
import time
from pathlib import Path

import httpx
import pytest

pytest.importorskip("fastapi")

from st2i_dask.serve.app import make_app
from st2i_dask.serve.keys import Entry, Holder, KeyRing, digest_of
from st2i_dask.serve.limits import Limits
from st2i_dask.serve.models import Models
from st2i_dask.serve.server import server

from .fake_cluster import FakeCluster

SKETCH = Path(__file__).parent / "sketch.py"

#: Keys of two tenants and of the operator.
ALICE, BOB, ADMIN = "st2i-alice", "st2i-bob", "st2i-admin"


def keys():
    return KeyRing(
        [
            Entry(digest_of(ALICE), Holder("alice")),
            Entry(digest_of(BOB), Holder("bob")),
            Entry(digest_of(ADMIN), Holder("operator", admin=True)),
        ]
    )


def models(root=None):
    found = Models(root, {"frame": "frame.safetensors"})
    found.add("sketch", f"{SKETCH}:sketch")
    for name in ("retouch", "unseeded", "numbers"):
        found.add(name, f"{SKETCH}:{name}")
    return found


@contextlib.contextmanager
def serving(app, limits):
    """The application on a port of its own; its URL."""
    made = server(app, limits, "127.0.0.1", 0)
    socket = made.config.bind_socket()
    thread = threading.Thread(
        target=lambda: asyncio.run(made.serve([socket])), name="asyncio_serve"
    )
    thread.start()
    try:
        deadline = time.monotonic() + 30
        while not made.started:
            assert thread.is_alive()
            assert time.monotonic() < deadline
            time.sleep(0.01)
        yield f"http://127.0.0.1:{socket.getsockname()[1]}"
    finally:
        made.should_exit = True
        thread.join(30)
        socket.close()
        assert not thread.is_alive()


class Front:
    """A server and what a test needs of it. `http` is one client for all: making one takes long."""

    def __init__(self, app, cluster, url, http):
        self.cluster, self.url, self.http = cluster, url, http
        self.service = app.state.service
        self.jobs = self.service.jobs

    def send(self, method, path, key=ALICE, headers=None, **options):
        own = {"authorization": f"Bearer {key}"} if key else {}
        return self.http.request(method, path, headers={**own, **(headers or {})}, **options)

    def post(self, path="/v1/images/generations", key=ALICE, **options):
        return self.send("POST", path, key, **options)

    def get(self, path, key=ALICE):
        return self.send("GET", path, key)

    def draw(self, key=ALICE, **fields):
        return self.post(key=key, json={"prompt": "a star", **fields})


@contextlib.contextmanager
def front(limits=None, ring=None, root=None, **options):
    cluster = FakeCluster()
    limits = limits or Limits()
    app = make_app(cluster, models(root), ring or keys(), limits, **options)
    with serving(app, limits) as url, httpx.Client(base_url=url, timeout=60) as http:
        yield Front(app, cluster, url, http)
    cluster.close()
    app.state.service.jobs._check()
    app.state.service.jobs.shelf._check()


@pytest.fixture(scope="module", autouse=True)
def path_as_before():
    before = list(sys.path)
    yield
    sys.path[:] = before


@pytest.fixture(scope="module")
def module_front(path_as_before):
    with front() as made:
        yield made


@pytest.fixture
def served(module_front):
    """The module's server, with nothing left of other tests."""
    cluster = module_front.cluster
    cluster.release()
    cluster.submitted.clear()
    cluster.cancelled.clear()
    yield module_front
    cluster.release()
    cluster.caps.clear()
    cluster.up = True
