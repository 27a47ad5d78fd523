"""Fetching from a hub: once per node, resumed, checked, and with a name for everything that goes wrong.

Each fetch runs in a process of its own, as workers do, against a server of this test.
"""

from __future__ import annotations

import hashlib
import json
import os
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save

from st2i_dask import shapes

from .fake_hub import COMMIT, REPOSITORY, FakeHub

LARGE_FILE = "transformer/diffusion_pytorch_model.safetensors"
SMALL_FILE = "vae/diffusion_pytorch_model.safetensors"
MIB = 1 << 20

FETCH = """
    import json, logging, sys
    from st2i_dask.catalogue import hub, turns
    from st2i_dask.errors import LoadError
    turns.LOG_SECONDS = 0.2
    logging.basicConfig(level=logging.INFO, format="%(levelname)s %(message)s")
    logging.getLogger("httpx2").setLevel(logging.WARNING)
    logging.getLogger("httpx").setLevel(logging.WARNING)
    patterns, options = json.loads(sys.argv[1])
    try:
        print(hub.fetch("some-one/some-model", patterns, **options))
    except LoadError as error:
        print("LoadError:", error)
"""


@pytest.fixture(scope="module")
def files():
    """A small file of weights and one that is fetched in pieces."""
    generator = torch.Generator().manual_seed(0)
    big = torch.rand(24 * MIB // 4, generator=generator)
    return {
        "model_index.json": b'{"_class_name": "FluxPipeline"}',
        "transformer/config.json": b"{}",
        LARGE_FILE: save({"blocks.0.weight": big}),
        "vae/config.json": b'{"_class_name": "AutoencoderKL"}',
        SMALL_FILE: save({"conv.weight": torch.arange(1000.0), "conv.bias": torch.ones(8)}),
    }


@pytest.fixture
def hub(files):
    with FakeHub(dict(files)) as hub:
        yield hub


@pytest.fixture
def node(hub, tmp_path):
    return Node(hub, tmp_path)


class Node:
    """A machine: processes that share a cache."""

    def __init__(self, hub, folder):
        self.hub, self.home = hub, folder / "hf"
        self.cache = self.home / "hub"
        self.repository = self.cache / f"models--{REPOSITORY.replace('/', '--')}"
        self.snapshot = self.repository / "snapshots" / COMMIT

    def start(self, patterns=("*",), code=FETCH, prefix=(), **options):
        options = {"weights": True, **options}
        arguments = [*prefix, sys.executable, "-c", textwrap.dedent(code)]
        return subprocess.Popen(
            [*arguments, json.dumps([list(patterns), options])],
            env={
                **{name: value for name, value in os.environ.items() if not name.startswith("HF_")},
                "HF_ENDPOINT": self.hub.address,
                "HF_HOME": str(self.home),
                "HF_HUB_OFFLINE": "0",
                "HF_HUB_DISABLE_XET": "1",
                "HF_TOKEN": "hf_secret",
            },
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def fetch(self, *arguments, **options):
        """What it printed and logged."""
        return ended(self.start(*arguments, **options))

    def check_whole(self):
        """Every file is there with its bytes, and nothing else."""
        for name, data in self.hub.files.items():
            assert (self.snapshot / name).read_bytes() == data, name
        assert self.unfinished() == []
        assert len(list((self.repository / "blobs").iterdir())) == len(set(self.hub.files.values()))

    def unfinished(self):
        return sorted((self.repository / "blobs").glob("*incomplete*"))


def ended(process, seconds=60):
    try:
        printed, log = process.communicate(timeout=seconds)
    finally:
        process.kill()
    assert process.returncode == 0, log
    return printed.strip(), log


def wait_for(what, process, seconds=20):
    deadline = time.monotonic() + seconds
    while not what():
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < deadline, "it did not happen"
        time.sleep(0.01)


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


# ---------------------------------------------------------------- damage


@pytest.mark.parametrize("name", [LARGE_FILE, SMALL_FILE])
def test_a_file_that_came_damaged_is_fetched_once_more(node, hub, files, name):
    data = bytearray(files[name])
    data[9] ^= 0xFF  # in the header
    hub.instead[name] = [bytes(data)]
    printed, log = node.fetch()
    assert printed == str(node.snapshot)
    assert log.count("WARNING") == 1, log
    assert len(hub.bodies(name)) == 2
    node.check_whole()


@pytest.mark.slow
def test_damage_in_the_middle_of_a_large_file_is_seen_too(node, hub, files):
    data = bytearray(files[LARGE_FILE])
    data[12 * MIB] ^= 1
    hub.instead[LARGE_FILE] = [bytes(data)]
    assert node.fetch()[0] == str(node.snapshot)
    node.check_whole()


@pytest.mark.slow
@pytest.mark.parametrize("name", [LARGE_FILE, SMALL_FILE])
def test_a_file_that_comes_damaged_twice_is_an_error_and_not_kept(node, hub, files, name):
    data = bytearray(files[name])
    data[9] ^= 0xFF
    hub.instead[name] = [bytes(data)] * 2
    printed, _ = node.fetch()
    assert printed.startswith(f"LoadError: {REPOSITORY!r}: ")
    if name == LARGE_FILE:
        assert f"{name} came twice with another SHA-256 than the hub says" in printed
    else:
        assert f"{node.snapshot / name} does not hold a header" in printed
        assert "also after it was fetched once more; it was removed" in printed
    assert not (node.snapshot / name).exists()
    assert node.unfinished() == []
    assert node.fetch()[0] == str(node.snapshot), "a later fetch begins anew"
    node.check_whole()


@pytest.mark.slow
def test_a_file_of_the_cache_that_lost_its_end_is_fetched_again(node, hub):
    node.fetch()
    os.truncate(node.snapshot / SMALL_FILE, 500)
    printed, log = node.fetch()
    assert printed == str(node.snapshot)
    assert "ends after 500 of " in log
    assert len(hub.bodies(SMALL_FILE)) == 2
    node.check_whole()


@pytest.mark.slow
def test_what_another_fetch_cannot_mend_is_not_fetched_again(node, hub):
    hub.files[SMALL_FILE] = save({"conv.weight": torch.ones(9, dtype=torch.int8)})
    printed, _ = node.fetch()
    assert "stores 'conv.weight' as I8, but a floating-point dtype is expected" in printed
    assert len(hub.bodies(SMALL_FILE)) == 1


# ---------------------------------------------------------------- full disks

SMALL_DISK = """
    import subprocess, sys
    from pathlib import Path
    from huggingface_hub import constants
    disk = Path(constants.HF_HUB_CACHE)
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=20M", "none", disk], check=True)
"""
FILL_WHEN_IT_WRITES = """
    import os, threading, time, urllib.request
    def fill():
        while not any(f.stat().st_size for f in disk.rglob("*incomplete*")):
            time.sleep(0.005)
        number = os.open(disk / "filling", os.O_WRONLY | os.O_CREAT)
        try:
            while True:
                os.write(number, bytes(4096))
        except OSError:
            os.close(number)
        urllib.request.urlopen(os.environ["HF_ENDPOINT"] + "/open").close()
    threading.Thread(target=fill, daemon=True).start()
"""
WHAT_IS_LEFT = """
    (disk / "filling").unlink(missing_ok=True)
    left = [f.name for f in disk.rglob("*") if f.is_file() and f.stat().st_size > 1 << 16]
    print("left:", left)
    if len(sys.argv) > 1:
        hub.LARGE = 8 << 20
        print(hub.fetch("some-one/some-model", ["vae/*"], weights=True))
        print(sorted(f.name for f in disk.rglob("*.safetensors")))
"""
NAMESPACE = ("unshare", "--user", "--map-root-user", "--mount")


@pytest.fixture
def small_disk(node):
    """20 MiB for the cache, mounted where only the process sees it."""
    node.cache.mkdir(parents=True)
    code = textwrap.dedent(SMALL_DISK) + "print(sorted(disk.iterdir()))"
    try:
        ended(node.start(code=code, prefix=NAMESPACE))
    except (OSError, AssertionError) as error:
        pytest.skip(f"a file system cannot be mounted here: {str(error)[-300:]}")
    return textwrap.dedent(SMALL_DISK)


def test_a_fetch_that_does_not_fit_is_not_begun(node, hub, small_disk):
    code = small_disk + textwrap.dedent(FETCH) + textwrap.dedent(WHAT_IS_LEFT)
    error, left, snapshot, there = ended(node.start(code=code, prefix=NAMESPACE))[0].splitlines()
    assert error.startswith(f"LoadError: {REPOSITORY!r}: no room in {node.cache} (No space left")
    assert (
        "25.2 MB more needed, 21.0 MB free; make room there, or set HF_HOME to a folder with more of it"
        in error
    )
    assert left == "left: []"
    assert hub.bodies(LARGE_FILE) == []
    # What does fit is fetched as ever.
    assert (snapshot, there) == (str(node.snapshot), "['diffusion_pytorch_model.safetensors']")


@pytest.mark.parametrize("by", ["us", pytest.param("the client", marks=pytest.mark.slow)])
def test_a_disk_that_fills_up_leaves_no_half_file(node, hub, small_disk, by):
    """Somebody else fills it while the fetch is under way: the write itself fails."""
    hub.files[LARGE_FILE] = save({"blocks.0.weight": torch.rand(18 * MIB // 4)})
    hub.hold[LARGE_FILE] = 11 * MIB
    large = MIB if by == "us" else 2**40
    whose = f"\nfrom st2i_dask.catalogue import hub\nhub.LARGE = {large}\n"
    code = small_disk + whose + textwrap.dedent(FILL_WHEN_IT_WRITES) + textwrap.dedent(FETCH)
    code += textwrap.dedent(WHAT_IS_LEFT)
    error, left, *_ = ended(node.start(code=code, prefix=NAMESPACE))[0].splitlines()
    assert error.startswith(f"LoadError: {REPOSITORY!r}: no room in {node.cache} (No space left")
    assert "18.9 MB more needed, " in error
    assert "MB free; make room there, or set HF_HOME" in error
    assert left == "left: []"
    assert len(hub.bodies(LARGE_FILE)) == 1


READ_ONLY = """
    import subprocess
    from huggingface_hub import constants
    cache = constants.HF_HUB_CACHE
    subprocess.run(["mount", "--bind", cache, cache], check=True)
    subprocess.run(["mount", "-o", "remount,ro,bind", cache], check=True)
"""


@pytest.mark.slow
def test_a_cache_that_cannot_be_written_is_used(node, hub, small_disk):
    """One that was filled beforehand, and is mounted everywhere."""
    node.fetch(["vae/*"])
    code = textwrap.dedent(READ_ONLY) + textwrap.dedent(FETCH)
    printed, _ = ended(node.start(["vae/*"], code=code, prefix=NAMESPACE))
    assert printed == str(node.snapshot)
    printed, _ = ended(node.start(code=code, prefix=NAMESPACE))
    assert printed.startswith(
        f"LoadError: {REPOSITORY!r}: the fetch broke off (OSError: [Errno 30]"
    )
