"""Qwen-Image: every picture equals, bit for bit, what the unmodified pipelines make."""

from __future__ import annotations

import json
import shutil

import numpy as np
import pytest
import torch
from PIL import Image

import st2i_dask as st2i
from st2i_dask.catalogue.tiny_qwen_image import save_qwen_image

from .originals import LONG, check, completed, expected, mask, picture, pixels, reference
from .running import run_here

CLASSES = {
    None: "QwenImagePipeline",
    "image-to-image": "QwenImageImg2ImgPipeline",
    "inpainting": "QwenImageInpaintPipeline",
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return save_qwen_image(tmp_path_factory.mktemp("qwen-image") / "tiny")


TENSOR = torch.from_numpy(pixels(48, 32).transpose(2, 0, 1)[None].copy() * 2 - 1)
IMAGE, INPAINT = "image-to-image", "inpainting"
CASES = [
    # task, dtype, parameters (a cat, seed 0, 3 steps, 32x32 pixels by default)
    (None, "float32", dict(prompt=LONG)),
    (None, "float32", dict(negative_prompt="", seed=2**63, height=48, width=16)),
    (None, "float32", dict(negative_prompt=LONG, num_steps=2)),
    (None, "float32", dict(negative_prompt=LONG, true_cfg_scale=1.0, max_sequence_length=400)),
    (None, "bfloat16", dict(negative_prompt="rain", num_images=2, height=16, width=48)),
    (None, "bfloat16", dict(num_steps=8, seed=-3)),
    (IMAGE, "float32", dict(strength=0.5, num_steps=5, negative_prompt="rain", height=48)),
    (IMAGE, "float32", dict(image=TENSOR, height=48, num_images=2, seed=-3)),
    (IMAGE, "bfloat16", dict(image=picture(70, 90), strength=0.9, height=32, width=48)),
    (IMAGE, "float32", dict(image=pixels(32, 32), strength=1.0)),
    (INPAINT, "float32", dict(negative_prompt="rain", num_images=2, seed=2**63)),
    (INPAINT, "bfloat16", dict(strength=1.0, num_steps=4, height=48, width=16)),
    (INPAINT, "float32", dict(image=picture(70, 90), num_steps=2, strength=1.0)),
]


def for_task(task, parameters):
    made = completed(parameters)
    if task is not None:
        made.setdefault("image", picture(made["height"], made["width"]))
    if task == INPAINT:
        made["mask_image"] = mask(64, 48)
    return made


@pytest.mark.parametrize(("task", "dtype", "parameters"), CASES)
def test_tensor_equals_the_pipelines(folder, task, dtype, parameters):
    parameters = for_task(task, parameters)
    ours = run_here(st2i.load(folder, task=task, dtype=dtype), **parameters)
    check(ours, expected(reference(CLASSES[task], folder, dtype), **parameters), dtype)


@pytest.mark.slow
@pytest.mark.parametrize("task", [None, IMAGE, INPAINT])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("negative_prompt", [None, "", LONG])
@pytest.mark.parametrize(("num_steps", "num_images"), [(2, 1), (3, 2), (12, 3)])
@pytest.mark.parametrize(("height", "width"), [(32, 32), (64, 16), (48, 80)])
def test_all_tensors_equal_the_pipelines(
    folder, task, dtype, negative_prompt, num_steps, num_images, height, width
):
    workflow = st2i.load(folder, task=task, dtype=dtype)
    for seed, prompt, scale in ((0, "a cat", 4.0), (8, LONG, 1.5)):
        parameters = dict(prompt=prompt, seed=seed, true_cfg_scale=scale)
        parameters |= dict(negative_prompt=negative_prompt, num_images=num_images)
        parameters |= dict(num_steps=num_steps, height=height, width=width)
        parameters = for_task(task, parameters)
        theirs = expected(reference(CLASSES[task], folder, dtype), **parameters)
        check(run_here(workflow, **parameters), theirs, dtype)


def test_every_parameter_changes_the_picture(folder):
    """Otherwise equality would say little about it."""
    common = for_task(INPAINT, dict(num_steps=5, prompt=LONG, negative_prompt="rain"))
    variants = [
        {},
        {"seed": 1},
        {"prompt": "a cat"},
        {"negative_prompt": "snow"},
        {"negative_prompt": None},
        {"true_cfg_scale": 2.0},
        {"strength": 0.9},
        {"image": picture(32, 32, seed=1)},
        {"mask_image": Image.new("L", (32, 32), "white")},
    ]
    workflow = st2i.load(folder, task=INPAINT)
    images = [run_here(workflow, **{**common, **more}) for more in variants]
    for i, image in enumerate(images):
        assert not any(torch.equal(image, other) for other in images[:i]), variants[i]


def test_spread_images_are_those_of_the_next_seeds(folder):
    workflow = st2i.load(folder)
    parameters = completed(dict(negative_prompt="rain"))
    spread = run_here(workflow, seed=7, num_images=2, spread=True, **parameters)
    for number in range(2):
        assert torch.equal(spread[number], run_here(workflow, seed=7 + number, **parameters))


def test_pictures_equal_the_pipelines(folder):
    parameters = completed(dict(seed=11))
    ours = run_here(st2i.load(folder), output_type="pil", **parameters)
    pipeline = reference("QwenImagePipeline", folder, "float32")
    theirs = expected(pipeline, output_type="pil", **parameters)
    assert np.array_equal(np.asarray(ours), np.asarray(theirs))


def count(request, name):
    return sum(annotation["fn"] == name for annotation in request.annotations.values())


@pytest.mark.parametrize(
    ("parameters", "forwards"),
    [
        ({}, 8),
        (dict(negative_prompt=""), 16),
        (dict(negative_prompt="rain", true_cfg_scale=1.0), 8),
    ],
)
def test_a_negative_prompt_doubles_the_forwards_as_in_the_pipeline(folder, parameters, forwards):
    request = st2i.load(folder).request(prompt="a cat", num_steps=8, **parameters)
    assert count(request, "QwenImageTransformer") == forwards
    assert count(request, "QwenVlText") == forwards // 8


def test_strength_leaves_out_steps_and_one_vae_serves_both_ways(folder):
    pictures = dict(image=picture(32, 32), mask_image=mask(32, 32))
    request = st2i.load(folder, task=INPAINT).request(
        prompt="a cat", num_steps=10, strength=0.35, **pictures
    )
    assert count(request, "QwenImageTransformer") == 4
    models = {a["fn"]: a["model"] for a in request.annotations.values()}
    assert models["InpaintingStart"] == models["VaeDecoder"]


def test_defaults_are_the_pipelines_unless_others_are_given(folder, fresh_registry):
    named = {p.name: p.default for p in st2i.load(folder).parameters}
    assert (named["num_steps"], named["true_cfg_scale"], named["height"]) == (50, 4.0, 1024)
    assert named["negative_prompt"] is None
    other = st2i.load(folder, name="other", num_steps=8, negative_prompt=" ")
    named = {p.name: p.default for p in other.parameters}
    assert (named["num_steps"], named["negative_prompt"]) == (8, " ")
    with pytest.raises(st2i.LoadError, match="no parameter 'stepps' to give a default to"):
        st2i.load(folder, stepps=8)


@pytest.mark.parametrize(
    ("task", "parameters", "message"),
    [
        (None, dict(prompt=" "), "empty"),
        (None, dict(prompt="x" * 600), r"\d+ tokens, limit 512"),
        (None, dict(negative_prompt="x" * 600), r"negative_prompt is too long: \d+ tokens"),
        (None, dict(max_sequence_length=1025), "1 to 1024"),
        (
            None,
            dict(num_steps=1),
            "num_steps=1 does not suit the scheduler: its timesteps are not finite",
        ),
        (None, dict(num_steps=10_000), "1 to 1000"),
        (None, dict(height=40), "multiples of 16.*nearest: 48"),
        (None, dict(true_cfg_scale=float("nan")), "0 to 100"),
        (None, dict(guidance_scale=3.5), "no parameter 'guidance_scale'"),
        (None, dict(strength=0.5), "no parameter 'strength'"),
        (IMAGE, dict(strength=0.0), "strength=0.0 leaves none of 50 steps"),
        (IMAGE, dict(image="cat.png"), "image has type str"),
        (INPAINT, {}, "'mask_image' is missing"),
    ],
)
def test_bad_parameters_are_refused_before_anything_is_sent(folder, task, parameters, message):
    if task is not None:
        parameters = {"image": picture(32, 32), **parameters}
    with pytest.raises(st2i.ParameterError, match=message):
        st2i.load(folder, task=task).request(**{"prompt": "a cat", **parameters})


def test_the_length_of_a_prompt_is_that_of_its_embeddings(folder):
    """One token longer, and the pipeline would cut its end off."""
    pipeline = reference("QwenImagePipeline", folder, "float32")
    embeds, _ = pipeline.encode_prompt([LONG])
    tokens = embeds.shape[1]
    workflow = st2i.load(folder)
    workflow.request(prompt=LONG, max_sequence_length=tokens)
    with pytest.raises(st2i.ParameterError, match=f"{tokens} tokens, limit {tokens - 1}"):
        workflow.request(prompt=LONG, max_sequence_length=tokens - 1)


def edited(folder, path, file, **changes):
    shutil.copytree(folder, path)
    file = path / file
    file.write_text(json.dumps({**json.loads(file.read_text()), **changes}))
    return path


def test_one_step_is_drawn_where_the_schedule_can_have_it(folder, tmp_path):
    file = "scheduler/scheduler_config.json"
    other = edited(folder, tmp_path / "other", file, shift_terminal=None)
    parameters = completed(dict(num_steps=1, negative_prompt="rain"))
    ours = run_here(st2i.load(other), **parameters)
    check(ours, expected(reference("QwenImagePipeline", other, "float32"), **parameters), "float32")


def test_folders_that_diffusers_cannot_run_are_refused(folder, tmp_path):
    index = dict(scheduler=["diffusers", "EulerDiscreteScheduler"])
    odd = edited(folder, tmp_path / "odd", "model_index.json", **index)
    with pytest.raises(st2i.LoadError, match=r"EulerDiscreteScheduler.*FlowMatchEuler"):
        st2i.load(odd)
    distilled = dict(guidance_embeds=True)
    odd = edited(folder, tmp_path / "distilled", "transformer/config.json", **distilled)
    with pytest.raises(st2i.LoadError, match="guidance_embeds=True"):
        st2i.load(odd)
    bare = tmp_path / "bare"
    shutil.copytree(folder, bare)
    for file in (bare / "tokenizer").glob("*"):
        if file.name != "tokenizer_config.json":
            file.unlink()
    with pytest.raises(st2i.LoadError, match="no vocabulary"):
        st2i.load(bare)


def test_another_scheduler_equals_the_pipelines(folder, tmp_path):
    """It keeps what earlier steps gave."""
    from diffusers import UniPCMultistepScheduler

    index = dict(scheduler=["diffusers", "UniPCMultistepScheduler"])
    other = edited(folder, tmp_path / "unipc", "model_index.json", **index)
    scheduler = UniPCMultistepScheduler(
        prediction_type="flow_prediction", use_flow_sigmas=True, flow_shift=3.0
    )
    scheduler.save_pretrained(other / "scheduler")
    parameters = completed(dict(num_steps=5))
    ours = run_here(st2i.load(other), **parameters)
    check(ours, expected(reference("QwenImagePipeline", other, "float32"), **parameters), "float32")
    with pytest.raises(st2i.LoadError, match="UniPCMultistepScheduler"):
        st2i.load(other, task=IMAGE)
