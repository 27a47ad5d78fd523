"""The examples run as they are written."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from PIL import Image

EXAMPLES = Path(__file__).parents[1] / "examples"


def run(name: str, *arguments: str, cwd: Path, **env: str) -> str:
    done = subprocess.run(
        [sys.executable, str(EXAMPLES / name), *arguments],
        cwd=cwd,
        env={**os.environ, "HF_HUB_OFFLINE": "1", **env},
        capture_output=True,
        text=True,
        timeout=180,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


def judge(image: Image.Image, prompt: str):
    from st2i_dask.shapes import parse
    from st2i_dask.shapes.judge import judge

    return judge(image, parse(prompt))


def test_quickstart_draws_its_star(tmp_path):
    printed = run("quickstart.py", "star.png", cwd=tmp_path)
    assert "star.png" in printed
    with Image.open(tmp_path / "star.png") as image:
        prompt = image.text["prompt"]
        assert prompt == "a small yellow star on a purple background"
        verdict = judge(image, prompt)
    assert verdict.background
    assert verdict.colour


def test_progress_shows_the_star_halfway_there(tmp_path):
    told = run("progress.py", cwd=tmp_path).splitlines()
    assert told[-1] == "finished: 23 of 23 steps"
    with Image.open(tmp_path / "star.png") as image, Image.open(tmp_path / "halfway.png") as half:
        assert judge(image, image.text["prompt"]).colour
        assert half.size == image.size
        assert half.tobytes() != image.tobytes()
        assert judge(half, image.text["prompt"]).background  # it is on its way there


def test_the_openai_client_gets_its_ring(tmp_path):
    pytest.importorskip("openai")
    command = [sys.executable, "-m", "st2i_dask.cli", "serve", "--port", "0", "--workers", "1"]
    made = subprocess.run(
        [*command, "--new-key", "alice"], capture_output=True, text=True, check=True
    )
    key, line = (said.partition(": ")[2] for said in made.stdout.splitlines())
    (tmp_path / "keys.txt").write_text(f"{line}\n")
    more = ["--model", "gpt-image-1=shapes", "--keys", "keys.txt"]
    server = subprocess.Popen([*command, *more], cwd=tmp_path, stdout=subprocess.PIPE, text=True)
    try:
        url = next(line.split()[1] for line in server.stdout if line.startswith("serving "))
        printed = run("openai_client.py", url, "ring.png", cwd=tmp_path, OPENAI_API_KEY=key)
        server.send_signal(signal.SIGINT)
        server.communicate(timeout=60)
    finally:
        server.kill()
        server.wait()
    assert "ring.png" in printed
    with Image.open(tmp_path / "ring.png") as image:
        prompt = image.text["prompt"]
        assert prompt == "a large red ring on a green background"
        verdict = judge(image, prompt)
    assert verdict.background


def test_compose_ends_with_its_last_prompt(tmp_path):
    run("compose.py", "turncoat.png", cwd=tmp_path)
    with Image.open(tmp_path / "turncoat.png") as image:
        assert image.text["workflow"] == "turncoat"
        assert image.text["tenant"] == "alice"
        verdict = judge(image, "a large red ring on a green background")
    assert verdict.background


def tiles(path: Path) -> list[Image.Image]:
    """The 64x64 pictures of a row."""
    with Image.open(path) as row:
        return [row.crop((x, 0, x + 64, 64)) for x in range(0, row.width, 64)]


def test_controlnet_draws_where_the_silhouette_is(tmp_path):
    from st2i_dask.shapes.judge import look, overlap

    run("controlnet.py", "controlled.png", cwd=tmp_path)
    silhouette, bound, free = tiles(tmp_path / "controlled.png")
    assert overlap(bound, silhouette) > 0.7
    assert overlap(free, silhouette) < 0.5
    assert {(look(p).colour, look(p).background) for p in (bound, free)} == {("yellow", "purple")}


def test_lora_adds_each_style_to_the_same_picture(tmp_path):
    from st2i_dask.shapes import parse
    from st2i_dask.shapes.judge import framed, look

    run("lora.py", "styles.png", cwd=tmp_path)
    plain, frame, night = tiles(tmp_path / "styles.png")
    scene = parse("a small yellow circle on a blue background")
    assert [framed(picture, scene) > 0.6 for picture in (plain, frame, night)] == [0, 1, 0]
    assert [look(picture).background for picture in (plain, night)] == ["blue", "black"]


def test_comfyui_draws_its_export_and_another_prompt(tmp_path):
    run("comfyui.py", cwd=tmp_path)
    for number, colours in enumerate([("green", "yellow"), ("red", "white")]):
        with Image.open(tmp_path / f"comfyui-{number}.png") as image:
            assert all(colour in image.text["prompt"] for colour in colours)
            assert image.text["workflow"] == "shape"
            verdict = judge(image, image.text["prompt"])
        assert verdict.background
        assert verdict.colour
