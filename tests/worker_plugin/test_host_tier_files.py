"""Files that change under the host tier: an error that names them, never a signal or wrong bytes."""

from __future__ import annotations

import os
import subprocess
import sys

import numpy as np
import pytest

from st2i_dask.errors import LoadError
from worker_plugin import mapped_file
from worker_plugin.host_tier import PIECE

from .host_files import MIB, File, copied, open_files


def cut(path):
    os.truncate(path, 4096)


def cut_all(path):
    os.truncate(path, 0)


def write(path):
    with open(path, "r+b") as file:
        file.write(b"other")


def replace(path):
    with open(path + ".new", "wb") as file:
        file.write(bytes(os.stat(path).st_size))
    os.replace(path + ".new", path)


CHANGES = {
    cut: "has 4,096 bytes",
    cut_all: "has 0 bytes",
    write: "written to",
    replace: "replaced",
    os.unlink: "is gone",
}


@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.__name__)
def test_a_changed_file_is_an_error_that_names_it_and_the_cure(folder, make_tier, change):
    file = File(folder / "a.safetensors", 2 * PIECE)
    other = File(folder / "b.safetensors", PIECE, seed=1)
    tier = make_tier()
    tier.acquire([file.identity, other.identity])
    copied(tier, [file.part(0, PIECE)], PIECE)
    change(file.path)
    cure = f"{file.path} .*{CHANGES[change]}.*submit again"
    into = np.empty(2 * PIECE, np.uint8)
    for attempt in (
        lambda: tier.copy([file.part(0, 2 * PIECE)], into.ctypes.data),
        lambda: tier.check(file.identity),
        lambda: tier.acquire([file.identity]),
        lambda: tier.acquire([other.identity, file.identity]),
    ):
        with pytest.raises(LoadError, match=cure):
            attempt()
    tier.check(other.identity)
    assert np.array_equal(copied(tier, [other.part(0, PIECE)], PIECE), other.content)
    assert tier.statistics().used == 2
    unopened = File(folder / "c.safetensors", 4096)
    another = make_tier()
    for _ in range(2):  # while it is open in this process, and when it is not any more
        with pytest.raises(LoadError, match=cure):
            another.acquire([unopened.identity, file.identity])
        assert open_files(unopened.path) == 0
        if tier.statistics().used:
            tier.release([file.identity, other.identity])
    assert tier.statistics().used == 0
    assert open_files(file.path) == 0, "it would keep a deleted file's space"
    assert open_files(other.path) == 1


def test_a_file_that_is_read_anew_serves_beside_what_it_was(folder, make_tier):
    old = File(folder / "a.safetensors", PIECE)
    tier = make_tier()
    tier.acquire([old.identity])
    new = File(folder / "a.safetensors", PIECE, seed=1)
    tier.acquire([new.identity])
    assert np.array_equal(copied(tier, [new.part(0, PIECE)], PIECE), new.content)
    with pytest.raises(LoadError, match="written to"):
        copied(tier, [old.part(0, PIECE)], PIECE)


def test_what_is_cut_off_meanwhile_is_an_error_too(folder, make_tier, monkeypatch):
    """Neither of the two defences lets a bus error through."""
    file = File(folder / "a.safetensors", 2 * PIECE)
    tier = make_tier()
    tier.acquire([file.identity])
    into = np.empty(2 * PIECE, np.uint8)
    with tier._using([file.identity]) as mapped:
        there = mapped[file.identity]
        assert there.fill(0, 2 * PIECE)
        os.truncate(file.path, 4096)
        monkeypatch.setattr(there, "check", lambda: None)  # it can be whole again by then
        with pytest.raises(LoadError, match=r"a.safetensors cannot be read at 8,388,608 .*submit"):
            there.fill(PIECE, PIECE)
        with pytest.raises(LoadError, match=r"a.safetensors was cut short .*submit again"):
            there.copy(into.ctypes.data, 0, 2 * PIECE)
        monkeypatch.undo()
        for attempt in (
            lambda: there.fill(PIECE, PIECE),
            lambda: there.copy(into.ctypes.data, 0, 2 * PIECE),
        ):
            with pytest.raises(LoadError, match=r"a.safetensors has 4,096 bytes.*submit again"):
                attempt()
        there.copy(into.ctypes.data, 0, 4096)
    assert np.array_equal(into[:4096], file.content[:4096])


def test_what_is_written_while_it_is_copied_is_an_error(folder, make_tier, monkeypatch):
    file = File(folder / "a.safetensors", 2 * PIECE)
    tier = make_tier()
    tier.acquire([file.identity])
    plain = mapped_file.MappedFile.copy

    def copy_and_write(*args):
        plain(*args)
        write(file.path)

    monkeypatch.setattr(mapped_file.MappedFile, "copy", copy_and_write)
    with pytest.raises(LoadError, match=r"a.safetensors was written to .*submit again"):
        copied(tier, [file.part(0, 2 * PIECE)], 2 * PIECE)
    assert tier.statistics().copied == 0


CUT_WHILE_COPYING = """
import os, sys, threading, time
import numpy as np
from st2i_dask.errors import LoadError
from worker_plugin.host_tier import HostTier, Part
from worker_plugin.file_identity import FileIdentity
from worker_plugin.mappings import FileRange

path, nbytes = sys.argv[1], int(sys.argv[2])
into, failed = np.zeros(nbytes, np.uint8), 0
for attempt in range(20):
    with open(path, "wb") as file:
        file.truncate(nbytes)
    identity = FileIdentity.of(path)
    tier = HostTier(1 << 30)
    tier.acquire([identity])
    def cut():
        time.sleep(0.001 * attempt)
        os.truncate(path, nbytes // 7 * (attempt % 7))
    thread = threading.Thread(target=cut)
    thread.start()
    try:
        for _ in range(5):
            tier.copy([Part(FileRange(identity, 0, nbytes), 0)], into.ctypes.data)
    except LoadError as error:
        failed += "submit again" in str(error)
    thread.join()
    tier.close()
print(failed)
"""


def test_a_process_survives_files_that_are_cut_while_it_copies(folder):
    done = subprocess.run(
        [sys.executable, "-c", CUT_WHILE_COPYING, str(folder / "a.safetensors"), str(16 * MIB)],
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) >= 10
