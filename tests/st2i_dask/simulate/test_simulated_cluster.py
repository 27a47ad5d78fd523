"""The simulator: schedules worked out by hand, conservation, determinism, sanity."""

from __future__ import annotations

import itertools
import math

import pytest

from scheduler_plugin.settings import Settings
from st2i_dask.errors import ParameterError
from st2i_dask.simulate import generate, systems, workload
from st2i_dask.simulate.cluster import Cluster
from st2i_dask.simulate.tasks import Arrival
from st2i_dask.simulate.workflows import diffusion

from .small import EXACT, MIB, solo_s
from .small import workload as small

TWO = diffusion("two", ["text"], "unet", 2, "vae")


def finished(system, arrivals, executors=1, load=None, **options):
    cluster = Cluster(system, load or small(), executors, check_every=1, **options)
    report = cluster.run(arrivals)
    assert not report.unfinished
    return {f.request: f for f in report.finished}, report


def test_three_requests_by_hand():
    """Loads hide behind compute from the second layer on; a later request waits for its turn."""
    done, report = finished(
        systems.OURS, [Arrival(0.0, "a"), Arrival(30.0, "a"), Arrival(32.0, "a")], keep_runs=True
    )
    # Four layers load in 1 s and compute in 0.25 s each; then 2 s and 1 s, two steps; then 1 s and 2 s.
    text, unet, vae = 4 + 0.25, 4 * 2 + 1 + 4, 1 + 2
    assert done["r0"].finished == pytest.approx(text + unet + vae)
    assert done["r0"].device_s == pytest.approx(text + unet + vae)
    # All is resident. The third waits until both steps of the second are done; the second ends first.
    assert done["r1"].finished == pytest.approx(30 + 1 + 8 + 2)
    assert done["r2"].finished == pytest.approx(41 + 1 + 8 + 2)
    assert [(r.request, r.position, r.started) for r in report.runs] == [
        *[("r0", 0, 0.0), ("r0", 1, 4.25), ("r0", 3, 17.25)],
        *[("r1", 0, 30.0), ("r1", 1, 31.0), ("r1", 3, 39.0)],
        *[("r2", 0, 41.0), ("r2", 1, 42.0), ("r2", 3, 50.0)],
    ]
    assert report.dispatches == 9
    assert report.invocations == 12
    assert report.loaded_bytes == 13 * MIB


@pytest.mark.parametrize(
    ("system", "second_loads"),
    [(systems.MCACHE, 0), (systems.WCACHE, 0), (systems.NOCACHE, 13), (systems.PIPELINED, None)],
    ids=lambda value: getattr(value, "name", ""),
)
def test_monoliths_load_everything_and_then_compute(system, second_loads):
    done, report = finished(system, [Arrival(0.0, "a"), Arrival(100.0, "a")])
    if second_loads is None:  # a task for each model: its loads overlap its own compute only
        for request in done.values():
            assert request.latency_s == pytest.approx(4.25 + 13 + 3)
        return
    assert done["r0"].latency_s == pytest.approx(13 + 11)
    assert done["r1"].latency_s == pytest.approx(second_loads + 11)
    assert report.loaded_bytes == (13 + second_loads) * MIB


def test_models_are_shared_by_mcache_and_not_by_wcache():
    workflows = {"a": TWO, "b": diffusion("other", ["text"], "other", 2, "vae")}
    arrivals = [Arrival(0.0, "a"), Arrival(100.0, "b")]
    loaded = {
        system.name: finished(system, arrivals, load=small(**workflows))[1].loaded_bytes // MIB
        for system in (systems.MCACHE, systems.WCACHE, systems.OURS)
    }
    assert loaded == {"mcache": 13 + 8, "wcache": 13 + 13, "ours": 13 + 8}


def test_another_tenants_request_ends_a_task_of_several_steps_after_its_step():
    load = small(a=TWO, b=diffusion("other", ["text"], "other", 1, "vae"))
    arrivals = [Arrival(0.0, "a"), Arrival(50.0, "a"), Arrival(52.0, "b")]
    _, report = finished(systems.OURS, arrivals, load=load, keep_runs=True)
    runs = [(r.request, r.position, r.started, r.ended) for r in report.runs]
    assert ("r1", 1, 51.0, 55.0) in runs  # 59 were nobody else there
    assert runs[runs.index(("r1", 1, 51.0, 55.0)) + 1][:2] == ("r2", 0)
    assert sum(r[0] == "r1" for r in runs) == 4
    assert report.invocations == 4 + 4 + 3


def test_a_controlnet_runs_beside_the_step_that_takes_its_residuals():
    load = small(a=diffusion("c", ["text"], "unet", 2, "vae", controlnet="control"))
    warm = [Arrival(0.0, "a"), Arrival(1000.0, "a")]
    done, report = finished(systems.OURS, warm, executors=2, load=load, keep_runs=True)
    beside = [r for r in report.runs if r.request == "r1" and r.position in (1, 2)]
    assert beside[0].started == beside[1].started
    assert beside[0].executor != beside[1].executor
    assert done["r1"].latency_s == pytest.approx(1 + 4 + 4 + 2)
    alone, _ = finished(systems.OURS, warm, executors=1, load=load)
    assert alone["r1"].latency_s == pytest.approx(1 + (1 + 4) * 2 + 2)


def test_pulls_hops_and_decisions_take_their_time():
    slow = type(EXACT)(
        EXACT.models,
        memory_bytes=EXACT.memory_bytes,
        activation_bytes=0,
        link_latency_s=0.5,
        link_bandwidth=1 << 22,  # an embedding a second
        hop_s=0.25,
    )
    load = small(slow, a=diffusion("c", ["text"], "unet", 1, "vae", controlnet="control"))
    done, _ = finished(
        systems.OURS, [Arrival(0.0, "a"), Arrival(100.0, "a")], 2, load, decision_s=0.125
    )
    # Embeddings go to one of the two executors; what is decided first goes first.
    fewest = 1 + 4 + 2 + 3 * 0.25 + 3 * 0.125
    assert fewest < done["r1"].latency_s < fewest + 3 * 1.5 + 0.5
    fast, _ = finished(systems.OURS, [Arrival(0.0, "a"), Arrival(100.0, "a")], 2, load)
    assert fast["r1"].latency_s < done["r1"].latency_s


@pytest.mark.parametrize("system", systems.SYSTEMS.values(), ids=lambda s: s.name)
@pytest.mark.parametrize("name", ["S1", "S2"])
def test_every_request_is_served_once_and_seconds_add_up(system, name):
    load = workload.setting(name)
    arrivals = generate.evaluation(load, load.rate(0.6), 12.0, seed=3)
    cluster = Cluster(system, load, 16, noise=0.2, seed=1, keep_runs=True, check_every=100)
    report = cluster.run(arrivals)
    assert report.unfinished == 0
    assert len({f.request for f in report.finished}) == len(report.finished) == len(arrivals)
    assert {(f.arrived, f.tenant) for f in report.finished} == {(a.at, a.tenant) for a in arrivals}
    spent = math.fsum(f.device_s for f in report.finished)
    assert spent == pytest.approx(report.device_s)
    assert math.fsum(r.device_s for r in report.runs) == pytest.approx(report.device_s)
    assert math.fsum(report.service.values()) == pytest.approx(report.device_s)
    assert report.invocations == sum(
        len(system.tasks_of(load.workflows[a.tenant]).positions) for a in arrivals
    )
    for executor in cluster.devices:  # one at a time
        there = sorted((r.started, r.ended) for r in report.runs if r.executor == executor)
        assert all(ends <= begins + 1e-9 for (_, ends), (begins, _) in itertools.pairwise(there))
    assert 0 < report.busy <= 1
    assert 0 <= report.memory_share <= 1


def test_the_same_seed_gives_the_same_schedule_and_another_one_does_not():
    load = workload.s1()
    arrivals = generate.evaluation(load, load.rate(0.3), 20.0, seed=3)
    assert arrivals == generate.evaluation(load, load.rate(0.3), 20.0, seed=3)
    assert arrivals != generate.evaluation(load, load.rate(0.3), 20.0, seed=4)

    def schedule(seed):
        return Cluster(systems.OURS, load, 8, noise=0.2, seed=seed).run(arrivals).finished

    assert schedule(1) == schedule(1)
    assert schedule(1) != schedule(2)


@pytest.mark.parametrize("system", [systems.OURS, systems.MCACHE], ids=lambda s: s.name)
def test_more_executors_never_serve_worse(system):
    load = workload.s1()
    arrivals = generate.evaluation(load, load.rate(0.3), 40.0, seed=3)
    found = [
        Cluster(system, load, executors).run(arrivals).attainment(solo_s(load), 3.0)
        for executors in (3, 6, 12, 24)
    ]
    assert found[0] < found[-1]
    assert all(later >= before - 0.03 for before, later in itertools.pairwise(found))


def test_a_prefix_is_what_the_cache_keeps_first():
    """Eq. 2: a model whose loads hide behind compute is not missing, though layers of it are."""
    load = small(a=TWO)
    cluster = Cluster(systems.OURS, load, 1)
    cluster.run([Arrival(0.0, "a")])
    device = cluster.devices["w000"]
    assert device.missing["unet"] == 0.0
    device.cache.trim("unet", 3, 100.0)
    device._changed.add("unet")
    device._renew()
    assert device.missing["unet"] == 0.0  # 2 s load hides behind three layers of 1 s
    device.cache.trim("unet", 1, 100.0)
    device._changed.add("unet")
    device._renew()
    assert device.missing["unet"] == pytest.approx((3 * 2 - 3) / (4 * 2 - 3))


def test_what_does_not_fit_is_refused():
    with pytest.raises(ParameterError, match=r"unet.* does not fit an executor"):
        Cluster(systems.OURS, small(EXACT.with_memory(2_000_000_000 + MIB)), 1)
    with pytest.raises(ParameterError, match="no model 'unknown'"):
        Cluster(systems.OURS, small(a=diffusion("x", ["unknown"], "unet", 1, "vae")), 1)


def test_settings_and_order_reach_the_policy():
    fair = systems.OURS.with_slack(7.0)
    assert Cluster(fair, small(), 1).policy.settings.slack_s == 7.0
    assert systems.OURS.settings == Settings()
    with pytest.raises(ValueError, match="no policy is called 'lifo'"):
        systems.MCACHE.with_order("lifo")
    with pytest.raises(ParameterError, match="no system is called 'gcache'"):
        systems.system("gcache")


@pytest.mark.parametrize("shared", [True, False])
def test_tensors_lie_in_the_arena_until_nobody_needs_them(shared):
    """The real allocator; a region that is too small loses some to other memory, and stalls nobody."""
    load = workload.drawn("c", list(workload.CONTROLLED.values()), 1, workload.h800.PROFILE)
    arrivals = generate.evaluation(load, load.rate(0.1), 60.0, seed=3)
    found = {}
    for arena_bytes in (200_000_000, 30_000_000_000):
        cluster = Cluster(
            systems.OURS, load, 6, arena_bytes=arena_bytes, shared=shared, check_every=500
        )
        report = cluster.run(arrivals)
        assert not report.unfinished
        arenas = [device.arena for device in cluster.devices.values()]
        for arena in arenas:
            arena._check()
            assert arena.tensor_bytes == 0
        found[arena_bytes] = sum(a.fallbacks for a in arenas), report.loaded_bytes
        in_arena = sum(d.cache.used("arena") for d in cluster.devices.values())
        assert (in_arena > 0) == (shared and arena_bytes > 10**9)
    assert found[200_000_000][0] > found[30_000_000_000][0] == 0


def test_a_large_region_without_weights_loads_more():
    load = workload.drawn("c", list(workload.CONTROLLED.values()), 1, workload.h800.PROFILE)
    arrivals = generate.evaluation(load, load.rate(0.1), 60.0, seed=3)
    both, apart = (
        Cluster(systems.OURS, load, 6, arena_bytes=40_000_000_000, shared=shared).run(arrivals)
        for shared in (True, False)
    )
    assert apart.loaded_bytes > 1.3 * both.loaded_bytes
