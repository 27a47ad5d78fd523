"""One copy of a file per machine; a file that changes is an error with a cure, and nothing else suffers."""

from __future__ import annotations

import contextlib
import gc
import mmap
import os
import subprocess
import sys
import threading
import time

import numpy as np
import pytest

from st2i_dask.errors import LoadError
from worker_plugin import host_tier, mapped_file
from worker_plugin.file_identity import FileIdentity
from worker_plugin.host_tier import PIECE, HostTier, Memory, Part
from worker_plugin.mappings import FileRange

MIB = 1 << 20


class File:
    """A file of random bytes, and what it was."""

    def __init__(self, path, nbytes, seed=0):
        self.path = str(path)
        self.content = np.random.default_rng(seed).integers(0, 256, nbytes, np.uint8)
        self.content.tofile(self.path)
        self.identity = FileIdentity.of(self.path)

    def part(self, start, nbytes, offset=0):
        return Part(FileRange(self.identity, start, nbytes), offset)


def copied(tier, parts, nbytes):
    into = np.full(nbytes, 0xAB, np.uint8)
    tier.copy(parts, into.ctypes.data)
    return into


def mappings_of(path):
    with open("/proc/self/maps") as maps:
        return sum(str(path) in line for line in maps)


def open_files(path):
    found = 0
    for number in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            found += os.readlink(f"/proc/self/fd/{number}").startswith(str(path))
    return found


@pytest.fixture
def folder(tmp_path):
    """A folder of which nothing is open or mapped after the test."""
    yield tmp_path
    assert (open_files(tmp_path), mappings_of(tmp_path)) == (0, 0)
    assert not mapped_file._open


@pytest.fixture
def make_tier(folder):
    made = []

    def make(budget=1 << 30, **options):
        made.append(HostTier(budget, **options))
        return made[-1]

    yield make
    for tier in made:
        tier._check()
        tier.close()
        tier._check()


# ---------------------------------------------------------------- copies


def test_copies_are_the_bytes_at_any_offset_and_nothing_beside_them(folder, make_tier):
    file = File(folder / "a.safetensors", 3 * PIECE + 1234)
    tier = make_tier()
    tier.acquire([file.identity])
    for start, nbytes in (
        (0, 1),
        (8, 100),
        (PIECE - 5, 10),
        (77, 2 * PIECE + 3),
        (0, 3 * PIECE + 1234),
    ):
        into = copied(tier, [file.part(start, nbytes, 64)], nbytes + 128)
        assert np.array_equal(into[64:-64], file.content[start : start + nbytes])
        assert (into[:64] == 0xAB).all()
        assert (into[-64:] == 0xAB).all()
    tier._check()


def test_parts_of_several_files_and_of_memory_make_one_layer(folder, make_tier):
    one = File(folder / "a.safetensors", MIB, seed=1)
    two = File(folder / "b.safetensors", MIB, seed=2)
    memory = np.arange(1000, dtype=np.uint8)
    tier = make_tier()
    tier.acquire([one.identity, two.identity])
    parts = [
        Part(Memory(memory.ctypes.data, memory.nbytes, memory), 2048),
        one.part(10, 100, 0),
        two.part(5, 200, 100),
        one.part(110, 300, 300),
        one.part(500, 100, 900),
    ]
    into = copied(tier, parts, 4096)
    assert np.array_equal(into[:100], one.content[10:110])
    assert np.array_equal(into[100:300], two.content[5:205])
    assert np.array_equal(into[300:600], one.content[110:410])
    assert np.array_equal(into[900:1000], one.content[500:600])
    assert np.array_equal(into[2048:3048], memory)
    assert tier.statistics().copied == 100 + 200 + 300 + 100 + 1000


def test_neighbours_are_copied_as_one(folder, make_tier, monkeypatch):
    file = File(folder / "a.safetensors", 4096)
    parts = [file.part(64, 64, 0), file.part(128, 32, 64), file.part(160, 32, 128)]
    assert list(host_tier._joined(parts)) == [file.part(64, 96, 0), file.part(160, 32, 128)]
    assert list(host_tier._joined([])) == []
    # In whatever order they are given.
    tier = make_tier()
    tier.acquire([file.identity])
    calls, plain = [], mapped_file.MappedFile.copy
    monkeypatch.setattr(
        mapped_file.MappedFile, "copy", lambda *args: calls.append(args) or plain(*args)
    )
    into = copied(tier, parts[::-1], 160)
    assert np.array_equal(into[:96], file.content[64:160])
    assert len(calls) == 2


def test_a_kernel_without_the_call_reads_instead(folder, make_tier, monkeypatch):
    monkeypatch.setattr(mapped_file, "_POPULATE_READ", 9999)  # EINVAL, as from an old one
    file = File(folder / "a.safetensors", PIECE + 1000)
    tier = make_tier()
    tier.acquire([file.identity])
    into = copied(tier, [file.part(5, PIECE + 900)], PIECE + 900)
    assert np.array_equal(into, file.content[5 : PIECE + 905])
    assert tier.statistics().warm == 0
    os.truncate(file.path, 1000)
    with tier._using([file.identity]) as mapped, pytest.raises(LoadError, match="ends at 1,000"):
        mapped[file.identity].read(into.ctypes.data, 5, PIECE)


def test_ranges_outside_of_the_file_and_files_nobody_acquired_are_refused(folder, make_tier):
    file = File(folder / "a.safetensors", 4096)
    tier = make_tier()
    with pytest.raises(ValueError, match="acquire"):
        copied(tier, [file.part(0, 10)], 10)
    tier.acquire([file.identity])
    for start, nbytes in ((4090, 10), (-1, 10)):
        with pytest.raises(ValueError, match="outside"):
            copied(tier, [file.part(start, nbytes)], 10)


@pytest.mark.parametrize("options", [{"budget": 0}, {"warm": 0}, {"bandwidth": 0.5}])
def test_settings_that_cannot_be_are_refused(options):
    (name,) = options
    with pytest.raises(LoadError, match=f"{name} .*give at least 1"):
        HostTier(**{"budget": 1, **options})


# ---------------------------------------------------------------- files that change


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


def test_what_is_cut_off_after_the_check_is_an_error_too(folder, make_tier, monkeypatch):
    """Neither of the two later defences lets a bus error through."""
    file = File(folder / "a.safetensors", 2 * PIECE)
    tier = make_tier()
    tier.acquire([file.identity])
    into = np.empty(2 * PIECE, np.uint8)
    with tier._using([file.identity]) as mapped:
        there = mapped[file.identity]
        assert there.fill(0, 2 * PIECE)
        os.truncate(file.path, 4096)
        with pytest.raises(LoadError, match=r"a.safetensors cannot be read at 8,388,608 .*submit"):
            there.fill(PIECE, PIECE)
        with pytest.raises(LoadError, match=r"a.safetensors was cut short .*submit again"):
            there.copy(into.ctypes.data, 0, 2 * PIECE)
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


# ---------------------------------------------------------------- memory


def test_files_and_mappings_are_gone_after_close(folder, make_tier):
    files = [File(folder / f"{number}.safetensors", 4096) for number in range(3)]
    tiers = [make_tier(), make_tier()]
    for tier in tiers:
        tier.acquire([file.identity for file in files])
        tier.acquire([files[0].identity])
    assert (open_files(folder), mappings_of(folder)) == (3, 3), "once per process"
    tiers[0].close()
    assert (open_files(folder), mappings_of(folder)) == (3, 3)
    assert copied(tiers[1], [files[0].part(0, 10)], 10) is not None
    tiers[1].close()
    assert (open_files(folder), mappings_of(folder)) == (0, 0)


def in_page_cache(path):
    """Whether the file's first bytes are in memory."""
    fd = os.open(path, os.O_RDONLY)
    try:
        os.preadv(fd, [bytearray(16)], 0, os.RWF_NOWAIT)
        return True
    except BlockingIOError:
        return False
    finally:
        os.close(fd)


def written(file):
    """Dirty pages cannot be dropped."""
    fd = os.open(file.path, os.O_RDONLY)
    os.fsync(fd)
    os.close(fd)
    return file


def test_idle_files_go_least_recently_used_first_and_leave_memory(folder, make_tier):
    files = [written(File(folder / f"{number}.safetensors", MIB)) for number in range(4)]
    first, second, third, fourth = (file.identity for file in files)
    tier = make_tier(budget=3 * MIB)
    for file in (first, second, third):
        tier.acquire([file])
    tier.release([second])
    tier.release([first])
    assert tier.statistics().files == 3, "idle ones stay while there is room"
    copied(tier, [files[0].part(0, 10)], 10)  # now the second is the one used longest ago
    tier.acquire([fourth])
    tier._check()
    assert [mappings_of(file.path) for file in files] == [1, 0, 1, 1]
    statistics = tier.statistics()
    assert (statistics.files, statistics.used, statistics.closed) == (3, 2, 1)
    assert statistics.nbytes == 3 * MIB
    if os.stat(folder).st_dev != os.stat("/dev/shm").st_dev:
        assert not in_page_cache(files[1].path)
    assert in_page_cache(files[0].path)


def test_files_in_use_may_exceed_the_budget_and_go_once_they_are_idle(folder, make_tier):
    files = [File(folder / f"{number}.safetensors", MIB) for number in range(3)]
    tier = make_tier(budget=MIB)
    tier.acquire([file.identity for file in files])
    assert tier.statistics().nbytes == 3 * MIB
    tier.acquire([files[0].identity])
    tier.release([file.identity for file in files])
    tier._check()
    assert tier.statistics().files == 1
    copied(tier, [files[0].part(0, 10)], 10)
    tier.release([files[0].identity])
    assert tier.statistics().files == 1, "within the budget it stays"


def test_what_another_worker_uses_stays_in_memory(folder, make_tier):
    file = written(File(folder / "a.safetensors", MIB))
    tier = make_tier(budget=1)
    child = subprocess.Popen(
        [sys.executable, "-c", HOLDS, file.path],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    try:
        child.stdout.readline()
        tier.acquire([file.identity])
        tier.release([file.identity])
        assert tier.statistics().closed == 1
        assert in_page_cache(file.path)
    finally:
        child.communicate(b"\n", timeout=20)
    tier.acquire([file.identity])
    tier.release([file.identity])
    if os.stat(folder).st_dev != os.stat("/dev/shm").st_dev:
        assert not in_page_cache(file.path)


HOLDS = """
import os, sys
from worker_plugin.host_tier import HostTier
from worker_plugin.file_identity import FileIdentity
tier = HostTier(1 << 30)
tier.acquire([FileIdentity.of(sys.argv[1])])
print("ready", flush=True)
sys.stdin.readline()
"""


def resident(path, key="Rss"):
    """Bytes of this process's mappings of a file."""
    total, inside = 0, False
    with open("/proc/self/smaps") as smaps:
        for line in smaps:
            if "-" in line.split(maxsplit=1)[0]:
                inside = line.rstrip("\n").endswith(path)
            elif inside and line.startswith(f"{key}:"):
                total += int(line.split()[1]) * 1024
    return total


def test_only_so_many_bytes_stay_mapped(folder, make_tier):
    file = File(folder / "a.safetensors", 8 * PIECE)
    tier = make_tier(warm=3 * PIECE)
    tier.acquire([file.identity])
    for _ in range(2):
        assert np.array_equal(copied(tier, [file.part(0, 8 * PIECE)], 8 * PIECE), file.content)
        tier._check()
        # Pages around the ones that were asked for come with them.
        assert 2 * PIECE < resident(file.path) <= 3 * PIECE + 4 * MIB
        assert tier.statistics().warm == 3 * PIECE
    tier.release([file.identity])


def test_two_workers_have_one_copy_in_memory(folder):
    """Both have copied all of a file of 200 MB: together their mappings of it are one file."""
    nbytes = 200 * MIB
    file = File(folder / "a.safetensors", nbytes)
    children = [
        subprocess.Popen(
            [sys.executable, "-c", COPIES, file.path],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        for _ in range(2)
    ]
    try:
        for child in children:
            assert child.stdout.readline() == "copied\n"
        found = [measured(child) for child in children]
    finally:
        for child in children:
            child.communicate("end\n", timeout=20)
    assert all(rss > 0.95 * nbytes for rss, _, _ in found)
    pss = sum(share for _, share, _ in found)
    assert 0.95 * nbytes < pss < 1.05 * nbytes
    assert [private for _, _, private in found] == [0, 0]


def measured(child):
    child.stdin.write("measure\n")
    child.stdin.flush()
    return tuple(map(int, child.stdout.readline().split()))


COPIES = """
import os, sys
import numpy as np
from worker_plugin.host_tier import HostTier, Part
from worker_plugin.file_identity import FileIdentity
from worker_plugin.mappings import FileRange

path = sys.argv[1]
identity = FileIdentity.of(path)
tier = HostTier(1 << 30)
tier.acquire([identity])
into = np.zeros(1 << 20, np.uint8)
for start in range(0, identity.nbytes, into.nbytes):
    nbytes = min(into.nbytes, identity.nbytes - start)
    tier.copy([Part(FileRange(identity, start, nbytes), 0)], into.ctypes.data)
print("copied", flush=True)
sys.stdin.readline()
totals, inside = {"Rss": 0, "Pss": 0, "Anonymous": 0}, False
for line in open("/proc/self/smaps"):
    name = line.split(maxsplit=1)[0].rstrip(":")
    if "-" in name:
        inside = line.rstrip("\\n").endswith(path)
    elif inside and name in totals:
        totals[name] += 1024 * int(line.split()[1])
print(*totals.values(), flush=True)
sys.stdin.readline()
tier.close()
"""


# ---------------------------------------------------------------- bandwidth and threads


@pytest.mark.parametrize("bandwidth", [64 * MIB, 512 * MIB])
def test_no_second_has_more_bytes_than_the_bandwidth(folder, make_tier, monkeypatch, bandwidth):
    clock, sent = [100.0], []
    monkeypatch.setattr(host_tier.time, "monotonic", lambda: clock[0])

    def sleep(seconds):
        assert seconds >= 0
        clock[0] += seconds

    monkeypatch.setattr(host_tier.time, "sleep", sleep)
    pace = host_tier._Pace(bandwidth)
    for idle in (0.0, 3.0, 0.1):  # no credit for a pause
        clock[0] += idle
        for _, nbytes in pace.pieces(12345, 2 * bandwidth):
            assert nbytes <= PIECE
            sent.append((clock[0], nbytes))
            clock[0] += 1e-3
    assert sum(nbytes for _, nbytes in sent) == 6 * bandwidth
    for start, _ in sent:
        within = sum(nbytes for at, nbytes in sent if start <= at < start + 1)
        assert within <= 1.02 * bandwidth
    assert sent[-1][0] - sent[0][0] < 6 + 3.1 + 0.2, "it is not slower than it must be"


def test_a_limited_copy_takes_its_time_for_all_threads_together(folder, make_tier):
    file = File(folder / "a.safetensors", 4 * MIB)
    tier = make_tier(bandwidth=16 * MIB)
    tier.acquire([file.identity])
    start = time.perf_counter()
    threads = [
        threading.Thread(target=copied, args=(tier, [file.part(0, 4 * MIB)], 4 * MIB))
        for _ in range(2)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    assert 0.45 < time.perf_counter() - start < 2


def test_copies_survive_files_that_come_and_go_in_other_threads(folder, make_tier):
    files = [File(folder / f"{number}.safetensors", MIB, seed=number) for number in range(4)]
    tier = make_tier(budget=MIB, warm=1)
    errors = []

    def work(number):
        try:
            for step in range(40):
                file = files[(number + step) % 4]
                tier.acquire([file.identity])
                assert np.array_equal(copied(tier, [file.part(0, MIB)], MIB), file.content)
                tier.release([file.identity])
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    while any(thread.is_alive() for thread in threads):
        tier._check()
        time.sleep(0.005)
    assert not errors
    gc.collect()
    assert tier.statistics().used == 0
    assert tier.statistics().copied == 4 * 40 * MIB
    assert mmap.PAGESIZE <= PIECE
