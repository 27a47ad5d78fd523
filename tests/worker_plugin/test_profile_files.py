"""Profiles in files: they survive restarts, are shared by workers, and no file or disk makes a run fail."""

from __future__ import annotations

import json
import shutil
import stat
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from worker_plugin.profile_files import VERSION, ProfileFiles
from worker_plugin.profiles import Profile, ProfileKey, Profiles

from .profiling import KEY, LAYERS, ORDER, measured, warnings


def test_a_restart_changes_nothing(open_profiles, tmp_path):
    profiles = open_profiles(tmp_path / "made" / "profiles")
    measured(profiles)
    for _ in range(3):
        profiles.observe_run(KEY, None, ORDER, 1.0)
    profiles.observe_load(KEY, 1, 0.1 + 0.2, LAYERS)
    profiles.close()
    (path,) = (tmp_path / "made" / "profiles").iterdir()
    assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    again = open_profiles(path.parent)
    assert again.get(KEY) == profiles.get(KEY)
    assert again.get(KEY).load_s[1] == 0.1 + 0.2
    assert again.wants_compute(KEY)
    again.observe_load(KEY, 0, 0.9, LAYERS)
    assert again.get(KEY).load_s[0] == 0.9, "it still knows that the old figure is to be forgotten"


KEYS = st.builds(
    ProfileKey,
    st.sampled_from(["a", "b", "../c"]),
    st.sampled_from(["bfloat16", "float32"]),
    st.sampled_from(["cpu", "NVIDIA H200"]),
    st.sampled_from(["64x64", "", "ü"]),
)
SECONDS = st.floats(0, 1e6) | st.sampled_from([0.0, 5e-324, 0.001, 1.0])
LOADS = st.tuples(st.just("load"), KEYS, st.integers(0, 2), SECONDS, st.sampled_from([3, 3, 3, 4]))
RUNS = st.tuples(
    st.just("run"),
    KEYS,
    st.none() | st.lists(SECONDS, min_size=3, max_size=3),
    st.lists(st.integers(0, 2), max_size=5),
    st.none() | SECONDS,
)
# A restart; a second worker's close; both are steps like any other.
RESTART = st.just(("restart",))


def observe(profiles, step):
    if step[0] == "load":
        profiles.observe_load(*step[1:])
    else:
        profiles.observe_run(*step[1:])


def everything(profiles, keys):
    return [(profiles.get(key), profiles.wants_compute(key), profiles.prefix(key)) for key in keys]


def round_trips(folder, steps):
    """A store that is restarted in between knows what one knows that only has memory."""
    kept, memory = Profiles(folder, write_s=60.0), Profiles(None)
    keys = sorted({step[1] for step in steps if len(step) > 1})
    for step in steps:
        if step[0] == "restart":
            kept.close()
            kept = Profiles(folder, write_s=60.0)
            assert everything(kept, keys) == everything(memory, keys)
        else:
            observe(kept, step)
            observe(memory, step)
        kept._check()
        memory._check()
    assert everything(kept, keys) == everything(memory, keys)
    kept.close()


STEPS = st.lists(LOADS | RUNS | RUNS | RESTART, max_size=60)


@settings(max_examples=60, deadline=None)
@given(steps=STEPS)
def test_any_observations_survive_restarts(tmp_path_factory, steps):
    round_trips(tmp_path_factory.mktemp("profiles"), steps)


@pytest.mark.slow
@settings(max_examples=2000, deadline=None)
@given(steps=STEPS)
def test_any_observations_survive_restarts_long(tmp_path_factory, steps):
    round_trips(tmp_path_factory.mktemp("profiles"), steps)


def test_workers_share_files_and_do_not_undo_each_other(open_profiles, tmp_path):
    other_bucket = KEY._replace(bucket="other")
    first, second = open_profiles(tmp_path), open_profiles(tmp_path)
    measured(first)
    assert second.get(KEY) is None
    measured(second, other_bucket, compute_s=0.5)
    first.close()
    second.close()
    third = open_profiles(tmp_path)
    assert third.get(KEY) == first.get(KEY)
    assert third.get(other_bucket) == second.get(other_bucket)
    # A worker that has read a figure and learned nothing about it does not bring it back.
    fourth = open_profiles(tmp_path)
    assert fourth.get(KEY) is not None
    measured(third, KEY, compute_s=0.7, runs=7)
    third.close()
    measured(fourth, other_bucket, compute_s=0.6)
    fourth.close()
    assert open_profiles(tmp_path).get(KEY).compute_s == (0.7,) * LAYERS


def test_readers_never_meet_a_torn_file(tmp_path, caplog):
    """Two writers and a reader on one file; every read is one writer's figures, whole."""
    files = ProfileFiles(tmp_path)
    files.write("w", ["0"] * 20_000)
    stop = threading.Event()

    def write(what):
        writer = ProfileFiles(tmp_path)
        while not stop.is_set():
            assert writer.write("w", [what] * 20_000)

    threads = [threading.Thread(target=write, args=(what,)) for what in "12"]
    for thread in threads:
        thread.start()
    try:
        seen, reads = set(), 0
        deadline = time.monotonic() + 30
        while (reads < 20 or not {"1", "2"} <= seen) and time.monotonic() < deadline:
            content = files.read("w", list)
            assert content is not None
            assert len(set(content)) == 1
            assert len(content) == 20_000
            seen.add(content[0])
            reads += 1
    finally:
        stop.set()
        for thread in threads:
            thread.join()
    assert {"1", "2"} <= seen
    assert not warnings(caplog)
    assert [path.suffix for path in tmp_path.iterdir()] == [".json"]


def test_files_are_written_now_and_then_and_not_by_the_observer(tmp_path):
    profiles = Profiles(tmp_path, write_s=0.3)
    writers = []
    write = profiles._files.write
    profiles._files.write = lambda *args: (
        writers.append((time.monotonic(), threading.current_thread())),
        write(*args),
    )[1]
    started = time.monotonic()
    while time.monotonic() < started + 1.0:
        measured(profiles)
        time.sleep(0.01)
    profiles.close()
    times = [at for at, _ in writers]
    assert 2 <= len(writers) <= 5
    gaps = [b - a for a, b in zip([started, *times], times[:-1], strict=False)]
    assert min(gaps) > 0.25
    assert threading.current_thread() not in [thread for _, thread in writers[:-1]]
    assert Profiles(tmp_path).get(KEY) is not None
    count = len(writers)
    profiles.observe_load(KEY, 0, 1.0, LAYERS)
    profiles.close()
    assert len(writers) == count, "closed"


BROKEN = {
    "empty": b"",
    "torn": b'{"version":1,"weights":"sha25',
    "no JSON": b"\x00\xff\xfe",
    "not an object": b"[1, 2]",
    "deep": b"[" * 100_000,
    "foreign version": {"version": VERSION + 1},
    "other weights": {"weights": "other"},
    "no content": {"content": None},
    "text for seconds": {"content": [{"load": [[False, "1"]]}]},
    "endless seconds": {"content": [{"load": [[False, 1e999]]}]},
    "negative seconds": {"content": [{"load": [[False, -1.0]]}]},
    "too many seconds": {"content": [{"load": [[False, *([1.0] * 8)]]}]},
    "no flag": {"content": [{"load": [[1.0]]}]},
    "order twice": {"content": [{"buckets": [{"order": [1, 1]}]}]},
    "negative layer": {"content": [{"buckets": [{"order": [-1]}]}]},
    "more measured than run": {"content": [{"buckets": [{"runs": 1, "measured": 2}]}]},
}


def broken(spoiled):
    """A file that is well but for what `spoiled` says."""
    if isinstance(spoiled, bytes):
        return spoiled
    bucket = {"bucket": "64x64", "runs": 3, "measured": 3, "order": [0], "stalls": []}
    bucket["compute"] = [[False, 1.0]]
    place = {"dtype": "bfloat16", "device": "cpu", "load": [[False, 1.0]], "buckets": [bucket]}
    for entry in spoiled.get("content") or []:
        place |= {key: value for key, value in entry.items() if key != "buckets"}
        for part in entry.get("buckets", []):
            bucket |= part
    whole = {"version": VERSION, "weights": KEY.weights, "content": [place]}
    whole |= {key: value for key, value in spoiled.items() if key != "content" or value is None}
    return json.dumps(whole).encode()


def test_what_the_broken_files_spoil_is_well_otherwise(open_profiles, tmp_path):
    ProfileFiles(tmp_path).path(KEY.weights).write_bytes(broken({}))
    assert open_profiles(tmp_path).get(KEY) == Profile((1.0,), (1.0,), (0,), 3)


@pytest.mark.parametrize("spoiled", BROKEN.values(), ids=BROKEN)
def test_a_broken_file_is_a_warning_and_is_replaced(open_profiles, tmp_path, caplog, spoiled):
    path = ProfileFiles(tmp_path).path(KEY.weights)
    path.write_bytes(broken(spoiled))
    profiles = open_profiles(tmp_path)
    assert profiles.get(KEY) is None
    assert profiles.wants_compute(KEY)
    measured(profiles)
    profiles.close()
    (warning,) = warnings(caplog)
    assert str(path) in warning
    assert open_profiles(tmp_path).get(KEY) == profiles.get(KEY)
    assert len(warnings(caplog)) == 1


def test_a_folder_that_cannot_be_one_is_a_warning(open_profiles, tmp_path, caplog):
    (tmp_path / "file").write_text("")
    profiles = open_profiles(tmp_path / "file" / "profiles")
    for weights in ("a", "b"):
        measured(profiles, KEY._replace(weights=weights))
    profiles.close()
    assert profiles.get(KEY._replace(weights="a")) is not None
    assert sum("ST2I_CACHE" in warning for warning in warnings(caplog)) == 1
    assert len(warnings(caplog)) <= 3


FULL = """
import logging, os, sys
from pathlib import Path
from worker_plugin.profiles import ProfileKey, Profiles

logging.basicConfig(stream=sys.stdout)
folder = Path(sys.argv[1])
key = ProfileKey("w", "bfloat16", "cpu", "64x64")
before = Profiles(folder)
before.observe_load(key, 0, 0.2, 50)
before.close()
(file_name,) = [path.name for path in folder.iterdir()]
with open(folder / "filling", "wb", buffering=0) as file:
    try:
        while True:
            file.write(bytes(4096))
    except OSError as error:
        print("full:", error.strerror)
profiles = Profiles(folder, write_s=0.01)
for layer in range(50):
    profiles.observe_load(key, layer, 0.1, 50)
profiles.observe_run(key, [0.1] * 50, range(50), None)
profiles._timer.join()
print("left:", {path.name for path in folder.iterdir()} - {file_name})
print("old:", Profiles(folder)._place(key).load[0].values)
(folder / "filling").unlink()
profiles.observe_run(key._replace(bucket="other"), [0.1] * 50, range(50), None)
profiles.close()
print("kept:", Profiles(folder).get(key) == profiles.get(key) is not None)
"""


def test_a_full_device_is_one_warning_and_what_it_missed_is_written_later(tmp_path):
    if shutil.which("unshare") is None:
        pytest.skip("needs unshare")
    inside = 'mount -t tmpfs -o size=32k tmpfs "$0" && exec "$@"'
    command = ["unshare", "-rm", "sh", "-c", inside, str(tmp_path)]
    if subprocess.run([*command, "true"], capture_output=True).returncode:
        pytest.skip("may not mount in a namespace of its own")
    done = subprocess.run(
        [*command, sys.executable, "-c", FULL, str(tmp_path)],
        capture_output=True,
        text=True,
        timeout=60,
        cwd=Path(__file__).parents[2],
    )
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert "full: No space left on device" in lines
    assert "left: {'filling'}" in lines
    assert "old: [0.2]" in lines
    assert "kept: True" in lines
    assert done.stdout.count("WARNING") == 1
    assert "ERROR" not in done.stdout


def test_threads_observe_and_ask_at_the_same_time(tmp_path):
    profiles = Profiles(tmp_path, write_s=0.001)
    failures = []

    def work(number):
        key = KEY._replace(bucket=str(number % 3), weights=str(number % 2))
        try:
            for _ in range(100):
                measured(profiles, key, runs=2)
                profiles.prefix(key)
                profiles.observe_run(key, None, ORDER, 1.0)
        except Exception as error:
            failures.append(error)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    profiles._check()
    profiles.close()
    assert not failures
    again = Profiles(tmp_path)
    for number in range(6):
        key = KEY._replace(bucket=str(number % 3), weights=str(number % 2))
        assert again.get(key) == profiles.get(key) is not None
        assert profiles.get(key).runs == 300
