"""Pipelines of other tasks, with ControlNets and schedulers, from the command line."""

from __future__ import annotations

import json
import os

import numpy as np
import pytest
from PIL import Image

import st2i_dask as st2i_package
from st2i_dask.catalogue import tiny, tiny_flux2_klein
from st2i_dask.cli.folder import MANIFEST

from ..controlnets import save_net
from ..running import run_here

SMALL = ("--size", "32x32", "--steps", 2, "--prompt", "a cat")


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    root = tmp_path_factory.mktemp("loading")
    tiny.save_flux(root / "flux")
    tiny_flux2_klein.save_flux2_klein(root / "klein")
    for seed, name in enumerate(("canny", "depth"), 1):
        save_net(root / name, seed=seed, control_layers=(2, 1))
    for name, seed in (("photo.png", 0), ("edges.png", 1)):
        values = np.random.default_rng(seed).integers(0, 256, (32, 32, 3), dtype=np.uint8)
        Image.fromarray(values).save(root / name)
    return root


@pytest.fixture
def draw(st2i, scheduler, tmp_path):
    """`st2i generate` of a folder; the images by name."""

    def run(source, *options, status=0):
        arguments = ("--workflow", source, "--scheduler", scheduler, "--out", tmp_path / "out")
        result = st2i("generate", *arguments, *SMALL, *options)
        assert result.exit_code == status, result.output
        if status:
            return result.output
        return {
            name: Image.open(tmp_path / "out" / name)
            for name in sorted(os.listdir(tmp_path / "out"))
            if name.endswith(".png")
        }

    return run


def check(picture, workflow, **parameters):
    ours = run_here(
        workflow, prompt="a cat", height=32, width=32, num_steps=2, output_type="pil", **parameters
    )
    assert np.array_equal(np.asarray(picture), np.asarray(ours))


def test_a_task_with_a_picture_from_a_file(folders, draw, tmp_path):
    task = ("--task", "image-to-image", "--seed", 3)
    with Image.open(folders / "photo.png") as file:
        photo = file.convert("RGB")
    options = (*task, "--param", f"image={folders / 'photo.png'}", "--param", "strength=0.8")
    [first] = (made := draw(folders / "flux", *options))
    workflow = st2i_package.load(folders / "flux", task="image-to-image")
    check(made[first], workflow, image=photo, strength=0.8, seed=3)
    # Another picture is another image; the same one is there already.
    other = ("--param", f"image={folders / 'edges.png'}", "--param", "strength=0.8")
    assert len(draw(folders / "flux", *task, *other)) == 2
    assert len(draw(folders / "flux", *options)) == 2
    entries = (tmp_path / "out" / MANIFEST).read_text().splitlines()
    assert len({json.loads(entry)["file"] for entry in entries}) == 2


def test_several_controlnets(folders, draw):
    nets = ["canny", "depth"]
    options = [part for net in nets for part in ("--controlnet", folders / net)]
    pictures = [str(folders / name) for name in ("edges.png", "photo.png")]
    [(_, image)] = draw(
        folders / "flux",
        *options,
        "--param",
        f"control_image={json.dumps(pictures)}",
        "--param",
        "controlnet_conditioning_scale=[0.7, 0.4]",
    ).items()
    workflow = st2i_package.load(folders / "flux", controlnet=[folders / net for net in nets])
    control = [Image.open(path).convert("RGB") for path in pictures]
    check(image, workflow, control_image=control, controlnet_conditioning_scale=[0.7, 0.4])


def test_other_arguments_of_load(folders, draw):
    scheduler = {"shift": 5.0, "use_dynamic_shifting": False}
    [(_, image)] = draw(
        folders / "flux",
        "--load-option",
        f"scheduler={json.dumps(scheduler)}",
        "--load-option",
        "dtype=bfloat16",
    ).items()
    check(image, st2i_package.load(folders / "flux", scheduler=scheduler, dtype="bfloat16"))


def test_layers_of_a_text_encoder(folders, draw):
    layers = "text_encoder_out_layers=[0, 1, 2]"
    [(_, image)] = draw(folders / "klein", "--load-option", layers).items()
    check(image, st2i_package.load(folders / "klein", text_encoder_out_layers=(0, 1, 2)))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--task", "upscaling"), "no workflow for task='upscaling'"),
        (("--controlnet", "/not/there"), "/not/there"),
        (("--load-option", "scheduler"), "is not NAME=VALUE"),
        (("--load-option", "controlnet=x"), "is not NAME=VALUE of another argument"),
        (("--load-option", "dtype=int8"), "dtype='int8' is not supported"),
        (("--load-option", "num_stepps=3"), "num_stepps"),
        (("--load-option", "dtype=float32", "--load-option", "dtype=float32"), "given twice"),
        (
            ("--load-option", 'scheduler={"_class_name": "DDIMScheduler"}'),
            "cannot use the scheduler",
        ),
        (
            ("--task", "image-to-image", "--param", "image=/not/there.png"),
            "cannot be read as a pic",
        ),
    ],
)
def test_mistakes_are_refused(folders, draw, options, message):
    assert message in draw(folders / "flux", *options, status=2)


def test_a_file_takes_none(draw, tmp_path):
    file = tmp_path / "own.py"
    file.write_text("")
    output = draw(f"{file}:w", "--task", "inpainting", status=2)
    assert "is a file, which loads its workflow itself: task cannot be given to it" in output


def test_serve_takes_them_for_one_model(st2i, folders):
    two = ("--model", f"a={folders / 'flux'}", "--model", f"b={folders / 'flux'}")
    result = st2i("serve", *two, "--task", "inpainting")
    assert result.exit_code == 2
    assert "task can be given for one --model, not for 2" in result.output


def test_a_served_model_keeps_them_for_its_other_tasks(folders):
    from st2i_dask.serve.models import Models

    models = Models()
    loaded = dict(controlnet=[str(folders / "canny")])
    model = models.add("canny", str(folders / "flux"), **loaded)
    controlled = st2i_package.load(folders / "flux", **loaded)
    assert [p.name for p in model.workflow.parameters] == [p.name for p in controlled.parameters]
    made = models.for_task(model, "image-to-image")
    assert {"image", "control_image"} <= {parameter.name for parameter in made.parameters}
