"""Z-Image: every picture equals, bit for bit, what the unmodified pipelines make."""

from __future__ import annotations

import json
import shutil

import numpy as np
import pytest
import torch
from PIL import Image

import st2i_dask as st2i
from st2i_dask.catalogue.tiny_z_image import save_z_image

from .originals import LONG, check, completed, expected, mask, picture, pixels, reference
from .running import run_here


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    root = tmp_path_factory.mktemp("z-image")
    return {
        "fixed": save_z_image(root / "fixed"),
        "dynamic": save_z_image(root / "dynamic", dynamic=True, seed=5),
    }


CASES = [
    # folder, dtype, parameters (a cat, seed 0, 3 steps, 32x32 pixels by default)
    ("fixed", "float32", dict(prompt=LONG)),
    ("fixed", "float32", dict(negative_prompt=LONG, seed=2**63, height=48, width=20)),
    ("fixed", "float32", dict(guidance_scale=0.0, num_steps=1)),
    ("fixed", "bfloat16", dict(guidance_scale=0.0, num_steps=8, negative_prompt="rain")),
    ("fixed", "bfloat16", dict(negative_prompt="rain", num_images=2, height=20, width=48)),
    ("fixed", "float32", dict(cfg_truncation=0.3, num_steps=6, negative_prompt="rain")),
    ("fixed", "float32", dict(cfg_normalization=0.7, num_images=3, guidance_scale=3.0)),
    ("dynamic", "float32", dict(height=64, width=36, max_sequence_length=64, seed=-3)),
    ("dynamic", "bfloat16", dict(cfg_truncation=0.5, cfg_normalization=1.0, num_steps=7)),
]


@pytest.mark.parametrize(("folder", "dtype", "parameters"), CASES)
def test_tensor_equals_the_pipelines(folders, folder, dtype, parameters):
    parameters = completed(parameters)
    ours = run_here(st2i.load(folders[folder], dtype=dtype), **parameters)
    check(ours, expected(reference("ZImagePipeline", folders[folder], dtype), **parameters), dtype)


@pytest.mark.slow
@pytest.mark.parametrize("folder", ["fixed", "dynamic"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("guidance_scale", [0.0, 0.5, 5.0])
@pytest.mark.parametrize(("num_steps", "num_images"), [(1, 1), (3, 2), (12, 3)])
@pytest.mark.parametrize(("height", "width"), [(32, 32), (64, 20), (12, 100)])
def test_all_tensors_equal_the_pipelines(
    folders, folder, dtype, guidance_scale, num_steps, num_images, height, width
):
    workflow = st2i.load(folders[folder], dtype=dtype)
    pipeline = reference("ZImagePipeline", folders[folder], dtype)
    for seed, prompt, negative_prompt in ((0, "a cat", ""), (8, LONG, "rain"), (9, "tea", LONG)):
        parameters = dict(
            prompt=prompt,
            negative_prompt=negative_prompt,
            seed=seed,
            guidance_scale=guidance_scale,
            num_steps=num_steps,
            num_images=num_images,
            height=height,
            width=width,
        )
        check(run_here(workflow, **parameters), expected(pipeline, **parameters), dtype)


TENSOR = torch.from_numpy(pixels(48, 32).transpose(2, 0, 1)[None].copy() * 2 - 1)
FROM_PICTURES = [
    # task, dtype, parameters; the pipelines take only pictures of the result's size
    ("image-to-image", "float32", dict(strength=0.5, num_steps=5, negative_prompt="rain")),
    ("image-to-image", "bfloat16", dict(strength=0.9, num_images=2, height=20, width=48)),
    ("image-to-image", "float32", dict(image=TENSOR, height=48, guidance_scale=0.0, seed=-3)),
    ("image-to-image", "float32", dict(image=pixels(32, 32), cfg_truncation=0.5, strength=1.0)),
    ("inpainting", "float32", dict(negative_prompt="rain", num_images=2, seed=2**63)),
    ("inpainting", "bfloat16", dict(strength=0.6, num_steps=6, height=48, width=20)),
    ("inpainting", "float32", dict(guidance_scale=0.0, num_steps=1)),
]
CLASSES = {"image-to-image": "ZImageImg2ImgPipeline", "inpainting": "ZImageInpaintPipeline"}


def with_pictures(task, parameters):
    made = completed(parameters)
    made.setdefault("image", picture(made["height"], made["width"]))
    if task == "inpainting":
        made["mask_image"] = mask(64, 48)
    return made


@pytest.mark.parametrize("folder", ["fixed", "dynamic"])
@pytest.mark.parametrize(("task", "dtype", "parameters"), FROM_PICTURES)
def test_tensor_from_a_picture_equals_the_pipelines(folders, folder, task, dtype, parameters):
    parameters = with_pictures(task, parameters)
    ours = run_here(st2i.load(folders[folder], task=task, dtype=dtype), **parameters)
    pipeline = reference(CLASSES[task], folders[folder], dtype)
    check(ours, expected(pipeline, **parameters), dtype)


def test_a_picture_of_another_size_is_resized_to_the_results(folders):
    parameters = completed(dict(height=48, width=20, strength=0.7))
    image = picture(90, 70)
    resized = image.resize((20, 48), resample=Image.Resampling.LANCZOS)
    ours = run_here(st2i.load(folders["fixed"], task="image-to-image"), image=image, **parameters)
    pipeline = reference("ZImageImg2ImgPipeline", folders["fixed"], "float32")
    check(ours, expected(pipeline, image=resized, **parameters), "float32")


def test_every_parameter_changes_the_picture(folders):
    """Otherwise equality would say little about it."""
    common = with_pictures("inpainting", dict(num_steps=5, prompt=LONG, max_sequence_length=256))
    variants = [
        {},
        {"seed": 1},
        {"prompt": "a cat"},
        {"negative_prompt": "rain"},
        {"guidance_scale": 2.0},
        {"guidance_scale": 0.0},
        {"cfg_normalization": 0.5},
        {"cfg_truncation": 0.2},
        {"strength": 0.8},
        {"image": picture(32, 32, seed=1)},
        {"mask_image": Image.new("L", (32, 32), "white")},
    ]
    workflow = st2i.load(folders["fixed"], task="inpainting")
    images = [run_here(workflow, **{**common, **more}) for more in variants]
    for i, image in enumerate(images):
        assert not any(torch.equal(image, other) for other in images[:i]), variants[i]


def test_split_guidance_is_two_forwards_and_nearly_the_same_picture(folders):
    workflow = st2i.load(folders["fixed"])
    parameters = completed(dict(negative_prompt="rain", cfg_truncation=0.5))
    whole = run_here(workflow, **parameters)
    split = run_here(workflow, split_guidance=True, **parameters)
    assert torch.allclose(split, whole, atol=1e-4)
    request = workflow.request(split_guidance=True, **parameters)
    assert count(request, "ZImageTransformer") == 2 * parameters["num_steps"]


def test_spread_images_are_those_of_the_next_seeds(folders):
    workflow = st2i.load(folders["fixed"], task="image-to-image")
    parameters = with_pictures("image-to-image", dict(strength=0.5))
    spread = run_here(workflow, seed=7, num_images=2, spread=True, **parameters)
    for number in range(2):
        assert torch.equal(spread[number], run_here(workflow, seed=7 + number, **parameters))


def count(request, name):
    return sum(annotation["fn"] == name for annotation in request.annotations.values())


def test_without_guidance_there_is_no_negative_prompt(folders):
    workflow = st2i.load(folders["fixed"])
    request = workflow.request(prompt="a cat", num_steps=8, negative_prompt="rain")
    assert len(request.tasks) == 11  # both prompts, 8 steps, VAE
    turbo = workflow.request(prompt="a cat", num_steps=8, guidance_scale=0)
    assert count(turbo, "QwenText") == 1
    assert len(turbo.tasks) == 10


def test_strength_leaves_out_steps_and_one_vae_serves_both_ways(folders):
    workflow = st2i.load(folders["fixed"], task="inpainting")
    pictures = dict(image=picture(32, 32), mask_image=mask(32, 32))
    request = workflow.request(prompt="a cat", num_steps=10, strength=0.35, **pictures)
    assert count(request, "ZImageTransformer") == 4
    models = {a["fn"]: a["model"] for a in request.annotations.values()}
    assert models["InpaintingStart"] == models["VaeDecoder"]


def test_defaults_are_the_pipelines_unless_others_are_given(folders, fresh_registry):
    named = {p.name: p.default for p in st2i.load(folders["fixed"]).parameters}
    assert (named["num_steps"], named["guidance_scale"], named["negative_prompt"]) == (50, 5.0, "")
    assert named["height"] == 256  # the tiny model has no positions for more; 1024 otherwise
    turbo = st2i.load(folders["fixed"], name="turbo", num_steps=8, guidance_scale=0.0, height=64)
    named = {p.name: p.default for p in turbo.parameters}
    assert (named["num_steps"], named["guidance_scale"], named["height"]) == (8, 0.0, 64)
    for task, strength in (("image-to-image", 0.6), ("inpainting", 1.0)):
        workflow = st2i.load(folders["fixed"], task=task)
        assert {p.name: p.default for p in workflow.parameters}["strength"] == strength
    with pytest.raises(st2i.LoadError, match="no parameter 'stepps' to give a default to"):
        st2i.load(folders["fixed"], stepps=8)


@pytest.mark.parametrize(
    ("task", "parameters", "message"),
    [
        (None, dict(prompt=" "), "empty"),
        (None, dict(prompt="x" * 600), r"\d+ tokens, limit 512"),
        (None, dict(negative_prompt="x" * 600), r"negative_prompt is too long: \d+ tokens"),
        (None, dict(max_sequence_length=993), "1 to 992"),
        (None, dict(prompt=LONG, max_sequence_length=60), r"tokens, limit 60"),
        (None, dict(num_steps=0), "1 to 1000"),
        (None, dict(num_steps=10_000), "1 to 1000"),
        (None, dict(height=34), "multiples of 4.*nearest: 36"),
        (None, dict(width=260), "from 4 to 256"),
        (None, dict(guidance_scale=float("nan")), "0 to 100"),
        (None, dict(num_images=17), "1 to 16"),
        (None, dict(strength=0.5), "no parameter 'strength'"),
        ("image-to-image", dict(strength=0.0), "strength=0.0 leaves none of 50 steps; .*above 0"),
        ("image-to-image", dict(strength=1.1), "0 to 1"),
        ("image-to-image", dict(image="cat.png"), "image has type str"),
        ("inpainting", {}, "'mask_image' is missing"),
    ],
)
def test_bad_parameters_are_refused_before_anything_is_sent(folders, task, parameters, message):
    if task is not None:
        parameters = {"image": picture(32, 32), **parameters}
    with pytest.raises(st2i.ParameterError, match=message):
        st2i.load(folders["fixed"], task=task).request(**{"prompt": "a cat", **parameters})


def test_the_longest_prompt_and_the_largest_size_can_be_drawn(folders):
    """The limits are where the model's positions end, and no earlier."""
    workflow = st2i.load(folders["fixed"])
    parameters = dict(prompt="x" * 950, max_sequence_length=992, num_steps=1, guidance_scale=0.0)
    ours = run_here(workflow, height=256, width=4, **parameters)
    assert ours.shape == (3, 256, 4)
    with pytest.raises(st2i.ParameterError, match=r"993 tokens|99\d tokens"):
        workflow.request(**{**parameters, "prompt": "x" * 980})


def edited(folder, path, file, **changes):
    shutil.copytree(folder, path)
    file = path / file
    file.write_text(json.dumps({**json.loads(file.read_text()), **changes}))
    return path


def test_schedulers_the_pipelines_fail_with_are_refused(folders, tmp_path):
    index = dict(scheduler=["diffusers", "EulerDiscreteScheduler"])
    odd = edited(folders["fixed"], tmp_path / "odd", "model_index.json", **index)
    with pytest.raises(st2i.LoadError, match=r"EulerDiscreteScheduler.*FlowMatchEuler"):
        st2i.load(odd)
    file = "scheduler/scheduler_config.json"
    random = edited(folders["fixed"], tmp_path / "random", file, stochastic_sampling=True)
    with pytest.raises(st2i.LoadError, match="stochastic_sampling=True"):
        st2i.load(random)


def test_a_tokenizer_without_its_files_is_refused(folders, tmp_path):
    bare = tmp_path / "bare"
    shutil.copytree(folders["fixed"], bare)
    (bare / "tokenizer" / "chat_template.jinja").unlink()
    with pytest.raises(st2i.LoadError, match="no chat template"):
        st2i.load(bare)
    for file in (bare / "tokenizer").glob("*"):
        if file.name != "tokenizer_config.json":
            file.unlink()
    with pytest.raises(st2i.LoadError, match="no vocabulary"):
        st2i.load(bare)


def test_pictures_equal_the_pipelines(folders):
    parameters = completed(dict(seed=11, num_images=2))
    ours = run_here(st2i.load(folders["fixed"]), output_type="pil", **parameters)
    pipeline = reference("ZImagePipeline", folders["fixed"], "float32")
    theirs = expected(pipeline, output_type="pil", **parameters)
    assert len(ours) == len(theirs) == 2
    for one, other in zip(ours, theirs, strict=True):
        assert np.array_equal(np.asarray(one), np.asarray(other))
