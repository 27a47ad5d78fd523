"""Shared by the command line's tests: a quick workflow file, a cluster, and a runner."""

from __future__ import annotations

import logging
import sys
from pathlib import Path

import dask
import pytest
from click.testing import CliRunner

PAINT = Path(__file__).parent / "paint.py"


@pytest.fixture(autouse=True)
def as_before(fresh_registry, monkeypatch):
    """What commands set for their own process does not outlive the test."""
    for name in ("TRANSFORMERS_VERBOSITY", "DIFFUSERS_VERBOSITY"):
        monkeypatch.setenv(name, "error")
    monkeypatch.setattr(sys, "path", list(sys.path))
    loggers = [logging.getLogger(n) for n in ("distributed", "distributed.client", "bokeh")]
    levels = [logger.level for logger in loggers]
    with dask.config.set({"logging": dask.config.get("logging", None)}):
        yield
    for logger, level in zip(loggers, levels, strict=True):
        logger.setLevel(level)


@pytest.fixture(scope="module")
def scheduler():
    """Address of a cluster with two workers."""
    import st2i_dask as st2i

    with st2i.local_cluster(2, dashboard_address=":0") as cluster:
        yield cluster.scheduler_address


@pytest.fixture
def st2i():
    """`st2i("generate", ...)`: run a command in this process; the result has all output."""
    from st2i_dask.cli import main

    def run(*arguments, stdin=None):
        result = CliRunner().invoke(main, [str(a) for a in arguments], input=stdin)
        if result.exception is not None and not isinstance(result.exception, SystemExit):
            raise result.exception
        return result

    return run


@pytest.fixture
def generate(st2i, scheduler, tmp_path):
    """`generate(prompts, *options)`: `st2i generate` with the paint workflow, into tmp_path/out."""

    def run(prompts, *options, workflow="paint", out=tmp_path / "out"):
        where = ("--scheduler", scheduler, "--out", out)
        source = f"{PAINT}:{workflow}"
        return st2i(
            "generate", "--workflow", source, "--prompts", "-", *where, *options, stdin=prompts
        )

    return run
