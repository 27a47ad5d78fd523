"""Figures, table and plan: small ones run, and the paper's orderings hold."""

from __future__ import annotations

import csv
import re
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner
from PIL import Image

from st2i_dask.cli import main
from st2i_dask.errors import ParameterError
from st2i_dask.simulate import figures, measured, systems, traces
from st2i_dask.simulate.experiment import Point, measure, spread
from st2i_dask.simulate.figures import host_cache, loading, parallel
from st2i_dask.simulate.figures.sweeps import reached
from st2i_dask.simulate.measured import Measured
from st2i_dask.simulate.plan import plan
from st2i_dask.simulate.table import BEGIN, END
from st2i_dask.simulate.tasks import Arrival
from st2i_dask.simulate.workflows import diffusion

from .small import EXACT, MIB
from .small import workload as small

ALONE = figures.QUICK._replace(processes=1)


@pytest.mark.parametrize("name", ["S1", "S2"])
def test_the_papers_order_of_systems_at_its_default_point(name):
    """Ours, MCache, WCache, NoCache; at every deadline up to eight times the solo latency."""
    point = Point(systems.OURS.with_slack(20.0), name, seconds=60.0)
    attained = {
        s.name: measure(point.at(system=s)).attained for s in (point.system, *systems.RIVALS)
    }
    assert list(attained) == ["ours", "mcache", "wcache", "nocache"]
    for scale in (1.5, 2.0, 3.0, 4.0, 6.0):
        shares = [found[scale] for found in attained.values()]
        assert shares == sorted(shares, reverse=True), scale
    assert attained["ours"][3.0] > attained["mcache"][3.0] > attained["nocache"][3.0]


def test_a_prefix_hides_loads_as_the_paper_says():
    rows = dict(row[:2] for row in loading.run(ALONE).rows)
    serial, pipelined, half, prefix, floor = (rows[name] for name in loading.PAPER_ORDER)
    assert serial > pipelined > half > prefix >= floor - 1e-9
    assert 1 - (prefix - floor) / (pipelined - floor) >= 0.9


def test_a_controlnet_beside_the_model_is_near_the_optimum():
    rows = [row[3:] for row in parallel.run(ALONE).rows if row[1] == "ControlNet"]
    assert len(rows) == len(parallel.WORKFLOWS)
    for alone, beside, ratio, optimum in rows:
        assert optimum - 0.02 < ratio == beside / alone < 1
        assert ratio < optimum + 0.05


def test_misses_of_a_cache_are_counted():
    assert host_cache.lru_misses("abab", 1) == 1.0
    assert host_cache.lru_misses("abab", 2) == 0.5
    assert host_cache.lru_misses("aab", 1) == pytest.approx(2 / 3)
    assert host_cache.lfu_misses("aabab", 1) == pytest.approx(4 / 5)
    assert host_cache.lfu_misses("abcba", 2) == pytest.approx(4 / 5), "of equals the first goes"


def test_how_far_a_target_is_reached():
    assert reached([(1.0, 1.0), (2.0, 0.8)]) == pytest.approx(1.5)
    assert reached([(1.0, 0.5), (2.0, 1.0)]) is None
    assert reached([(1.0, 1.0), (2.0, 0.95)]) == 2.0


def test_points_are_spread_over_processes():
    assert spread(abs, [-1, 2, -3], processes=2) == [1, 2, 3]


def test_reproduce_writes_data_and_table(tmp_path, monkeypatch):
    monkeypatch.setattr(figures, "find_spec", lambda name: None)  # no plots: fonts stay open
    run = CliRunner().invoke(
        main,
        ["reproduce", "--figure", "12-left", "--figure", "A", "--quick", "--out", str(tmp_path)],
    )
    assert run.exit_code == 0, run.output
    text = (tmp_path / "table.md").read_text()
    assert "| what | paper says | we get | how measured |" in text
    assert "--figure 12-left --figure A --quick" in text
    with (tmp_path / "figure-12-left.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert [row["cached"] for row in rows] == list(loading.PAPER_ORDER)
    page = tmp_path / "page.md"
    page.write_text(f"before\n{BEGIN}\nold\n{END}\nafter\n")
    again = ["reproduce", "--figure", "A", "--quick", "--out", str(tmp_path), "--page", str(page)]
    for _ in range(2):
        assert CliRunner().invoke(main, again).exit_code == 0
    text = page.read_text()
    assert text.startswith("before\n")
    assert text.endswith("after\n")
    assert text.count("### Appendix A") == 1
    assert "old" not in text
    page.write_text("no marks")
    refused = CliRunner().invoke(main, again)
    assert refused.exit_code == 2
    assert "lacks the lines" in refused.output
    refused = CliRunner().invoke(main, ["reproduce", "--figure", "99", "--out", str(tmp_path)])
    assert refused.exit_code == 2
    assert "no figure is called '99'" in refused.output


def test_figures_are_drawn(tmp_path):
    # In a process of its own: matplotlib keeps its fonts open.
    pytest.importorskip("matplotlib")
    arguments = ["reproduce", "--figure", "12-left", "--quick", "--out", tmp_path]
    subprocess.run([sys.executable, "-m", "st2i_dask.cli", *arguments], check=True, timeout=120)
    with Image.open(tmp_path / "figure-12-left.png") as image:
        assert len(image.convert("RGB").getcolors(1 << 20)) > 10


def test_every_figure_is_there():
    for name in figures.NAMES:
        assert len(figures.describe(name)) > 20


# ---------------------------------------------------------------- plan


def test_a_plan_is_the_smallest_number_that_reaches_the_target():
    """Eleven seconds of work a request, warm; one every two seconds, a deadline of three times that."""
    arrivals = [Arrival(2.0 * n, "a") for n in range(60)]
    (found,) = plan(small(), arrivals, slo_scale=3.0, target=0.9)
    by_size = {size.executors: size.attainment for size in found.curve}
    assert 4 <= found.needed <= 8
    assert by_size[found.needed] >= 0.9 > by_size[found.needed - 1]
    (loose,) = plan(small(), arrivals, slo_scale=30.0, target=0.9)
    assert loose.needed < found.needed
    with pytest.raises(ParameterError, match=r"target is 1\.5"):
        plan(small(), arrivals, slo_scale=3.0, target=1.5)
    with pytest.raises(ParameterError, match="no request"):
        plan(small(), [], slo_scale=3.0, target=0.9)


def test_the_plan_command(tmp_path):
    measured.write(Measured(EXACT), tmp_path / "p.json")
    assert measured.read(tmp_path / "p.json") == Measured(EXACT)
    trace = tmp_path / "t.csv"
    traces.write([traces.Asked(n * 1.0, "x") for n in range(30)], trace)
    arguments = ["--trace", trace, "--workflows", "S1", "--seconds", 20, "--slo", 5]
    run = CliRunner().invoke(main, ["plan", *map(str, arguments), "--memory", "80"])
    assert run.exit_code == 0, run.output
    assert "<- enough" in run.output
    assert "20 requests within 5 times" in run.output
    refused = CliRunner().invoke(main, ["plan", "--profile", str(tmp_path / "p.json")])
    assert refused.exit_code == 2
    assert "the profile has no model" in refused.output


def test_a_plan_that_no_number_of_executors_reaches_says_why(tmp_path):
    """The first request loads for 13 s, and no executor beside spares it that."""
    workflow = diffusion("two", ["text"], "unet", 2, "vae")
    measured.write(Measured(EXACT, {"two": workflow}), tmp_path / "p.json")
    traces.write([traces.Asked(n * 100.0, "x", "two") for n in range(3)], tmp_path / "t.csv")
    arguments = ["plan", "--profile", tmp_path / "p.json", "--trace", tmp_path / "t.csv"]
    arguments = [*map(str, arguments), "--target", "0.9"]
    run = CliRunner().invoke(main, [*arguments, "--slo", "1.2"])
    assert run.exit_code == 1, run.output
    assert "no number of executors of 1,971 MiB for 90 % of 3 requests" in run.output
    assert "66.7 %; 1 of two miss, and more executors do not help" in run.output
    assert "deadline 13.200 s" in run.output
    cold_s = float(re.search(r"two: ([\d.]+) s where nothing is loaded", run.output)[1])
    assert cold_s > 13.2
    assert "<- enough" not in run.output
    run = CliRunner().invoke(main, [*arguments, "--slo", "5", "--memory", "3GiB", "--memory", "4"])
    assert run.exit_code == 0, run.output
    assert {"3,072", "3,815"} <= set(run.output.split())


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--memory", "much"], "--memory is much; give a size above 0"),
        (["--memory", "0"], "--memory is 0"),
        (["--rate", -1], "--rate is -1"),
        (["--seconds", "nan"], "--seconds is nan"),
        (["--memory", "inf"], "--memory is inf"),
        (["--workflows", "S7"], "no setting is called 'S7'"),
        (["--slo", 1], "slo is 1.0"),
        (["--trace", "none.csv"], "trace none.csv cannot be read"),
    ],
)
def test_a_plan_of_what_makes_no_sense_is_refused(arguments, message):
    run = CliRunner().invoke(main, ["plan", *map(str, arguments)])
    assert run.exit_code == 2, run.output
    assert message in run.output


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[]", "has no models"),
        ("{", "cannot be read"),
        ('{"models": {"a": {"nbytes": 0, "load_s": 1, "compute_s": 1}}}', "nbytes is 0"),
        ('{"models": {"a": {"nbytes": 1}}}', "missing"),
        ('{"models": {}, "hop": 1}', "has 'hop'; it may have"),
        ('{"models": {}, "link_bandwidth": 0}', "link_bandwidth is 0"),
        ('{"models": {}, "activation_bytes": 90000000000}', "leave nothing for weights"),
    ],
)
def test_a_profile_that_makes_no_sense_is_refused(tmp_path, text, message):
    (tmp_path / "p").write_text(text)
    with pytest.raises(ParameterError, match=message):
        measured.read(tmp_path / "p")


def test_memory_is_what_a_plan_compares():
    bigger = EXACT.with_memory(EXACT.memory_bytes + MIB)
    assert bigger.weight_bytes == EXACT.weight_bytes + MIB


def test_the_readme_cites_nothing_that_the_page_lacks():
    root = Path(__file__).parents[3]
    page = (root / "docs" / "evaluation.md").read_text()
    section = (root / "README.md").read_text().partition("## Evaluation")[2].partition("\n## ")[0]
    rows = [line.split(" | ") for line in section.splitlines() if line.startswith("| ")][1:]
    assert len(rows) == 3
    for what, we_get, _ in rows:
        assert any(f"{what} | " in line and f" | {we_get} | " in line for line in page.splitlines())
