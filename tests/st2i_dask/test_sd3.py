"""Stable Diffusion 3: every image equals, bit for bit, what the unmodified pipelines make."""

from __future__ import annotations

import functools

import numpy as np
import pytest
import torch
from PIL import Image

import st2i_dask as st2i
from st2i_dask.catalogue import tiny_sd3

from .running import run_here

# Workers run one torch thread each; the reference must sum in the same order.
torch.set_num_threads(1)

FORMS = {
    "sd3": {},
    "sd35": dict(v35=True, t5=False),
    "inpaint": dict(in_channels=33, t5=False, pipeline="StableDiffusion3InpaintPipeline"),
}


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    root = tmp_path_factory.mktemp("sd3")
    return {form: tiny_sd3.save_sd3(root / form, **options) for form, options in FORMS.items()}


@functools.cache
def reference(folder, dtype, task="StableDiffusion3Pipeline"):
    import diffusers

    parts = diffusers.StableDiffusion3Pipeline.load_config(folder)
    absent = {part: None for part, value in parts.items() if value == [None, None]}
    pipeline = getattr(diffusers, task).from_pretrained(
        folder, dtype=getattr(torch, dtype), **absent
    )
    pipeline.set_progress_bar_config(disable=True)
    return pipeline


def expected(pipeline, *, seed, num_steps, output_type="pt", num_images=1, **parameters):
    made = pipeline(
        **parameters,
        num_inference_steps=num_steps,
        num_images_per_prompt=num_images,
        output_type=output_type,
        generator=torch.Generator("cpu").manual_seed(seed),
    ).images
    return made if num_images > 1 else made[0]


def completed(parameters):
    return {**dict(prompt="a cat", seed=0, num_steps=3, height=32, width=32), **parameters}


def check(ours, theirs, dtype, parameters):
    assert str(theirs.dtype) == f"torch.{dtype}"
    assert ours.shape[-3:] == (3, parameters["height"], parameters["width"])
    assert torch.equal(ours.float(), theirs.float())
    assert ours.std() > 0.01  # not a constant picture, which would prove nothing


CASES = [
    # form, dtype, parameters (seed 0, 3 steps, 32x32 pixels by default)
    ("sd3", "float32", dict(negative_prompt="a dog", seed=7)),
    ("sd3", "float32", dict(height=48, width=20, num_images=2, guidance_scale=3.5)),
    ("sd3", "float32", dict(guidance_scale=1.0, num_steps=1, max_sequence_length=32)),
    ("sd3", "bfloat16", dict(num_steps=12)),
    ("sd3", "bfloat16", dict(num_images=2, seed=-3, negative_prompt="blue", width=64)),
    ("sd35", "float32", dict(seed=2**63)),
    ("sd35", "bfloat16", dict(prompt="tea", height=20, width=40)),
]


@pytest.mark.parametrize(("form", "dtype", "parameters"), CASES)
def test_tensor_equals_the_pipelines(folders, form, dtype, parameters):
    parameters = completed(parameters)
    ours = run_here(st2i.load(folders[form], dtype=dtype), **parameters)
    theirs = expected(reference(folders[form], dtype), **parameters)
    check(ours, theirs, dtype, parameters)


# ---------------------------------------------------------------- from an image

IMAGE, INPAINT = "StableDiffusion3Img2ImgPipeline", "StableDiffusion3InpaintPipeline"
TASKS = {IMAGE: "image-to-image", INPAINT: "inpainting"}


def picture(height, width, seed=0):
    pixels = np.random.default_rng(seed).random((height, width, 3), dtype=np.float32)
    return Image.fromarray((pixels * 255).astype(np.uint8))


def mask(height, width):
    """Half of it, with an edge of greys."""
    columns = np.clip(np.linspace(-1, 2, width), 0, 1) * 255
    return Image.fromarray(np.tile(columns.astype(np.uint8), (height, 1)))


# Contiguous: a convolution over channels that come last in memory sums in another order.
TENSOR = torch.from_numpy(
    np.ascontiguousarray(np.asarray(picture(32, 32), np.float32).transpose(2, 0, 1)[None]) / 127.5
    - 1
)
FROM_IMAGE = [
    # form, pipeline, dtype, parameters (4 steps by default)
    ("sd3", IMAGE, "float32", dict(negative_prompt="a dog", seed=3)),
    ("sd3", IMAGE, "float32", dict(strength=1.0, num_images=2, width=48)),
    ("sd3", IMAGE, "bfloat16", dict(image=TENSOR, guidance_scale=1.0, strength=0.3, num_steps=10)),
    ("sd35", IMAGE, "bfloat16", dict(num_images=2, strength=0.26, height=20)),
    ("sd3", INPAINT, "float32", dict(negative_prompt="a dog", seed=3)),
    ("sd3", INPAINT, "float32", dict(strength=1.0, num_images=2, width=48)),
    ("sd3", INPAINT, "bfloat16", dict(image=TENSOR, guidance_scale=1.0, num_steps=10)),
    ("sd35", INPAINT, "bfloat16", dict(strength=0.26, num_images=2, height=20)),
    ("inpaint", INPAINT, "float32", dict(strength=1.0)),
    ("inpaint", INPAINT, "bfloat16", dict(num_images=2, width=48)),
    ("inpaint", INPAINT, "float32", dict(guidance_scale=1.0)),
]


@pytest.mark.parametrize(("form", "pipeline", "dtype", "parameters"), FROM_IMAGE)
def test_tensor_from_an_image_equals_the_pipelines(folders, form, pipeline, dtype, parameters):
    parameters = completed({"num_steps": 4, "image": picture(40, 36), **parameters})
    if pipeline == INPAINT:
        parameters = {"mask_image": mask(33, 47), **parameters}
    ours = run_here(st2i.load(folders[form], task=TASKS[pipeline], dtype=dtype), **parameters)
    theirs = expected(reference(folders[form], dtype, pipeline), **parameters)
    check(ours, theirs, dtype, parameters)
