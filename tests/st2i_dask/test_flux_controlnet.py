"""FLUX.1 with a ControlNet: images equal FluxControlNetPipeline's; residuals arrive block by block."""

from __future__ import annotations

import json
import shutil

import numpy as np
import pytest
import torch
from PIL import Image

import st2i_dask as st2i
from st2i_dask.catalogue.flux.controlnet_parts import VaeEncoder
from st2i_dask.catalogue.flux.parts import FluxTransformer, VaeDecoder

from .controlnets import FORMS, reference, save_all
from .originals import expected, picture, pixels
from .running import run_here

TIMEOUT = 120


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    return save_all(tmp_path_factory.mktemp("controlled"))


# ---------------------------------------------------------------- equal to the pipeline

SCALE, START, END = (
    "controlnet_conditioning_scale",
    "control_guidance_start",
    "control_guidance_end",
)
ACROSS = [  # on a cluster: values cross processes
    ("dev", "bfloat16", {SCALE: 0.7, START: 0.25, END: 0.75, "num_steps": 8}),
    ("doubles", "float32", dict(num_steps=3, height=48, width=20, seed=-3)),
]
TENSOR = torch.from_numpy(pixels(48, 32).transpose(2, 0, 1)[None] * 2 - 1)
CASES = [
    # form, dtype, parameters (seed 0, 3 steps, 32x32 pixels and an image of that size by default)
    ("dev", "float32", {SCALE: 0.7}),
    ("dev", "float32", {SCALE: 0.0, "seed": 5}),
    ("dev", "float32", dict(height=20, width=48, control_image=picture(64, 64), seed=2**63)),
    ("dev", "float32", dict(height=48, width=32, control_image=TENSOR, guidance_scale=1.0)),
    ("dev", "bfloat16", dict(height=48, width=32, control_image=TENSOR.bfloat16())),
    ("dev", "bfloat16", {SCALE: 0.7, "num_steps": 16}),
    ("dev", "bfloat16", {SCALE: 0.7, START: 0.25, END: 0.75, "num_steps": 8}),
    ("dev", "float32", {START: 0.34, "num_steps": 3}),
    ("dev", "float32", {END: 0.0}),
    ("doubles", "float32", dict(num_steps=5, seed=-3)),
    ("doubles", "bfloat16", {SCALE: 1.3, "height": 36, "width": 52}),
    ("doubles", "float32", dict(control_image=pixels(30, 50), height=36, width=20)),
    ("schnell", "float32", {SCALE: 0.7, "num_steps": 1}),
    ("schnell", "bfloat16", {SCALE: 0.7, "num_steps": 4, END: 0.5}),
    ("schnell", "bfloat16", dict(control_image=pixels(48, 40)[None].astype(np.float64))),
    ("pixels", "float32", {SCALE: 0.7, "height": 32, "width": 48}),
    ("pixels", "bfloat16", dict(control_image=picture(90, 50), height=48, width=16, num_steps=5)),
    ("union", "float32", dict(control_mode=2)),
    ("union", "bfloat16", dict(control_mode=0, num_steps=4)),
]


def completed(parameters):
    defaults = dict(prompt="a cat", seed=0, num_steps=3, height=32, width=32)
    return {**defaults, "control_image": picture(32, 32), **parameters}


def check(ours, form_folder, dtype, parameters):
    theirs = expected(reference(form_folder, dtype), **parameters)
    assert str(theirs.dtype) == f"torch.{dtype}"
    assert ours.shape == (3, parameters["height"], parameters["width"])
    assert torch.equal(ours.float(), theirs.float())
    assert ours.std() > 0.01  # not a constant picture, which would prove nothing


@pytest.mark.parametrize(("form", "dtype", "parameters"), CASES)
def test_tensor_equals_the_pipelines(folders, form, dtype, parameters):
    parameters = completed(parameters)
    ours = run_here(st2i.load(folders[form], dtype=dtype), **parameters)
    check(ours, folders[form], dtype, parameters)


@pytest.mark.parametrize(("form", "dtype", "parameters"), ACROSS)
def test_tensor_from_a_cluster_equals_the_pipelines(client, folders, form, dtype, parameters):
    parameters = completed(parameters)
    workflow = st2i.load(folders[form], dtype=dtype)
    future = workflow.submit(client, output_type="pt", **parameters)
    check(future.result(timeout=TIMEOUT), folders[form], dtype, parameters)


def test_every_control_parameter_changes_the_picture(folders):
    """Otherwise equality would say little about it."""
    common = completed({"control_mode": 1, "num_steps": 4})
    variants = [
        {},
        {"control_mode": 2},
        {SCALE: 0.5},
        {START: 0.5},
        {END: 0.5},
        {"control_image": picture(32, 32, seed=1)},
        {"guidance_scale": 1.0},
    ]
    workflow = st2i.load(folders["union"], dtype="float32")
    images = [run_here(workflow, **{**common, **more}) for more in variants]
    for i, image in enumerate(images):
        assert not any(torch.equal(image, other) for other in images[:i]), variants[i]


def test_png_pixels_equal_the_pipelines(client, folders, tmp_path):
    parameters = dict(prompt="a cat", seed=11, num_steps=2, height=32, width=48)
    parameters["control_image"] = picture(33, 47)
    image = st2i.load(folders["dev"], dtype="float32").submit(client, **parameters)
    image.result(timeout=TIMEOUT).save(tmp_path / "cat.png")
    theirs = expected(reference(folders["dev"], "float32"), output_type="pil", **parameters)
    with Image.open(tmp_path / "cat.png") as ours:
        assert np.array_equal(np.asarray(ours), np.asarray(theirs))
        assert ours.text["prompt"] == "a cat"
        assert "control_image" not in ours.text["parameters"]


@pytest.fixture
def apart(folders, tmp_path):
    """A plain FLUX.1 folder, and a ControlNet in a folder of its own."""
    shutil.copytree(folders["dev"], tmp_path / "plain")
    shutil.move(tmp_path / "plain" / "controlnet", tmp_path / "canny")
    index = tmp_path / "plain" / "model_index.json"
    parts = json.loads(index.read_text())
    del parts["controlnet"]
    parts["_class_name"] = "FluxPipeline"
    index.write_text(json.dumps(parts))
    return tmp_path / "plain", tmp_path / "canny"


def test_a_controlnet_from_elsewhere_goes_with_a_plain_folder(apart, fresh_registry):
    from diffusers import FluxControlNetModel, FluxControlNetPipeline

    plain, canny = apart
    parameters = dict(prompt="a cat", seed=4, num_steps=3, height=32, width=32)
    parameters["control_image"] = picture(32, 32)
    controlled = st2i.load(plain, controlnet=canny, dtype="bfloat16")
    assert controlled.name == "plain+canny:bfloat16"
    assert controlled is not st2i.load(plain, dtype="bfloat16")
    ours = run_here(controlled, **parameters)
    controlnet = FluxControlNetModel.from_pretrained(canny, torch_dtype=torch.bfloat16)
    pipeline = FluxControlNetPipeline.from_pretrained(
        plain, controlnet=controlnet, dtype=torch.bfloat16
    )
    pipeline.set_progress_bar_config(disable=True)
    assert torch.equal(ours, expected(pipeline, **parameters))


def test_two_dtypes_are_refused_with_the_cure(apart, fresh_registry, monkeypatch):
    plain, canny = apart
    from diffusers import FluxControlNetModel

    half = FluxControlNetModel.from_pretrained(canny, torch_dtype=torch.bfloat16)
    half.save_pretrained(canny)
    with pytest.raises(st2i.LoadError, match=r"canny.*bfloat16.*float32; give both one"):
        st2i.load(plain, controlnet=canny)
    # Of weights that only workers have.
    monkeypatch.setattr("st2i_dask.catalogue.folder._stored_here", lambda path: None)
    with pytest.raises(st2i.LoadError, match=r"canny.*bfloat16.*float32; give both one"):
        run_here(st2i.load(plain, controlnet=canny), **completed({}))


# ---------------------------------------------------------------- what is composed


def request(folder, **parameters):
    parameters = {"control_image": picture(32, 32), "num_steps": 8, **parameters}
    return st2i.load(folder).request(prompt="a cat", **parameters)


def count(request, name):
    return sum(annotation["fn"] == name for annotation in request.annotations.values())


def test_one_task_per_invocation_and_none_outside_the_window(folders):
    assert len(request(folders["dev"]).tasks) == 20  # CLIP, T5, both VAEs, 8 + 8 steps
    windowed = request(folders["dev"], control_guidance_start=0.25, control_guidance_end=0.75)
    assert count(windowed, "FluxControlNet") == 4
    assert count(windowed, "FluxTransformer") == 8
    assert count(request(folders["pixels"]), "VaeEncoder") == 0


def test_residuals_are_callback_inputs_of_every_step(folders):
    made = request(folders["dev"])
    transformers = [a for a in made.annotations.values() if a["fn"] == "FluxTransformer"]
    assert all(len(a["callbacks"]) == 1 for a in transformers)


def test_one_vae_and_one_transformer_serve_encoder_decoder_and_the_plain_pipeline(folders):
    source = str(folders["dev"])
    encoder, decoder = VaeEncoder(source, dtype="float32"), VaeDecoder(source, dtype="float32")
    assert encoder.model_key == decoder.model_key
    assert encoder.model_key != VaeEncoder(source, dtype="bfloat16").model_key
    models = {a["fn"]: a["model"] for a in request(folders["dev"]).annotations.values()}
    assert models["VaeEncoder"] == models["VaeDecoder"]
    assert models["FluxTransformer"] == FluxTransformer(source).model_key


def test_parameters_without_use_are_not_there(folders):
    names = {form: {p.name for p in st2i.load(folders[form]).parameters} for form in FORMS}
    assert {form for form in FORMS if "control_mode" in names[form]} == {"union"}
    assert {form for form in FORMS if "guidance_scale" not in names[form]} == {"schnell"}


@pytest.mark.parametrize(
    ("form", "parameters", "message"),
    [
        ("dev", dict(control_image=picture(8, 8).convert("L")), "mode 'L'.*convert"),
        ("dev", dict(control_image="cat.png"), "control_image has type str, wanted one RGB image"),
        ("dev", dict(control_image=torch.zeros(1, 3, 8, 8)), r"wanted \(1, 3, 256, 256\)"),
        ("dev", dict(controlnet_conditioning_scale=float("nan")), "-10 to 10"),
        ("dev", dict(control_guidance_end=1.5), "0 to 1"),
        ("dev", dict(control_mode=1), "no parameter 'control_mode'"),
        ("union", {}, "'control_mode' is missing"),
        ("union", dict(control_mode=4), "0 to 3"),
    ],
)
def test_bad_parameters_are_refused_before_anything_is_sent(folders, form, parameters, message):
    with pytest.raises(st2i.ParameterError, match=message):
        request(folders[form], **parameters)


def edited(folder, path, **changes):
    shutil.copytree(folder, path)
    file = path / "controlnet" / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **changes}))
    return path


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (dict(_class_name="FluxMultiControlNetModel"), "is a FluxMultiControlNetModel; supported"),
        (dict(joint_attention_dim=64), "joint_attention_dim=64, the transformer 32; use a"),
        (dict(num_layers=0), "no double blocks"),
    ],
)
def test_a_controlnet_that_does_not_fit_is_refused(folders, tmp_path, changes, message):
    with pytest.raises(st2i.LoadError, match=message):
        st2i.load(edited(folders["dev"], tmp_path / "odd", **changes))
