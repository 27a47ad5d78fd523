"""What users write is quoted in errors, at a length that a message may have."""

from __future__ import annotations

import dask.config
import pytest
from click.testing import CliRunner

import st2i_dask as st2i
from st2i_dask.cli import main
from st2i_dask.columns import rows
from st2i_dask.config import worker_options
from st2i_dask.quoting import MOST, quoted
from st2i_dask.rules import OneOf, Range
from st2i_dask.serve.problems import of_validation
from st2i_dask.tenants import check_tenant

LONG = "x" * 10_000
#: What an error says around two quotations at most.
BOUND = 2 * MOST + 400


@pytest.fixture(scope="module")
def shapes():
    return st2i.load("shapes")


def test_a_quotation_has_both_ends_and_a_bound():
    assert quoted("studio") == "'studio'"
    assert quoted("y" * (MOST - 2)) == repr("y" * (MOST - 2))
    long = quoted("begin" + LONG + "end")
    assert len(long) == MOST
    assert long.startswith("'begin")
    assert long.endswith("end'")
    assert "..." in long
    assert len(quoted([LONG, LONG])) == len(quoted("\0" * 300)) == MOST


def test_a_quotation_never_raises():
    assert quoted(10**5000) == "<int>"


@pytest.mark.parametrize(
    "use",
    [
        lambda shapes: check_tenant(LONG),
        lambda shapes: check_tenant([LONG]),
        lambda shapes: shapes.submit(None, prompt="a red ring", tenant=LONG),
        lambda shapes: shapes.bind(prompt="a red ring", **{LONG: 1}),
        lambda shapes: shapes.bind(prompt="a red ring", num_steps=LONG),
        lambda shapes: shapes.bind(prompt="a red ring", num_steps=10**5000),
        lambda shapes: shapes.bind(prompt="a red ring", width=10**5000),
        lambda shapes: shapes.submit(None, prompt="a red ring", previews=LONG),
        lambda shapes: rows(["a", "b"], None, {LONG: [1]}, {}),
        lambda shapes: rows(["a", "b"], None, {LONG: [1]}, {LONG: 1}),
        lambda shapes: Range(0, 1).check("share", 10**5000),
        lambda shapes: OneOf(("a",)).check("mode", LONG),
        lambda shapes: st2i.load("shapes", task=LONG),
        lambda shapes: st2i.load("shapes", dtype=LONG),
        lambda shapes: st2i.load("shapes", **{LONG: 1}),
        lambda shapes: st2i.load(LONG),
        lambda shapes: st2i.load("/" + LONG),
        lambda shapes: st2i.load("shapes", controlnet="/" + LONG),
        lambda shapes: st2i.load("shapes", controlnet={LONG: 1}),
        lambda shapes: st2i.from_pipeline("/" + LONG),
    ],
)
def test_errors_are_bounded_and_quote_the_beginning(monkeypatch, shapes, use):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with pytest.raises(st2i.St2iError) as caught:
        use(shapes)
    assert len(str(caught.value)) < BOUND
    assert "xxx" in str(caught.value) or "<int>" in str(caught.value)


def test_a_long_value_of_the_configuration():
    with (
        dask.config.set({"st2i.worker.allocator": LONG}),
        pytest.raises(st2i.AttachError) as caught,
    ):
        worker_options()
    assert len(str(caught.value)) < BOUND


@pytest.mark.parametrize("kind", ["extra_forbidden", "missing", "int_type"])
def test_parameters_over_http(kind):
    error = of_validation([{"loc": ("body", LONG), "msg": "not valid", "type": kind}])
    assert len(str(error.detail)) < BOUND
    assert len(error.param) == MOST


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["tenants", "--scheduler", LONG], "has no port"),
        (["tenants", "--scheduler", f"tcp://{LONG}:1"], "no machine has such a name"),
        (["settings", "--scheduler", "tcp://127.0.0.1:9", "--weight", LONG], "TENANT=VALUE"),
        (["generate", "--workflow", LONG + ".py", "--prompt", "a"], "is not there; give FILE.py"),
        (["generate", "--workflow", LONG, "--prompt", "a"], "neither a packaged model"),
        (["generate", "--workflow", "shapes", "--prompt", "a", "--tenant", LONG], "tenant name"),
        (["generate", "--workflow", "shapes", "--prompt", "a", "--param", LONG], "NAME=VALUE"),
        (
            ["generate", "--workflow", "shapes", "--prompt", "a", "--param", f"{LONG}=1"],
            "no parameter",
        ),
        (["generate", "--workflow", "shapes", "--prompt", "a", "--size", LONG], "is not a size"),
        (["generate", "--workflow", "shapes", "--prompt", "a", "--task", LONG], "no workflow for"),
        (
            ["generate", "--workflow", "shapes", "--prompt", "a", "--load-option", LONG],
            "of another argument",
        ),
    ],
)
def test_the_command_line(monkeypatch, tmp_path, arguments, said):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    out = ["--out", str(tmp_path / "out")] if arguments[0] == "generate" else []
    result = CliRunner().invoke(main, [*arguments, *out])
    assert result.exit_code == 2
    assert said in result.output
    assert len(result.output) < BOUND
