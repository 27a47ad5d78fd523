"""Configuration through Dask: defaults, files, environment, and keys that are not known."""

from __future__ import annotations

import inspect
import os
import subprocess
import sys

import dask.config
import pytest

import st2i_dask as st2i
from scheduler_plugin.plugin import configured_settings
from scheduler_plugin.settings import Settings
from st2i_dask.config import DEFAULTS, check_keys, scheduler_settings, worker_options


def test_the_packaged_defaults_are_those_of_the_code():
    assert configured_settings() == Settings()
    assert set(worker_options()) == set(inspect.signature(st2i.attach).parameters) - {"client"}
    from st2i_dask.cluster import ALLOCATORS, WEIGHTS

    options = worker_options()
    assert options.pop("allocator") == ALLOCATORS[0]
    assert options.pop("weights") == WEIGHTS[0]
    assert options.pop("nvshmem") is True
    assert set(options.values()) == {None}


def test_sizes_are_bytes_and_settings_are_numbers():
    with dask.config.set(
        {
            "st2i.worker.memory-bytes": "3 MiB",
            "st2i.scheduler.weights": {"studio": 3},
            "st2i.scheduler.default_cap": 7,
        }
    ):
        assert worker_options()["memory_bytes"] == 3 << 20
        assert configured_settings() == Settings(weights={"studio": 3}, default_cap=7)
    assert worker_options()["memory_bytes"] is None


def test_a_whole_section_may_be_set_in_part():
    with dask.config.set({"st2i": {"worker": {"device": "cpu"}}}):
        assert worker_options()["device"] == "cpu"
        assert worker_options()["allocator"] == "best_fit"
        assert configured_settings() == Settings()


@pytest.mark.parametrize(
    ("key", "value", "said"),
    [
        ("st2i.wroker.device", "cpu", "st2i.wroker is not known; did you mean worker"),
        ("st2i.worker.memory", "1 GiB", "worker.memory is not known; did you mean memory-bytes"),
        ("st2i.worker.qqq", 1, "worker.qqq is not known; st2i.worker has memory-bytes, arena"),
        ("st2i.scheduler.slack", 1, "DASK_ST2I__SCHEDULER__SLACK,"),
        ("st2i.scheduler", 3, "st2i.scheduler is 3; it is a section with slack-s"),
        ("st2i.scheduler", None, "st2i.scheduler is None; it is a section"),
        ("st2i", None, "st2i is None; it is a section with worker, scheduler"),
        (
            "st2i.scheduler.weights",
            "a=3",
            "weights is 'a=3'; it gives tenants their weights, as {stu",
        ),
        ("st2i.scheduler.caps", [1], r"caps is \[1\]; it gives tenants their caps, as {studio"),
        ("st2i.scheduler.caps", 3, "correct the environment variable DASK_ST2I__SCHEDULER__CAPS"),
    ],
)
def test_unknown_keys_are_errors_with_a_hint(key, value, said):
    with dask.config.set({key: value}):
        for read in (check_keys, worker_options, scheduler_settings):
            with pytest.raises(st2i.AttachError, match=said):
                read()
    check_keys()


@pytest.mark.parametrize(
    ("key", "value", "said"),
    [
        ("memory-bytes", -1, r"st2i\.worker\.memory-bytes: memory_bytes=-1 is not a positive size"),
        ("memory-bytes", [1], "is not a positive size"),
        ("load-bandwidth", True, "load_bandwidth=True is not a positive size"),
        ("allocator", "slab", "'slab' is not known; use 'best_fit' or 'buddy'"),
        ("weights", "all", "use one of 'elastic', 'pipelined'"),
        ("nvshmem", "maybe", "nvshmem='maybe' is not known"),
        ("device", 0, "device=0 is not known"),
    ],
)
def test_bad_values_of_a_worker_name_their_key(key, value, said):
    with (
        dask.config.set({f"st2i.worker.{key}": value}),
        pytest.raises(st2i.AttachError, match=said),
    ):
        worker_options()


@pytest.mark.parametrize(
    ("key", "value"),
    [("slack-s", -1), ("bandwidth", "4e9"), ("weights", {"a": 0}), ("caps", {1: 1})],
)
def test_bad_settings_name_their_section(key, value):
    with (
        dask.config.set({f"st2i.scheduler.{key}": value}),
        pytest.raises(st2i.St2iError, match=r"configuration st2i\.scheduler"),
    ):
        configured_settings()


def test_environment_and_file_in_a_new_process(tmp_path):
    (tmp_path / "ours.yaml").write_text("st2i:\n  worker:\n    weights: mcache\n    device: cpu\n")
    environment = {
        "DASK_CONFIG": str(tmp_path),
        "DASK_ST2I__WORKER__MEMORY_BYTES": "2 MiB",
        "DASK_ST2I__WORKER__NVSHMEM": "false",
        "DASK_ST2I__WORKER__WEIGHTS": "wcache",  # the environment goes before files
        "DASK_ST2I__SCHEDULER__CAPS": "{'Ann': 2}",
    }
    code = "from st2i_dask.config import *; print(worker_options(), scheduler_settings()['caps'])"
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
    )
    for part in ("'memory_bytes': 2097152", "'nvshmem': False", "'weights': 'wcache'"):
        assert part in done.stdout
    assert "'device': 'cpu'" in done.stdout
    assert done.stdout.endswith("{'Ann': 2}\n")


_SAYS_WHAT_IS_WRONG = """
import dask.config
{before}
from st2i_dask.config import check_keys
try:
    check_keys()
except ValueError as error:
    print(type(error).__name__, error)
"""


@pytest.mark.parametrize(
    ("file", "variables", "said"),
    [
        ("", {"SCHEDULER__WEIGHTS": "studio=3"}, "st2i.scheduler.weights is 'studio=3'; it gives"),
        ("", {"SCHEDULER__WEIGHTS": "[1]"}, "variable DASK_ST2I__SCHEDULER__WEIGHTS, or"),
        ("", {"LOGS": "true"}, "st2i.logs is True; it is a section with json, level; correct"),
        ("st2i: {scheduler: {weights: [1]}}", {}, "st2i.scheduler.weights is [1]; it gives"),
        ("st2i: {scheduler: 5}", {}, "st2i.scheduler is 5; it is a section with slack-s"),
        ("st2i: 5", {}, "st2i is 5; it is a section with worker"),
        # Dask keeps the file's mapping alone, though the environment goes first.
        ("st2i: {scheduler: {caps: {a: 1}}}", {"SCHEDULER__CAPS": "a=2"}, "caps is 'a=2'; it"),
        # What goes first is right; what is empty is not there.
        ("st2i: {scheduler: {caps: [1]}}", {"SCHEDULER__CAPS": "{'a': 1}"}, ""),
        ("st2i:\n  scheduler:\n  worker:\n    device: cpu\n", {}, ""),
        ("st2i:\n", {}, ""),
    ],
)
def test_no_mapping_where_one_is_wanted_is_an_error(tmp_path, file, variables, said):
    """Dask itself would put an empty mapping there, which serves with defaults."""
    (tmp_path / "ours.yaml").write_text(file)
    found = _check_in_a_process(tmp_path, variables)
    if not said:
        assert found == ""
        return
    assert found.startswith("AttachError configuration st2i")
    assert said in found
    assert str(tmp_path) in found


def test_no_mapping_that_a_program_has_set_is_an_error_too(tmp_path):
    found = _check_in_a_process(tmp_path, {}, "dask.config.set({'st2i.scheduler.caps': 4})")
    assert "st2i.scheduler.caps is 4; it gives tenants their caps" in found


def _check_in_a_process(folder, variables, before=""):
    ours = {f"DASK_ST2I__{name}": value for name, value in variables.items()}
    return subprocess.run(
        [sys.executable, "-c", _SAYS_WHAT_IS_WRONG.format(before=before)],
        env={**os.environ, "DASK_CONFIG": str(folder), **ours},
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
    ).stdout


def test_every_key_is_documented_with_its_file(tmp_path):
    import st2i_dask.config as config

    text = (config.Path(config.__file__).with_name("st2i.yaml")).read_text()
    for section, keys in DEFAULTS.items():
        for key in keys:
            line = next(line for line in text.splitlines() if line.startswith(f"    {key}:"))
            assert "# " in line, (section, key)


def test_attach_refuses_an_unknown_key_before_it_asks_the_cluster():
    class Client:
        asynchronous, status = False, "running"

        def run_on_scheduler(self, function):
            raise AssertionError("asked")

    with (
        dask.config.set({"st2i.worker.arena": 1}),
        pytest.raises(st2i.AttachError, match="did you mean arena-bytes"),
    ):
        st2i.attach(Client())
