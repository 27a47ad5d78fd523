"""Stable Diffusion XL with ControlNets: images equal StableDiffusionXLControlNetPipeline's."""

from __future__ import annotations

import functools
import json
import shutil

import numpy as np
import pytest
import torch
from distributed import wait

import st2i_dask as st2i
from st2i_dask.catalogue import tiny_sdxl

from .originals import expected, picture
from .running import run_here
from .test_sd3 import check, completed, mask
from .test_sdxl import IMAGE, INPAINT, PLAIN
from .test_sdxl import reference as uncontrolled

TIMEOUT = 120
SCALE, START, END = (
    "controlnet_conditioning_scale",
    "control_guidance_start",
    "control_guidance_end",
)
CONTROLLED = "StableDiffusionXLControlNetPipeline"
# Pixels as this pipeline has them, in [0, 1].
TENSOR = torch.from_numpy(
    np.ascontiguousarray(np.asarray(picture(32, 32), np.float32).transpose(2, 0, 1)[None]) / 255
)


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """A folder with a ControlNet inside, one with several, a plain one, and ControlNets alone."""
    from diffusers import MultiControlNetModel, StableDiffusionXLControlNetPipeline

    root = tmp_path_factory.mktemp("sdxl-controlled")
    nets = [tiny_sdxl.sdxl_control(seed) for seed in (1, 2)]
    several = StableDiffusionXLControlNetPipeline(
        **tiny_sdxl.sdxl().components, controlnet=MultiControlNetModel(nets)
    )
    several.save_pretrained(root / "several")
    return {
        "one": tiny_sdxl.save_sdxl(root / "one", pipeline=CONTROLLED),
        "several": root / "several",
        "plain": tiny_sdxl.save_sdxl(root / "plain"),
        "canny": tiny_sdxl.save_sdxl_control(root / "canny", seed=1),
        "depth": tiny_sdxl.save_sdxl_control(root / "depth", seed=2),
    }


@functools.cache
def reference(folder, dtype, *controlnets):
    from diffusers import ControlNetModel, StableDiffusionXLControlNetPipeline

    dtype = getattr(torch, dtype)
    options = {}
    if controlnets:
        nets = [ControlNetModel.from_pretrained(each, torch_dtype=dtype) for each in controlnets]
        options = dict(controlnet=nets if len(nets) > 1 else nets[0])
    pipeline = StableDiffusionXLControlNetPipeline.from_pretrained(folder, dtype=dtype, **options)
    pipeline.set_progress_bar_config(disable=True)
    return pipeline


def controlled(pipeline, **parameters):
    return expected(pipeline, image=parameters.pop("control_image"), **parameters)


CASES = [
    # dtype, parameters (seed 0, 3 steps, 32x32 pixels and an image of that size by default)
    ("float32", {SCALE: 0.7, "seed": 5, "negative_prompt": "a dog"}),
    ("bfloat16", {SCALE: 0.7, START: 0.25, END: 0.75, "num_steps": 8}),
    ("float32", dict(guidance_scale=1.0, control_image=TENSOR, num_steps=1)),
    ("bfloat16", dict(num_images=2, height=24, width=48)),
    ("float16", dict(height=None, width=None, control_image=picture(49, 34))),
]


@pytest.mark.parametrize(("dtype", "parameters"), CASES)
def test_tensor_equals_the_pipelines(folders, dtype, parameters):
    parameters = completed({"control_image": picture(32, 32), **parameters})
    ours = run_here(st2i.load(folders["one"], dtype=dtype), **parameters)
    theirs = controlled(reference(folders["one"], dtype), **parameters)
    size = dict(height=theirs.shape[-2], width=theirs.shape[-1])
    check(ours, theirs, str(theirs.dtype)[6:], size)


SEVERAL = [
    (("canny", "depth"), "float32", {SCALE: [0.7, 0.4], "seed": 5}),
    (("depth", "canny"), "bfloat16", {SCALE: 0.8, "num_images": 2, END: 0.7}),
    (("canny",), "bfloat16", {SCALE: 0.5}),
    ((), "float32", {SCALE: [1.0, -0.4], "height": None, "width": None}),
    (("canny", "depth"), "float32", {START: [0.5, 0.0], END: [1.0, 0.5], "num_steps": 4}),
    (("canny", "depth"), "bfloat16", {START: [0.0, 0.4], SCALE: [0.7, 1.0]}),
]


@pytest.mark.parametrize(("names", "dtype", "parameters"), SEVERAL)
def test_several_controlnets_and_those_from_elsewhere(folders, names, dtype, parameters):
    nets = [folders[name] for name in names]
    images = [picture(32, 32, seed) for seed in range(len(nets) or 2)]
    parameters = completed(
        {"control_image": images if len(images) > 1 else images[0], **parameters}
    )
    folder = folders["plain" if nets else "several"]
    ours = run_here(st2i.load(folder, controlnet=nets, dtype=dtype), **parameters)
    theirs = controlled(reference(folder, dtype, *nets), **parameters)
    check(ours, theirs, dtype, {"height": 32, "width": 32})


@pytest.mark.parametrize(
    "scheduler", ["UniPCMultistepScheduler", "EulerAncestralDiscreteScheduler"]
)
def test_schedulers(folders, scheduler):
    import diffusers

    parameters = completed({"control_image": picture(32, 32), "num_steps": 4})
    original = reference(folders["one"], "float32")
    kept = original.scheduler
    original.scheduler = getattr(diffusers, scheduler).from_config(kept.config)
    try:
        theirs = controlled(original, **parameters)
    finally:
        original.scheduler = kept
    changes = {"_class_name": scheduler}
    ours = run_here(st2i.load(folders["one"], dtype="float32", scheduler=changes), **parameters)
    check(ours, theirs, "float32", parameters)


def test_every_control_parameter_changes_the_picture(folders):
    """Otherwise equality would say little about it."""
    common = completed({"control_image": picture(32, 32), "num_steps": 4})
    variants = [{}, {SCALE: 0.5}, {START: 0.5}, {END: 0.5}, {"control_image": picture(32, 32, 1)}]
    workflow = st2i.load(folders["one"], dtype="float32")
    images = [run_here(workflow, **{**common, **more}) for more in variants]
    for i, image in enumerate(images):
        assert not any(torch.equal(image, other) for other in images[:i]), variants[i]


def test_split_guidance_is_about_the_same(folders):
    workflow = st2i.load(folders["several"], dtype="float32")
    parameters = completed({"control_image": [picture(32, 32), picture(32, 32, 1)]})
    batched = run_here(workflow, **parameters)
    apart = run_here(workflow, split_guidance=True, **parameters)
    assert torch.allclose(batched, apart, atol=1e-4)


def test_spread_images_are_those_of_the_next_seeds(folders):
    parameters = completed({"num_images": 2, "control_image": picture(32, 32)})
    ours = run_here(st2i.load(folders["one"], dtype="float32"), spread=True, **parameters)
    for number in range(2):
        alone = {**parameters, "num_images": 1, "seed": number}
        theirs = controlled(reference(folders["one"], "float32"), **alone)
        check(ours[number], theirs, "float32", parameters)


def test_residuals_are_callback_inputs_of_every_step_in_the_window(folders):
    made = st2i.load(folders["several"]).request(
        prompt="a cat", control_image=[picture(32, 32)] * 2, num_steps=8, **{START: 0.5}
    )
    steps = [a for a in made.annotations.values() if a["fn"] == "SDXLUnet"]
    assert [len(a["callbacks"]) for a in steps] == [0] * 4 + [2] * 4
    assert sum(a["fn"] == "SDXLControlNet" for a in made.annotations.values()) == 8


@pytest.mark.parametrize(
    ("parameters", "message"),
    [
        (dict(height=36), "multiples of 8 from 8 to 4096"),
        (dict(control_image=picture(8, 8)), "control_image holds 1 images, wanted a list of 2"),
        (
            dict(control_image=[picture(32, 32), picture(40, 32)], height=None),
            "images of several sizes",
        ),
        (
            dict(control_image=[picture(1, 32), picture(32, 32)], height=None),
            r"control_image\[0\] has 32x1 pixels, and the result its size; allowed: 2 to 4096",
        ),
        ({SCALE: [1.0]}, "holds 1 values, wanted a list of 2 numbers"),
        ({START: 1.5}, "0 to 1"),
        ({START: [0.0, 0.5], END: 0.4}, "start=0.5 is not below control_guidance_end=0.4"),
        (
            {START: 0.5, END: 0.5},
            "control_guidance_start=0.5 is not below control_guidance_end=0.5",
        ),
    ],
)
def test_bad_parameters_are_refused_before_anything_is_sent(folders, parameters, message):
    parameters = completed({"control_image": [picture(8, 8)] * 2, **parameters})
    with pytest.raises(st2i.ParameterError, match=message):
        st2i.load(folders["several"]).request(**parameters)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (dict(_class_name="ControlNetUnionModel"), "is a ControlNetUnionModel; supported: Contr"),
        (dict(cross_attention_dim=32), "cross_attention_dim=32, the UNet 64; use a"),
        (dict(conditioning_embedding_out_channels=[8]), "1 times smaller, the VAE 2 times"),
        (dict(global_pool_conditions=True), "has global_pool_conditions"),
    ],
)
def test_a_controlnet_that_does_not_fit_is_refused(folders, tmp_path, changes, message):
    shutil.copytree(folders["canny"], tmp_path / "odd")
    file = tmp_path / "odd" / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **changes}))
    with pytest.raises(st2i.LoadError, match=message):
        st2i.load(folders["plain"], controlnet=tmp_path / "odd")
    with pytest.raises(st2i.LoadError, match="at most 4 ControlNets"):
        st2i.load(folders["plain"], controlnet=[folders["canny"]] * 5)


def test_two_dtypes_are_refused_with_the_cure(folders, tmp_path, monkeypatch):
    from diffusers import ControlNetModel

    half = ControlNetModel.from_pretrained(folders["canny"], torch_dtype=torch.bfloat16)
    half.save_pretrained(tmp_path / "half")
    with pytest.raises(st2i.LoadError, match=r"half.*bfloat16.*float32; give both one"):
        st2i.load(folders["plain"], controlnet=tmp_path / "half")
    # Of weights that only workers have.
    monkeypatch.setattr("st2i_dask.catalogue.folder._stored_here", lambda path: None)
    with pytest.raises(st2i.LoadError, match=r"half.*bfloat16.*float32; give both one"):
        run_here(
            st2i.load(folders["plain"], controlnet=tmp_path / "half"),
            **completed({"control_image": picture(32, 32)}),
        )


# ---------------------------------------------------------------- on a cluster


def test_requests_at_once_on_a_cluster_equal_those_made_alone(client, folders):
    """Values cross processes, residuals while the ControlNets still run; a VAE that is upcast."""
    controls = [picture(32, 32), picture(32, 32, 1)]
    several = completed({"control_image": controls, SCALE: [1.0, 0.5]})
    changed = completed({"image": picture(32, 32), "num_images": 2, "num_steps": 8})
    painted = {**changed, "mask_image": mask(32, 32), "seed": 4, "strength": 0.5}
    for side in ("height", "width"):
        del changed[side]
    text = completed({"seed": 3, "negative_prompt": "a dog"})
    plain, nets, dtype = folders["plain"], (folders["canny"], folders["depth"]), "float16"
    load = functools.partial(st2i.load, dtype=dtype)
    futures = [
        load(plain).submit(client, output_type="pt", tenant="alice", **text),
        load(plain, controlnet=nets).submit(client, output_type="pt", tenant="bob", **several),
        load(plain, task="image-to-image").submit(client, output_type="pt", **changed),
        load(plain, task="inpainting").submit(client, output_type="pt", **painted),
    ]
    wait(futures, timeout=TIMEOUT)
    theirs = [
        expected(uncontrolled(plain, dtype, PLAIN), **text),
        controlled(reference(plain, dtype, *nets), **several),
        expected(uncontrolled(plain, dtype, IMAGE), **changed),
        expected(uncontrolled(plain, dtype, INPAINT), **painted),
    ]
    for future, image in zip(futures, theirs, strict=True):
        check(future.result(timeout=TIMEOUT), image, "float32", dict(height=32, width=32))
