"""Stable Diffusion XL: every image equals, bit for bit, what the unmodified pipelines make."""

from __future__ import annotations

import functools
import json
import shutil

import pytest
import torch

import st2i_dask as st2i
from st2i_dask.catalogue import tiny_sdxl

from .originals import expected, picture
from .running import run_here
from .test_sd3 import TENSOR, check, completed, mask

PLAIN = "StableDiffusionXLPipeline"
IMAGE = "StableDiffusionXLImg2ImgPipeline"
INPAINT = "StableDiffusionXLInpaintPipeline"
TASKS = {PLAIN: "text-to-image", IMAGE: "image-to-image", INPAINT: "inpainting"}

FORMS = {
    "sdxl": {},
    "words": dict(upcast=False, force_zeros_for_empty_prompt=False),
    "centred": dict(latents_mean=(0.1, -0.2, 0.3, 0.0), latents_std=(1.1, 0.9, 1.0, 1.2)),
    "inpaint": dict(in_channels=9, pipeline=INPAINT),
    "refiner": dict(refiner=True, pipeline=IMAGE, requires_aesthetics_score=True),
}


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    root = tmp_path_factory.mktemp("sdxl")
    return {form: tiny_sdxl.save_sdxl(root / form, **options) for form, options in FORMS.items()}


@functools.cache
def reference(folder, dtype, task=PLAIN):
    import diffusers

    absent = {"text_encoder": None, "tokenizer": None} if folder.name == "refiner" else {}
    pipeline = getattr(diffusers, task).from_pretrained(
        folder, dtype=getattr(torch, dtype), **absent
    )
    pipeline.set_progress_bar_config(disable=True)
    return pipeline


CASES = [
    # form, dtype, parameters (seed 0, 3 steps, 32x32 pixels by default)
    ("sdxl", "float32", dict(negative_prompt="a dog", seed=7)),
    ("sdxl", "float32", dict(height=48, width=24, num_images=2)),
    ("sdxl", "float32", dict(negative_prompt="", seed=2**63)),
    ("sdxl", "float32", dict(guidance_scale=1.0, num_steps=1)),
    ("sdxl", "bfloat16", dict(num_images=2, seed=-3, negative_prompt="blue", width=64)),
    ("sdxl", "float16", dict(num_steps=4)),
    ("words", "bfloat16", dict(num_steps=12)),
    ("words", "float32", dict(guidance_scale=7.5, height=24)),
    ("centred", "float32", dict(prompt="tea")),
]


@pytest.mark.parametrize(("form", "dtype", "parameters"), CASES)
def test_tensor_equals_the_pipelines(folders, form, dtype, parameters):
    parameters = completed(parameters)
    ours = run_here(st2i.load(folders[form], dtype=dtype), **parameters)
    theirs = expected(reference(folders[form], dtype), **parameters)
    check(ours, theirs, str(theirs.dtype)[6:], parameters)


FROM_IMAGE = [
    # form, pipeline, dtype, parameters (5 steps, strength 0.5 by default)
    ("sdxl", IMAGE, "float32", dict(negative_prompt="a dog", seed=3)),
    ("sdxl", IMAGE, "float32", dict(strength=1.0, num_images=2, image=picture(49, 32))),
    ("sdxl", IMAGE, "bfloat16", dict(image=TENSOR, guidance_scale=1.0, num_steps=10)),
    ("sdxl", IMAGE, "float16", dict(strength=0.8)),
    ("words", IMAGE, "bfloat16", dict(num_images=2, strength=0.3)),
    ("centred", IMAGE, "bfloat16", {}),
    ("refiner", IMAGE, "float32", dict(negative_prompt="a dog", num_images=2)),
    ("sdxl", INPAINT, "float32", dict(negative_prompt="a dog", seed=3, width=48)),
    ("sdxl", INPAINT, "bfloat16", dict(image=TENSOR, strength=1.0, num_images=2)),
    ("sdxl", INPAINT, "float32", dict(guidance_scale=1.0, strength=0.9999)),
    ("centred", INPAINT, "float32", {}),
    ("inpaint", INPAINT, "float32", dict(strength=1.0, num_images=2)),
    ("inpaint", INPAINT, "bfloat16", dict(width=48)),
    ("inpaint", INPAINT, "float32", dict(guidance_scale=1.0)),
]


def from_image(pipeline, parameters):
    parameters = {"num_steps": 5, "strength": 0.5, "image": picture(36, 33), **parameters}
    if pipeline == INPAINT:
        return completed({"mask_image": mask(33, 47), **parameters})
    parameters = completed(parameters)
    for side in ("height", "width"):
        del parameters[side]
    return parameters


@pytest.mark.parametrize(("form", "pipeline", "dtype", "parameters"), FROM_IMAGE)
def test_tensor_from_an_image_equals_the_pipelines(folders, form, pipeline, dtype, parameters):
    parameters = from_image(pipeline, parameters)
    ours = run_here(st2i.load(folders[form], task=TASKS[pipeline], dtype=dtype), **parameters)
    theirs = expected(reference(folders[form], dtype, pipeline), **parameters)
    height, width = theirs.shape[-2:]
    check(ours, theirs, str(theirs.dtype)[6:], {"height": height, "width": width})


SCHEDULERS = [
    ("DDIMScheduler", {}),
    ("TCDScheduler", {}),  # whose own eta is not the pipeline's
    ("DPMSolverMultistepScheduler", {}),
    ("UniPCMultistepScheduler", {}),
    ("EulerAncestralDiscreteScheduler", {}),
    ("HeunDiscreteScheduler", {}),
    ("DPMSolverMultistepScheduler", dict(algorithm_type="sde-dpmsolver++")),
    ("EulerDiscreteScheduler", dict(use_karras_sigmas=True, timestep_spacing="trailing")),
]


ANCESTRAL = ("EulerAncestralDiscreteScheduler", {})
ALL = [
    pytest.param(
        pipeline,
        *scheduler,
        # Noise of each step comes after that of the masked image, which inpainting alone draws.
        marks=[] if pipeline == PLAIN or scheduler == ANCESTRAL else pytest.mark.slow,
    )
    for pipeline in TASKS
    for scheduler in SCHEDULERS
]


@pytest.mark.parametrize(("pipeline", "scheduler", "options"), ALL)
def test_schedulers(folders, pipeline, scheduler, options):
    import diffusers

    folder = folders["sdxl"]
    parameters = completed({"num_steps": 4})
    if pipeline != PLAIN:
        parameters = from_image(pipeline, {"strength": 0.8})
    original = reference(folder, "float32", pipeline)
    kept = original.scheduler
    original.scheduler = getattr(diffusers, scheduler).from_config({**kept.config, **options})
    try:
        theirs = expected(original, **parameters)
    finally:
        original.scheduler = kept
    changes = {"_class_name": scheduler, **options}
    workflow = st2i.load(folder, task=TASKS[pipeline], dtype="float32", scheduler=changes)
    ours = run_here(workflow, **parameters)
    check(ours, theirs, "float32", dict(height=theirs.shape[-2], width=theirs.shape[-1]))


# ---------------------------------------------------------------- what parameters do


def test_every_parameter_changes_the_picture(folders):
    """Otherwise equality would say little about it."""
    common = from_image(IMAGE, {"num_steps": 6})
    variants = [
        {},
        {"prompt": "a cow"},
        {"negative_prompt": ""},
        {"negative_prompt": "blue"},
        {"guidance_scale": 2.0},
        {"guidance_scale": 1.0},
        {"strength": 0.9},
        {"image": picture(36, 33, seed=1)},
        {"seed": 1},
    ]
    workflow = st2i.load(folders["sdxl"], task="image-to-image", dtype="float32")
    images = [run_here(workflow, **{**common, **more}) for more in variants]
    for i, image in enumerate(images):
        assert not any(torch.equal(image, other) for other in images[:i]), variants[i]


@pytest.mark.parametrize("pipeline", TASKS)
def test_split_guidance_runs_both_prompts_apart(folders, pipeline):
    form = "inpaint" if pipeline == INPAINT else "sdxl"
    parameters = completed({"num_steps": 5})
    if pipeline != PLAIN:
        parameters = from_image(pipeline, {})
    workflow = st2i.load(folders[form], task=TASKS[pipeline])
    one = workflow.request(**parameters)
    two = workflow.request(split_guidance=True, **parameters)
    assert len(two.tasks) - len(one.tasks) == (5 if pipeline == PLAIN else 2)
    batched = run_here(workflow, **parameters)
    apart = run_here(workflow, split_guidance=True, **parameters)
    assert torch.allclose(batched, apart, atol=1e-4)


def test_the_refiners_halves_have_their_own_scores(folders):
    parameters = from_image(IMAGE, {})
    workflow = st2i.load(folders["refiner"])  # a folder of that pipeline: its own task
    batched = run_here(workflow, **parameters)
    apart = run_here(workflow, split_guidance=True, **parameters)
    assert torch.allclose(batched, apart, atol=1e-4)


def test_spread_images_are_those_of_the_next_seeds(folders):
    parameters = from_image(INPAINT, {"num_images": 2})
    workflow = st2i.load(folders["sdxl"], task="inpainting", dtype="float32")
    ours = run_here(workflow, spread=True, **parameters)
    pipeline = reference(folders["sdxl"], "float32", INPAINT)
    for number in range(2):
        alone = {**parameters, "num_images": 1, "seed": number}
        check(ours[number], expected(pipeline, **alone), "float32", parameters)


def test_one_task_per_invocation(folders):
    def tasks(form="sdxl", task=None, dtype=None, **parameters):
        workflow = st2i.load(folders[form], task=task, dtype=dtype)
        made = workflow.request(prompt="a cat", num_steps=5, **parameters)
        return sorted(annotation["fn"] for annotation in made.annotations.values())

    texts, steps = ["ClipGText", "ClipLText"], ["SDXLUnet"] * 5
    assert tasks(num_images=2) == sorted([*texts, *steps, "VaeDecoder"])
    assert tasks("words") == sorted([*texts * 2, *steps, "VaeDecoder"])
    assert tasks(dtype="float16") == sorted([*texts, *steps, "UpcastVaeDecoder"])
    painted = dict(image=picture(8, 8), mask_image=mask(8, 8), strength=0.4)
    encoders = [
        name for name in tasks(task="inpainting", dtype="bfloat16", **painted) if "Enc" in name
    ]
    assert encoders == ["UpcastVaeEncoder"]  # the masked image's latents have no use there


# ---------------------------------------------------------------- what is refused


@pytest.mark.parametrize(
    ("form", "task", "parameters", "message"),
    [
        ("sdxl", None, dict(prompt=" "), "prompt=' ' is empty"),
        ("sdxl", None, dict(prompt="x" * 100), "102 tokens, limit 77"),
        ("sdxl", None, dict(negative_prompt="x" * 100), "102 tokens, limit 77"),
        ("sdxl", None, dict(height=36), "multiples of 8 from 8 to 4096"),
        ("sdxl", None, dict(num_steps=0), "1 to 1000"),
        ("sdxl", None, dict(num_steps=10_000), "1 to 1000"),
        ("sdxl", None, dict(guidance_scale=float("nan")), "0 to 100"),
        ("sdxl", "image-to-image", {}, "parameter 'image' is missing"),
        (
            "sdxl",
            "image-to-image",
            dict(image=picture(1, 9)),
            "9x1 pixels, and the result its size",
        ),
        (
            "sdxl",
            "image-to-image",
            dict(image=picture(8, 8), strength=0.2, num_steps=4),
            r"strength=0.2 leaves none of 4 steps; give at least 0.25",
        ),
        ("sdxl", "inpainting", dict(image=picture(8, 8)), "parameter 'mask_image' is missing"),
    ],
)
def test_bad_parameters_are_refused_before_anything_is_sent(
    folders, form, task, parameters, message
):
    with pytest.raises(st2i.ParameterError, match=message):
        st2i.load(folders[form], task=task).request(**{"prompt": "a cat", **parameters})


@pytest.mark.parametrize(
    ("scheduler", "message"),
    [
        (dict(_class_name="KarrasVeScheduler"), "cannot use the scheduler KarrasVe.*take Euler"),
        (dict(_class_name="DDPMScheduler", variance_type="learned_range"), "DDPMScheduler"),
    ],
)
def test_schedulers_that_the_pipeline_cannot_use_are_refused(folders, scheduler, message):
    with pytest.raises(st2i.LoadError, match=message):
        st2i.load(folders["sdxl"], scheduler=scheduler)


def edited(folder, path, file, **changes):
    shutil.copytree(folder, path)
    text = path / file
    text.write_text(json.dumps({**json.loads(text.read_text()), **changes}))
    return path


@pytest.mark.parametrize(
    ("form", "task", "changes", "message"),
    [
        ("sdxl", "inpainting", dict(in_channels=5), "4 or 9 channels and VAEs of 4, not 5 and 4"),
        ("sdxl", None, dict(time_cond_proj_dim=8), "time_cond_proj_dim.*st2i.from_pipeline"),
        ("refiner", "text-to-image", {}, "cannot be used for this task: .*time embedding"),
    ],
)
def test_folders_that_a_pipeline_cannot_use_are_refused(
    folders, tmp_path, form, task, changes, message
):
    folder = edited(folders[form], tmp_path / "odd", "unet/config.json", **changes)
    # Its weights would not be what the changed configuration says.
    (folder / "unet" / "diffusion_pytorch_model.safetensors").unlink()
    with pytest.raises(st2i.LoadError, match=message):
        st2i.load(folder, task=task)


def test_a_missing_tokenizer_is_an_error_at_load(folders, tmp_path):
    shutil.copytree(folders["sdxl"], tmp_path / "broken")
    for file in (tmp_path / "broken" / "tokenizer").iterdir():
        if file.name != "tokenizer_config.json":
            file.unlink()
    with pytest.raises(st2i.LoadError, match="tokenizer has no vocabulary"):
        st2i.load(tmp_path / "broken")
