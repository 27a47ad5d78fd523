"""Gangs in virtual time: the formula by hand, schedules by hand, seconds that add up."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from st2i_dask.simulate import figures, generate, h800, systems
from st2i_dask.simulate.cluster import Cluster
from st2i_dask.simulate.figures import parallel
from st2i_dask.simulate.gangs import Split, z_image
from st2i_dask.simulate.tasks import Arrival
from st2i_dask.simulate.workflows import diffusion
from st2i_dask.simulate.workload import BASIC, drawn, wide_z_image

from .small import EXACT
from .small import workload as small

#: An exchange that takes no time.
FREE = Split(4, 10, 0)
WARM = [Arrival(0.0, "a"), Arrival(1000.0, "a")]


def wide(split=FREE, steps=2):
    return diffusion("wide", ["text"], "unet", steps, "vae", split=split)


def latency(workflow, executors, profile=EXACT, **options):
    load = small(profile, a=workflow)
    report = Cluster(systems.OURS, load, executors, check_every=1, **options).run(WARM)
    assert not report.unfinished
    return report.finished[-1].latency_s, report


@pytest.mark.parametrize(
    ("n", "seconds"),
    [(1, 6.0), (2, 3.0 + 5 * (0.1 + 0.5)), (3, 2.0 + 5 * 2 * (0.1 + 1 / 3))],
)
def test_the_formula(n, seconds):
    """Six seconds, five blocks, a second to pull all keys and values, a tenth before each pull."""
    profile = replace(EXACT, link_latency_s=0.1, link_bandwidth=1000.0)
    assert Split(4, 5, 1000).seconds(6.0, n, profile) == pytest.approx(seconds)


def test_keys_and_values_of_z_image():
    """Two tensors of 4096 tokens, 30 heads of 128 numbers, two bytes each; twice with guidance."""
    assert z_image(2, guided=False) == Split(2, 32, 2 * 4096 * 30 * 128 * 2)
    assert z_image(2, guided=True).kv_bytes == 2 * z_image(2, guided=False).kv_bytes


@pytest.mark.parametrize(("executors", "seconds"), [(1, 4.0), (2, 2.0), (4, 1.0), (6, 1.0)])
def test_a_request_alone_divides_its_steps(executors, seconds):
    found, report = latency(wide(), executors)
    assert found == pytest.approx(1 + 2 * seconds + 2)
    assert report.invocations == 2 * 4


def test_an_exchange_delays_every_step():
    plain, _ = latency(wide(Split(2, 10, 0)), 2)
    tenth_s = 10**17  # bytes that the link moves meanwhile
    exchanging, _ = latency(wide(Split(2, 10, tenth_s)), 2)
    assert exchanging == pytest.approx(plain + 2 * 10 * 0.05)


def test_each_executor_is_charged():
    _, report = latency(wide(), 2)
    warm = report.finished[-1].device_s
    assert warm == pytest.approx(1 + 2 * (2 * 2.0) + 2), "as many device seconds as alone"
    assert math.fsum(report.service.values()) == pytest.approx(report.device_s)


def test_members_load_the_model_and_the_run_waits_for_them():
    """Encoder 4.25 s. Its executor and another load the unet then, 2 s a layer, and compute half of
    each layer: 2 + 0.5, then 2 a layer, 0.5 after the last."""
    load = small(a=wide(Split(2, 1, 0), steps=1))
    cluster = Cluster(systems.OURS, load, 2, check_every=1)
    report = cluster.run([Arrival(0.0, "a")])
    assert report.finished[0].latency_s == pytest.approx(4.25 + 8.5 + 3)
    assert all(device.missing["unet"] == 0.0 for device in cluster.devices.values())
    assert cluster.policy._placement.missing_on("w001", "unet") == 0.0


def test_others_come_first():
    """Where another request takes each executor, nobody is a member, and nothing takes longer."""
    together = [Arrival(1000.0 * round, "a") for round in range(3) for _ in range(2)]
    load = small(a=wide(steps=1))
    one = small(a=diffusion("plain", ["text"], "unet", 1, "vae"))
    gangs, plain = (
        [f.latency_s for f in Cluster(systems.OURS, w, 2, check_every=1).run(together).finished]
        for w in (load, one)
    )
    assert gangs[-2:] == plain[-2:]


def test_seconds_add_up_with_gangs_among_others():
    load = drawn("gangs", [wide_z_image(4), BASIC["turbo"], BASIC["klein"]], 2, h800.NODE)
    arrivals = generate.evaluation(load, load.rate(0.1), 60.0, seed=3)
    cluster = Cluster(systems.OURS, load, 8, noise=0.2, seed=1, keep_runs=True, check_every=50)
    members = []
    commit = cluster.policy.commit

    def recording(decision, now):
        commit(decision, now)
        members.append(len(decision.members))

    cluster.policy.commit = recording
    report = cluster.run(arrivals)
    assert report.unfinished == 0
    assert len(report.finished) == len(arrivals)
    assert {0, 3} <= set(members)
    spent = math.fsum(f.device_s for f in report.finished)
    assert spent == pytest.approx(report.device_s)
    assert math.fsum(r.device_s for r in report.runs) == pytest.approx(report.device_s)
    assert math.fsum(report.service.values()) == pytest.approx(report.device_s)
    assert 0 < report.busy <= 1


def test_the_figure_is_near_the_optimum_over_a_fast_link_and_no_better():
    figure = parallel.run(figures.QUICK._replace(processes=1))
    found = {row[1:3]: row[-2:] for row in figure.rows if row[0] == "z-image"}
    for (link, executors), (ratio, optimum) in found.items():
        assert optimum - 0.01 < ratio, (link, executors)
        assert (ratio == 1.0) == (executors == 1)
    for executors in (2, 4):
        ratio, optimum = found["NVLink", executors]
        assert ratio < optimum + 0.11
        assert ratio < found["between nodes", executors][0]
    assert found["NVLink", 4] < found["NVLink", 2]
