"""`st2i replay` on a live cluster of two workers."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner

import st2i_dask as st2i
from st2i_dask.cli import main
from st2i_dask.cli.replay import _caches, _jain
from st2i_dask.simulate import traces
from st2i_dask.simulate.traces import Asked

PAINT = Path(__file__).parents[1] / "cli" / "paint.py"


@pytest.fixture(scope="module")
def scheduler():
    with st2i.local_cluster(2, dashboard_address=":0") as cluster:
        yield cluster.scheduler_address


def replay(*arguments):
    return CliRunner().invoke(main, ["replay", *map(str, arguments)])


@pytest.fixture
def trace(tmp_path):
    asked = [Asked(0.1 * n, "ab"[n % 3 == 0], "plain" if n % 2 else "") for n in range(12)]
    traces.write(asked, tmp_path / "t.csv")
    return tmp_path / "t.csv"


def test_a_trace_is_replayed_for_its_tenants(scheduler, trace, tmp_path):
    run = replay(
        *("--trace", trace, "--scheduler", scheduler, "--slo", 50, "--rate", 2),
        *("--workflow", f"plain={PAINT}:plain", "--workflow", f"{PAINT}:paint"),
        *("--json", tmp_path / "f.json"),
    )
    assert run.exit_code == 0, run.output
    figures = json.loads((tmp_path / "f.json").read_text())
    assert figures["requests"] == 12
    assert figures["failed"] == 0
    assert 0.55 <= figures["seconds"] < 30
    assert figures["attainment"] > 0.5
    assert figures["p50_s"] <= figures["p95_s"] <= figures["p99_s"]
    assert {row["tenant"] for row in figures["tenants"]} == {"a", "b"}
    assert all(row["service_s"] > 0 for row in figures["tenants"])
    assert 0.5 <= figures["fairness"] <= 1
    assert figures["caches"]["runs"] >= 0
    assert "12 requests in" in run.output


def test_requests_that_fail_are_misses_and_the_status_says_so(scheduler, trace, tmp_path):
    """The run alone is refused first: nothing would be learned from a trace of failures."""
    run = replay(
        *("--trace", trace, "--scheduler", scheduler, "--workflow", f"{PAINT}:plain"),
        *("--prompt", "slow", "--slo", 1.001, "--rate", 20, "--json", tmp_path / "f.json"),
    )
    assert run.exit_code == 0, run.output
    figures = json.loads((tmp_path / "f.json").read_text())
    assert figures["attainment"] < 0.5  # twelve at once on two workers, 0.3 s each


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--workflow", f"plain={PAINT}:plain"], "the trace asks for workflow ''"),
        (["--workflow", f"{PAINT}:paint", "--slo", 0.5], "give a multiple of the latency"),
        (["--workflow", f"{PAINT}:paint", "--seconds", 0], "no request of"),
        (["--workflow", f"{PAINT}:paint", "--param", "num_steps=99"], "num_steps"),
        (["--workflow", f"{PAINT}:paint", "--rate", 0], "rate scale is 0"),
        (["--workflow", f"{PAINT}:paint"] * 2, "there is one for all others already"),
        (
            ["--workflow", f"odd={PAINT}:paint"],
            "the trace asks for no workflow 'odd', but for '', 'plain'",
        ),
        (["--workflow", f"{PAINT}:paint", "--json", "/nowhere/f"], "there is no folder /nowhere"),
        (["--workflow", f"{PAINT}:paint", "--profile", "none"], "profile none cannot be read"),
        (["--workflow", f"{PAINT}:paint", "--rate", 1e-9], "lasts 1.1e+09 s"),
    ],
)
def test_what_makes_no_sense_is_refused_before_anything_is_submitted(trace, arguments, message):
    run = replay("--trace", trace, "--scheduler", "tcp://127.0.0.1:1", *arguments)
    assert run.exit_code == 2, run.output
    assert message in run.output


def test_fairness_is_jains():
    assert _jain([1.0, 1.0, 1.0]) == pytest.approx(1)
    assert _jain([5.0, 0.0]) == pytest.approx(0.5)
    assert _jain([0.0]) == 1.0


def test_caches_are_what_happened_in_between():
    def row(model, runs, hits, loads):
        rest = {"load_s": 0.5 * loads, "stalled_s": 0.25 * loads}
        return {
            "worker": "w",
            "model_key": model,
            "runs": runs,
            "hits": hits,
            "loads": loads,
            **rest,
        }

    before = [row("kept", 5, 3, 8), row("gone", 9, 9, 4), row("anew", 7, 7, 4)]
    after = [row("kept", 9, 6, 12), row("new", 2, 1, 4), row("anew", 1, 0, 4)]
    found = {"runs": 7, "hits": 4, "loads": 12, "load_s": 6.0, "stalled_s": 3.0}
    assert _caches(before, after) == found
