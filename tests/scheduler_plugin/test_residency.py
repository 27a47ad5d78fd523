"""What workers say of their models reaches the scheduler: where the next request goes, and who pays."""

from __future__ import annotations

import pytest
import torch

import st2i_dask as st2i
from scheduler_plugin import events as ev
from scheduler_plugin.outline import Outline, Step
from scheduler_plugin.policy import FairPolicy

from ..worker_plugin import stacks
from ..worker_plugin.stacks import BLOCK
from .live import TIMEOUT, decisions_of, plugin_of, serving, until

torch.set_num_threads(1)
MIB = 1 << 20
ARENA = 64 << 10


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """Models of sixteen blocks, 4 MiB each."""
    folder = tmp_path_factory.mktemp("stacks")
    return [
        stacks.save(folder / f"{name}.safetensors", 16, seed) for seed, name in enumerate("abc")
    ]


@pytest.fixture(scope="module")
def client():
    # In this process; both layers of the policy as ever.
    with serving(2) as client:
        yield client


def run(client, file, x=0.5, **options):
    future = stacks.workflow(file).submit(client, x=x, **options)
    assert future.result(timeout=TIMEOUT) == stacks.expected(file, x)


def key(file):
    return stacks.Stack(str(file), name=f"Stack-{file.stem}").model_key


def believed(client, file):
    """By executor, the share of the model that the scheduler takes to be missing."""
    placement = plugin_of(client).policy._fleet.placement
    return {name: placement.missing_on(name, key(file)) for name in placement.executors()}


def true(client, file):
    """By worker, the share that is missing."""

    def ask(dask_worker):
        return dask_worker.plugins["st2i-worker"].executor.models.missing()

    return {name: found.get(key(file), 1.0) for name, found in client.run(ask).items()}


def trim(client, worker, file, layers):
    """Evict all but the first layers there, and say so."""

    def act(dask_worker):
        plugin = dask_worker.plugins["st2i-worker"]
        plugin.executor.models.trim(stacks.Stack(str(file), name=f"Stack-{file.stem}"), layers)
        plugin.runner.announce()

    client.run(act, workers=[worker])


# Live


def test_the_next_request_goes_where_the_model_is(client, files):
    st2i.attach(client, memory_bytes=16 * MIB, arena_bytes=ARENA)
    decisions = decisions_of(client)
    run(client, files[0])
    home = decisions[-1].executor
    assert believed(client, files[0])[home] == 0.0
    for x in range(4):
        run(client, files[0], x / 10)
        assert decisions[-1].executor == home
        assert decisions[-1].estimate.load_s == 0.0
    # Another model goes to the other one, which has more free memory.
    run(client, files[1])
    assert decisions[-1].executor != home
    for x in range(2):
        run(client, files[1], x / 10)
        assert decisions[-1].executor != home
        run(client, files[0], x / 10)
        assert decisions[-1].executor == home


def test_of_two_prefixes_the_larger_one_is_chosen(client, files):
    """Both workers have a part of the model; what they say of it decides."""
    st2i.attach(client, memory_bytes=16 * MIB, arena_bytes=ARENA, load_bandwidth=64 * MIB)
    workflow = stacks.workflow(files[0])
    both = [workflow.submit(client, x=0.1, seconds=0.3) for _ in range(2)]
    assert client.gather(both) == [stacks.expected(files[0], 0.1)] * 2
    assert set(true(client, files[0]).values()) == {0.0}
    decisions = decisions_of(client)
    first, second = sorted(true(client, files[0]))
    for less, more in ((first, second), (second, first)):
        trim(client, less, files[0], 4)
        trim(client, more, files[0], 12)
        until(lambda: believed(client, files[0]) == pytest.approx(true(client, files[0])))
        shares = true(client, files[0])
        assert 0.0 < shares[more] < shares[less] < 1.0
        run(client, files[0])
        assert decisions[-1].executor == more
        run(client, files[0])
        assert decisions[-1].executor == more
        assert believed(client, files[0])[less] == pytest.approx(shares[less])
        both = [workflow.submit(client, x=0.1, seconds=0.3) for _ in range(2)]
        client.gather(both)


def test_what_is_evicted_is_missing_again(client, files):
    """Models of 12 MiB through 5 MiB: the scheduler always knows what is there."""
    st2i.attach(client, memory_bytes=ARENA + 5 * MIB, arena_bytes=ARENA)
    for turn in range(6):
        run(client, files[turn % 3], turn / 10)
        until(
            lambda: all(
                share == pytest.approx(true(client, file)[worker])
                for file in files
                for worker, share in believed(client, file).items()
            ),
            lambda: f"{[(believed(client, f), true(client, f)) for f in files]}",
        )


def test_a_worker_that_is_attached_anew_has_nothing(client, files):
    st2i.attach(client, memory_bytes=16 * MIB, arena_bytes=ARENA)
    run(client, files[0])
    assert min(believed(client, files[0]).values()) == 0.0
    st2i.attach(client, memory_bytes=12 * MIB, arena_bytes=ARENA)
    until(lambda: set(believed(client, files[0]).values()) == {1.0})
    placement = plugin_of(client).policy._fleet.placement
    until(lambda: all(placement._free_bytes[s] == 12 * MIB for s in placement._slot.values()))


def test_load_is_charged_to_the_tenant_that_causes_it(files):
    """One worker; room for two of three models. Ann's fits and stays, Bob alternates between two that do
    not fit beside it: his loads are his."""
    with serving(1) as client:
        bandwidth = 16 * MIB  # 4 MiB take a quarter of a second
        st2i.attach(
            client, memory_bytes=ARENA + 9 * MIB, arena_bytes=ARENA, load_bandwidth=bandwidth
        )
        for number, tenant in ((1, "bob"), (2, "bob"), (0, "ann")):
            run(client, files[number], tenant=tenant)  # Ann has paid her first load
        before = service(client)
        turns = 4
        for turn in range(turns):
            run(client, files[0], turn / 10, tenant="ann")
            run(client, files[1 + turn % 2], turn / 10, tenant="bob")
        ann, bob = (service(client)[name] - before[name] for name in ("ann", "bob"))
        one_load = 16 * BLOCK / bandwidth
        # The first of his turns may find the model still there.
        assert bob > 0.6 * (turns - 1) * one_load
        assert ann < 0.25 * bob


def service(client):
    return {row["tenant"]: row["service_s"] for row in st2i.tenants(client)}


# The policy alone

MODEL = "m"
OUTLINE = Outline("w", (Step("fn", MODEL, "64x64", (), ()),))


def policy_of(*executors):
    policy = FairPolicy()
    for name in executors:
        policy.handle(ev.ExecutorJoined(0.0, name))
    return policy


def submit(policy, name, now, tenant="t"):
    policy.handle(ev.RequestSubmitted(now, name, tenant, OUTLINE))
    policy.handle(ev.InvocationReady(now, f"k-{name}", name, 0, 0, {}))
    decision = policy.next_decision(now)
    policy._check()
    assert decision is not None
    return decision


def complete(policy, decision, now, load_s=0.0, **residency):
    used = ev.Measured(load_s, 1.0, 0.0)
    policy.handle(ev.Completed(now, decision.key, used, **residency))
    policy.handle(ev.RequestClosed(now, decision.request))
    policy._check()


def test_the_share_that_is_missing_scales_the_estimate():
    policy = policy_of("a")
    first = submit(policy, "r1", 0.0)
    complete(policy, first, 9.0, load_s=8.0, missing={MODEL: 0.25}, free_bytes=5)
    second = submit(policy, "r2", 10.0)
    assert second.estimate.load_s == pytest.approx(0.25 * 8.0)
    complete(policy, second, 13.0, load_s=2.0, missing={}, free_bytes=5)
    third = submit(policy, "r3", 14.0)
    assert third.estimate.load_s == pytest.approx(8.0), "all of it is missing again"


@pytest.mark.parametrize("swap", [False, True])
def test_the_smaller_missing_share_wins_then_more_free_memory(swap):
    names = ("b", "a") if swap else ("a", "b")
    policy = policy_of(*names)
    decisions = [submit(policy, f"r{n}", 0.0) for n in range(2)]
    shares = {"a": 0.6, "b": 0.3}
    for decision in decisions:
        share = shares[decision.executor]
        complete(policy, decision, 9.0, load_s=8.0, missing={MODEL: share}, free_bytes=1)
    decision = submit(policy, "r2", 10.0)
    assert decision.executor == "b"
    complete(policy, decision, 13.0, missing={MODEL: 0.6}, free_bytes=2)
    assert submit(policy, "r3", 14.0).executor == "b", "equal shares, more memory"


def test_a_lost_executors_models_are_forgotten():
    policy = policy_of("a", "b")
    decision = submit(policy, "r0", 0.0)
    home = decision.executor
    complete(policy, decision, 9.0, load_s=8.0, missing={MODEL: 0.0}, free_bytes=9)
    policy.handle(ev.ExecutorLeft(10.0, home))
    policy.handle(ev.ExecutorJoined(11.0, home))
    assert submit(policy, "r1", 12.0).estimate.load_s == pytest.approx(8.0)
