"""Z-Image with a ControlNet: pictures equal the pipelines'; residuals arrive layer by layer."""

from __future__ import annotations

import json
import shutil

import pytest
import torch
from safetensors.torch import load_file

import st2i_dask as st2i
from st2i_dask.catalogue.lora_files import identity_of
from st2i_dask.catalogue.tiny_lora import save_lora
from st2i_dask.catalogue.tiny_z_image import save_z_image_controlnet
from st2i_dask.catalogue.z_image.controlnet_parts import ZImageControlNet
from st2i_dask.stream import streaming

from .originals import LONG, check, completed, expected, mask, picture, pixels, reference
from .running import run_here

SCALE = "controlnet_conditioning_scale"
PIPELINE, INPAINTING = "ZImageControlNetPipeline", "ZImageControlNetInpaintPipeline"
FORMS = {
    "first": dict(control=dict(places=(0, 2))),
    "refiner": dict(control=dict(places=(0, 1), channels=9, refiner="control_noise_refiner")),
    "layers": dict(control=dict(places=(0, 2), channels=9, refiner="control_layers")),
    "inpainting": dict(control=dict(channels=9), inpainting=True, dynamic=True),
}


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    root = tmp_path_factory.mktemp("z-image-controlnet")
    return {form: save_z_image_controlnet(root / form, **FORMS[form]) for form in FORMS}


TENSOR = torch.from_numpy(pixels(48, 32).transpose(2, 0, 1)[None].copy() * 2 - 1)
CASES = [
    # form, dtype, parameters (seed 0, 3 steps, 32x32 pixels and an image of that size by default)
    ("first", "float32", dict(prompt=LONG)),
    ("first", "float32", {"guidance_scale": 0.0, SCALE: 1.3, "num_steps": 1, "seed": 2**63}),
    ("first", "bfloat16", dict(height=20, width=48, control_image=picture(64, 64), num_images=2)),
    ("first", "bfloat16", dict(cfg_truncation=0.4, num_steps=6, negative_prompt=LONG)),
    ("first", "float32", dict(height=48, control_image=TENSOR, cfg_normalization=0.7)),
    ("refiner", "float32", dict(negative_prompt=LONG, seed=-3)),
    ("refiner", "bfloat16", {SCALE: 0.0}),
    ("layers", "float32", dict(control_image=pixels(30, 50), height=36, width=20)),
    ("layers", "bfloat16", dict(num_images=2, guidance_scale=0.0)),
]


def controlled(parameters):
    return {"control_image": picture(32, 32), **completed(parameters)}


@pytest.mark.parametrize(("form", "dtype", "parameters"), CASES)
def test_tensor_equals_the_pipelines(folders, form, dtype, parameters):
    parameters = controlled(parameters)
    ours = run_here(st2i.load(folders[form], dtype=dtype), **parameters)
    check(ours, expected(reference(PIPELINE, folders[form], dtype), **parameters), dtype)


@pytest.mark.parametrize(
    ("form", "pipeline", "dtype"),
    [
        ("first", PIPELINE, "float32"),
        ("refiner", PIPELINE, "bfloat16"),
        ("layers", PIPELINE, "float32"),
        ("inpainting", INPAINTING, "float32"),
    ],
)
def test_adapters_change_what_the_controlnet_has_of_the_transformer(
    folders, tmp_path, form, pipeline, dtype
):
    import diffusers

    folder = folders[form]
    cls = getattr(diffusers, pipeline)
    theirs = cls.from_pretrained(folder, dtype=getattr(torch, dtype))
    theirs.set_progress_bar_config(disable=True)
    # Of the layers that both have, too.
    targets = ("to_q", "to_v", "to_out.0", "w1", "w2")
    options = dict(targets=targets, strength=0.5)
    files = [
        save_lora(tmp_path / f"{seed}.safetensors", theirs, seed=seed, **options)
        for seed in range(2)
    ]
    named = load_file(files[0])
    assert any("refiner" in key for key in named)
    parameters = controlled({"negative_prompt": LONG})
    if pipeline == INPAINTING:
        parameters.update(image=picture(32, 32, 4), mask_image=mask(32, 32))
    workflow = st2i.load(folder, dtype=dtype)
    plain = run_here(workflow, **parameters)
    for number, file in enumerate(files):
        theirs.load_lora_weights(str(file), adapter_name=f"n{number}")
    for scales in ([0.8, -0.5], [0.3, 1.0]):
        loras = list(zip(files, scales, strict=True))
        ours = run_here(workflow, loras=loras, **parameters)
        theirs.set_adapters(["n0", "n1"], scales)
        check(ours, expected(theirs, **parameters), dtype)
        assert not torch.equal(ours, plain)
    assert torch.equal(run_here(workflow, **parameters), plain)


def test_a_controlnet_with_adapters_is_one_model_whatever_the_scales(folders, tmp_path):
    from diffusers import ZImageControlNetPipeline

    base = ZImageControlNetPipeline.from_pretrained(folders["first"])
    file = save_lora(tmp_path / "a.safetensors", base)
    made = {
        scale: ZImageControlNet(
            str(folders["first"]),
            **({"adapters": [[str(file), identity_of(file), scale]]} if scale else {}),
        )
        for scale in (None, 0.5, 1.0)
    }
    assert made[0.5].model_key == made[1.0].model_key != made[None].model_key
    components = made[0.5].load_model(made[0.5].model_path)
    layers = components["adapters"]._layers
    within = set(map(id, components["controlnet"].modules()))
    assert layers
    assert all(id(layer) in within for layer in layers)


INPAINTING_CASES = [
    ("float32", dict(negative_prompt=LONG, height=48, width=20)),
    ("bfloat16", dict(guidance_scale=0.0, num_steps=4)),
]


@pytest.mark.parametrize(("dtype", "parameters"), INPAINTING_CASES)
def test_inpainting_equals_the_pipelines(folders, dtype, parameters):
    parameters = controlled(parameters)
    size = parameters["height"], parameters["width"]
    parameters |= dict(image=picture(*size, seed=1), mask_image=mask(64, 48))
    ours = run_here(st2i.load(folders["inpainting"], dtype=dtype), **parameters)
    pipeline = reference(INPAINTING, folders["inpainting"], dtype)
    check(ours, expected(pipeline, **parameters), dtype)


def test_several_images_can_be_inpainted(folders):
    """The pipeline fails there. The first one starts from the noise that it has alone."""
    workflow = st2i.load(folders["inpainting"])
    parameters = controlled(dict(image=picture(32, 32, seed=1), mask_image=mask(64, 48)))
    together = run_here(workflow, num_images=2, **parameters)
    assert torch.allclose(together[0], run_here(workflow, **parameters), atol=1e-4)
    assert not torch.equal(together[0], together[1])


def test_every_control_parameter_changes_the_picture(folders):
    common = controlled(dict(image=picture(32, 32, seed=1), mask_image=mask(64, 48)))
    variants = [
        {},
        {SCALE: 0.5},
        {"control_image": picture(32, 32, seed=2)},
        {"image": picture(32, 32, seed=2)},
        {"mask_image": mask(32, 16).rotate(180)},
    ]
    workflow = st2i.load(folders["inpainting"])
    images = [run_here(workflow, **{**common, **more}) for more in variants]
    for i, image in enumerate(images):
        assert not any(torch.equal(image, other) for other in images[:i]), variants[i]


@pytest.fixture
def apart(folders, tmp_path):
    """A plain Z-Image folder, and a ControlNet in a folder of its own."""
    plain = edited(folders["first"], tmp_path / "plain", "model_index.json", controlnet=None)
    index = plain / "model_index.json"
    parts = json.loads(index.read_text())
    del parts["controlnet"]
    index.write_text(json.dumps({**parts, "_class_name": "ZImagePipeline"}))
    shutil.move(plain / "controlnet", tmp_path / "canny")
    return plain, tmp_path / "canny"


@pytest.mark.parametrize("whole", [False, True])
def test_a_controlnet_from_elsewhere_goes_with_a_plain_folder(apart, tmp_path, whole):
    """whole: saved with what it shares with the transformer, as one of a pipeline is."""
    from diffusers import ZImageControlNetModel, ZImageControlNetPipeline

    plain, canny = apart
    controlnet = ZImageControlNetModel.from_pretrained(canny, torch_dtype=torch.bfloat16)
    pipeline = ZImageControlNetPipeline.from_pretrained(
        plain, controlnet=controlnet, dtype=torch.bfloat16
    )
    pipeline.set_progress_bar_config(disable=True)
    if whole:
        canny = tmp_path / "whole"
        controlnet.save_pretrained(canny)
    workflow = st2i.load(plain, controlnet=canny, dtype="bfloat16")
    assert workflow.name == f"plain+{canny.name}:bfloat16"
    parameters = controlled(dict(seed=4))
    check(run_here(workflow, **parameters), expected(pipeline, **parameters), "bfloat16")


def test_two_dtypes_are_refused_with_the_cure(apart, monkeypatch):
    from diffusers import ZImageControlNetModel

    plain, canny = apart
    half = ZImageControlNetModel.from_pretrained(canny, torch_dtype=torch.bfloat16)
    half.save_pretrained(canny)
    with pytest.raises(st2i.LoadError, match=r"canny.*bfloat16.*float32; give both one"):
        st2i.load(plain, controlnet=canny)
    # Of weights that only workers have.
    monkeypatch.setattr("st2i_dask.catalogue.folder._stored_here", lambda path: None)
    with pytest.raises(st2i.LoadError, match=r"canny.*bfloat16.*float32; give both one"):
        run_here(st2i.load(plain, controlnet=canny), **controlled({}))


@pytest.mark.parametrize("form", ["first", "layers"])
@torch.no_grad()
def test_residuals_are_published_while_the_controlnet_runs(folders, form):
    model_fn = ZImageControlNet(str(folders[form]))
    components = model_fn.load_model(model_fn.model_path)
    happened = []

    class Sink:
        def put(self, index, item):
            happened.append(f"residual {index}")
            return item

    for number, layer in enumerate(components["controlnet"].control_layers):
        layer.register_forward_hook(lambda *_, n=number: happened.append(f"layer {n}"))
    generator = torch.Generator().manual_seed(0)
    channels = FORMS[form]["control"].get("channels", 4)
    with streaming(lambda output, length: Sink()):
        made = model_fn.execute(
            components,
            latents=torch.randn(1, 4, 16, 16, generator=generator),
            timestep=torch.tensor([0.3]),
            prompt_embeds=torch.randn(7, 32, generator=generator),
            negative_prompt_embeds=torch.randn(9, 32, generator=generator),
            cfg_truncation=1.0,
            control=torch.randn(1, channels, 1, 16, 16, generator=generator),
            conditioning_scale=0.5,
        )
    refining = ["layer 0", "layer 1"] if form == "layers" else []
    assert happened == [*refining, "residual 0", "layer 0", "residual 1", "layer 1"]
    assert [residual.shape[0] for residual in made["residuals"]] == [2, 2]


def test_a_step_is_two_invocations_joined_by_a_callback(folders):
    request = st2i.load(folders["first"]).request(
        prompt="a cat", control_image=picture(32, 32), num_steps=8
    )
    assert len(request.tasks) == 20  # both prompts, both VAEs, 8 + 8 steps
    notes = request.annotations.values()
    assert all(len(a["callbacks"]) == 1 for a in notes if a["fn"] == "ZImageTransformer")
    split = st2i.load(folders["first"]).request(
        prompt="a cat", control_image=picture(32, 32), num_steps=8, split_guidance=True
    )
    assert len(split.tasks) == 36


def test_split_guidance_gives_nearly_the_same_picture(folders):
    workflow = st2i.load(folders["first"])
    parameters = controlled(dict(negative_prompt=LONG))
    split = run_here(workflow, split_guidance=True, **parameters)
    assert torch.allclose(split, run_here(workflow, **parameters), atol=1e-4)


def edited(folder, path, file, **changes):
    shutil.copytree(folder, path)
    file = path / file
    file.write_text(json.dumps({**json.loads(file.read_text()), **changes}))
    return path


@pytest.mark.parametrize(
    ("form", "changes", "message"),
    [
        ("first", dict(_class_name="FluxControlNetModel"), "is a FluxControlNetModel; supported"),
        ("first", dict(dim=64), "dim=64, the transformer 32; use a ControlNet made for"),
        ("first", dict(control_layers_places=[0, 3]), r"layers \[0, 3\], .* has layers 0 to 2"),
        ("first", dict(control_in_dim=3), "takes 3 channels, the control image has 4"),
        ("inpainting", dict(control_in_dim=4), "takes 4 channels, inpainting gives it 9"),
    ],
)
def test_a_controlnet_that_does_not_fit_is_refused(folders, tmp_path, form, changes, message):
    odd = edited(folders[form], tmp_path / "odd", "controlnet/config.json", **changes)
    with pytest.raises(st2i.LoadError, match=message):
        st2i.load(odd)


def test_several_controlnets_are_refused(folders):
    with pytest.raises(st2i.LoadError, match="one ControlNet at a time, not 2"):
        st2i.load(folders["first"], controlnet=["one", "other"])
    with pytest.raises(st2i.LoadError, match="no workflow for task='image-to-image' with a Contr"):
        st2i.load(folders["first"], task="image-to-image")


@pytest.mark.parametrize(
    ("parameters", "message"),
    [
        (dict(control_image=picture(8, 8).convert("L")), "mode 'L'.*convert"),
        (dict(control_image=torch.zeros(1, 3, 8, 8)), r"wanted \(1, 3, 256, 256\)"),
        ({SCALE: float("nan")}, "-10 to 10"),
        (dict(control_guidance_end=0.5), "no parameter 'control_guidance_end'"),
    ],
)
def test_bad_parameters_are_refused_before_anything_is_sent(folders, parameters, message):
    parameters = {"control_image": picture(32, 32), **parameters}
    with pytest.raises(st2i.ParameterError, match=message):
        st2i.load(folders["first"]).request(prompt="a cat", **parameters)
