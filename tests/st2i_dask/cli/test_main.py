"""The command as a whole: quick help, errors as one line, workflows and where they come from."""

from __future__ import annotations

import resource
import subprocess
import sys

import pytest

import st2i_dask
from st2i_dask.cli.prompts import Failure
from st2i_dask.cli.sources import find_workflow
from st2i_dask.cli.tables import failure_list, table
from st2i_dask.errors import LoadError

from .conftest import PAINT


def test_help_imports_nothing_heavy():
    code = (
        "import sys\nfrom st2i_dask.cli import main\n"
        "try: main(['--help'])\nexcept SystemExit: pass\n"
        "print(sorted(m for m in ('torch', 'distributed', 'diffusers', 'transformers', 'PIL.PngI"
        "magePlugin') if m in sys.modules and not m.startswith('PIL')))"
    )
    run = [sys.executable, "-c", code]
    done = subprocess.run(run, capture_output=True, text=True, timeout=60, check=True)
    assert "generate" in done.stdout
    assert "demo" in done.stdout
    assert done.stdout.strip().endswith("[]")


def test_help_is_quick():
    """In processor seconds: other processes share the cores."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    command = [sys.executable, "-m", "st2i_dask.cli", "--help"]
    for _ in range(3):
        subprocess.run(command, capture_output=True, check=True, timeout=60)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    used = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    assert used / 3 < 1.0


def test_version(st2i):
    assert st2i("--version").output == f"st2i, version {st2i_dask.__version__}\n"


def test_unknown_commands(st2i):
    result = st2i("paint")
    assert result.exit_code == 2
    assert "No such command 'paint'" in result.output


@pytest.mark.parametrize("name", ["demo", "generate", "workflows"])
def test_every_command_has_help(st2i, name):
    result = st2i(name, "--help")
    assert result.exit_code == 0
    assert result.output.startswith(f"Usage: main {name}")


def test_errors_are_one_line_on_stderr(st2i, tmp_path):
    (tmp_path / "model_index.json").write_text("{")
    result = st2i("workflows", tmp_path)
    assert result.exit_code == 2
    assert result.stdout == ""
    assert result.stderr.startswith("st2i: ")
    assert result.stderr.count("\n") == 1
    assert "is not JSON" in result.stderr


def test_workflows_shows_parameters(st2i):
    result = st2i("workflows", f"{PAINT}:paint")
    assert result.exit_code == 0
    lines = result.output.splitlines()
    assert lines[0] == "paint: Noise as pictures."
    assert lines[1].split() == ["parameter", "kind", "type,", "default,", "rule"]
    rows = {line.split()[0]: line.split(maxsplit=2)[1:] for line in lines[2:]}
    assert rows["seed"] == ["data", "int, default 0"]
    assert rows["num_steps"] == ["static", "int, default 2, 1 to 50"]
    assert rows["medium"] == ["static", "'oil' | 'chalk', default 'oil'"]


def test_workflows_lists_what_is_packaged(st2i):
    result = st2i("workflows")
    assert result.exit_code == 0
    assert result.output.startswith("shapes: ")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("absent.py:x", "'absent.py' is not there"),
        (f"{PAINT}:absent", "has no workflow 'absent'; it has: batch, numbers, paint, plain"),
        (f"{PAINT}", "name one: paint.py:WORKFLOW"),
        ("no-such-folder", "'no-such-folder'"),
    ],
)
def test_workflows_that_are_not_found(text, message, monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with pytest.raises(LoadError, match=message):
        find_workflow(text)


def test_a_file_that_cannot_be_run_says_where(tmp_path):
    (tmp_path / "flow.py").write_text("import st2i_dask\n\nmissing_name\n")
    with pytest.raises(LoadError, match=r"flow\.py', line 3 cannot be run: NameError"):
        find_workflow(str(tmp_path / "flow.py:flow"))


def test_the_only_workflow_of_a_file_needs_no_name(tmp_path):
    (tmp_path / "json.py").write_text(  # the name of a standard module, which must stay what it is
        "import st2i_dask as st2i\n"
        "@st2i.workflow(name='fancy name')\n"
        "def flow(prompt: str): return prompt\n"
    )
    for text in ("json.py", "json.py:flow", "json.py:fancy name"):
        assert find_workflow(str(tmp_path / text)).name == "fancy name"
    import json

    assert json.loads("1") == 1


def test_a_relative_folder_is_made_absolute(tmp_path, monkeypatch):
    from st2i_dask import catalogue

    seen = []
    monkeypatch.setattr(catalogue, "load", seen.append)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "model").mkdir()
    find_workflow("model")
    assert seen == [tmp_path / "model"]


def test_tables():
    text = table(["a", "number"], [["bb", "1"], ["c", "22"]], right=[1])
    assert text == "  a   number\n  bb       1\n  c       22"


def test_failures_with_one_reason_are_grouped_in_order():
    failures = [Failure(f"line {n}", "x", "why") for n in (10, 2)] + [Failure("line 1", "y", "z")]
    assert failure_list(failures).splitlines() == [
        "3 prompts failed:",
        "  line 1: 'y': z",
        "  2 prompts: why",
        "    line 2: 'x'",
        "    line 10: 'x'",
    ]


def test_long_lists_of_failures_are_cut():
    failures = [Failure(f"line {n}", "x", "why") for n in range(1000)]
    lines = failure_list(failures, most=3).splitlines()
    assert lines[0] == "1,000 prompts failed:"
    assert lines[-1].strip() == "... and 997 more"
    assert len(lines) == 6
