"""FLUX.1 with several ControlNets, and with ControlNets from a picture: equal to the pipelines."""

from __future__ import annotations

import itertools
import json
import shutil

import pytest
import torch

import st2i_dask as st2i
from st2i_dask.catalogue import tiny
from st2i_dask.catalogue.residuals import summed

from .controlnets import save_net, several_reference
from .originals import expected as of_pipeline
from .originals import picture
from .running import run_here

TIMEOUT = 120
IMAGE = "image-to-image"
CLASSES = {None: "FluxControlNetPipeline", IMAGE: "FluxControlNetImg2ImgPipeline"}
SCALE, START, END = (
    "controlnet_conditioning_scale",
    "control_guidance_start",
    "control_guidance_end",
)
# Double and single blocks that are not alike: the shortest counts.
NETS = {
    "canny": dict(seed=1, control_layers=(2, 3)),
    "depth": dict(seed=2, control_layers=(3, 2)),
    "lines": dict(seed=3, control_layers=(1, 0)),
    "union": dict(seed=4, control_layers=(2, 2), modes=4),
    "pixels": dict(seed=5, control_layers=(2, 0), pixels=True),
    "hints": dict(seed=6, control_layers=(1, 0), pixels=True),
    "guided": dict(seed=7, control_layers=(2, 1), control_guidance=True),
}


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    root = tmp_path_factory.mktemp("several")
    for name, options in NETS.items():
        save_net(root / name, **options)
    tiny.save_flux(root / "dev")
    # XLabs' form makes one token of 8x8 pixels.
    tiny.flux(vae_blocks=3).save_pretrained(root / "coarse")
    return root


def completed(nets, task, parameters):
    made = dict(prompt="a cat", seed=3, num_steps=3, height=32, width=48)
    images = [picture(32 + 9 * n, 48, seed=n) for n in range(len(nets))]
    made["control_image"] = images if len(nets) > 1 else images[0]
    if task == IMAGE:
        made["image"] = picture(50, 60, seed=9)
    return {**made, **parameters}


def load(root, nets, task=None, dtype="float32", base=None):
    folders = [root / net for net in nets]
    base = base or ("coarse" if "pixels" in nets else "dev")
    return st2i.load(root / base, controlnet=folders, task=task, dtype=dtype)


def expected(root, nets, task, dtype, *, base=None, **parameters):
    if len(nets) > 1:  # the pipeline takes no number for all
        scale = parameters.get(SCALE, 1.0)
        parameters[SCALE] = scale if isinstance(scale, list) else [scale] * len(nets)
    base = base or ("coarse" if "pixels" in nets else "dev")
    folders = tuple(root / net for net in nets)
    return of_pipeline(several_reference(CLASSES[task], root / base, folders, dtype), **parameters)


def check(root, nets, task, dtype, parameters):
    parameters = completed(nets, task, parameters)
    ours = run_here(load(root, nets, task, dtype), **parameters)
    theirs = expected(root, nets, task, dtype, **parameters)
    assert str(theirs.dtype) == f"torch.{dtype}"
    assert torch.equal(ours.float(), theirs.float())
    assert ours.std() > 0.01  # not a constant picture, which would prove nothing


TRUE_CFG = dict(negative_prompt="a dog", true_cfg_scale=4.0)
CASES = [
    (("canny", "depth"), None, "float32", {SCALE: [0.7, 1.3]}),
    (("canny", "depth"), None, "bfloat16", {SCALE: 0.5, "num_images": 2}),
    (("canny", "lines", "depth"), None, "float32", {SCALE: [0.7, 1.0, -0.4], **TRUE_CFG}),
    (("lines", "canny"), None, "bfloat16", {START: 0.3, END: 0.7, "num_steps": 6}),
    (("union", "union"), None, "float32", {"control_mode": [1, 3]}),
    (("canny", "union"), None, "bfloat16", {"control_mode": [None, 2], "num_images": 2}),
    (("pixels", "hints"), None, "float32", {SCALE: [1.0, 0.5]}),
    # One that is shorter decides how many residuals there are also while it does not run.
    (("lines", "canny"), None, "float32", {START: [0.5, 0.0], END: [1.0, 0.5], "num_steps": 4}),
    (("canny", "lines"), None, "bfloat16", {END: [1.0, 0.4], SCALE: [0.7, 1.3]}),
    (("canny", "depth"), None, "float32", {START: 0.6, END: [0.3, 0.9]}),
    (("canny",), None, "float32", {START: 0.5, END: 0.5}),  # no step at all
    (("canny",), None, "float32", {START: 0.8, END: 0.3}),
    (("canny",), None, "float32", {**TRUE_CFG, "num_images": 2}),
    (("union",), None, "bfloat16", {"control_mode": 2, "num_images": 2, SCALE: 0.6}),
    (("pixels",), None, "float32", {"num_images": 2}),
    (("canny",), IMAGE, "float32", {}),
    (("guided",), IMAGE, "bfloat16", {"strength": 1.0, "num_images": 2, "seed": -3}),
    (("union",), IMAGE, "float32", {"control_mode": 1, "strength": 0.4, "num_steps": 5}),
    (("pixels",), IMAGE, "float32", {START: 0.3, END: 0.7, "num_steps": 10}),
    (("canny", "lines"), IMAGE, "float32", {START: [0.5, 0.0], "control_mode": [None] * 2}),
    (("canny", "depth"), IMAGE, "bfloat16", {"control_mode": [None, None], SCALE: [0.7, 0.9]}),
]


@pytest.mark.parametrize(("nets", "task", "dtype", "parameters"), CASES)
def test_images_equal_the_pipelines(root, nets, task, dtype, parameters):
    ours = dict(parameters)
    if not any("union" in net for net in nets):
        # The image to image pipeline wants a list of modes; ControlNets without any have no parameter.
        ours.pop("control_mode", None)
    completed_ours = completed(nets, task, ours)
    image = run_here(load(root, nets, task, dtype), **completed_ours)
    theirs = expected(root, nets, task, dtype, **completed(nets, task, parameters))
    assert str(theirs.dtype) == f"torch.{dtype}"
    assert torch.equal(image.float(), theirs.float())
    assert image.std() > 0.01  # not a constant picture, which would prove nothing


@pytest.mark.slow
@pytest.mark.parametrize("nets", list(itertools.permutations(("canny", "depth", "lines"))))
@pytest.mark.parametrize("window", [{}, {START: 0.25}, {END: 0.6}])
@pytest.mark.parametrize("more", [{}, TRUE_CFG, {"num_images": 2}])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_images_equal_the_pipelines_in_any_order(root, nets, dtype, window, more):
    check(root, nets, None, dtype, {"num_steps": 5, SCALE: [0.7, 1.0, 1.3], **window, **more})


def test_every_control_parameter_changes_the_picture(root):
    """Otherwise equality would say little about it."""
    nets = ("canny", "union")
    common = completed(nets, None, {"control_mode": [None, 1], "num_steps": 4})
    images = common["control_image"]
    variants = [
        {},
        {"control_mode": [None, 2]},
        {SCALE: [0.5, 1.0]},
        {SCALE: [1.0, 0.5]},
        {START: 0.5},
        {END: 0.5},
        {"control_image": images[::-1]},
        {"control_image": [images[0], images[0]]},
    ]
    workflow = load(root, nets)
    made = [run_here(workflow, **{**common, **more}) for more in variants]
    for i, image in enumerate(made):
        assert not any(torch.equal(image, other) for other in made[:i]), variants[i]


def test_spread_images_are_those_of_their_seeds(root):
    nets = ("canny", "depth")
    parameters = completed(nets, None, dict(num_steps=2))
    ours = run_here(load(root, nets), **parameters, num_images=2, spread=True)
    for number, image in enumerate(ours):
        theirs = expected(root, nets, None, "float32", **{**parameters, "seed": 3 + number})
        assert torch.equal(image, theirs)


def test_images_from_a_cluster_equal_the_pipelines(client, root):
    """Two tenants on two workers: two ControlNets with true CFG, and a plain one from a picture."""
    first = completed(("canny", "depth"), None, {SCALE: [0.7, 1.3], "num_steps": 4, **TRUE_CFG})
    second = completed(("lines",), IMAGE, {"num_steps": 5, "num_images": 2})
    futures = [
        load(root, ("canny", "depth")).submit(client, output_type="pt", tenant="a", **first),
        load(root, ("lines",), IMAGE, "bfloat16").submit(
            client, output_type="pt", tenant="b", **second
        ),
    ]
    ours = [future.result(timeout=TIMEOUT) for future in futures]
    assert torch.equal(ours[0], expected(root, ("canny", "depth"), None, "float32", **first))
    theirs = expected(root, ("lines",), IMAGE, "bfloat16", **second)
    assert torch.equal(ours[1], theirs.float())


# ---------------------------------------------------------------- what is composed


def test_each_controlnet_is_a_callback_producer_of_every_step(root):
    request = load(root, ("canny", "depth")).request(**completed(("canny", "depth"), None, {}))
    made = request.annotations.values()
    assert sum(about["fn"] == "FluxControlNet" for about in made) == 6
    assert sum(about["fn"] == "VaeEncoder" for about in made) == 2
    transformers = [about for about in made if about["fn"] == "FluxTransformer"]
    assert all(len(about["callbacks"]) == 2 for about in transformers)


def test_a_controlnet_named_twice_is_one_model(root):
    parameters = completed(("union", "union"), None, dict(control_mode=[0, 1]))
    request = load(root, ("union", "union")).request(**parameters)
    made = request.annotations.values()
    assert len({about["model"] for about in made if about["fn"] == "FluxControlNet"}) == 1


def test_sums_are_made_in_order_and_item_by_item():
    read = []

    class Part:
        def __init__(self, name, length):
            self.name, self.length = name, length

        def __len__(self):
            return self.length

        def __getitem__(self, index):
            read.append((self.name, index))
            return f"{self.name}{index}"  # the sum of texts shows its order

    made = summed([Part("a", 3), Part("b", 2), Part("c", 4)])
    assert len(made) == 2
    assert [made[1], made[1], made[0]] == ["a1b1c1", "a1b1c1", "a0b0c0"]
    assert read == [("a", 1), ("b", 1), ("c", 1), ("a", 0), ("b", 0), ("c", 0)]
    with pytest.raises(IndexError):
        made[2]
    one = Part("a", 3)
    assert summed([one]) is one
    assert len(summed([one], 2)) == 2
    assert summed([]) is None


@pytest.mark.parametrize(
    ("nets", "parameters", "message"),
    [
        (
            ("canny", "depth"),
            {"control_image": picture(8, 8)},
            "holds 1 images, wanted a list of 2",
        ),
        (("canny", "depth"), {SCALE: [1.0]}, "holds 1 values, wanted a list of 2 numbers"),
        (("canny", "depth"), {SCALE: [1.0, float("nan")]}, r"scale\[1\]=nan is out of range"),
        (("canny", "depth"), {SCALE: [1.0, "1"]}, r"scale\[1\]='1' has type str"),
        (("canny", "depth"), {START: [0.1]}, "start holds 1 values, wanted a list of 2 numbers"),
        (("canny", "depth"), {END: [0.5, 1.5]}, r"control_guidance_end\[1\]=1.5 is out of range"),
        (("canny",), {END: "0.5"}, r"control_guidance_end='0.5' has type str"),
        (("canny", "depth"), {"control_mode": [1, 2]}, "no parameter 'control_mode'"),
        (("canny", "union"), {}, "'control_mode' is missing"),
        (("canny", "union"), {"control_mode": 1}, "a list of None, 0 to 3"),
        (("canny", "union"), {"control_mode": [0, 1]}, r"mode\[0\]=0, but that ControlNet has no"),
        (("canny", "union"), {"control_mode": [None, 4]}, r"mode\[1\]=4 is out of range"),
        (("canny", "union"), {"control_mode": [None, None]}, r"mode\[1\]=None has type NoneType"),
        (("canny", "union"), {"control_mode": [None, True]}, r"mode\[1\]=True has type bool"),
    ],
)
def test_bad_parameters_are_refused_before_anything_is_sent(root, nets, parameters, message):
    with pytest.raises(st2i.ParameterError, match=message):
        load(root, nets).request(**completed(nets, None, parameters))


@pytest.mark.parametrize(
    ("nets", "message"),
    [
        (("canny", "pixels"), "pixels' takes pixels, .*canny' does not"),
        (("guided", "canny"), "guided' has a guidance embedding, .*canny' does not"),
        (("canny",) * 5, "at most 4 ControlNets at a time, not 5"),
    ],
)
def test_controlnets_that_do_not_go_together_are_refused(root, nets, message):
    with pytest.raises(st2i.LoadError, match=message):
        load(root, nets, base="dev")


@pytest.mark.parametrize("task", [None, IMAGE])
def test_every_controlnet_must_fit(root, tmp_path, task):
    shutil.copytree(root / "depth", tmp_path / "wide")
    config = tmp_path / "wide" / "config.json"
    config.write_text(json.dumps({**json.loads(config.read_text()), "joint_attention_dim": 64}))
    with pytest.raises(st2i.LoadError, match=r"wide.*joint_attention_dim=64, the transformer 32"):
        load(root, ("canny", tmp_path / "wide"), task)


def test_no_inpainting_with_a_controlnet(root):
    with pytest.raises(st2i.LoadError, match="no workflow for task='inpainting' with a ControlNet"):
        load(root, ("canny",), "inpainting")
