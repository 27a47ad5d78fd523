"""Options of attach that say how workers keep models: limits, changes, and models beyond them."""

from __future__ import annotations

import time

import dask
import pytest
import torch
from distributed import Client, get_worker

import st2i_dask as st2i
from st2i_dask.cluster import WEIGHTS

from ..worker_plugin import stacks
from ..worker_plugin.stacks import BLOCK

TIMEOUT = 60
MIB = 1 << 20
ARENA = 64 << 10


@pytest.fixture(scope="module")
def client():
    with (
        dask.config.set({"distributed.scheduler.validate": True}),
        st2i.local_cluster(2, processes=False, dashboard_address=":0") as cluster,
        Client(cluster) as client,
    ):
        yield client


@pytest.fixture(scope="module")
def alone():
    """Of one worker."""
    with (
        dask.config.set({"distributed.scheduler.validate": True}),
        st2i.local_cluster(1, processes=False, dashboard_address=":0") as cluster,
        Client(cluster) as client,
    ):
        yield client


@pytest.fixture(scope="module")
def file(tmp_path_factory):
    """Eight blocks, 2 MiB."""
    return stacks.save(tmp_path_factory.mktemp("stacks") / "eight.safetensors", 8)


def stores(client, question):
    def ask(dask_worker):
        return question(dask_worker.plugins["st2i-worker"].executor.models)

    return list(client.run(ask).values())


def run(client, file, x=0.5):
    return stacks.workflow(file).submit(client, x=x).result(timeout=TIMEOUT)


@pytest.mark.parametrize("weights", ["elastik", "", 1, "ELASTIC"])
def test_an_unknown_way_to_keep_models_is_refused(client, weights):
    with pytest.raises(st2i.AttachError, match=r"weights=.* is not known; use one of 'elastic'"):
        st2i.attach(client, weights=weights)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"memory_bytes": 64 * 1024}, r"memory_bytes=65,536; a worker needs at least 131,072"),
        (
            {"memory_bytes": MIB, "arena_bytes": 2 * MIB},
            r"arena_bytes=2,097,152 .* 65,536 bytes \(one tensor\) to 983,040 bytes",
        ),
        ({"load_bandwidth": "-1 GiB"}, r"load_bandwidth='-1 GiB' is not a positive size"),
        ({"load_bandwidth": True}, r"load_bandwidth=True is not a positive size"),
        ({"host_bytes": 0.0}, r"host_bytes=0.0 is not a positive size"),
        ({"host_bytes": float("nan")}, r"host_bytes=nan is not a positive size"),
        ({"memory_bytes": float("inf")}, r"memory_bytes=inf is not a positive size"),
    ],
)
def test_sizes_beyond_the_limits_are_refused_and_nothing_changes(client, file, options, message):
    st2i.attach(client, memory_bytes=MIB, arena_bytes=ARENA)
    before = stores(client, lambda models: models.memory)
    with pytest.raises(st2i.AttachError, match=message):
        st2i.attach(client, **options)
    assert stores(client, lambda models: models.memory) == before
    assert run(client, file) == stacks.expected(file, 0.5)


def test_an_arena_of_the_whole_budget_is_refused(client, file):
    """It leaves nothing for torch's own memory."""
    st2i.attach(client, memory_bytes=MIB, arena_bytes=ARENA)
    with pytest.raises(st2i.AttachError, match=r"arena_bytes=1,048,576 .* leave it out"):
        st2i.attach(client, memory_bytes=MIB, arena_bytes=MIB)
    assert run(client, file) == stacks.expected(file, 0.5)


@pytest.mark.parametrize("weights", WEIGHTS)
def test_another_mode_takes_effect(client, file, weights):
    st2i.attach(client, memory_bytes=4 * MIB, arena_bytes=ARENA, weights=weights)
    assert stores(client, lambda models: models.mode) == [weights] * 2
    assert run(client, file) == stacks.expected(file, 0.5)
    (row,) = st2i.models(client)
    assert row["resident_layers"] == (0 if weights == "pipelined" else 8)


def test_options_that_are_left_out_go_back_to_defaults(client, file):
    st2i.attach(client, weights="nocache", load_bandwidth="1 GiB", host_bytes="1 GiB")
    assert stores(client, lambda models: models.mode) == ["nocache"] * 2
    st2i.attach(client, memory_bytes="8 MiB")
    assert stores(client, lambda models: (models.mode, models.memory)) == [("elastic", 8 * MIB)] * 2
    st2i.attach(client)
    assert stores(client, lambda models: models.memory) == [8 * MIB] * 2
    assert run(client, file) == stacks.expected(file, 0.5)


def test_bandwidth_and_host_bytes_reach_the_workers(client, file):
    st2i.attach(client, memory_bytes="8 MiB", load_bandwidth="4 MiB", host_bytes="1 MiB")
    start = time.monotonic()
    assert run(client, file) == stacks.expected(file, 0.5)
    assert time.monotonic() - start > 0.8 * 8 * BLOCK / (4 * MIB)
    # A file in use may be larger than the host tier; nobody uses it now.
    for _ in range(50):
        found = stores(client, lambda models: models._host.statistics().nbytes)
        if not any(found):
            break
        time.sleep(0.1)
    assert found == [0, 0]


def test_changing_the_mode_while_requests_run(client, file):
    st2i.attach(client, memory_bytes="8 MiB")
    workflow, futures = stacks.workflow(file), []
    for mode in WEIGHTS:
        futures += [workflow.submit(client, x=x / 10, seconds=0.05) for x in range(6)]
        st2i.attach(client, memory_bytes="8 MiB", weights=mode)
    assert client.gather(futures) == [stacks.expected(file, x / 10) for x in range(6)] * 5


@pytest.mark.parametrize(
    ("weights", "memory", "message"),
    [
        (
            "elastic",
            ARENA + BLOCK - 4096,
            r"the root layers, 0 bytes, and the largest layer, 262,144",
        ),
        ("pipelined", ARENA + BLOCK - 4096, r"the largest layer, 262,144 bytes"),
        ("mcache", ARENA + MIB, r"all their layers, 2,097,152 bytes"),
        ("wcache", ARENA + MIB, r"all their layers, 2,097,152 bytes"),
        ("nocache", ARENA + MIB, r"all their layers, 2,097,152 bytes"),
    ],
)
def test_a_model_beyond_the_budget_fails_with_numbers_and_cure(
    client, file, weights, memory, message
):
    st2i.attach(client, memory_bytes=memory, arena_bytes=ARENA, weights=weights)
    for _ in range(2):
        with pytest.raises(st2i.LoadError, match=message) as caught:
            run(client, file)
        assert f"{memory - ARENA:,} in framework" in str(caught.value)
        assert "st2i.attach(client, memory_bytes=" in str(caught.value)
    st2i.attach(client, memory_bytes=ARENA + 4 * MIB, arena_bytes=ARENA, weights=weights)
    assert run(client, file) == stacks.expected(file, 0.5)


class Made(st2i.ModelFn):
    """Weights that are in no file: 1 MiB that load_model makes."""

    def setup_io(self):
        self.add_input("x")
        self.add_output("y")

    def load_model(self, model_path):
        stacks.loads.append((get_worker().address, str(self.options["value"])))
        return {"weight": torch.full((MIB // 4,), float(self.options["value"]))}

    def execute(self, model_components, x):
        return {"y": float(model_components["weight"].mean()) * x}


def made(value):
    @st2i.workflow(name=f"attach-made-{value}", replace=True)
    def workflow(x: float):
        return Made(value=value)(x)

    return workflow


def test_weights_that_are_made_go_least_recently_used_first(alone):
    """Room for two of three."""
    st2i.attach(alone, memory_bytes=ARENA + 5 * MIB // 2, arena_bytes=ARENA)
    stacks.loads.clear()
    for value in (1, 2, 1, 1, 2):
        assert made(value).submit(alone, x=2.0).result(timeout=TIMEOUT) == 2.0 * value
    assert [value for _, value in stacks.loads] == ["1", "2"]
    for value in (3, 2, 1, 2):  # 3 in place of 1, then 1 in place of 3
        assert made(value).submit(alone, x=2.0).result(timeout=TIMEOUT) == 2.0 * value
    assert [value for _, value in stacks.loads] == ["1", "2", "3", "1"]
    held = st2i.models(alone)
    assert sum(row["resident_bytes"] for row in held) == 2 * MIB
    stores(alone, lambda models: models._check())


def test_weights_that_are_made_are_made_once_per_worker(client):
    st2i.attach(client, memory_bytes=8 * MIB, arena_bytes=ARENA)
    stacks.loads.clear()
    futures = [made(value).submit(client, x=1.0) for value in (1, 2) * 10]
    assert client.gather(futures) == [1.0, 2.0] * 10
    assert len(stacks.loads) == len(set(stacks.loads)) <= 4


def test_weights_that_are_made_and_do_not_fit(client):
    st2i.attach(client, memory_bytes=ARENA + MIB // 2, arena_bytes=ARENA)
    with pytest.raises(st2i.LoadError, match=r"1,048,576 bytes.*memory_bytes"):
        made(1).submit(client, x=1.0).result(timeout=TIMEOUT)
