"""Qwen-Image with a ControlNet: pictures equal the pipeline's; residuals arrive block by block."""

from __future__ import annotations

import json
import shutil

import pytest
import torch
from distributed import Client

import st2i_dask as st2i
from st2i_dask.catalogue.tiny_qwen_image import save_qwen_image_controlnet
from st2i_dask.catalogue.tiny_z_image import save_z_image_controlnet

from .originals import LONG, check, completed, expected, picture, pixels, reference
from .running import run_here

TIMEOUT = 240
PIPELINE = "QwenImageControlNetPipeline"
SCALE, START, END = (
    "controlnet_conditioning_scale",
    "control_guidance_start",
    "control_guidance_end",
)
FORMS = {"one": dict(control_layers=1), "two": dict(layers=3, control_layers=2, seed=5)}


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    root = tmp_path_factory.mktemp("qwen-image-controlnet")
    return {form: save_qwen_image_controlnet(root / form, **FORMS[form]) for form in FORMS}


TENSOR = torch.from_numpy(pixels(48, 32).transpose(2, 0, 1)[None].copy() * 2 - 1)
CASES = [
    # form, dtype, parameters (seed 0, 3 steps, 32x32 pixels and an image of that size by default)
    ("one", "float32", {"prompt": LONG, SCALE: 0.7}),
    ("one", "bfloat16", dict(negative_prompt="", num_images=2, control_image=picture(64, 64))),
    ("one", "float32", dict(height=48, control_image=TENSOR, seed=2**63, num_steps=2)),
    ("two", "float32", {"negative_prompt": LONG, START: 0.25, END: 0.75, "num_steps": 8}),
    ("two", "float32", {START: 0.8, END: 0.3}),  # no step at all
    ("two", "bfloat16", dict(control_image=pixels(30, 50), height=16, width=48, seed=-3)),
    ("two", "bfloat16", {END: 0.5, SCALE: 1.3, "negative_prompt": "rain", "num_steps": 4}),
    ("two", "float32", {END: 0.0}),
]


def controlled(parameters):
    return {"control_image": picture(32, 32), **completed(parameters)}


@pytest.mark.parametrize(("form", "dtype", "parameters"), CASES)
def test_tensor_equals_the_pipelines(folders, form, dtype, parameters):
    parameters = controlled(parameters)
    ours = run_here(st2i.load(folders[form], dtype=dtype), **parameters)
    check(ours, expected(reference(PIPELINE, folders[form], dtype), **parameters), dtype)


def test_every_control_parameter_changes_the_picture(folders):
    """Otherwise equality would say little about it."""
    common = controlled(dict(num_steps=4))
    variants = [
        {},
        {SCALE: 0.5},
        {START: 0.5},
        {END: 0.5},
        {"control_image": picture(32, 32, seed=1)},
    ]
    workflow = st2i.load(folders["two"])
    images = [run_here(workflow, **{**common, **more}) for more in variants]
    for i, image in enumerate(images):
        assert not any(torch.equal(image, other) for other in images[:i]), variants[i]


@pytest.fixture
def apart(folders, tmp_path):
    """A plain Qwen-Image folder, and a ControlNet in a folder of its own."""
    plain = edited(folders["two"], tmp_path / "plain", "model_index.json")
    index = plain / "model_index.json"
    parts = json.loads(index.read_text())
    del parts["controlnet"]
    index.write_text(json.dumps({**parts, "_class_name": "QwenImagePipeline"}))
    shutil.move(plain / "controlnet", tmp_path / "canny")
    return plain, tmp_path / "canny"


def test_a_controlnet_from_elsewhere_goes_with_a_plain_folder(folders, apart):
    plain, canny = apart
    workflow = st2i.load(plain, controlnet=canny, dtype="bfloat16")
    assert workflow.name == "plain+canny:bfloat16"
    parameters = controlled(dict(seed=4))
    theirs = expected(reference(PIPELINE, folders["two"], "bfloat16"), **parameters)
    check(run_here(workflow, **parameters), theirs, "bfloat16")


def test_two_dtypes_are_refused_with_the_cure(apart, monkeypatch):
    from diffusers import QwenImageControlNetModel

    plain, canny = apart
    half = QwenImageControlNetModel.from_pretrained(canny, torch_dtype=torch.bfloat16)
    half.save_pretrained(canny)
    with pytest.raises(st2i.LoadError, match=r"canny.*bfloat16.*float32; give both one"):
        st2i.load(plain, controlnet=canny)
    # Of weights that only workers have.
    monkeypatch.setattr("st2i_dask.catalogue.folder._stored_here", lambda path: None)
    with pytest.raises(st2i.LoadError, match=r"canny.*bfloat16.*float32; give both one"):
        run_here(st2i.load(plain, controlnet=canny), **controlled({}))


def test_both_forwards_of_a_step_get_the_residuals_of_one_controlnet(folders):
    request = st2i.load(folders["one"]).request(
        prompt="a cat", negative_prompt="", control_image=picture(32, 32), num_steps=8, **{END: 0.5}
    )
    notes = list(request.annotations.values())
    assert len(notes) == 24  # both prompts, both VAEs, 2 * 8 + 4 steps
    transformers = [a for a in notes if a["fn"] == "QwenImageTransformer"]
    assert [len(a["callbacks"]) for a in transformers].count(1) == 8
    assert sum(a["fn"] == "QwenImageControlNet" for a in notes) == 4


def test_two_families_at_once_on_a_cluster_equal_the_pipelines(folders, tmp_path):
    """On two workers: values cross processes, residuals while they are made."""
    other = save_z_image_controlnet(tmp_path / "z-image")
    common = controlled(dict(negative_prompt=LONG, num_images=2, num_steps=4))
    workflows = st2i.load(folders["two"], dtype="bfloat16"), st2i.load(other)
    with st2i.local_cluster(2, dashboard_address=None) as cluster, Client(cluster) as client:
        st2i.attach(client)
        futures = [
            workflow.submit(client, tenant=tenant, output_type="pt", **common)
            for tenant, workflow in zip(("alice", "bob"), workflows, strict=True)
        ]
        ours = [future.result(timeout=TIMEOUT) for future in futures]
    pipeline = reference(PIPELINE, folders["two"], "bfloat16")
    check(ours[0], expected(pipeline, **common), "bfloat16")
    pipeline = reference("ZImageControlNetPipeline", other, "float32")
    check(ours[1], expected(pipeline, **common), "float32")


def edited(folder, path, file, **changes):
    shutil.copytree(folder, path)
    file = path / file
    file.write_text(json.dumps({**json.loads(file.read_text()), **changes}))
    return path


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (dict(_class_name="FluxControlNetModel"), "is a FluxControlNetModel; supported"),
        (dict(joint_attention_dim=64), "joint_attention_dim=64, the transformer 32; use a"),
        (dict(extra_condition_channels=4), "made for inpainting"),
        (dict(num_layers=0), "no blocks"),
    ],
)
def test_a_controlnet_that_does_not_fit_is_refused(folders, tmp_path, changes, message):
    odd = edited(folders["one"], tmp_path / "odd", "controlnet/config.json", **changes)
    with pytest.raises(st2i.LoadError, match=message):
        st2i.load(odd)


def test_several_controlnets_are_refused(folders):
    with pytest.raises(st2i.LoadError, match="one ControlNet at a time, not 2"):
        st2i.load(folders["one"], controlnet=["one", "other"])


@pytest.mark.parametrize(
    ("parameters", "message"),
    [
        (dict(control_image=picture(8, 8).convert("L")), "mode 'L'.*convert"),
        ({SCALE: float("nan")}, "-10 to 10"),
        ({END: 1.5}, "0 to 1"),
    ],
)
def test_bad_parameters_are_refused_before_anything_is_sent(folders, parameters, message):
    parameters = {"control_image": picture(32, 32), **parameters}
    with pytest.raises(st2i.ParameterError, match=message):
        st2i.load(folders["one"]).request(prompt="a cat", **parameters)
