"""Stable Diffusion 3 with ControlNets: images equal StableDiffusion3ControlNetPipeline's."""

from __future__ import annotations

import functools
import json
import shutil

import pytest
import torch
from distributed import wait

import st2i_dask as st2i
from st2i_dask.catalogue import tiny_sd3

from .originals import expected, picture
from .running import run_here
from .test_sd3 import IMAGE, INPAINT, TENSOR, check, completed, mask
from .test_sd3 import reference as uncontrolled

TIMEOUT = 120
SCALE, START, END = (
    "controlnet_conditioning_scale",
    "control_guidance_start",
    "control_guidance_end",
)


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """A folder for each form with the ControlNet inside, a plain one, and ControlNets alone."""
    root = tmp_path_factory.mktemp("sd3-controlled")
    made = {
        form: tiny_sd3.save_sd3_controlnet(root / form, form=form)
        for form in tiny_sd3.CONTROL_FORMS
    }
    made["plain"] = tiny_sd3.save_sd3(root / "plain", t5=False)
    for seed, form in enumerate(("zeros", "pooled", "large"), 1):
        path = root / f"alone-{form}"
        made[f"alone-{form}"] = tiny_sd3.save_sd3_control(path, form=form, seed=seed)
    return made


@functools.cache
def reference(folder, dtype, *controlnets):
    from diffusers import SD3ControlNetModel, StableDiffusion3ControlNetPipeline

    dtype = getattr(torch, dtype)
    options = {}
    if controlnets:
        nets = [SD3ControlNetModel.from_pretrained(each, torch_dtype=dtype) for each in controlnets]
        options = dict(controlnet=nets if len(nets) > 1 else nets[0])
        options.update(text_encoder_3=None, tokenizer_3=None)
    pipeline = StableDiffusion3ControlNetPipeline.from_pretrained(folder, dtype=dtype, **options)
    pipeline.set_progress_bar_config(disable=True)
    return pipeline


def controlled(pipeline, *, seed, **parameters):
    torch.manual_seed(seed)  # the control image's latents come from the global generator
    return expected(pipeline, seed=seed, **parameters)


CASES = [
    # form, dtype, parameters (seed 0, 3 steps, 32x32 pixels and an image of that size by default)
    ("zeros", "float32", {SCALE: 0.7, "seed": 5, "negative_prompt": "a dog"}),
    ("zeros", "bfloat16", {SCALE: 0.7, START: 0.25, END: 0.75, "num_steps": 8}),
    ("zeros", "float32", dict(guidance_scale=1.0, control_image=TENSOR, num_steps=1)),
    ("zeros", "float32", dict(num_images=2, height=24, width=48)),
    ("pooled", "float32", dict(seed=-3, control_image=picture(64, 50))),
    ("pooled", "bfloat16", dict(num_images=2, guidance_scale=1.0, height=48)),
    ("large", "float32", dict(seed=2**63)),
    ("zeros", "float32", {START: 0.5, END: 0.5}),  # no step at all
    ("pooled", "float32", {START: 0.8, END: 0.3}),
    ("large", "bfloat16", dict(height=48, width=24)),
]


@pytest.mark.parametrize(("form", "dtype", "parameters"), CASES)
def test_tensor_equals_the_pipelines(folders, form, dtype, parameters):
    parameters = completed({"control_image": picture(32, 32), **parameters})
    ours = run_here(st2i.load(folders[form], dtype=dtype), **parameters)
    theirs = controlled(_plain(folders, form, dtype), **parameters)
    check(ours, theirs, dtype, parameters)


def _plain(folders, form, dtype):
    if form != "large":
        return reference(folders[form], dtype)
    # The pipeline cannot load such a ControlNet from a folder of its own.
    return _large(folders["large"], dtype)


@functools.cache
def _large(folder, dtype):
    from diffusers import SD3ControlNetModel, StableDiffusion3ControlNetPipeline

    dtype = getattr(torch, dtype)
    net = SD3ControlNetModel.from_pretrained(folder, subfolder="controlnet", torch_dtype=dtype)
    pipeline = StableDiffusion3ControlNetPipeline.from_pretrained(
        folder, dtype=dtype, controlnet=net
    )
    pipeline.set_progress_bar_config(disable=True)
    return pipeline


ALTERNATING = {START: [0.5, 0.0], END: [1.0, 0.5], "num_steps": 4}
SEVERAL = [
    (("zeros", "pooled"), "float32", {SCALE: [0.7, 0.4], "seed": 5}),
    (("pooled", "zeros"), "bfloat16", {SCALE: [0.7, 1.0], "num_images": 2, END: 0.7}),
    (("zeros",), "bfloat16", {SCALE: 0.5}),
    (("large", "large"), "float32", {SCALE: [1.0, -0.4], "width": 24}),
    (("zeros", "pooled"), "float32", {**ALTERNATING, SCALE: [1.0, 1.0]}),
    (("pooled", "zeros"), "bfloat16", {END: [0.0, 0.7], SCALE: [1.0, 0.5], "num_steps": 4}),
]


@pytest.mark.parametrize(("forms", "dtype", "parameters"), SEVERAL)
def test_controlnets_from_elsewhere_go_with_a_plain_folder(folders, forms, dtype, parameters):
    nets = [folders[f"alone-{form}"] for form in forms]
    images = [picture(32, 32, seed) for seed in range(len(nets))]
    parameters = completed({"control_image": images if len(nets) > 1 else images[0], **parameters})
    workflow = st2i.load(folders["plain"], controlnet=nets, dtype=dtype)
    theirs = controlled(reference(folders["plain"], dtype, *nets), **parameters)
    check(run_here(workflow, **parameters), theirs, dtype, parameters)


def test_every_control_parameter_changes_the_picture(folders):
    """Otherwise equality would say little about it."""
    common = completed({"control_image": picture(32, 32), "num_steps": 4})
    variants = [{}, {SCALE: 0.5}, {START: 0.5}, {END: 0.5}, {"control_image": picture(32, 32, 1)}]
    workflow = st2i.load(folders["zeros"], dtype="float32")
    images = [run_here(workflow, **{**common, **more}) for more in variants]
    for i, image in enumerate(images):
        assert not any(torch.equal(image, other) for other in images[:i]), variants[i]


def test_split_guidance_is_about_the_same(folders):
    nets = [folders["alone-zeros"], folders["alone-pooled"]]
    workflow = st2i.load(folders["plain"], controlnet=nets, dtype="float32")
    parameters = completed({"control_image": [picture(32, 32), picture(32, 32, 1)]})
    batched = run_here(workflow, **parameters)
    apart = run_here(workflow, split_guidance=True, **parameters)
    assert torch.allclose(batched, apart, atol=1e-4)


def test_spread_images_are_those_of_the_next_seeds(folders):
    parameters = completed({"num_images": 2, "control_image": picture(32, 32)})
    ours = run_here(st2i.load(folders["pooled"], dtype="float32"), spread=True, **parameters)
    for number in range(2):
        alone = {**parameters, "num_images": 1, "seed": number}
        theirs = controlled(reference(folders["pooled"], "float32"), **alone)
        check(ours[number], theirs, "float32", parameters)


def test_residuals_are_callback_inputs_of_every_step_in_the_window(folders):
    nets = [folders["alone-zeros"], folders["alone-pooled"]]
    workflow = st2i.load(folders["plain"], controlnet=nets)
    images = [picture(32, 32)] * 2
    made = workflow.request(
        prompt="a cat", control_image=images, height=32, width=32, num_steps=8, **{START: 0.5}
    )
    steps = [a for a in made.annotations.values() if a["fn"] == "SD3Transformer"]
    assert [len(a["callbacks"]) for a in steps] == [0] * 4 + [2] * 4
    assert sum(a["fn"] == "SD3ControlNet" for a in made.annotations.values()) == 8


@pytest.mark.parametrize(
    ("parameters", "message"),
    [
        (dict(height=36), "multiples of 8 from 8 to 96"),
        (dict(control_image=picture(8, 8)), "control_image holds 1 images, wanted a list of 2"),
        ({SCALE: [1.0]}, "holds 1 values, wanted a list of 2 numbers"),
        ({SCALE: [1.0, 11]}, r"controlnet_conditioning_scale\[1\]=11.0 is out of range"),
        ({START: 1.5}, "0 to 1"),
    ],
)
def test_bad_parameters_are_refused_before_anything_is_sent(folders, parameters, message):
    nets = [folders["alone-zeros"], folders["alone-pooled"]]
    parameters = completed({"control_image": [picture(8, 8)] * 2, **parameters})
    with pytest.raises(st2i.ParameterError, match=message):
        st2i.load(folders["plain"], controlnet=nets).request(**parameters)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (dict(_class_name="FluxControlNetModel"), "is a FluxControlNetModel; supported: SD3"),
        (dict(joint_attention_dim=32), "joint_attention_dim=32, the transformer 64; use a"),
        (dict(num_attention_heads=4), "a width of=64, the transformer 32"),
        (dict(extra_conditioning_channels=1), "takes 1 channels beside.*inpainting"),
        (dict(num_layers=0), "no blocks"),
    ],
)
def test_a_controlnet_that_does_not_fit_is_refused(folders, tmp_path, changes, message):
    shutil.copytree(folders["alone-zeros"], tmp_path / "odd")
    file = tmp_path / "odd" / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **changes}))
    with pytest.raises(st2i.LoadError, match=message):
        st2i.load(folders["plain"], controlnet=tmp_path / "odd")


def test_controlnets_that_do_not_go_together_are_refused(folders):
    nets = [folders["alone-zeros"], folders["alone-large"]]
    with pytest.raises(st2i.LoadError, match=r"alone-zeros' reads the prompt, .*large' does not"):
        st2i.load(folders["plain"], controlnet=nets)
    with pytest.raises(st2i.LoadError, match="at most 4 ControlNets"):
        st2i.load(folders["plain"], controlnet=nets[:1] * 5)


def test_a_scheduler_that_shifts_with_the_size_is_refused(folders):
    """The pipeline does not tell it the size, and fails in its first step."""
    with pytest.raises(st2i.LoadError, match="set use_dynamic_shifting to False"):
        st2i.load(folders["zeros"], scheduler=dict(use_dynamic_shifting=True))


def test_two_dtypes_are_refused_with_the_cure(folders, tmp_path, monkeypatch):
    from diffusers import SD3ControlNetModel

    half = SD3ControlNetModel.from_pretrained(folders["alone-zeros"], torch_dtype=torch.bfloat16)
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
    """Values cross processes, residuals while the ControlNets still run."""
    nets = [folders["alone-zeros"], folders["alone-pooled"]]
    large = completed({"control_image": picture(48, 32), "height": 48})
    several = completed({"control_image": [picture(32, 32), picture(32, 32, 1)], SCALE: [1.0, 0.5]})
    changed = completed({"image": picture(40, 40), "num_images": 2, "num_steps": 4})
    painted = {**changed, "mask_image": mask(32, 32), "seed": 4}
    plain, dtype = folders["plain"], "float32"
    load = functools.partial(st2i.load, dtype=dtype)
    futures = [
        load(folders["large"]).submit(client, output_type="pt", tenant="alice", **large),
        load(plain, controlnet=nets).submit(client, output_type="pt", tenant="bob", **several),
        load(plain, task="image-to-image").submit(client, output_type="pt", **changed),
        load(plain, task="inpainting").submit(client, output_type="pt", **painted),
    ]
    wait(futures, timeout=TIMEOUT)
    theirs = [
        controlled(_large(folders["large"], dtype), **large),
        controlled(reference(plain, dtype, *nets), **several),
        expected(uncontrolled(plain, dtype, IMAGE), **changed),
        expected(uncontrolled(plain, dtype, INPAINT), **painted),
    ]
    for future, image, parameters in zip(
        futures, theirs, (large, several, changed, painted), strict=True
    ):
        check(future.result(timeout=TIMEOUT), image, dtype, parameters)
