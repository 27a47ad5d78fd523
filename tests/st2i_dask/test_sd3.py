"""Stable Diffusion 3: every image equals, bit for bit, what the unmodified pipelines make."""

from __future__ import annotations

import functools
import json
import shutil

import numpy as np
import pytest
import torch
from PIL import Image

import st2i_dask as st2i
from st2i_dask.catalogue import tiny_sd3

from .originals import expected, picture
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


# ---------------------------------------------------------------- what parameters do


def test_every_parameter_changes_the_picture(folders):
    """Otherwise equality would say little about it."""
    common = completed({"negative_prompt": "a dog", "image": picture(32, 32), "num_steps": 4})
    variants = [
        {},
        {"prompt": "a cow"},
        {"negative_prompt": "blue"},
        {"guidance_scale": 2.0},
        {"guidance_scale": 1.0},
        {"max_sequence_length": 16},
        {"strength": 0.9},
        {"image": picture(32, 32, seed=1)},
        {"seed": 1},
    ]
    workflow = st2i.load(folders["sd3"], task="image-to-image", dtype="float32")
    images = [run_here(workflow, **{**common, **more}) for more in variants]
    for i, image in enumerate(images):
        assert not any(torch.equal(image, other) for other in images[:i]), variants[i]


@pytest.mark.parametrize("task", ["text-to-image", "image-to-image", "inpainting"])
def test_split_guidance_runs_both_prompts_apart(folders, task):
    parameters = completed({"negative_prompt": "a dog"})
    if task != "text-to-image":
        parameters["image"] = picture(32, 32)
    if task == "inpainting":
        parameters["mask_image"] = mask(32, 32)
    workflow = st2i.load(folders["inpaint" if task == "inpainting" else "sd3"], task=task)
    one = workflow.request(**parameters)
    two = workflow.request(split_guidance=True, **parameters)
    steps = {"text-to-image": 3}.get(task, 2)
    assert len(two.tasks) - len(one.tasks) == steps
    batched = run_here(workflow, **parameters)
    apart = run_here(workflow, split_guidance=True, **parameters)
    assert torch.allclose(batched, apart, atol=1e-4)


def test_spread_images_are_those_of_the_next_seeds(folders):
    parameters = completed({"num_images": 2, "image": picture(32, 32)})
    workflow = st2i.load(folders["sd35"], task="image-to-image", dtype="float32")
    ours = run_here(workflow, spread=True, **parameters)
    pipeline = reference(folders["sd35"], "float32", IMAGE)
    for number in range(2):
        alone = {**parameters, "num_images": 1, "seed": number}
        check(ours[number], expected(pipeline, **alone), "float32", parameters)


def test_one_task_per_invocation(folders):
    def tasks(**parameters):
        made = st2i.load(folders["sd3"]).request(prompt="a cat", num_steps=5, **parameters)
        return sorted(annotation["fn"] for annotation in made.annotations.values())

    texts = ["ClipGText", "ClipLText", "T5Text"]
    steps = ["SD3Transformer"] * 5
    assert tasks(num_images=2) == sorted([*texts * 2, *steps, "VaeDecoder"])
    assert tasks(guidance_scale=1.0) == sorted([*texts, *steps, "VaeDecoder"])
    assert tasks(num_images=2, spread=True).count("T5Text") == 2
    models = {
        annotation["model"]
        for annotation in st2i.load(folders["sd3"], task="image-to-image")
        .request(prompt="a cat", image=picture(8, 8))
        .annotations.values()
    }
    assert len(models) == 5  # encoder and decoder are one VAE


@pytest.mark.parametrize(
    "scheduler",
    [
        dict(_class_name="FlowMatchHeunDiscreteScheduler"),
        dict(use_dynamic_shifting=True),
        dict(
            _class_name="UniPCMultistepScheduler",
            use_flow_sigmas=True,
            prediction_type="flow_prediction",
        ),
    ],
)
def test_other_schedulers(folders, scheduler):
    import diffusers

    parameters = completed({"num_steps": 4})
    workflow = st2i.load(folders["sd35"], dtype="float32", scheduler=scheduler)
    pipeline = reference(folders["sd35"], "float32")
    kept = pipeline.scheduler
    cls = getattr(diffusers, scheduler.get("_class_name", type(kept).__name__))
    options = {name: value for name, value in scheduler.items() if name != "_class_name"}
    pipeline.scheduler = cls.from_config({**kept.config, **options})
    try:
        theirs = expected(pipeline, **parameters)
    finally:
        pipeline.scheduler = kept
    check(run_here(workflow, **parameters), theirs, "float32", parameters)
    assert not torch.equal(theirs, expected(pipeline, **parameters))


# ---------------------------------------------------------------- what is refused


@pytest.mark.parametrize(
    ("form", "task", "parameters", "message"),
    [
        ("sd3", None, dict(prompt=" "), "prompt=' ' is empty"),
        ("sd3", None, dict(prompt="x" * 300), "302 tokens, limit 256"),
        ("sd3", None, dict(negative_prompt="x" * 20, max_sequence_length=9), "tokens, limit 9"),
        ("sd35", None, dict(prompt="x" * 100), "102 tokens, limit 77"),
        ("sd3", None, dict(height=34), "multiples of 4 from 4 to 96; nearest: 36"),
        ("sd3", None, dict(height=100), "multiples of 4 from 4 to 96"),
        ("sd3", None, dict(num_steps=0), "1 to 1000"),
        ("sd3", None, dict(num_steps=10_000), "1 to 1000"),
        ("sd3", None, dict(guidance_scale=float("nan")), "0 to 100"),
        ("sd3", None, dict(num_images=17), "1 to 16"),
        ("sd3", None, dict(strength=0.5), "no parameter 'strength'"),
        ("sd3", "image-to-image", {}, "parameter 'image' is missing"),
        ("sd3", "image-to-image", dict(image=TENSOR), r"wanted \(1, 3, 36, 36\)"),
        (
            "sd3",
            "image-to-image",
            dict(image=picture(8, 8), strength=0.0, num_steps=4),
            "strength=0.0 leaves none of 4 steps",
        ),
        ("sd3", "inpainting", dict(image=picture(8, 8)), "parameter 'mask_image' is missing"),
    ],
)
def test_bad_parameters_are_refused_before_anything_is_sent(
    folders, form, task, parameters, message
):
    parameters = {"prompt": "a cat", "height": 36, "width": 36, **parameters}
    with pytest.raises(st2i.ParameterError, match=message):
        st2i.load(folders[form], task=task).request(**parameters)


def _named(scheduler):
    return {"_class_name": scheduler}


@pytest.mark.parametrize(
    ("form", "task", "scheduler", "message"),
    [
        (
            "sd3",
            "image-to-image",
            _named("EulerDiscreteScheduler"),
            "adds no noise to a picture; take",
        ),
        ("sd3", None, _named("KarrasVeScheduler"), r"cannot use the scheduler KarrasVe.*take Flow"),
        (
            "sd3",
            None,
            dict(stochastic_sampling=True),
            "stochastic_sampling=True and draws noise that no seed gives again",
        ),
    ],
)
def test_schedulers_that_a_pipeline_cannot_use_are_refused(folders, form, task, scheduler, message):
    with pytest.raises(st2i.LoadError, match=message):
        st2i.load(folders[form], task=task, scheduler=scheduler)


def test_a_missing_tokenizer_is_an_error_at_load(folders, tmp_path):
    shutil.copytree(folders["sd3"], tmp_path / "broken")
    for file in (tmp_path / "broken" / "tokenizer_3").iterdir():
        if file.name != "tokenizer_config.json":
            file.unlink()
    with pytest.raises(st2i.LoadError, match="tokenizer_3 has no vocabulary"):
        st2i.load(tmp_path / "broken")


def test_channels_that_inpainting_does_not_know_are_refused(folders, tmp_path):
    shutil.copytree(folders["sd3"], tmp_path / "odd")
    file = tmp_path / "odd" / "transformer" / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "in_channels": 17}))
    (file.parent / "diffusion_pytorch_model.safetensors").unlink()  # it would be of another shape
    with pytest.raises(st2i.LoadError, match=r"16 or 33 channels.*not 17 and 16"):
        st2i.load(tmp_path / "odd", task="inpainting")
