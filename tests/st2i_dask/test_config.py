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
    [("slack-s", -1), ("bandwidth", "4e9"), ("weights", {"a": 0}), ("caps", 3), ("caps", {1: 1})],
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
