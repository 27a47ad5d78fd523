"""What the host tier takes of memory: once per machine, bounded, given back."""

from __future__ import annotations

import os
import subprocess
import sys

import numpy as np

from worker_plugin.host_tier import PIECE

from .host_files import MIB, File, copied, mappings_of, open_files


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
