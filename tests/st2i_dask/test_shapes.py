"""The packaged model ``shapes``: vocabulary, judge, and the pictures it really draws."""

from __future__ import annotations

import os
import random
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest
from PIL import Image

from st2i_dask import shapes
from st2i_dask.shapes import COLOURS, SHAPES, SIZES, Scene, gallery, parse, scenes
from st2i_dask.shapes.judge import Seen, Verdict, judge, look
from st2i_dask.shapes.render import MAX_OFFSET, render

ROOT = Path(__file__).parents[2]
ATTRIBUTES = ("background", "colour", "size", "shape")


# ---------------------------------------------------------------- vocabulary


def test_importing_the_vocabulary_loads_no_model_library():
    code = (
        "import sys, st2i_dask.shapes;"
        "print([m for m in ('torch', 'diffusers', 'transformers') if m in sys.modules])"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == "[]"


def test_scenes_are_all_combinations_and_survive_the_prompt():
    everything = scenes()
    assert len(set(everything)) == len(SIZES) * len(COLOURS) * (len(COLOURS) - 1) * len(SHAPES)
    assert [parse(scene.prompt) for scene in everything] == everything


def test_parse_ignores_case_and_spacing():
    expected = Scene("small", "yellow", "star", "purple")
    assert parse("  A small Yellow star\n on a  purple background ") == expected


@pytest.mark.parametrize(
    ("prompt", "message"),
    [
        ("", "write it as"),
        ("a red circle", "write it as"),
        ("a small red circle on a blue background please", "write it as"),
        ("a small red circle in a blue background", "write it as"),
        ("a tiny red circle on a blue background", "unknown size 'tiny'; use one of: small, large"),
        ("a small pink circle on a blue background", "unknown colour 'pink'; use one of: red"),
        ("a small red heart on a blue background", "unknown shape 'heart'; use one of: circle"),
        ("a small red circle on a pink background", "unknown background 'pink'; use one of: red"),
        ("a small red circle on a red background", "use two different colours"),
    ],
)
def test_parse_refuses(prompt, message):
    with pytest.raises(ValueError, match=message):
        parse(prompt)


@pytest.mark.parametrize("seed", range(5))
def test_gallery_is_even_and_without_repetition(seed):
    prompts = gallery(96, seed)
    assert prompts == gallery(96, seed)
    assert prompts[:10] == gallery(10, seed)
    assert len(set(prompts)) == 96
    for half in (prompts[:48], prompts[48:]):
        asked = [parse(prompt) for prompt in half]
        for attribute in ATTRIBUTES:
            counts = Counter(getattr(scene, attribute) for scene in asked)
            assert len(set(counts.values())) == 1, (attribute, counts)
        assert set(Counter((s.shape, s.size) for s in asked).values()) == {4}


def test_gallery_depends_on_the_seed_and_refuses_a_negative_number():
    assert gallery(8, seed=0) != gallery(8, seed=1)
    assert gallery(0) == []
    with pytest.raises(ValueError, match="n=-1"):
        gallery(-1)


# ---------------------------------------------------------------- drawing and judge


def test_judge_accepts_every_reference_drawing():
    rng = random.Random(0)
    wrong = []
    for scene in scenes():
        dx, dy = (rng.uniform(-MAX_OFFSET, MAX_OFFSET) for _ in range(2))
        if not judge(render(scene, dx, dy), scene).right:
            wrong.append((scene.prompt, dx, dy))
    assert wrong == []


def test_judge_scores_scrambled_labels_near_chance():
    everything = scenes()
    labels = everything[:]
    random.Random(1).shuffle(labels)
    verdicts = [judge(render(s), label) for s, label in zip(everything, labels, strict=True)]
    share = {a: sum(getattr(v, a) for v in verdicts) / len(verdicts) for a in ATTRIBUTES}
    # 672 pictures: three standard deviations are 0.06 for the sizes, 0.04 for the rest.
    assert share["size"] == pytest.approx(1 / 2, abs=0.06)
    assert share["shape"] == pytest.approx(1 / 6, abs=0.045)
    assert share["colour"] == pytest.approx(1 / 8, abs=0.04)
    assert share["background"] == pytest.approx(1 / 8, abs=0.04)
    assert sum(v.right for v in verdicts) / len(verdicts) < 0.02


@pytest.mark.parametrize(
    ("attribute", "other"),
    [("background", "green"), ("colour", "white"), ("size", "large"), ("shape", "ring")],
)
def test_judge_tells_which_attribute_is_wrong(attribute, other):
    scene = parse("a small yellow star on a purple background")
    words = {a: getattr(scene, a) for a in ATTRIBUTES}
    verdict = judge(render(scene), Scene(**{**words, attribute: other}))
    assert verdict == Verdict(**{a: a != attribute for a in ATTRIBUTES})
    assert not verdict.right


def test_look_names_nothing_in_a_plain_picture():
    plain = Image.new("RGB", (64, 64), COLOURS["blue"])
    assert look(plain) == Seen(background="blue", colour=None, size=None, shape=None)


def test_look_gives_no_name_to_unknown_colours_and_shapes():
    picture = Image.new("RGB", (64, 64), (128, 128, 128))
    picture.paste((0, 255, 255), (20, 10, 24, 54))  # an upright bar
    seen = look(picture)
    assert (seen.background, seen.colour, seen.shape) == (None, None, None)


def test_look_gives_no_name_to_noise():
    rng = random.Random(0)
    noise = Image.frombytes("RGB", (64, 64), rng.randbytes(64 * 64 * 3))
    assert look(noise).shape is None


def test_judge_refuses_another_picture_size():
    scene = parse("a small yellow star on a purple background")
    with pytest.raises(ValueError, match="32x64 pixels; the judge reads 64x64 only"):
        judge(render(scene).resize((32, 64)), scene)


@pytest.mark.parametrize(
    ("shape", "size", "message"),
    [("heart", "small", "unknown shape 'heart'"), ("ring", "huge", "unknown size 'huge'")],
)
def test_coverage_refuses_unknown_words(shape, size, message):
    from st2i_dask.shapes.render import coverage

    with pytest.raises(ValueError, match=message):
        coverage(shape, size)


# ---------------------------------------------------------------- the model


def test_the_packaged_pipeline_is_small_and_complete():
    files = [path for path in shapes.PIPELINE.rglob("*") if path.is_file()]
    assert sum(path.stat().st_size for path in files) <= 8_000_000
    assert {"model_index.json", "README.md"} <= {path.name for path in files}


@pytest.fixture(scope="module")
def pipeline():
    import diffusers
    import torch

    pipe = diffusers.FluxPipeline.from_pretrained(
        shapes.PIPELINE, dtype=torch.float32, local_files_only=True
    )
    pipe.set_progress_bar_config(disable=True)
    threads = torch.get_num_threads()
    # One thread: two that wait for each other crawl on a machine busy with other tests.
    torch.set_num_threads(1)
    yield pipe
    torch.set_num_threads(threads)


def draw(pipe, prompts: list[str], seeds: list[int]) -> list[Image.Image]:
    import torch

    return pipe(
        prompt=prompts,
        num_inference_steps=shapes.DEFAULT_STEPS,
        guidance_scale=0.0,
        height=shapes.DEFAULT_SIZE,
        width=shapes.DEFAULT_SIZE,
        max_sequence_length=shapes.MAX_PROMPT_TOKENS,
        generator=[torch.Generator().manual_seed(seed) for seed in seeds],
    ).images


def test_the_model_draws_what_is_asked_for(pipeline):
    """48 prompts, every word evenly, three seeds each."""
    asked = [parse(prompt) for prompt in gallery(48, seed=0)]
    verdicts = []
    for seed in range(3):
        seeds = [1000 * seed + i for i in range(len(asked))]
        pictures = draw(pipeline, [scene.prompt for scene in asked], seeds)
        verdicts += [judge(p, scene) for p, scene in zip(pictures, asked, strict=True)]
    share = {a: sum(getattr(v, a) for v in verdicts) / len(verdicts) for a in ATTRIBUTES}
    assert min(share.values()) >= 0.95, share
    assert sum(v.right for v in verdicts) / len(verdicts) >= 0.90, share


def test_the_same_seed_draws_the_same_picture_and_another_seed_does_not(pipeline):
    prompt = "a large green triangle on a white background"
    first, again, other = (draw(pipeline, [prompt], [seed])[0] for seed in (5, 5, 6))
    assert first.tobytes() == again.tobytes()
    assert first.tobytes() != other.tobytes()


def test_the_training_script_runs(tmp_path):
    script = [sys.executable, "examples/train_shapes.py", "--quick", "--threads", "1"]
    done = subprocess.run(
        [*script, "--out", str(tmp_path / "model")],
        cwd=ROOT,
        env={**os.environ, "HF_HUB_OFFLINE": "1", "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    assert '"judged"' in done.stdout
    assert (tmp_path / "model" / "model_index.json").exists()
    assert (tmp_path / "model" / "transformer" / "diffusion_pytorch_model.safetensors").exists()
