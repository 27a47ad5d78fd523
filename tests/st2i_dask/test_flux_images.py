"""FLUX.1 with several images, a negative prompt, from a picture and with a mask: equal to the pipelines."""

from __future__ import annotations

import functools
import itertools
import json
import shutil

import numpy as np
import pytest
import torch
from PIL import Image

import st2i_dask as st2i
from st2i_dask.catalogue import tiny

from .originals import expected as of_pipeline
from .originals import picture
from .running import run_here

torch.set_num_threads(1)

TEXT, IMAGE, INPAINT = "text-to-image", "image-to-image", "inpainting"
CLASSES = {TEXT: "FluxPipeline", IMAGE: "FluxImg2ImgPipeline", INPAINT: "FluxInpaintPipeline"}


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    root = tmp_path_factory.mktemp("flux")
    return {
        "dev": tiny.save_flux(root / "pictured-dev", guidance=True),
        "schnell": tiny.save_flux(root / "pictured-schnell", guidance=False),
    }


@functools.cache
def reference(folder, task, dtype):
    import diffusers

    cls = getattr(diffusers, CLASSES[task])
    pipeline = cls.from_pretrained(folder, dtype=getattr(torch, dtype))
    pipeline.set_progress_bar_config(disable=True)
    return pipeline


def blob(height, width):
    """A grey mask with soft edges."""
    y, x = np.mgrid[0:height, 0:width]
    far = np.hypot(y - height / 2, x - width / 3) / min(height, width)
    return Image.fromarray((255 * (1 - far).clip(0, 1)).astype(np.uint8))


def expected(folder, task, dtype, **parameters):
    return of_pipeline(reference(folder, task, dtype), **parameters)


def completed(task, parameters):
    made = dict(prompt="a cat", seed=3, num_steps=3, height=32, width=48)
    if task != TEXT:
        made["image"] = picture(64, 60)
    if task == INPAINT:
        made["mask_image"] = blob(50, 40)
    return {**made, **parameters}


def check(folder, task, dtype, parameters):
    parameters = completed(task, parameters)
    ours = run_here(st2i.load(folder, task=task, dtype=dtype), **parameters)
    theirs = expected(folder, task, dtype, **parameters)
    assert str(theirs.dtype) == f"torch.{dtype}"
    assert torch.equal(ours.float(), theirs.float())
    assert ours.std() > 0.01  # not a constant picture, which would prove nothing
    return ours


TRUE_CFG = dict(negative_prompt="a dog", true_cfg_scale=4.0)
TENSOR = torch.rand(1, 3, 32, 48, generator=torch.Generator().manual_seed(1)) * 2 - 1
CASES = [
    ("dev", TEXT, "float32", dict(num_images=2)),
    ("dev", TEXT, "bfloat16", dict(num_images=3, num_steps=1, height=20)),
    ("dev", TEXT, "float32", TRUE_CFG),
    ("schnell", TEXT, "bfloat16", {**TRUE_CFG, "num_images": 2, "num_steps": 4}),
    ("schnell", TEXT, "float32", dict(true_cfg_scale=2.5, negative_prompt="")),
    ("schnell", TEXT, "float32", dict(true_cfg_scale=2.5)),  # no negative prompt: no guidance
    ("dev", IMAGE, "bfloat16", dict(true_cfg_scale=2.5)),
    ("dev", IMAGE, "float32", dict()),
    ("dev", IMAGE, "bfloat16", dict(strength=1.0, num_images=2, seed=2**63)),
    ("dev", IMAGE, "float32", dict(strength=0.1, image=np.asarray(picture(40, 20)) / 255)),
    ("schnell", IMAGE, "float32", {**TRUE_CFG, "strength": 0.75, "num_steps": 4}),
    ("schnell", IMAGE, "bfloat16", dict(image=TENSOR, num_steps=1, strength=0.5)),
    ("dev", INPAINT, "float32", dict(strength=1.0)),
    ("dev", INPAINT, "bfloat16", {**TRUE_CFG, "num_images": 2, "num_steps": 5}),
    ("schnell", INPAINT, "float32", dict(mask_image=blob(9, 30).convert("1"), num_steps=1)),
    ("schnell", INPAINT, "bfloat16", dict(mask_image=picture(70, 90, seed=4), strength=0.85)),
]


@pytest.mark.parametrize(("form", "task", "dtype", "parameters"), CASES)
def test_images_equal_the_pipelines(folders, form, task, dtype, parameters):
    check(folders[form], task, dtype, parameters)


@pytest.mark.slow
@pytest.mark.parametrize("more", [{}, TRUE_CFG, dict(num_images=2)], ids=["one", "cfg", "two"])
@pytest.mark.parametrize("size", [(32, 32), (48, 20), (20, 64)])
@pytest.mark.parametrize(
    ("form", "task", "dtype", "seed", "num_steps"),
    list(
        itertools.product(
            ("dev", "schnell"), (TEXT, IMAGE, INPAINT), ("float32", "bfloat16"), (0, 7), (1, 3, 8)
        )
    ),
)
def test_images_equal_the_pipelines_everywhere(
    folders, form, task, dtype, seed, num_steps, size, more
):
    height, width = size
    parameters = dict(height=height, width=width, seed=seed, num_steps=num_steps)
    check(folders[form], task, dtype, {**parameters, **more})


@pytest.mark.parametrize("task", [TEXT, IMAGE, INPAINT])
def test_spread_images_are_those_of_their_seeds(folders, task):
    parameters = completed(task, dict(seed=2**64 - 1, num_steps=2))
    workflow = st2i.load(folders["dev"], task=task, dtype="float32")
    ours = run_here(workflow, **parameters, num_images=2, spread=True)
    for image, seed in zip(ours, (2**64 - 1, 0), strict=True):
        theirs = expected(folders["dev"], task, "float32", **{**parameters, "seed": seed})
        assert torch.equal(image, theirs)
    assert not torch.equal(*ours)


@pytest.mark.parametrize("task", [IMAGE, INPAINT])
def test_every_parameter_changes_the_picture(folders, task):
    """Otherwise equality would say little about it."""
    common = completed(task, dict(num_steps=4))
    variants = [
        {},
        {"strength": 0.9},
        {"image": picture(64, 60, seed=1)},
        {"guidance_scale": 1.0},
        {"true_cfg_scale": 3.0, "negative_prompt": ""},
        {"true_cfg_scale": 3.0, "negative_prompt": "a dog"},
        {"true_cfg_scale": 5.0, "negative_prompt": "a dog"},
    ]
    if task == INPAINT:
        variants.append({"mask_image": blob(30, 90)})
    workflow = st2i.load(folders["dev"], task=task, dtype="float32")
    images = [run_here(workflow, **{**common, **more}) for more in variants]
    for i, image in enumerate(images):
        assert not any(torch.equal(image, other) for other in images[:i]), variants[i]


def test_a_mask_keeps_what_is_black_in_it(folders):
    """Without the VAE's blur: everything is kept, and it is the encoded picture that is shown."""
    none = Image.new("L", (48, 32), 0)
    parameters = [dict(mask_image=none, seed=0, num_steps=n, strength=1.0) for n in (1, 6)]
    images = [check(folders["dev"], INPAINT, "float32", each) for each in parameters]
    assert torch.equal(*images)


# ---------------------------------------------------------------- what is composed


def names(folder, task, **parameters):
    request = st2i.load(folder, task=task).request(**completed(task, parameters))
    return [annotation["fn"] for annotation in request.annotations.values()]


def test_true_cfg_is_two_invocations_a_step_and_two_of_each_text_encoder(folders):
    made = names(folders["dev"], TEXT, num_steps=5, **TRUE_CFG)
    assert made.count("FluxTransformer") == 10
    assert made.count("ClipText") == made.count("T5Text") == 2
    off = names(folders["dev"], TEXT, num_steps=5, negative_prompt="a dog", true_cfg_scale=1.0)
    assert off.count("FluxTransformer") == 5
    assert off.count("ClipText") == off.count("T5Text") == 1


def test_both_forwards_of_a_step_are_ready_at_once(folders):
    made = st2i.load(folders["dev"]).request(prompt="a cat", num_steps=2, **TRUE_CFG)
    steps = [
        {dependency.key for dependency in task.args[4:]}
        for key, task in made.tasks.items()
        if made.annotations[key]["fn"] == "FluxTransformer"
    ]
    transformers = {
        key for key, about in made.annotations.items() if about["fn"] == "FluxTransformer"
    }
    # The two of the first step wait for neither; those of the second for both, and not for each other.
    assert sorted(len(step & transformers) for step in steps) == [0, 0, 2, 2]


@pytest.mark.parametrize(("spread", "texts", "decoders"), [(False, 1, 1), (True, 1, 3)])
def test_texts_are_encoded_once_for_all_images(folders, spread, texts, decoders):
    made = names(folders["dev"], TEXT, num_images=3, spread=spread, num_steps=2)
    assert made.count("T5Text") == made.count("ClipText") == texts
    assert made.count("VaeDecoder") == decoders
    assert made.count("FluxTransformer") == 2 * decoders


@pytest.mark.parametrize(("strength", "steps"), [(1.0, 10), (0.6, 6), (0.05, 1), (0.999, 10)])
def test_strength_leaves_steps_out(folders, strength, steps):
    made = names(folders["dev"], IMAGE, strength=strength, num_steps=10)
    assert made.count("FluxTransformer") == steps


def test_the_encoder_of_pictures_shares_the_vae(folders):
    request = st2i.load(folders["dev"], task=IMAGE).request(**completed(IMAGE, {}))
    models = {about["fn"]: about["model"] for about in request.annotations.values()}
    assert models["ImageEncoder"] == models["VaeDecoder"]


@pytest.mark.parametrize(
    ("task", "parameters", "message"),
    [
        (TEXT, dict(num_images=0), "num_images=0 is out of range; allowed: 1 to 16"),
        (TEXT, dict(negative_prompt="x" * 600), "negative_prompt is too long: 602 tokens"),
        (TEXT, dict(true_cfg_scale=float("nan")), "true_cfg_scale=nan is out of range"),
        (TEXT, dict(strength=0.5), "no parameter 'strength'"),
        (IMAGE, dict(strength=0.0), r"strength=0.0 leaves none of 3 steps"),
        (IMAGE, dict(strength=1.5), "strength=1.5 is out of range"),
        (IMAGE, dict(image="cat.png"), "image has type str, wanted one RGB image"),
        (IMAGE, dict(image=torch.zeros(1, 3, 8, 8)), r"wanted \(1, 3, 32, 48\)"),
        (IMAGE, dict(mask_image=blob(8, 8)), "no parameter 'mask_image'"),
        (IMAGE, dict(num_steps=0), "1 to 1000"),
        (IMAGE, dict(num_steps=10_000), "1 to 1000"),
        (IMAGE, dict(height=33), "multiples of 4"),
        (INPAINT, dict(mask_image=np.zeros((8, 8))), "mask_image has type ndarray"),
    ],
)
def test_bad_parameters_are_refused_before_anything_is_sent(folders, task, parameters, message):
    with pytest.raises(st2i.ParameterError, match=message):
        st2i.load(folders["dev"], task=task).request(**completed(task, parameters))


@pytest.mark.parametrize("task", [IMAGE, INPAINT])
def test_pictures_are_wanted(folders, task):
    with pytest.raises(st2i.ParameterError, match="parameter 'image' is missing"):
        st2i.load(folders["dev"], task=task).request(prompt="a cat")


@pytest.mark.parametrize("task", [IMAGE, INPAINT])
def test_a_folder_of_such_a_pipeline_has_its_task(folders, tmp_path, task):
    folder = tmp_path / f"of-{task}"
    shutil.copytree(folders["dev"], folder)
    index = json.loads((folder / "model_index.json").read_text())
    (folder / "model_index.json").write_text(json.dumps({**index, "_class_name": CLASSES[task]}))
    parameters = completed(task, {})
    ours = run_here(st2i.load(folder, dtype="float32"), **parameters)
    assert torch.equal(ours, expected(folders["dev"], task, "float32", **parameters))


UNIPC = dict(
    _class_name="UniPCMultistepScheduler", use_flow_sigmas=True, prediction_type="flow_prediction"
)


def test_a_scheduler_with_a_memory_gives_what_the_pipeline_gives(folders):
    import diffusers

    pipeline = diffusers.FluxPipeline.from_pretrained(folders["dev"], dtype=torch.float32)
    pipeline.set_progress_bar_config(disable=True)
    config = {**pipeline.scheduler.config, **UNIPC}
    pipeline.scheduler = diffusers.UniPCMultistepScheduler.from_config(config)
    theirs = pipeline(
        "a cat",
        num_inference_steps=6,
        height=32,
        width=32,
        output_type="pt",
        generator=torch.Generator().manual_seed(0),
    ).images[0]
    workflow = st2i.load(folders["dev"], dtype="float32", scheduler=UNIPC)
    ours = run_here(workflow, prompt="a cat", num_steps=6, height=32, width=32)
    assert torch.equal(ours, theirs)


@pytest.mark.parametrize(
    ("task", "changes", "message"),
    [
        (
            TEXT,
            dict(_class_name="FlowMatchHeunDiscreteScheduler"),
            "does not support custom sigmas",
        ),
        (TEXT, dict(_class_name="EulerDiscreteScheduler"), "unexpected keyword argument 'mu'"),
        (TEXT, dict(_class_name="FlowMatchLCMScheduler"), "draws noise that no seed gives again"),
        (TEXT, dict(stochastic_sampling=True), "stochastic_sampling=True"),
        (IMAGE, UNIPC, "UniPCMultistepScheduler, which adds no noise to a picture"),
        (INPAINT, UNIPC, "UniPCMultistepScheduler, which adds no noise to a picture"),
    ],
)
def test_a_scheduler_that_the_pipeline_cannot_use_is_refused(folders, task, changes, message):
    with pytest.raises(st2i.LoadError, match=message):
        st2i.load(folders["dev"], task=task, scheduler=changes)
