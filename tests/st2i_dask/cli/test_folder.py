"""The output folder: whole files, a manifest that matches them, one run at a time."""

from __future__ import annotations

import json
import os

import pytest
from PIL import Image

from st2i_dask.cli import folder as folder_module
from st2i_dask.cli.folder import MANIFEST, OutputFolder, checked_image, is_whole, replace_with
from st2i_dask.errors import OutputError, ParameterError
from st2i_dask.image import GeneratedImage

ABOUT = {
    "workflow": "w",
    "version": "1e5",
    "prompt": "7",
    "seed": 3,
    "steps": 2,
    "tenant": "bob",
    "parameters": {"prompt": "7", "seed": 3, "scale": 0.1},
    "software": "st2i_dask 0.1.0",
    "size": "8x8",
}


def picture(**about):
    return GeneratedImage.of(Image.new("RGB", (8, 8), "red"), {**ABOUT, **about})


def manifest(path):
    return [json.loads(line) for line in (path / MANIFEST).read_text().splitlines()]


@pytest.fixture
def filled(tmp_path):
    with OutputFolder(tmp_path / "out") as folder:
        for file in ("a.png", "b.png"):
            folder.save(file, picture(), seconds=1.5)
    return tmp_path / "out"


def test_saving_writes_the_image_and_its_line(filled):
    assert sorted(os.listdir(filled)) == ["a.png", "b.png", MANIFEST]
    assert Image.open(filled / "a.png").getpixel((0, 0)) == (255, 0, 0)
    assert manifest(filled)[0] == {"file": "a.png", **ABOUT, "seconds": 1.5}


def test_an_unchanged_folder_is_opened_without_writing(filled):
    before = os.stat(filled / MANIFEST)
    with OutputFolder(filled) as folder:
        assert "a.png" in folder
        assert folder.entry("a.png")["seconds"] == 1.5
    after = os.stat(filled / MANIFEST)
    assert (before.st_ino, before.st_mtime_ns) == (after.st_ino, after.st_mtime_ns)


def test_lines_of_missing_images_go(filled):
    (filled / "a.png").unlink()
    with OutputFolder(filled) as folder:
        assert "a.png" not in folder
    assert [entry["file"] for entry in manifest(filled)] == ["b.png"]


@pytest.mark.parametrize(
    "damage", [lambda data: data[:-1], lambda data: b"x" + data[1:], lambda d: b""]
)
def test_a_damaged_image_counts_as_missing(filled, damage):
    path = filled / "a.png"
    path.write_bytes(damage(path.read_bytes()))
    with OutputFolder(filled) as folder:
        assert "a.png" not in folder
    assert not is_whole(path)


def test_a_lost_manifest_comes_back_from_the_images(filled):
    (filled / MANIFEST).unlink()
    with OutputFolder(filled):
        pass
    # All but the seconds, which only the manifest knew. Texts stay texts: prompt "7", version "1e5".
    assert manifest(filled) == [{"file": file, **ABOUT} for file in ("a.png", "b.png")]


def test_half_a_last_line_is_tolerated(filled):
    path = filled / MANIFEST
    path.write_bytes(path.read_bytes()[:-20])
    with OutputFolder(filled) as folder:
        folder.save("c.png", picture(), seconds=2.0)
    assert [entry["file"] for entry in manifest(filled)] == ["a.png", "b.png", "c.png"]


def test_other_peoples_files_and_lines_stay(filled):
    Image.new("RGB", (4, 4)).save(filled / "mine.png")
    with open(filled / MANIFEST, "a") as file:
        file.write('{"note": "keep me"}\nnonsense\n')
    with OutputFolder(filled) as folder:
        assert folder.entry("mine.png") is None
    assert [entry.get("file", "other") for entry in manifest(filled)] == ["a.png", "b.png", "other"]
    assert (filled / "mine.png").exists()


def test_temporary_files_of_a_killed_run_are_removed(filled):
    for name in (".c.png.tmp", f".{MANIFEST}.tmp"):
        (filled / name).write_bytes(b"half")
    (filled / "notes.tmp").write_bytes(b"not ours")
    with OutputFolder(filled):
        pass
    assert sorted(os.listdir(filled)) == ["a.png", "b.png", MANIFEST, "notes.tmp"]


def test_one_run_at_a_time(filled):
    other = OutputFolder(filled)
    with OutputFolder(filled), pytest.raises(ParameterError, match="another run is writing"):
        other.__enter__()
    with OutputFolder(filled):
        pass


def test_a_path_that_cannot_be_a_folder(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ParameterError, match=r"cannot write to .*file/x.*: Not a directory"):
        OutputFolder(tmp_path / "file" / "x").__enter__()


def test_a_failed_write_leaves_nothing(tmp_path, monkeypatch):
    def full(source, target):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(folder_module.os, "replace", full)
    with pytest.raises(OSError, match="No space left"):
        replace_with(tmp_path / "a.png", b"data")
    assert os.listdir(tmp_path) == []


def test_an_image_made_again_has_one_line(filled):
    with OutputFolder(filled) as folder:
        folder.save("a.png", picture(seed=4), seconds=9.0)
    assert [(entry["file"], entry["seed"]) for entry in manifest(filled)] == [
        ("a.png", 4),
        ("b.png", 3),
    ]


def test_only_missing_lines_are_noted(filled):
    Image.new("RGB", (4, 4)).save(filled / "mine.png")
    with OutputFolder(filled) as folder:
        folder.note("a.png", {"prompt": "no"})
        folder.note("absent.png", {"prompt": "no"})
        folder.note("mine.png", {"prompt": "yes"})
    assert manifest(filled)[2:] == [{"file": "mine.png", "prompt": "yes"}]


def test_results_that_are_no_image():
    with pytest.raises(OutputError, match="returned list, not an image"):
        checked_image([picture()])
