"""Ctrl-C and kill -9 in the middle of a batch: nothing half written, and the rest can be made."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time

import pytest
from PIL import Image

from st2i_dask.cli.folder import MANIFEST
from st2i_dask.cli.interrupts import Interrupts
from st2i_dask.shielded import shielded_children

from .conftest import PAINT

COUNT = 24
PROMPTS = "".join(f"slow picture {i}\n" for i in range(COUNT))


@pytest.fixture
def command(tmp_path):
    """The command line of a batch into tmp_path/out."""
    (tmp_path / "prompts.txt").write_text(PROMPTS)

    def make(*options):
        return [
            *(sys.executable, "-m", "st2i_dask.cli", "generate"),
            *("--workflow", f"{PAINT}:paint", "--prompts", str(tmp_path / "prompts.txt")),
            *("--out", str(tmp_path / "out"), *options),
        ]

    return make


def start(command, out, images):
    """A process of the command in its own group, when it has made so many images."""
    process = subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    deadline = time.monotonic() + 90
    while not out.exists() or len(list(out.glob("*.png"))) < images:
        if process.poll() is not None or time.monotonic() > deadline:
            process.kill()
            pytest.fail(f"no image came: {process.communicate()}")
        time.sleep(0.02)
    return process


def end(process):
    try:
        out, err = process.communicate(timeout=60)
    finally:
        process.kill()
    return process.returncode, out, err


def check_whole(out):
    """Only images and the manifest, all of them whole, and they agree; returns how many."""
    names = sorted(os.listdir(out))
    names.remove(MANIFEST)
    for name in names:
        assert name.endswith(".png"), names
        Image.open(out / name).load()
    entries = [json.loads(line) for line in (out / MANIFEST).read_text().splitlines()]
    assert sorted(entry["file"] for entry in entries) == names
    return len(names)


def test_ctrl_c_keeps_what_is_done(command, scheduler, tmp_path):
    out = tmp_path / "out"
    process = start(command("--scheduler", scheduler), out, 3)
    process.send_signal(signal.SIGINT)
    status, said, err = end(process)
    assert status == 130, (said, err)
    made = check_whole(out)
    assert 3 <= made < COUNT
    assert f"{made} images made" in said
    assert f"st2i: interrupted; {COUNT - made} images not made." in err
    assert "run the same command again" in err
    assert "Traceback" not in said + err

    again = subprocess.run(
        command("--scheduler", scheduler), capture_output=True, text=True, timeout=90
    )
    assert again.returncode == 0, again.stderr
    assert f"{COUNT - made} images made, {made} kept" in again.stdout
    assert check_whole(out) == COUNT


def test_ctrl_c_cancels_what_is_pending(command, scheduler, tmp_path):
    from distributed import Client

    process = start(command("--scheduler", scheduler), tmp_path / "out", 1)
    process.send_signal(signal.SIGINT)
    status, _, _ = end(process)
    assert status == 130
    with Client(scheduler, set_as_default=False) as client:
        deadline = time.monotonic() + 10
        while client.run_on_scheduler(lambda dask_scheduler: len(dask_scheduler.tasks)):
            assert time.monotonic() < deadline
            time.sleep(0.05)


def test_ctrl_c_in_a_terminal_reaches_the_whole_group(command, tmp_path):
    """With a cluster of its own: its workers get the signal too, and say nothing."""
    out = tmp_path / "out"
    process = start(command("--workers", "1"), out, 2)
    os.killpg(process.pid, signal.SIGINT)
    status, said, err = end(process)
    assert status == 130, (said, err)
    assert 2 <= check_whole(out) < COUNT
    lines = [line for line in err.splitlines() if line.strip() and f"/{COUNT} [" not in line]
    assert lines[0] == "stopping; once more to quit at once"
    assert lines[1].startswith("st2i: interrupted; ")
    assert len(lines) == 2, err


def test_sigterm_does_the_same(command, scheduler, tmp_path):
    process = start(command("--scheduler", scheduler), tmp_path / "out", 1)
    process.terminate()
    status, _, _ = end(process)
    assert status == 128 + signal.SIGTERM
    check_whole(tmp_path / "out")


def test_killed_outright_the_next_run_repairs_the_folder(command, scheduler, tmp_path):
    out = tmp_path / "out"
    process = start(command("--scheduler", scheduler), out, 3)
    process.kill()
    end(process)
    (out / ".half.png.tmp").write_bytes(b"\x89PNG")  # whether or not the kill left one
    with open(out / MANIFEST, "r+b") as file:  # and a line cut off in the middle
        file.truncate(os.path.getsize(out / MANIFEST) - 7)
    again = subprocess.run(
        command("--scheduler", scheduler), capture_output=True, text=True, timeout=90
    )
    assert again.returncode == 0, again.stderr
    assert check_whole(out) == COUNT


def test_the_second_signal_acts_as_usual():
    with Interrupts() as interrupts:
        os.kill(os.getpid(), signal.SIGINT)
        assert interrupts.received == signal.SIGINT
        assert interrupts.exit_status == 130
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)


def test_handlers_are_given_back():
    before = signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)
    with Interrupts():
        assert signal.getsignal(signal.SIGINT) != before[0]
    assert (signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)) == before


def test_other_threads_cannot_catch_signals_and_do_not_try():
    def enter():
        with Interrupts() as interrupts:
            results.append(interrupts.received)

    results = []
    thread = threading.Thread(target=enter)
    thread.start()
    thread.join()
    assert results == [0]


def test_children_do_not_see_ctrl_c_and_it_is_not_lost():
    code = "import time; print('up', flush=True); time.sleep(1); print('survived')"
    shield = shielded_children()
    shield.__enter__()
    child = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    assert child.stdout.readline() == "up\n"
    child.send_signal(signal.SIGINT)
    signal.raise_signal(signal.SIGINT)  # to this thread: the others of this process are older
    with pytest.raises(KeyboardInterrupt):
        shield.__exit__(None, None, None)
    assert child.communicate(timeout=30)[0] == "survived\n"
    assert child.returncode == 0
