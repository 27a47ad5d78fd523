"""Stable Diffusion XL with ControlNets from an image: equal to StableDiffusionXLControlNetImg2ImgPipeline."""

from __future__ import annotations

import functools
import json
import shutil

import pytest
import torch

import st2i_dask as st2i
from st2i_dask.catalogue import tiny_lora, tiny_sdxl

from .originals import expected, picture
from .running import run_here
from .test_sd3 import check
from .test_sdxl_controlnet import END, SCALE, START

IMAGE = "image-to-image"


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    root = tmp_path_factory.mktemp("sdxl-controlled-images")
    return {
        "plain": tiny_sdxl.save_sdxl(root / "plain"),
        "canny": tiny_sdxl.save_sdxl_control(root / "canny", seed=1),
        "depth": tiny_sdxl.save_sdxl_control(root / "depth", seed=2),
        "one": tiny_sdxl.save_sdxl(root / "one", pipeline="StableDiffusionXLControlNetPipeline"),
    }


@functools.cache
def reference(folder, dtype, *controlnets):
    from diffusers import ControlNetModel, StableDiffusionXLControlNetImg2ImgPipeline

    dtype = getattr(torch, dtype)
    nets = [ControlNetModel.from_pretrained(each, torch_dtype=dtype) for each in controlnets]
    pipeline = StableDiffusionXLControlNetImg2ImgPipeline.from_pretrained(
        folder, dtype=dtype, controlnet=nets if len(nets) > 1 else nets[0]
    )
    pipeline.set_progress_bar_config(disable=True)
    return pipeline


def completed(nets, parameters):
    images = [picture(32, 32, seed) for seed in range(len(nets))]
    made = dict(prompt="a cat", num_steps=4, image=picture(32, 32, 9), seed=3)
    made["control_image"] = images if len(nets) > 1 else images[0]
    return {**made, **parameters}


CASES = [
    # ControlNets, dtype, parameters
    (("canny",), "float32", {SCALE: 0.7, "negative_prompt": "a dog", "strength": 0.5}),
    (("canny",), "bfloat16", dict(num_images=2, height=24, width=48, image=picture(50, 60))),
    (("canny",), "float32", dict(image=picture(49, 34), control_image=picture(48, 35, 1))),
    (("canny",), "float16", dict(guidance_scale=1.0, num_steps=1, strength=1.0)),
    # Windows count the steps that are taken.
    (("depth",), "float32", {START: 0.3, END: 0.7, "num_steps": 10, "strength": 0.6}),
    (("canny", "depth"), "float32", {SCALE: [0.7, -0.4], START: [0.0, 0.5], "num_steps": 5}),
    (("depth", "canny"), "bfloat16", {END: [0.4, 1.0], "num_images": 2}),
]


@pytest.mark.parametrize(("names", "dtype", "parameters"), CASES)
def test_tensor_equals_the_pipelines(folders, names, dtype, parameters):
    nets = [folders[name] for name in names]
    parameters = completed(names, parameters)
    workflow = st2i.load(folders["plain"], task=IMAGE, controlnet=nets, dtype=dtype)
    ours = run_here(workflow, **parameters)
    theirs = expected(reference(folders["plain"], dtype, *nets), **parameters)
    size = dict(height=theirs.shape[-2], width=theirs.shape[-1])
    check(ours, theirs, str(theirs.dtype)[6:], size)


def test_schedulers_that_draw_noise_go_on_where_the_encoder_ended(folders):
    import diffusers

    pipeline = reference(folders["plain"], "float32", folders["canny"])
    kept = pipeline.scheduler
    parameters = completed(["canny"], {"strength": 0.7})
    pipeline.scheduler = diffusers.EulerAncestralDiscreteScheduler.from_config(kept.config)
    try:
        theirs = expected(pipeline, **parameters)
    finally:
        pipeline.scheduler = kept
    workflow = st2i.load(
        folders["plain"],
        task=IMAGE,
        controlnet=folders["canny"],
        dtype="float32",
        scheduler={"_class_name": "EulerAncestralDiscreteScheduler"},
    )
    assert torch.equal(run_here(workflow, **parameters), theirs)


def test_each_picture_counts_and_so_do_adapters(folders, tmp_path):
    workflow = st2i.load(folders["one"], task=IMAGE, dtype="float32")
    lora = tiny_lora.save_lora(tmp_path / "a.safetensors", tiny_sdxl.sdxl(), parts=["unet"])
    variants = [
        {},
        {SCALE: 0.0},
        {"image": picture(32, 32, 5)},
        {"control_image": picture(32, 32, 6)},
        {"loras": [(lora, 1.0)]},
    ]
    drawn = [run_here(workflow, **completed(["canny"], each)) for each in variants]
    assert len({image.numpy().tobytes() for image in drawn}) == len(drawn)


def test_a_folder_of_that_pipeline_is_taken_as_it_is(folders, tmp_path):
    folder = shutil.copytree(folders["one"], tmp_path / "made")
    index = json.loads((folder / "model_index.json").read_text())
    index["_class_name"] = "StableDiffusionXLControlNetImg2ImgPipeline"
    (folder / "model_index.json").write_text(json.dumps(index))
    parameters = completed(["canny"], {})
    ours = run_here(st2i.load(folder, dtype="float32"), **parameters)
    theirs = expected(
        reference(folders["plain"], "float32", folders["one"] / "controlnet"), **parameters
    )
    assert torch.equal(ours, theirs)


@pytest.mark.parametrize(
    ("parameters", "message"),
    [
        (
            dict(control_image=picture(40, 32)),
            "control_image has 32x40 pixels, image 32x32; resize",
        ),
        (dict(control_image=picture(40, 32), width=32), "control_image has 32x40 pixels"),
        (dict(image="cat.png"), "image has type str"),
        (dict(image=None), "image=None"),
        (dict(strength=0.1), "leaves none of 4 steps"),
        ({START: 0.5, END: 0.5}, "start=0.5 is not below control_guidance_end=0.5"),
    ],
)
def test_bad_parameters_are_refused_before_anything_is_sent(folders, parameters, message):
    with pytest.raises(st2i.ParameterError, match=message):
        st2i.load(folders["one"], task=IMAGE).request(**completed(["canny"], parameters))
    # Of one size in the end.
    fine = completed(["canny"], dict(control_image=picture(40, 32), height=32, width=32))
    assert st2i.load(folders["one"], task=IMAGE).request(**fine)
