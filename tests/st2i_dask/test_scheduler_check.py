"""A scheduler that a pipeline cannot run is refused when it is loaded; one that it can run gives its image."""

from __future__ import annotations

import importlib.util
import json
import math
import shutil
import traceback

import pytest
import torch

import st2i_dask as st2i
from st2i_dask.catalogue import (
    tiny,
    tiny_flux2_klein,
    tiny_qwen_image,
    tiny_sd3,
    tiny_sdxl,
    tiny_z_image,
)
from st2i_dask.catalogue.scheduler_check import Steps

from .originals import expected, reference
from .running import run_here

SAVE = {
    "flux": (tiny.save_flux, "FluxPipeline"),
    "klein": (tiny_flux2_klein.save_flux2_klein, "Flux2KleinPipeline"),
    "sd3": (tiny_sd3.save_sd3, "StableDiffusion3Pipeline"),
    "sdxl": (tiny_sdxl.save_sdxl, "StableDiffusionXLPipeline"),
    "z-image": (tiny_z_image.save_z_image, "ZImagePipeline"),
    "qwen": (tiny_qwen_image.save_qwen_image, "QwenImagePipeline"),
}
OPTIONS = {"klein": {"text_encoder_out_layers": (0, 1, 2)}}


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    root = tmp_path_factory.mktemp("scheduled")
    return {name: save(root / name) for name, (save, _) in SAVE.items()}


def load(folders, family, scheduler=None, **more):
    options = {**OPTIONS.get(family, {}), **more}
    return st2i.load(folders[family], dtype="float32", scheduler=scheduler, **options)


NONSENSE = [
    ("sd3", dict(shift="x")),
    ("z-image", dict(shift="x")),
    *((family, dict(num_train_timesteps=0)) for family in SAVE),
    *((family, dict(num_train_timesteps="many")) for family in SAVE),
    ("sd3", dict(shift=math.nan)),
    ("sd3", dict(shift=None)),
    ("flux", dict(base_shift="x")),
    ("flux", dict(max_shift=math.nan)),
    ("sdxl", dict(beta_schedule="steep")),
    ("sdxl", dict(beta_start="x")),
    ("sdxl", dict(prediction_type="guess")),
    ("sdxl", dict(timestep_spacing="wide")),
    ("sdxl", dict(_class_name="DPMSolverMultistepScheduler", algorithm_type="magic")),
    ("sdxl", dict(_class_name="DPMSolverMultistepScheduler", solver_order="x")),
    ("sdxl", dict(_class_name="FlowMapEulerDiscreteScheduler")),  # no init_noise_sigma
    ("sdxl", dict(_class_name="FlowMatchEulerDiscreteScheduler")),
    ("sdxl", dict(_class_name="RePaintScheduler")),
    ("sd3", dict(_class_name="ScoreSdeVeScheduler")),
]


@pytest.mark.parametrize(("family", "changes"), NONSENSE)
def test_nonsense_is_refused_when_it_is_loaded(folders, family, changes):
    with pytest.raises(st2i.LoadError, match=r"cannot use the scheduler \w+, which .*; \w+"):
        load(folders, family, changes)


@pytest.mark.parametrize("family", ["flux", "sdxl"])
def test_nonsense_in_the_folder_is_refused_too(folders, tmp_path, family):
    path = shutil.copytree(folders[family], tmp_path / family)
    file = path / "scheduler" / "scheduler_config.json"
    config = json.loads(file.read_text())
    file.write_text(json.dumps({**config, "num_train_timesteps": 0}))
    with pytest.raises(st2i.LoadError, match="cannot use the scheduler"):
        st2i.load(path)
    # An image to image pipeline asks no less.
    with pytest.raises(st2i.LoadError, match="cannot use the scheduler"):
        st2i.load(path, task="image-to-image")
    index = json.loads((path / "model_index.json").read_text())
    del index["scheduler"]
    (path / "model_index.json").write_text(json.dumps(index))
    with pytest.raises(st2i.LoadError, match="names no scheduler"):
        st2i.load(path)


NEEDS = {
    "LMSDiscreteScheduler": "scipy",
    "DPMSolverSDEScheduler": "torchsde",
    "CosineDPMSolverMultistepScheduler": "torchsde",
}


@pytest.mark.parametrize("name", NEEDS)
def test_a_missing_library_is_named(folders, name):
    if importlib.util.find_spec(NEEDS[name]) is not None:
        pytest.skip(f"{NEEDS[name]} is installed")
    with pytest.raises(st2i.LoadError, match=f"needs {NEEDS[name]}: pip install {NEEDS[name]}"):
        load(folders, "sdxl", dict(_class_name=name))


@pytest.mark.parametrize("family", ["sd3", "sdxl"])
def test_too_few_steps_for_a_scheduler_are_refused_before_anything_is_sent(folders, family):
    workflow = load(folders, family, dict(_class_name="PNDMScheduler"))
    parameters = dict(prompt="a cat", height=32, width=32)
    for steps in (1, 3):
        with pytest.raises(st2i.ParameterError, match=rf"num_steps={steps} does not suit the sch"):
            workflow.request(**parameters, num_steps=steps)
    assert workflow.request(**parameters, num_steps=4)


def test_too_many_steps_for_a_scheduler_are_refused(folders):
    workflow = load(
        folders, "sdxl", dict(_class_name="DDIMScheduler", num_train_timesteps=20), num_steps=9
    )
    assert workflow.request(prompt="a cat", num_steps=20)
    with pytest.raises(st2i.ParameterError, match="num_steps=21 does not suit the scheduler"):
        workflow.request(prompt="a cat", num_steps=21)


def test_a_schedule_is_tried_once_for_each_number_of_steps():
    made = []

    def make(steps):
        made.append(steps)
        raise ValueError("none")

    rule = Steps(make)
    for _ in range(3):
        with pytest.raises(st2i.ParameterError, match=r"it cannot make so many \(ValueError: none"):
            rule.check("num_steps", 7)
    with pytest.raises(st2i.ParameterError, match="allowed: 1 to 1000"):
        rule.check("num_steps", 0)
    assert made == [7]


def classes():
    import diffusers

    return sorted(
        name
        for name in dir(diffusers)
        if name.endswith("Scheduler") and isinstance(getattr(diffusers, name), type)
    )


def verdicts(folders, family, names, num_steps):
    """Those that are drawn with; each must equal the pipeline's image, and it fails with the others or
    cannot be repeated."""
    import diffusers

    pipeline = reference(SAVE[family][1], folders[family], "float32")
    kept, drawn = pipeline.scheduler, []
    parameters = dict(prompt="a cat", height=32, width=32, num_steps=num_steps)
    for name in names:
        try:
            workflow = load(folders, family, dict(_class_name=name), name=f"{family} {name}")
            workflow.request(**parameters)
        except st2i.St2iError as error:
            refusal = str(error)
        else:
            refusal = None
        theirs = None
        try:
            pipeline.scheduler = getattr(diffusers, name).from_config(kept.config)
            theirs = expected(pipeline, **parameters, **OPTIONS.get(family, {}))
        except Exception:
            failed = traceback.format_exc()
        finally:
            pipeline.scheduler = kept
        if theirs is None:
            assert refusal, (name, failed)
        elif refusal is None:
            assert torch.equal(run_here(workflow, **parameters), theirs), name
            drawn.append(name)
        else:
            known = "no seed gives again" in refusal or "not finite" in refusal or name in ODD
            assert known, (name, refusal)
    return drawn


#: Of latents whose sides are as many as their channels, by chance.
ODD = {"DiscreteDDIMScheduler", "EntropyBoundScheduler"}


def test_what_is_drawn_with_equals_the_pipeline(folders):
    names = ["PNDMScheduler", "DDIMScheduler", "FlowMapEulerDiscreteScheduler", "LCMScheduler"]
    assert verdicts(folders, "sdxl", names, 5) == ["PNDMScheduler", "DDIMScheduler", "LCMScheduler"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "num_steps"),
    [*((family, 3) for family in SAVE), ("sd3", 1), ("sdxl", 1), ("sdxl", 30), ("qwen", 1)],
)
def test_every_scheduler_of_diffusers_is_refused_or_equals_the_pipeline(folders, family, num_steps):
    drawn = verdicts(folders, family, classes(), num_steps)
    assert drawn or (family, num_steps) == ("qwen", 1)
