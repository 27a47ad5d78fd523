"""The ControlNet and the LoRAs that are packaged with ``shapes``: what they really draw."""

from __future__ import annotations

import random
import runpy
import sys
from pathlib import Path

import pytest
from PIL import Image

from st2i_dask import shapes
from st2i_dask.shapes import COLOURS, CONTROLNET, SHAPES, STYLES, gallery, parse
from st2i_dask.shapes.judge import framed, judge, look, overlap, unframe
from st2i_dask.shapes.render import FRAME, at_night, coverage, render, silhouette

ROOT = Path(__file__).parents[2]
STAR = parse("a small yellow star on a purple background")


# ---------------------------------------------------------------- drawing and judge


def test_a_silhouette_grows_moves_and_turns():
    square = silhouette("square", 10)
    assert square.getbbox() == (23, 23, 41, 41)
    assert silhouette("square", 20).getbbox() == (15, 15, 49, 49)
    assert silhouette("square", 10, dx=-9, dy=6).getbbox() == (14, 29, 32, 47)
    turned = silhouette("square", 10, turn=45)
    assert turned.getpixel((32, 22)) == 255
    assert turned.getpixel((25, 25)) < 128


def test_overlap_of_a_drawing_with_its_outline_and_with_others():
    outline = coverage("star", "small", 3, -2)
    assert overlap(render(STAR, 3, -2), outline) > 0.95
    assert overlap(render(STAR, -4, 4), outline) < 0.5
    assert overlap(Image.new("RGB", (64, 64), "red"), outline) == 0
    with pytest.raises(ValueError, match="32x64 pixels"):
        overlap(render(STAR), outline.resize((32, 64)))


def test_styles_are_drawn_and_measured():
    assert framed(render(STAR), STAR) == 0
    picture = render(STAR, style="framed")
    assert framed(picture, STAR) == 1
    assert picture.getpixel((FRAME, FRAME)) == COLOURS["purple"]
    assert judge(unframe(picture), STAR).right
    night = render(STAR, style="night")
    assert at_night(STAR) == parse("a small yellow star on a black background")
    assert judge(night, at_night(STAR)).right
    black = parse("a large black ring on a red background")
    assert at_night(black) == parse("a large white ring on a black background")
    with pytest.raises(ValueError, match="unknown style 'striped'; use one of: framed, night"):
        render(STAR, style="striped")


# ---------------------------------------------------------------- the models


@pytest.fixture(scope="module", autouse=True)
def one_thread():
    import torch

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def pipeline():
    import diffusers
    import torch

    return diffusers.FluxPipeline.from_pretrained(
        shapes.PIPELINE, dtype=torch.float32, local_files_only=True
    )


@pytest.fixture(scope="module")
def controlled(pipeline):
    import diffusers
    import torch

    controlnet = diffusers.FluxControlNetModel.from_pretrained(CONTROLNET, dtype=torch.float32)
    return diffusers.FluxControlNetPipeline(**pipeline.components, controlnet=controlnet)


def draw(
    pipe, prompts: list[str], outlines: list[Image.Image] = (), **options
) -> list[Image.Image]:
    """One picture of each prompt; seeds 0, 1, 2, ..."""
    import torch

    pipe.set_progress_bar_config(disable=True)
    if outlines:
        options["control_image"] = [outline.convert("RGB") for outline in outlines]
    return pipe(
        prompt=prompts,
        num_inference_steps=shapes.DEFAULT_STEPS,
        height=shapes.DEFAULT_SIZE,
        width=shapes.DEFAULT_SIZE,
        max_sequence_length=shapes.MAX_PROMPT_TOKENS,
        generator=[torch.Generator().manual_seed(seed) for seed in range(len(prompts))],
        **options,
    ).images


def share(pictures, prompts, outlines) -> tuple[float, float]:
    """Mean overlap with the outlines, and share of pictures with both colours as asked for."""
    seen = [
        (look(picture), parse(prompt)) for picture, prompt in zip(pictures, prompts, strict=True)
    ]
    right = sum((s.colour, s.background) == (a.colour, a.background) for s, a in seen)
    return sum(map(overlap, pictures, outlines)) / len(pictures), right / len(pictures)


def test_what_is_packaged_is_small():
    files = [path for path in CONTROLNET.rglob("*") if path.is_file()] + list(STYLES.values())
    assert sum(path.stat().st_size for path in files) <= 5_000_000


def test_the_shape_follows_the_silhouette(pipeline, controlled):
    rng = random.Random(2)
    prompts = gallery(24, seed=2)
    outlines = []
    for prompt in prompts:
        radius = rng.uniform(14, 24)
        dx, dy = (rng.uniform(radius - 32, 32 - radius) for _ in range(2))
        outlines.append(silhouette(parse(prompt).shape, radius, dx, dy, rng.uniform(0, 90)))
    with_it, colours = share(draw(controlled, prompts, outlines), prompts, outlines)
    without, _ = share(draw(pipeline, prompts), prompts, outlines)
    assert with_it >= 0.85
    assert colours >= 0.95
    assert without <= 0.45


def test_the_silhouette_wins_over_the_words_for_shape_and_size(controlled):
    prompts = gallery(12, seed=3)
    shapes_asked = [SHAPES.index(parse(prompt).shape) for prompt in prompts]
    outlines = [silhouette(SHAPES[(shape + 2) % len(SHAPES)], 22) for shape in shapes_asked]
    overlaps, colours = share(draw(controlled, prompts, outlines), prompts, outlines)
    assert overlaps >= 0.85
    assert colours >= 0.9


def test_scale_zero_is_no_control(controlled):
    prompts = gallery(2, seed=4)
    outlines = [silhouette("ring", 20, 8, 8)] * 2
    off = draw(controlled, prompts, outlines, controlnet_conditioning_scale=0.0)
    for picture, prompt in zip(off, prompts, strict=True):
        assert judge(picture, parse(prompt)).right


def shows(style: str, picture: Image.Image, prompt: str) -> bool:
    scene = parse(prompt)
    if style == "framed":
        return framed(picture, scene) >= 0.6
    return look(picture).background == "black"


def keeps(style: str, picture: Image.Image, prompt: str) -> bool:
    """Whether all that the style leaves alone is as the prompt says."""
    if style == "framed":
        return judge(unframe(picture), parse(prompt)).right
    return judge(picture, at_night(parse(prompt))).right


@pytest.mark.parametrize("style", STYLES)
def test_a_lora_adds_its_style_and_leaves_the_rest(pipeline, style):
    prompts = [prompt for prompt in gallery(40, seed=5) if "black background" not in prompt][:16]
    plain, before = draw(pipeline, prompts), draw(pipeline, prompts[:2])
    pipeline.load_lora_weights(STYLES[style], adapter_name=style)
    styled = draw(pipeline, prompts)
    pipeline.unload_lora_weights()
    after = draw(pipeline, prompts[:2])
    assert sum(map(shows, [style] * 16, plain, prompts)) == 0
    assert sum(map(shows, [style] * 16, styled, prompts)) >= 15
    assert sum(map(keeps, [style] * 16, styled, prompts)) >= 13
    assert after == before


# ---------------------------------------------------------------- by name, and from scratch


def test_the_controlnet_is_loaded_by_name():
    import st2i_dask as st2i
    from st2i_dask.catalogue.folder import load_component, read_component

    component = read_component("shapes-silhouette")
    assert (component.source, component.path) == ("shapes-silhouette", CONTROLNET)
    model = load_component("shapes-silhouette", "FluxControlNetModel", "float32")
    assert str(model.dtype) == "torch.float32"
    workflow = st2i.load("shapes", controlnet="shapes-silhouette")
    assert "control_image" in [parameter.name for parameter in workflow.parameters]


def test_the_training_script_runs(tmp_path, monkeypatch, capsys):
    arguments = ["--quick", "--threads", "1", "--out", str(tmp_path)]
    monkeypatch.setattr(sys, "argv", ["train_shapes_adapters.py", *arguments])
    runpy.run_path(str(ROOT / "examples" / "train_shapes_adapters.py"), run_name="__main__")
    assert capsys.readouterr().out.count("without: ") == 3
    made = {path.relative_to(tmp_path).as_posix() for path in tmp_path.rglob("*.safetensors")}
    assert made == {
        "controlnet/diffusion_pytorch_model.safetensors",
        "framed.safetensors",
        "night.safetensors",
    }


def test_packaged_adapters_have_names_that_hold_on_every_worker():
    from st2i_dask.catalogue.folder import read_folder
    from st2i_dask.catalogue.lora import Loras
    from st2i_dask.shapes import STYLES

    rule = Loras(read_folder("shapes"))
    for style, path in STYLES.items():
        (named,), (by_path,) = rule.carry("loras", f"shapes-{style}"), rule.carry("loras", path)
        assert named.source == f"shapes-{style}"
        assert named.identity == by_path.identity
