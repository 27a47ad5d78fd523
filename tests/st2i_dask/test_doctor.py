"""`st2i doctor`: sound clusters, and what it says about those that are not."""

from __future__ import annotations

import importlib.metadata

import dask.config
import pytest
from click.testing import CliRunner
from distributed import Client

import st2i_dask as st2i
from st2i_dask import doctor
from st2i_dask.cli import main


@pytest.fixture(scope="module")
def cluster():
    with st2i.local_cluster(2, dashboard_address=":0") as cluster:
        yield cluster


@pytest.fixture
def client(cluster):
    with Client(cluster, set_as_default=False) as client:
        yield client


def run(cluster):
    with dask.config.set({"logging": {}}):  # it keeps logs quiet unless they are configured
        result = CliRunner().invoke(main, ["doctor", "--scheduler", cluster.scheduler_address])
    assert not result.exception or isinstance(result.exception, SystemExit), result.exception
    return result.exit_code, result.output


def findings(client, level):
    return [f"{f.node}: {f.what}; {f.cure}" for f in doctor.examine(client) if f.level == level]


def test_a_plain_cluster_is_looked_at_and_stays_plain(cluster, client):
    status, text = run(cluster)
    assert status == 0, text
    assert "the plugin is not there yet; its seams are those that are known" in text
    assert text.count("it has no plugin yet") == 4  # two workers, in the table and the notes
    assert "nothing is wrong" in text
    names = client.run_on_scheduler(lambda dask_scheduler: list(dask_scheduler.plugins))
    assert "st2i-scheduler" not in names


def test_a_sound_cluster(cluster, client):
    st2i.attach(client, arena_bytes="2 MiB")
    used = {a: w["arena"]["used"] for a, w in st2i.data_plane(client).items()}
    status, text = run(cluster)
    assert status == 0, text
    assert text.count("pulled by transport host") == 2
    assert text.count("host arena of 2 MiB") == 2
    assert "all seams are in place" in text
    assert "wrong" not in text.replace("nothing is wrong", "")
    after = st2i.data_plane(client)
    assert {a: w["arena"]["used"] for a, w in after.items()} == used, "nothing stays in the arenas"
    assert all(w["transports"]["host"]["pulls"] for w in after.values()), "they were real pulls"


def test_arenas_that_cannot_be_read_on_one_machine(cluster, client):
    st2i.attach(client, arena_bytes="3 MiB")

    def blind(dask_worker):
        dask_worker.handlers["st2i_reach"] = lambda heap: False

    first = next(iter(client.scheduler_info(-1)["workers"]))
    client.run(blind, workers=[first])
    status, text = run(cluster)
    assert status == 1
    assert text.count("on one machine, but the second cannot read the first one's arena") == 2
    assert "cure: run both as one user" in text
    assert "1 thing is wrong" in text


def test_a_full_arena_and_a_lost_block_are_told_apart(cluster, client):
    st2i.attach(client, arena_bytes="1 MiB")

    def fill(dask_worker):
        arena = dask_worker.plugins["st2i-worker"].store.arena
        dask_worker.kept = [b for b in (arena.allocate(64 << 10) for _ in range(40)) if b]

    client.run(fill)
    assert findings(client, "wrong") == []
    assert sum("the arena of the first one is full" in f for f in findings(client, "note")) == 2

    def lose(dask_worker):
        dask_worker.kept.clear()
        dask_worker.plugins["st2i-worker"].store.arena.heap.pull = lambda ticket, into: False

    client.run(lose)
    assert sum("a pull failed: block" in f for f in findings(client, "wrong")) == 2
    st2i.attach(client, arena_bytes="2 MiB")


def test_a_worker_whose_plugin_did_not_start(cluster, client):
    st2i.attach(client, arena_bytes="2 MiB")

    def break_down(dask_worker):
        plugin = dask_worker.plugins["st2i-worker"]
        plugin.teardown(dask_worker)

    first = next(iter(client.scheduler_info(-1)["workers"]))
    client.run(break_down, workers=[first])
    assert [f for f in findings(client, "wrong") if "its plugin did not start" in f]
    assert any("no pull was tried" in f for f in findings(client, "note"))
    st2i.attach(client, arena_bytes="3 MiB")
    assert findings(client, "wrong") == []


def test_versions_and_configuration_of_the_client(client, monkeypatch):
    real = importlib.metadata.version

    def other(package):  # in this process: client and scheduler
        return "2020.1" if package == "distributed" else real(package)

    monkeypatch.setattr(importlib.metadata, "version", other)
    with dask.config.set({"st2i.worker.memory": 1}):
        wrong = findings(client, "wrong")
    assert len(wrong) == 3, wrong
    for node, said in zip(("client", "scheduler"), (wrong[0], wrong[2]), strict=True):
        assert said.startswith(f"{node}: configuration st2i.worker.memory is not known")
        assert "did you mean memory-bytes" in said
    assert "distributed differs (2020.1: client, scheduler; " in wrong[1]
    assert "install one version of distributed on every node" in wrong[1]


@pytest.mark.parametrize(
    ("key", "value", "said", "cure"),
    [
        ("st2i.scheduler.weights", "a=3", "weights is 'a=3'", "as {studio: 3.0}; correct the env"),
        ("st2i.logs.level", "loud", "level='loud' is not known", "use one of debug, info"),
        ("st2i.scheduler", 5, "st2i.scheduler is 5", "it is a section with slack-s"),
    ],
)
def test_every_section_of_the_configuration_is_looked_at(client, key, value, said, cure):
    with dask.config.set({key: value}):
        found = doctor.examine(client)
    wrong = {f.node: f for f in found if f.level == "wrong"}
    assert list(wrong) == ["client", "scheduler"]  # both in this process
    for finding in wrong.values():
        assert said in finding.what
        assert cure in finding.cure
    assert not any("every key is known" in f.what for f in found)


def versions(**changes):
    return {**dict.fromkeys(doctor._PACKAGES, "1"), **changes}


def test_versions_that_decide_pixels_are_compared_between_workers_only():
    none = versions(**dict.fromkeys(doctor.PIXEL_PACKAGES))
    nodes = {"client": none, "scheduler": none, "a": versions(), "b": versions()}
    assert {f.level for f in doctor._versions(nodes)} == {"ok"}
    nodes["b"] = versions(torch="2")
    [wrong] = [f for f in doctor._versions(nodes) if f.level == "wrong"]
    assert wrong.what == "torch differs (1: a; 2: b)"
    nodes = {"scheduler": none, "a": versions(torch=None)}
    [wrong] = [f for f in doctor._versions(nodes) if f.level == "wrong"]
    assert wrong.cure == "pip install torch"


FACTS = {
    "nthreads": 1, "driver": False, "cuda": False, "configuration": "", "plugin": True, "serves": True,
}  # fmt: skip


@pytest.mark.parametrize(
    ("changes", "attached", "level", "said"),
    [
        ({"nthreads": 4}, True, "note", "4 threads; an executor has one"),
        ({"driver": True}, True, "wrong", "has a CUDA driver, but torch sees no device"),
        ({"configuration": "x is bad; do y"}, True, "wrong", "x is bad"),
        ({"serves": False}, True, "wrong", "its plugin did not start"),
        ({"serves": False, "plugin": False}, True, "wrong", "it has no plugin yet"),
        ({"serves": False, "plugin": False}, False, "note", "it has no plugin yet"),
    ],
)
def test_what_a_worker_says_of_itself(changes, attached, level, said):
    assert list(doctor._worker("w", FACTS, True)) == []
    [found] = doctor._worker("w", {**FACTS, **changes}, attached)
    assert found.level == level
    assert said in found.what
    assert found.cure


@pytest.mark.parametrize(
    ("facts", "level", "said"),
    [
        ({"seams": "no method x; install distributed 2026.8"}, "wrong", "no method x"),
        ({"attached": True, "installed": False}, "wrong", "its seams are not in place"),
        ({}, "note", "the plugin is not there yet"),
        ({"attached": True, "installed": True}, "ok", "all seams are in place"),
    ],
)
def test_what_the_scheduler_says_of_itself(facts, level, said):
    [found] = doctor._scheduler({"seams": "", "attached": False, "installed": False, **facts})
    assert found.level == level
    assert said in found.what


def device(name="cuda (H)", uuid="u", nvshmem="on", kind="nvshmem"):
    return {
        "host": "h", "device": {"name": name, "uuid": uuid}, "nvshmem": nvshmem,
        "arena": {"kind": kind, "nbytes": 1 << 20},
    }  # fmt: skip


def test_devices_and_nvshmem():
    assert [f.level for f in doctor._arena("w", device())] == ["ok"]
    assert [f.level for f in doctor._arena("w", device("cpu", None, "off", "host"))] == ["ok"]
    found = list(doctor._arena("w", device(nvshmem="off", kind="host")))
    assert [f.level for f in found] == ["ok", "note"]
    found = list(doctor._arena("w", device(nvshmem="cannot be loaded; pip install x", kind="host")))
    assert (found[1].level, found[1].what, found[1].cure) == (
        "wrong",
        "cannot be loaded",
        "pip install x",
    )
    [shared] = doctor._shared_devices({"a": device(), "b": device(), "c": device(uuid="v")})
    assert (shared.level, shared.node) == ("wrong", "a, b")
    assert not list(doctor._shared_devices({"a": device("cpu", None), "b": device("cpu", None)}))


def test_every_worker_gives_and_takes_and_hosts_are_joined():
    hosts = {"a1": "a", "a2": "a", "a3": "a", "b1": "b", "c1": "c"}
    pairs = doctor._pairs({w: {"host": h} for w, h in hosts.items()})
    assert {("a1", "a2"), ("a2", "a3"), ("a3", "a1")} <= set(pairs)
    assert {("a1", "b1"), ("b1", "c1"), ("c1", "a1")} <= set(pairs)
    assert len(pairs) == 6
    assert doctor._pairs({"a1": {"host": "a"}}) == []
