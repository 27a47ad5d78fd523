"""The workers' /metrics pages: their own figures only, true, and counters that never decrease."""

from __future__ import annotations

import asyncio

import pytest

import st2i_dask as st2i

from ..scheduler_plugin.live import serving
from ..st2i_dask.metrics_rules import check, grew, page, samples, value
from . import stacks
from .stacks import BLOCK
from .tensors import fork, forked

TIMEOUT = 60.0
MIB = 1 << 20
ARENA = MIB // 4


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """Two models of eight blocks, 2 MiB each."""
    folder = tmp_path_factory.mktemp("stacks")
    return [stacks.save(folder / f"{name}.safetensors", 8, seed) for seed, name in enumerate("ab")]


@pytest.fixture(scope="module")
def client(tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("ST2I_CACHE", str(tmp_path_factory.mktemp("cache")))
        with serving(2) as client:
            yield client


def pages(client):
    """By worker."""
    return {worker.address: page(worker) for worker in client.cluster.workers.values()}


def total(client, name, **labels):
    return sum(value(text, name, **labels) for text in pages(client).values())


def test_every_worker_of_a_process_has_a_page_of_its_own(client):
    for address, text in pages(client).items():
        check(text)
        about = [dict(labels) for name, labels in samples(text) if name == "st2i_worker_info"]
        assert [row["worker"] for row in about] == [address]
        assert "st2i_tenant" not in text
        assert "dask_worker_threads" in text


def test_weights_that_come_and_go_are_counted(client, files):
    memory = ARENA + 10 * BLOCK
    st2i.attach(client, memory_bytes=memory, arena_bytes=ARENA)
    before = pages(client)
    for file in (*files, *files):
        for _ in range(2):
            future = stacks.workflow(file).submit(client, x=0.5)
            assert future.result(timeout=TIMEOUT) == stacks.expected(file, 0.5)
            del future
    after = pages(client)
    for address, text in after.items():
        check(text)
        grew(before[address], text)
        assert value(text, "st2i_memory_budget_bytes") == memory
    rows = st2i.models(client)
    assert total(client, "st2i_weights_runs_total") == 8
    hits = total(client, "st2i_weights_hits_total")
    assert 0 < hits < 8
    loads = total(client, "st2i_weights_loads_total")
    assert loads == sum(row["loads"] for row in rows)
    assert total(client, "st2i_weights_loaded_bytes_total") == loads * BLOCK
    evictions = total(client, "st2i_weights_evictions_total")
    assert total(client, "st2i_weights_evicted_bytes_total") == evictions * BLOCK
    resident = sum(
        total(client, "st2i_weights_resident_bytes", region=r) for r in ("framework", "arena")
    )
    assert resident == sum(row["resident_bytes"] for row in rows) == (loads - evictions) * BLOCK
    assert total(client, "st2i_weights_load_seconds_total") > 0
    assert 0 < total(client, "st2i_weights_reads_total") <= 4
    assert total(client, "st2i_weights_read_seconds_total") > 0
    assert total(client, "st2i_host_tier_copied_bytes_total") == loads * BLOCK
    assert total(client, "st2i_host_tier_bytes", state="open") > 0
    for address, text in after.items():
        for row in (row for row in rows if row["worker"] == address):
            assert (
                value(text, "st2i_model_bytes", model=row["model"], state="resident")
                == row["resident_bytes"]
            )


def test_counters_of_a_model_that_is_forgotten_stay(client, files):
    """Its figures in `st2i.models` go with it."""
    st2i.attach(client, memory_bytes="8 MiB", weights="nocache")
    before = None
    for file in (*files, *files):
        assert stacks.workflow(file).submit(client, x=0.1).result(timeout=TIMEOUT)
        now = pages(client)
        if before is not None:
            for address in now:
                grew(before[address], now[address])
        before = now
    assert total(client, "st2i_weights_runs_total") == 4
    assert total(client, "st2i_weights_evictions_total") > 0


def test_tensors_in_the_arena_and_the_ways_they_came():
    """Workers in processes of their own: in one, Dask passes objects on as they are."""
    with serving(2, processes=True) as client:
        workers = client.scheduler_info(n_workers=-1)["workers"]
        ports = {address: worker["services"]["dashboard"] for address, worker in workers.items()}
        before = {address: page(port) for address, port in ports.items()}
        # So long that both workers take part.
        future = fork.submit(client, seed=1, seconds=0.1)
        assert (future.result(timeout=TIMEOUT) == forked(1)).all()
        found = st2i.data_plane(client)
        pulls = peak = 0
        for address, port in ports.items():
            text = page(port)
            check(text)
            grew(before[address], text)
            arena = found[address]["arena"]
            assert value(text, "st2i_arena_bytes", use="tensors") == arena["used"]
            assert value(text, "st2i_arena_peak_bytes") == arena["peak"]
            parts = [value(text, "st2i_arena_bytes", use=u) for u in ("tensors", "weights", "free")]
            assert sum(parts) == arena["nbytes"]
            peak += arena["peak"]
            for way, moved in found[address]["transports"].items():
                assert value(text, "st2i_pulls_total", way=way) == moved["pulls"]
                assert value(text, "st2i_pulled_bytes_total", way=way) == moved["bytes"]
            pulls += value(text, "st2i_pulls_total", way="host")
        assert peak > 0
        assert pulls > 0
        del future


def test_tensors_without_room_in_the_arena_are_counted(client):
    st2i.attach(client, memory_bytes="256 MiB", arena_bytes="64 KiB")
    assert (fork.submit(client, seed=2).result(timeout=TIMEOUT) == forked(2)).all()
    arenas = [row["arena"] for row in st2i.data_plane(client).values()]
    fallbacks = total(client, "st2i_arena_fallbacks_total")
    assert fallbacks == sum(arena["fallbacks"] for arena in arenas) > 0
    assert total(client, "st2i_arena_fallback_bytes_total") > 64 * 1024


def test_attached_anew_the_page_is_the_new_plugins(client):
    """However often: each time Dask's own handler, and one extension of it."""
    for _ in range(3):
        st2i.attach(client, device="cpu")
    for worker in client.cluster.workers.values():
        check(page(worker))
        (ours,) = [
            rule.target
            for rule in worker.http_application.wildcard_router.rules
            if getattr(rule.target, "__name__", "") == "Extended"
        ]
        assert [base.__name__ for base in ours.__mro__[:3]] == [
            "Extended",
            "PrometheusHandler",
            "RequestHandler",
        ]
    client.unregister_worker_plugin("st2i-worker")
    for text in pages(client).values():
        assert "st2i_" not in text
        assert "dask_worker_threads" in text
    st2i.attach(client, device="cpu")
    for text in pages(client).values():
        check(text)


def test_figures_that_fail_leave_dasks_own(client, caplog):
    worker = next(iter(client.cluster.workers.values()))
    plugin = worker.plugins["st2i-worker"]
    statistics = plugin.store.transports.statistics

    def fail():
        raise RuntimeError("as the test wants")

    plugin.store.transports.statistics = fail
    try:
        text = page(worker)
    finally:
        plugin.store.transports.statistics = statistics
    assert "st2i_" not in text
    assert "dask_worker_threads" in text
    assert "figures of st2i_dask left out" in caplog.text
    check(page(worker))


def test_pages_asked_for_at_once_are_not_mixed(client):
    """Dask's handlers of one process share a registry."""

    async def ask():
        from tornado.httpclient import AsyncHTTPClient

        http = AsyncHTTPClient(force_instance=True)
        try:
            ports = {w.address: w.http_server.port for w in client.cluster.workers.values()}
            wanted = [*ports.items()] * 10
            answers = await asyncio.gather(
                *(http.fetch(f"http://127.0.0.1:{port}/metrics") for _, port in wanted)
            )
            return [
                (address, a.body.decode()) for (address, _), a in zip(wanted, answers, strict=True)
            ]
        finally:
            http.close()

    for address, text in asyncio.run(ask()):
        about = [dict(labels) for name, labels in samples(text) if name == "st2i_worker_info"]
        assert [row["worker"] for row in about] == [address]
