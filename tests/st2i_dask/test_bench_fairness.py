"""The benchmarks about sharing, shortened: their keys, the bound, the plot."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
from click.testing import CliRunner
from PIL import Image

from st2i_dask import bench
from st2i_dask.bench import __main__ as command
from st2i_dask.bench import fairness

FIGURES = {
    "max_difference_s": 0.5,
    "bound_s": 1.0,
    "series": {
        policy: {"time_s": [0.0, 1.0, 2.0], "difference_s": [0.0, 0.5, 0.4]}
        for policy in fairness.POLICIES
    },
}


def ran(tenant, start, seconds, *, first=True, worker="w"):
    return fairness.Run(tenant, first, start, start + seconds, seconds, worker)


def test_service_is_the_difference_while_both_have_requests_left():
    submitted = [(1.0, "cheap"), (1.0, "cheap"), (1.5, "dear"), (1.5, "dear"), (1.5, "dear")]
    runs = [
        ran("dear", 2.0, 3.0),
        ran("cheap", 2.0, 1.0, worker="v"),
        ran("cheap", 3.0, 1.0, first=False, worker="v"),
        ran("cheap", 4.0, 1.0, worker="v"),  # the last of its requests: not backlogged any more
        ran("dear", 5.0, 3.0, first=False),
        ran("dear", 5.0, 9.0, worker="v"),
    ]
    service = fairness._service(submitted, runs, ("cheap", "dear"))
    assert service.times == [0.0, 0.5, 0.5, 1.5]
    assert service.difference == [0.0, 3.0, 2.0, 1.0]
    assert service.worst == 3.0
    assert service.largest == 3.0


def test_service_is_taken_from_the_longest_time_with_a_backlog():
    submitted = [(0.0, "cheap"), (0.1, "dear"), (2.0, "cheap"), (2.0, "cheap"), (2.0, "dear")]
    runs = [ran("cheap", 0.2, 1.0), ran("dear", 2.5, 1.0, first=False), ran("cheap", 3.5, 0.5)]
    runs += [ran("dear", 4.0, 1.0, first=False)]
    service = fairness._service(submitted, runs, ("cheap", "dear"))
    assert service.times == [0.0, 0.5, 1.5, 2.0]
    assert service.difference == [0.0, 1.0, 0.5, 1.5]


def test_service_leaves_out_what_may_not_have_been_told_yet():
    submitted = [(0.0, "cheap")] * 5 + [(0.0, "dear")] * 5
    runs = [
        ran("dear", 0.0, 1.0),
        ran("cheap", 0.0, 5.0, worker="v"),
        ran("dear", 1.0, 1.0),
        ran("cheap", 5.0, 1.0, worker="v"),  # w ran something from 2 s on, which has not ended
    ]
    service = fairness._service(submitted, runs, ("cheap", "dear"))
    assert service.difference == [0.0, 1.0, -4.0, -3.0]


def test_worst_is_over_any_interval():
    service = fairness.Service(0.0, [0.0, 1.0, 2.0], [0.0, 2.0, -3.0])
    assert service.worst == 5.0


def test_series_are_thinned():
    service = fairness.Service(0.0, [float(n) for n in range(1000)], [0.0] * 1000)
    assert 200 <= len(fairness._thinned(service)["time_s"]) <= 250


def test_fairness_holds_its_bound_where_fifo_does_not():
    figures = fairness.run(seconds=2.5, policies=("fair", "fifo", "dask"))
    assert figures["max_difference_s"] <= figures["bound_s"]
    assert figures["bound_s"] == pytest.approx(
        2 * (figures["slack_s"] + figures["largest_charge_s"]), abs=0.01
    )
    assert figures["fifo_difference_s"] > 1.5 * figures["max_difference_s"]
    assert set(figures["series"]) == {"fair", "fifo", "dask"}
    json.dumps(figures)


def test_plot_draws_every_policy(tmp_path):
    # In a process of its own: matplotlib keeps its fonts open.
    draw = "from st2i_dask.bench import fairness; import json, sys"
    draw += "; fairness.plot(json.loads(sys.argv[1]), sys.argv[2])"
    target = tmp_path / "f.png"
    subprocess.run(
        [sys.executable, "-c", draw, json.dumps(FIGURES), str(target)], check=True, timeout=60
    )
    with Image.open(target) as image:
        assert image.format == "PNG"
        assert image.width >= 800
        colours = {colour for _, colour in image.convert("RGB").getcolors(1 << 20)}
    assert len(colours) > 50


def test_command_draws_and_keeps_series_out_of_what_it_prints(tmp_path, monkeypatch):
    drawn = []
    monkeypatch.setattr(command, "run", lambda name: FIGURES)
    monkeypatch.setattr(command, "plotter", lambda name: lambda *what: drawn.append(what))
    file, picture = tmp_path / "f.json", tmp_path / "f.png"
    result = CliRunner().invoke(
        command.bench, ["fairness", "--json", str(file), "--plot", str(picture)]
    )
    assert result.exit_code == 0
    assert "bound_s" in result.stdout
    assert "series" not in result.stdout
    assert json.loads(file.read_text()) == FIGURES
    assert drawn == [(FIGURES, picture)]


def test_plot_is_refused_before_anything_runs(tmp_path, monkeypatch):
    monkeypatch.setattr(command, "run", lambda name: pytest.fail("it ran"))
    target = ["--plot", str(tmp_path / "f.png")]
    assert bench.plotter("hop") is None
    result = CliRunner().invoke(command.bench, ["hop", *target])
    assert result.exit_code == 2
    assert "benchmark 'hop' draws nothing; --plot works with: fairness" in result.output
    monkeypatch.setattr(command, "find_spec", lambda name: None)
    result = CliRunner().invoke(command.bench, ["fairness", *target])
    assert result.exit_code == 2
    assert "pip install 'st2i_dask[plot]'" in result.output


def test_throughput_gives_its_ratios():
    from st2i_dask.bench import throughput

    figures = throughput.run(requests=40, rounds=1, workers=1)
    assert set(figures) == {"ratio", "one_step_ratio", "ours_us", "one_step_us", "dask_us"}
    assert figures["ratio"] == pytest.approx(figures["ours_us"] / figures["dask_us"], rel=0.01)
    assert figures["ours_us"] < figures["one_step_us"]


@pytest.mark.slow
def test_steps_says_what_they_save_and_that_a_newcomer_waits_for_one():
    from st2i_dask.bench import steps

    figures = steps.run(rounds=2, newcomers=2)
    assert set(figures) >= {"alone_1_s", "alone_many_s", "no_op_1_s", "no_op_many_s"}
    assert figures["saved_fraction"] == pytest.approx(
        1 - figures["alone_many_s"] / figures["alone_1_s"], abs=0.02
    )
    assert 0 < figures["no_op_many_s"] < figures["alone_many_s"]
    # One step, and what a busy machine adds; without the yield it would be six or more.
    assert figures["newcomer_wait_steps"] < 3
