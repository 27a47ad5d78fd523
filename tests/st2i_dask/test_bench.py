"""Benchmarks run and give the figures they are read for."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from st2i_dask import bench


def test_every_benchmark_says_what_it_measures():
    assert "hop" in bench.names()
    for name in bench.names():
        assert len(bench.describe(name)) > 20


def test_hop_gives_both_times_and_their_ratio():
    from st2i_dask.bench import hop

    figures = hop.run(length=20, rounds=1)
    assert set(figures) == {"ours_ms", "dask_ms", "ratio", "one_step_ms", "one_step_ratio"}
    assert figures["ratio"] == pytest.approx(figures["ours_ms"] / figures["dask_ms"], abs=0.01)
    assert figures["ours_ms"] > 0


def test_command_writes_json(tmp_path, monkeypatch):
    from click.testing import CliRunner

    from st2i_dask.bench import __main__ as command

    monkeypatch.setattr(command, "run", lambda name: {"ratio": 0.5})
    result = CliRunner().invoke(command.bench, ["hop", "--json", str(tmp_path / "f.json")])
    assert result.exit_code == 0
    assert json.loads((tmp_path / "f.json").read_text()) == {"ratio": 0.5}


def test_unknown_benchmark_is_refused_with_the_list():
    done = subprocess.run(
        [sys.executable, "-m", "st2i_dask.bench", "nothing"],
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 2
    assert "hop" in done.stderr


def test_overhead_compares_the_images_and_gives_ratios():
    from st2i_dask.bench import overhead

    figures = overhead.run(steps=3, rounds=1, layers=(1, 1), heads=2, side=32)
    assert set(figures) == {"ratio", "one_step_ratio", "ours_s", "diffusers_s", "step_ms"}
    assert figures["ratio"] == pytest.approx(figures["ours_s"] / figures["diffusers_s"], rel=0.01)
    assert figures["diffusers_s"] > 0
