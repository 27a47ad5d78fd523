"""Fetching from the hub: what is fetched, by whom, and where a fetch goes on."""

from __future__ import annotations

import hashlib
import os
import signal
import time
from pathlib import Path

import pytest
from safetensors.torch import load_file

from st2i_dask import shapes

from .fake_hub import COMMIT, REPOSITORY
from .hub_node import LARGE_FILE, MIB, SMALL_FILE, ended, wait_for


# ---------------------------------------------------------------- what is fetched
def test_a_model_is_fetched_whole_and_once(node, hub, files):
    printed, log = node.fetch()
    assert printed == str(node.snapshot)
    node.check_whole()
    assert f"INFO fetching {REPOSITORY}: 25.2 MB" in log
    assert {name: len(hub.bodies(name)) for name in files} == dict.fromkeys(files, 1)
    assert load_file(node.snapshot / SMALL_FILE)["conv.bias"].sum() == 8
    # Tokens are for the hub, not for where it stores files.
    hub_path, storage = f"/{REPOSITORY}/resolve/{COMMIT}/{LARGE_FILE}", hub.bodies(LARGE_FILE)[0]
    assert any(r.token == "Bearer hf_secret" for r in hub.requests if r.path == hub_path)
    assert storage.token is None
    # Again: nothing is fetched, and nobody takes turns.
    before = len(hub.requests)
    (node.cache / ".locks").rename(node.cache / "locks-then")
    assert node.fetch()[0] == str(node.snapshot)
    assert [r.path for r in hub.requests[before:] if "/resolve/" in r.path] == []
    assert not (node.cache / ".locks").exists()


@pytest.mark.slow
def test_only_what_matches_is_fetched(node, hub):
    patterns = ["model_index.json", "*/config.json"]
    printed, _ = node.fetch(patterns, weights=False)
    assert sorted(p.name for p in Path(printed).rglob("*.*")) == [
        *("config.json", "config.json", "model_index.json")
    ]
    node.fetch(["vae/*"])
    assert hub.bodies(LARGE_FILE) == []
    assert len(hub.bodies(SMALL_FILE)) == 1


@pytest.mark.slow
def test_what_is_there_is_used_when_the_hub_is_away(node, hub):
    node.fetch()
    hub.__exit__()
    assert node.fetch()[0] == str(node.snapshot)
    hub.__enter__()


LOAD = """
    import json, sys
    from st2i_dask.catalogue.folder import load_component, load_parts
    from st2i_dask.errors import LoadError
    parts, _ = json.loads(sys.argv[1])
    try:
        pipeline = load_parts("some-one/some-model", set(parts), None)
        print(*(getattr(pipeline, part).dtype for part in sorted(parts) if part != "tokenizer"))
    except LoadError as error:
        print("LoadError:", error)
"""


@pytest.mark.slow
def test_parts_have_the_same_dtype_whichever_are_here(node, hub):
    """That of the denoiser, of which only a header is read."""
    if not shapes.PIPELINE.is_dir():
        pytest.skip("its weights are not here")
    paths = [path for path in shapes.PIPELINE.rglob("*") if path.is_file()]
    hub.files = {str(p.relative_to(shapes.PIPELINE)): p.read_bytes() for p in paths}
    assert node.fetch(["text_encoder", "tokenizer"], code=LOAD)[0] == "torch.float16"
    assert [request.range for request in hub.bodies(LARGE_FILE)] == ["bytes=0-100000"]
    assert node.fetch(["vae", "transformer"], code=LOAD)[0] == "torch.float16 torch.float16"


@pytest.mark.slow
def test_a_dtype_that_cannot_be_known_is_asked_for(node, hub):
    if not shapes.PIPELINE.is_dir():
        pytest.skip("its weights are not here")
    paths = [path for path in shapes.PIPELINE.rglob("*") if path.is_file()]
    hub.files = {str(p.relative_to(shapes.PIPELINE)): p.read_bytes() for p in paths}
    hub.failures[LARGE_FILE] = [500]
    printed, _ = node.fetch(["text_encoder", "tokenizer"], code=LOAD)
    assert "the dtype of its transformer is not known here and the hub does not say" in printed
    assert "give the dtype, one of float32, bfloat16, float16" in printed


# ---------------------------------------------------------------- broken off
def test_a_fetch_goes_on_where_its_process_was_killed(node, hub):
    hub.hold[LARGE_FILE] = 16 * MIB
    process = node.start()
    wait_for(lambda: [f for f in node.unfinished() if f.stat().st_size >= 10 * MIB], process)
    process.send_signal(signal.SIGKILL)
    process.communicate()
    hub.gate.set()
    (partial,) = node.unfinished()
    size = partial.stat().st_size
    assert node.fetch()[0] == str(node.snapshot)
    assert [request.range for request in hub.bodies(LARGE_FILE)] == [None, f"bytes={size}-"]
    node.check_whole()


@pytest.mark.slow
def test_a_fetch_goes_on_where_the_connection_was_cut(node, hub):
    hub.cut[LARGE_FILE] = 16 * MIB
    hub.failures[LARGE_FILE] = [None, 503]  # the client tries again at once
    printed, _ = node.fetch()
    assert printed.startswith(f"LoadError: {REPOSITORY!r}: the fetch broke off (")
    assert "503" in printed
    assert "try again: it goes on from what is there" in printed
    assert not (node.snapshot / LARGE_FILE).exists()
    (partial,) = node.unfinished()
    size = partial.stat().st_size
    assert size >= 10 * MIB
    hub.cut.clear()
    before = len(hub.bodies(LARGE_FILE))
    assert node.fetch()[0] == str(node.snapshot)
    assert [r.range for r in hub.bodies(LARGE_FILE)[before:]] == [f"bytes={size}-"]
    node.check_whole()


@pytest.mark.slow
def test_a_beginning_that_does_not_fit_is_thrown_away(node, hub):
    """Half of another file, or of a disk that lost power, longer than the file or not."""
    node.fetch(["*/config.json"])
    name = hashlib.sha256(hub.files[LARGE_FILE]).hexdigest()
    for size, requests in ((11 * MIB, [f"bytes={11 * MIB}-", None]), (30 * MIB, [None])):
        partial = node.repository / "blobs" / f"{name}.st2i.incomplete"
        partial.write_bytes(bytes(size))
        before = len(hub.bodies(LARGE_FILE))
        assert node.fetch()[0] == str(node.snapshot)
        assert [r.range for r in hub.bodies(LARGE_FILE)[before:]] == requests
        node.check_whole()
        (node.snapshot / LARGE_FILE).resolve().unlink()


# ---------------------------------------------------------------- several processes
def test_two_processes_fetch_every_file_once(node, hub, files):
    hub.hold[LARGE_FILE] = MIB
    processes = [node.start() for _ in range(2)]
    wait_for(lambda: hub.bodies(LARGE_FILE), processes[0])
    time.sleep(1)
    hub.gate.set()
    results = [ended(process) for process in processes]
    assert [printed for printed, _ in results] == [str(node.snapshot)] * 2
    assert {name: len(hub.bodies(name)) for name in files} == dict.fromkeys(files, 1)
    waiting = [log for _, log in results if "INFO waiting for process" in log]
    assert len(waiting) == 1
    holder = next(
        p.pid for p, (_, log) in zip(processes, results, strict=True) if log not in waiting
    )
    assert f"waiting for process {holder} on {os.uname().nodename} (" in waiting[0]
    assert "of at most 1800 s" in waiting[0]
    (fetching,) = [log for _, log in results if log not in waiting]
    assert f"INFO fetch {REPOSITORY!r}: " in fetching, "the holder says how far it is"
    node.check_whole()


@pytest.mark.slow
def test_waiting_has_an_end_and_says_for_whom(node, hub):
    hub.hold[LARGE_FILE] = MIB
    first = node.start()
    wait_for(lambda: hub.bodies(LARGE_FILE), first)
    start = time.monotonic()
    second = node.start(wait=0.5)
    printed, _ = ended(second)
    assert time.monotonic() - start < 30
    assert f"process {second.pid} on " in printed
    assert f"waited 0.5 s, the limit, for process {first.pid} on " in printed
    assert f"to fetch {REPOSITORY!r}; try again later, or fetch it beforehand with `hf" in printed
    hub.gate.set()
    assert ended(first)[0] == str(node.snapshot)


@pytest.mark.slow
def test_configurations_do_not_wait_for_weights(node, hub):
    hub.hold[LARGE_FILE] = MIB
    first = node.start()
    wait_for(lambda: hub.bodies(LARGE_FILE), first)
    assert node.fetch(["*/config.json"], weights=False)[0] == str(node.snapshot)
    assert first.poll() is None
    hub.gate.set()
    ended(first)


@pytest.mark.slow
def test_a_turn_ends_with_its_process(node, hub):
    hub.hold[LARGE_FILE] = MIB
    first = node.start()
    wait_for(lambda: hub.bodies(LARGE_FILE), first)
    second = node.start()
    wait_for(
        lambda: len([r for r in hub.requests if r.path.endswith("/revision/main")]) > 1, second
    )
    first.kill()
    first.communicate()
    hub.gate.set()
    assert ended(second)[0] == str(node.snapshot)
    node.check_whole()
