"""Copies out of mapped files: every byte, at a pace, from several threads."""

from __future__ import annotations

import gc
import mmap
import os
import threading
import time

import numpy as np
import pytest

from st2i_dask.errors import LoadError
from worker_plugin import host_tier, mapped_file
from worker_plugin.host_tier import PIECE, HostTier, Memory, Part

from .host_files import MIB, File, copied


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


def test_pages_are_asked_for_once_while_they_stay_mapped(folder, make_tier, monkeypatch):
    """Asking takes a sixth of the time of the copy, also where they are there."""
    file = File(folder / "a.safetensors", 4 * PIECE)
    tier = make_tier(warm=2 * PIECE)
    asked = []
    fill = mapped_file.MappedFile.fill

    def note(mapped, start, nbytes):
        asked.append((start, nbytes))
        return fill(mapped, start, nbytes)

    monkeypatch.setattr(mapped_file.MappedFile, "fill", note)

    def asks(start, nbytes):
        asked.clear()
        assert np.array_equal(
            copied(tier, [file.part(start, nbytes)], nbytes), file.content[start : start + nbytes]
        )
        tier._check()
        return asked

    assert asks(100, 2 * PIECE - 100) == [(100, PIECE - 100), (PIECE, PIECE)]
    assert asks(100, 2 * PIECE - 100) == []
    assert asks(0, PIECE) == [(0, PIECE)], "the first page was not among them"
    assert asks(2 * PIECE, 2 * PIECE) == [(2 * PIECE, PIECE), (3 * PIECE, PIECE)]
    assert asks(100, PIECE - 100) == [(100, PIECE - 100)], "its piece has been unmapped"
    tier._warm.forget(tier._files[file.identity])
    assert asks(100, PIECE - 100) == [(100, PIECE - 100)]


def test_a_copy_opens_files_that_nobody_has_acquired(folder, make_tier):
    files = [File(folder / f"{name}.safetensors", MIB, seed=name) for name in range(2)]
    tier = make_tier(budget=MIB)
    tier.acquire([files[0].identity])
    parts = [files[0].part(0, MIB), files[1].part(0, MIB, MIB)]
    into = copied(tier, parts, 2 * MIB)
    assert np.array_equal(into, np.concatenate([file.content for file in files]))
    tier._check()
    assert tier.statistics().files == tier.statistics().used == 1, "over the budget: closed again"
    os.unlink(files[1].path)
    with pytest.raises(LoadError, match=r"1\.safetensors is gone"):
        copied(tier, parts, 2 * MIB)
    tier._check()
    assert tier.statistics().used == 1
    tier.release([files[0].identity])
    assert tier.statistics().used == 0


def test_ranges_outside_of_the_file_are_refused(folder, make_tier):
    file = File(folder / "a.safetensors", 4096)
    tier = make_tier()
    for start, nbytes in ((4090, 10), (-1, 10)):
        with pytest.raises(ValueError, match="outside"):
            copied(tier, [file.part(start, nbytes)], 10)


@pytest.mark.parametrize("options", [{"budget": 0}, {"warm": 0}, {"bandwidth": 0.5}])
def test_settings_that_cannot_be_are_refused(options):
    (name,) = options
    with pytest.raises(LoadError, match=f"{name} .*give at least 1"):
        HostTier(**{"budget": 1, **options})


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
