"""Imports go one way: who may import what, read from the source, and how little a user pays."""

from __future__ import annotations

import ast
import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGES = ("st2i_dask", "scheduler_plugin", "worker_plugin")

# The one place that assembles both plugins. Benchmarks measure the plugins' own parts; the simulator
# drives their policies.
ASSEMBLER = "st2i_dask/cluster.py"
MEASURING = ("st2i_dask/bench/", "st2i_dask/simulate/")

# Files that may touch Dask's scheduler or worker, torch, an event loop or the clock. Everything else
# in these packages is policy or composition and stays pure.
PURE = (
    *("errors", "parameters", "rules", "tenants", "model_fn", "glue", "symbol", "trace", "dag"),
    *("fusion", "plan", "fingerprint"),
)
PURE_WORKER = (
    *("prefix", "weight_books", "weight_cache", "weight_fit", "weight_loads", "weight_runs"),
    *("weight_refusals", "weight_victims"),
)
FORBIDDEN_IN_PURE = {
    *("dask", "distributed", "torch", "diffusers", "transformers", "asyncio", "tornado", "time"),
    *("numpy", "PIL"),
}
ALLOWED_ARRAYS_IN_POLICY = {"numpy"}


def sources(package):
    return sorted((ROOT / package).rglob("*.py"))


def imported(path, *, lazily=True):
    """Absolute names of all modules that a file imports; lazily: also inside functions."""
    tree = ast.parse(path.read_text())
    nodes = ast.walk(tree) if lazily else top_level(tree)
    package = path.relative_to(ROOT).with_suffix("").parts[:-1]
    found = set()
    for node in nodes:
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) + 1 - node.level] if node.level else ()
            module = ".".join([*base, *([node.module] if node.module else [])])
            found |= {module, *(f"{module}.{alias.name}" for alias in node.names)}
    return found


def top_level(tree):
    """Nodes that run on import and not only for type checkers."""
    stack = list(tree.body)
    while stack:
        node = stack.pop()
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)):
            continue
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            stack.extend(node.orelse)
            continue
        yield node
        stack.extend(ast.iter_child_nodes(node))


def packages_of(modules):
    return {module.partition(".")[0] for module in modules}


def relative(path):
    return path.relative_to(ROOT).as_posix()


@pytest.mark.parametrize("path", sources("st2i_dask"), ids=relative)
def test_st2i_dask_imports_neither_plugin_except_where_they_are_assembled(path):
    plugins = packages_of(imported(path)) & {"scheduler_plugin", "worker_plugin"}
    assert not plugins or relative(path) == ASSEMBLER or relative(path).startswith(MEASURING)


def test_the_assembler_imports_the_plugins_only_when_it_attaches():
    assert not packages_of(imported(ROOT / ASSEMBLER, lazily=False)) & set(PACKAGES[1:])
    assert packages_of(imported(ROOT / ASSEMBLER)) >= set(PACKAGES[1:])


@pytest.mark.parametrize("package", PACKAGES[1:])
def test_plugins_do_not_import_each_other_nor_what_assembles_them(package):
    other = {"scheduler_plugin": "worker_plugin", "worker_plugin": "scheduler_plugin"}[package]
    for path in sources(package):
        names = imported(path)
        assert other not in packages_of(names), relative(path)
        assert not {n for n in names if n.startswith("st2i_dask.cluster")}, relative(path)
        # The vocabulary, not the whole interface.
        assert "st2i_dask.workflow" not in names, relative(path)
        assert "tests" not in packages_of(names), relative(path)


@pytest.mark.parametrize(
    "path",
    [
        *(ROOT / "st2i_dask" / f"{name}.py" for name in PURE),
        *(ROOT / "worker_plugin" / f"{name}.py" for name in PURE_WORKER),
    ],
    ids=relative,
)
def test_pure_modules_import_no_dask_torch_loop_or_clock(path):
    assert not packages_of(imported(path)) & FORBIDDEN_IN_PURE


POLICY = (
    *("backlog", "candidates", "charging", "cost_model", "critical_path", "events", "fair_queue"),
    *("fleet", "instructions", "lanes", "ledger", "lifecycle", "outline", "placement", "policy"),
    *("reactions", "recent", "requests", "rivals", "robust", "settings", "usage", "world"),
    *("journal", "metrics_counts", "metrics_tenants"),
)


@pytest.mark.parametrize("name", POLICY)
def test_the_policy_imports_no_dask_torch_loop_or_clock(name):
    path = ROOT / "scheduler_plugin" / f"{name}.py"
    if not path.exists():
        pytest.skip("renamed")
    forbidden = FORBIDDEN_IN_PURE - ALLOWED_ARRAYS_IN_POLICY
    assert not packages_of(imported(path)) & forbidden


def test_the_reader_of_imports_sees_all_kinds(tmp_path, monkeypatch):
    source = (
        "from typing import TYPE_CHECKING\n"
        "import torch.nn as nn\n"
        "from . import a\n"
        "from ..b import c\n"
        "if TYPE_CHECKING:\n    import hidden\n"
        "def f():\n    import lazy\n"
        "class C:\n    import inner\n"
    )
    path = tmp_path / "pkg" / "sub" / "m.py"
    path.parent.mkdir(parents=True)
    path.write_text(source)
    monkeypatch.setitem(globals(), "ROOT", tmp_path)
    assert imported(path) >= {"torch.nn", "pkg.sub.a", "pkg.b.c", "hidden", "lazy", "inner"}
    assert not imported(path, lazily=False) & {"hidden", "lazy"}
    assert "inner" in imported(path, lazily=False)


# ---------------------------------------------------------------- in a fresh process

HEAVY = ("torch", "diffusers", "transformers", "distributed", "tornado", "bokeh", "safetensors")


def loaded_after(statement):
    """Top-level packages in a new process after the statement, and how long it took, seconds."""
    code = (
        "import sys, time, json; start = time.perf_counter();"
        f"{statement}; took = time.perf_counter() - start;"
        "print(json.dumps([sorted({m.partition('.')[0] for m in sys.modules}), took]))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60
    )
    packages, took = json.loads(done.stdout)
    return set(packages), took


def test_importing_the_package_is_cheap():
    packages, took = loaded_after("import st2i_dask")
    assert not packages & {*HEAVY, *PACKAGES[1:]}
    assert took < 10


def test_unpickling_a_task_on_the_scheduler_needs_no_model_library():
    packages, _ = loaded_after("import st2i_dask.invocation, scheduler_plugin.plugin")
    assert not packages & {"torch", "diffusers", "transformers", "worker_plugin"}


def test_a_worker_imports_no_model_library_before_its_first_model():
    packages, _ = loaded_after("import st2i_dask.invocation, worker_plugin.plugin")
    assert not packages & {"torch", "diffusers", "transformers", "scheduler_plugin"}
