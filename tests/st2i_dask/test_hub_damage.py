"""Fetches that cannot be used: damaged files, full disks."""

from __future__ import annotations

import os
import textwrap

import pytest
import torch
from safetensors.torch import save

from .fake_hub import REPOSITORY
from .hub_node import FETCH, LARGE_FILE, MIB, SMALL_FILE, ended


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
