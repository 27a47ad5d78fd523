"""Calls of NVSHMEM: order, lock, and what goes wrong at attach, in real processes. On a fake."""

from __future__ import annotations

import base64
import subprocess
import sys
import threading
import time

import pytest

from worker_plugin.nvshmem_library import Library, NvshmemError, Packages

from .nvshmem_fake import Faults, pe
from .nvshmem_fake_cuda import Misuse
from .nvshmem_pe import Pe

UID = bytes(128)
ARENA = 1 << 20


def alone(tmp_path, **faults):
    """(library, cuda, world) of a world of one, attached."""
    part = pe(tmp_path, Faults(**faults))
    part[0].attach(part[0].mint(), 0, 1, 0, ARENA)
    return part


def test_one_allocation_right_after_init_and_nothing_collective_later(tmp_path):
    library, cuda, world = alone(tmp_path)
    stream = cuda.new_stream()
    assert library.mapped(0)
    with cuda.selected():
        library.get(library.base, 4096, 8, 0, stream)
    assert world.calls == [
        "get_unique_id", "init", "init_status", "malloc", "ptr", "getmem_on_stream",
    ]  # fmt: skip
    assert library.nbytes == ARENA


@pytest.mark.parametrize(
    "call",
    [
        lambda library: library.mapped(0),
        lambda library: library.finalize(),
        lambda library: library.attach(library.mint(), 0, 1, 0, ARENA) or library.mint(),
        lambda library: (
            library.attach(library.mint(), 0, 1, 0, ARENA) or library.attach(UID, 0, 1, 0, ARENA)
        ),
    ],
)
def test_calls_out_of_order_never_enter_the_library(tmp_path, call):
    library, _, _ = pe(tmp_path)
    with pytest.raises(NvshmemError, match="in this process, this needs it"):
        call(library)


def test_nothing_enters_after_finalize(tmp_path):
    library, cuda, world = alone(tmp_path)
    stream = cuda.new_stream()
    library.finalize()
    assert world.calls[-1] == "finalize"
    for call in (lambda: library.mapped(0), library.finalize, library.mint):
        with pytest.raises(NvshmemError, match="is finalized in this process"):
            call()
    with cuda.selected(), pytest.raises(AssertionError):
        library.get(4096, 0, 8, 0, stream)


def test_threads_never_meet_in_the_library(tmp_path):
    library, cuda, world = alone(tmp_path)
    stream = cuda.new_stream()
    enter, errors = world.entered, []

    def slowly(name):
        entered = enter(name)
        time.sleep(0.001)
        return entered

    world.entered = slowly

    def work():
        try:
            with cuda.selected():
                for _ in range(20):
                    library.get(library.base, 4096, 8, 0, stream)
                    library.mapped(0)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert not errors


@pytest.mark.parametrize(("offset", "nbytes"), [(-8, 8), (0, 0), (ARENA - 4, 8)])
def test_a_get_outside_the_arena_is_refused(tmp_path, offset, nbytes):
    library, cuda, _ = alone(tmp_path)
    with cuda.selected(), pytest.raises(AssertionError):
        library.get(library.base, offset, nbytes, 0, cuda.new_stream())


@pytest.mark.parametrize("arguments", [(b"short", 0, 1), (UID, 1, 1), (UID, -1, 1), (UID, 0, 0)])
def test_attach_checks_its_arguments_before_it_enters(tmp_path, arguments):
    library, _, world = pe(tmp_path)
    with pytest.raises(NvshmemError, match="need 128 bytes, 0 <= pe < n_pes"):
        library.attach(*arguments, 0, ARENA)
    assert world.calls == []


@pytest.mark.parametrize(
    ("faults", "match"),
    [
        ({"code": 7}, r"did not start on CUDA device 0 \(NVSHMEMError: Status code 7\)"),
        ({"no_driver": True}, r"did not start .*CUDA_ERROR_NO_DEVICE"),
        ({"bare": True}, r"started without CUDA device 0 \(status 1\)"),
        ({"no_room": True}, "has no 1,048,576 bytes on CUDA device 0"),
    ],
)
def test_a_refusal_is_an_error_with_a_cure_and_final(tmp_path, faults, match):
    library, _, world = pe(tmp_path, Faults(**faults))
    with pytest.raises(NvshmemError, match=match):
        library.attach(library.mint(), 0, 1, 0, ARENA)
    calls = list(world.calls)
    with pytest.raises(NvshmemError, match="restart the worker to attach again"):
        library.attach(UID, 0, 1, 0, ARENA)
    assert world.calls == calls


def test_collectives_that_nobody_needs_are_switched_off(tmp_path, monkeypatch):
    monkeypatch.delenv("NVSHMEM_DISABLE_NVLS", raising=False)
    monkeypatch.setenv("NVSHMEM_DISABLE_NCCL", "0")
    import os

    pe(tmp_path)
    assert os.environ["NVSHMEM_DISABLE_NVLS"] == "1"
    assert os.environ["NVSHMEM_DISABLE_NCCL"] == "0"  # who set it knows better


def test_the_fake_is_as_strict_as_the_library(tmp_path):
    library, cuda, world = alone(tmp_path)
    packages = library._packages
    with pytest.raises(Misuse, match="without the lock"):
        packages.bindings.ptr(library.base, 0)
    stream = cuda.new_stream()
    with library._lock:
        with pytest.raises(Misuse, match="a second collective"):
            world.malloc(1)
        with pytest.raises(Misuse, match="a second init"):
            packages.core.init(object(), None, 0, 1, None, "uid")
        with pytest.raises(Misuse, match="no device is selected"):
            packages.bindings.getmem_on_stream(1, library.base, 8, 0, stream)
        with cuda.selected():
            for source, nbytes in ((library.base - 1, 8), (library.base + ARENA - 7, 8)):
                with pytest.raises(Misuse, match="out of bounds"):
                    packages.bindings.getmem_on_stream(1, source, nbytes, 0, stream)
            with pytest.raises(Misuse, match="is no stream"):
                packages.bindings.getmem_on_stream(1, library.base, 8, 0, stream + 1)
        packages.core.finalize()
        with pytest.raises(Misuse, match="after finalize"):
            packages.bindings.ptr(library.base, 0)


# ---------------------------------------------------------------- several processes


def start(children, n_pes):
    """The first mints; all begin to attach, and say within half a second what came of it."""
    uid = children[0].ask("mint")
    for number, child in enumerate(children):
        child.tell("attach", uid, number, n_pes, ARENA, 0.5)


def test_a_pe_that_is_missing_hangs_the_others_and_their_processes_live_on(tmp_path):
    with Pe(tmp_path) as one, Pe(tmp_path) as two:
        start([one, two], 3)
        for child in (one, two):
            assert child.answer() == "hangs"
            assert child.ask("alive")


@pytest.mark.parametrize("where", ["init", "malloc"])
def test_a_pe_that_dies_on_the_way_hangs_the_others_and_their_processes_live_on(tmp_path, where):
    with Pe(tmp_path) as one, Pe(tmp_path, die=where) as two:
        start([one, two], 2)
        with pytest.raises(EOFError, match="137"):
            two.answer()
        assert one.answer() == "hangs"
        assert one.ask("alive")


def test_a_device_that_is_missing_is_told_before_it_is_a_crash(tmp_path):
    with Pe(tmp_path, bare=True) as one:
        uid = one.ask("mint")
        assert "started without CUDA device" in one.ask("attach", uid, 0, 1, ARENA)


def test_nothing_of_cuda_is_imported_with_the_modules():
    code = (
        "import sys, worker_plugin.nvshmem_world;"
        "print(sorted({m.partition('.')[0] for m in sys.modules} "
        "& {'cuda', 'nvshmem', 'cupy', 'torch'}))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60
    )
    assert done.stdout.strip() == "[]"


def test_without_the_package_the_error_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "nvshmem", None)
    with pytest.raises(NvshmemError, match=r"pip install 'st2i_dask\[cuda13\]'"):
        Packages.real()


def test_the_unique_id_travels_as_it_is(tmp_path):
    with Pe(tmp_path) as one:
        uid = base64.b64decode(one.ask("mint"))
    library, _, _ = pe(tmp_path)
    assert len(uid) == 128
    library.attach(uid, 0, 1, 0, ARENA)
    assert isinstance(library, Library)
