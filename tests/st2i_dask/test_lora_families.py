"""Adapters in every family and task: images equal those of the pipeline that has loaded them."""

from __future__ import annotations

import functools

import numpy as np
import pytest
import torch
from PIL import Image

import st2i_dask as st2i
from st2i_dask.catalogue import (
    tiny,
    tiny_flux2_klein,
    tiny_lora,
    tiny_qwen_image,
    tiny_sd3,
    tiny_sdxl,
    tiny_z_image,
)
from st2i_dask.plan import unpack

from .running import run_here

# Workers run one torch thread each; the reference must sum in the same order.
torch.set_num_threads(1)

IMAGE = np.random.default_rng(0).random((32, 32, 3), dtype=np.float32)
MASK = Image.fromarray(np.pad(np.full((16, 16), 255, np.uint8), 8))
LAYERS = tiny_flux2_klein.LAYERS  # of the text encoder

SDXL = ("unet", "text_encoder", "text_encoder_2")
BOTH = ("transformer", "text_encoder")
CASES = [
    # what saves the folder, parts of the adapter, task, pipeline of the task, parameters
    (tiny.save_flux, BOTH, "image-to-image", "FluxImg2ImgPipeline", dict(image=IMAGE)),
    (tiny.save_flux, BOTH, "inpainting", "FluxInpaintPipeline", dict(image=IMAGE, mask_image=MASK)),
    (tiny_sd3.save_sd3, (*BOTH, "text_encoder_2"), "text-to-image", "StableDiffusion3Pipeline", {}),
    (
        tiny_sd3.save_sd3,
        BOTH,
        "image-to-image",
        "StableDiffusion3Img2ImgPipeline",
        dict(image=IMAGE),
    ),
    (tiny_z_image.save_z_image, BOTH[:1], "text-to-image", "ZImagePipeline", {}),
    (
        tiny_flux2_klein.save_flux2_klein,
        BOTH[:1],
        "text-to-image",
        "Flux2KleinPipeline",
        dict(text_encoder_out_layers=LAYERS),
    ),
    (tiny_sdxl.save_sdxl, SDXL, "text-to-image", "StableDiffusionXLPipeline", {}),
    (
        tiny_sdxl.save_sdxl,
        SDXL,
        "inpainting",
        "StableDiffusionXLInpaintPipeline",
        dict(image=IMAGE, mask_image=MASK),
    ),
    (tiny_qwen_image.save_qwen_image, BOTH[:1], "text-to-image", "QwenImagePipeline", {}),
]


@functools.cache
def saved(save, root):
    return save(root / save.__name__)


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    return tmp_path_factory.mktemp("families")


def pipeline(name, folder, dtype):
    import diffusers

    parts = getattr(diffusers, name).load_config(folder)
    absent = {part: None for part, value in parts.items() if value == [None, None]}
    made = getattr(diffusers, name).from_pretrained(folder, dtype=getattr(torch, dtype), **absent)
    made.set_progress_bar_config(disable=True)
    return made


@pytest.mark.parametrize(("save", "parts", "task", "name", "parameters"), CASES)
@pytest.mark.parametrize(
    "dtype", ["float32", pytest.param("bfloat16", marks=pytest.mark.slow)]
)  # bfloat16 in every family takes long
def test_image_equals_the_pipelines(root, save, parts, task, name, parameters, dtype):
    folder = saved(save, root)
    base = pipeline(name, folder, dtype)
    files = [
        tiny_lora.save_lora(root / f"{number}.safetensors", base, parts=parts, seed=number)
        for number in range(2)
    ]
    common = dict(prompt="a cat", height=32, width=32, **parameters)
    loras = [(files[0], 0.8), (files[1], -0.5)]
    defaults = {"text_encoder_out_layers": LAYERS} if "text_encoder_out_layers" in common else {}
    workflow = st2i.load(folder, dtype=dtype, task=task, **defaults)
    given = {name: value for name, value in common.items() if name not in defaults}
    ours = run_here(workflow, seed=3, num_steps=2, loras=loras, **given)

    def expected():
        return base(
            **common,
            num_inference_steps=2,
            output_type="pt",
            generator=torch.Generator("cpu").manual_seed(3),
        ).images[0]

    plain = expected()
    for number, file in enumerate(files):
        base.load_lora_weights(str(file), adapter_name=f"n{number}")
    base.set_adapters(["n0", "n1"], [0.8, -0.5])
    theirs = expected()
    assert torch.equal(ours.float(), theirs.float())
    assert ours.std() > 0.01  # not a constant picture, which would prove nothing
    assert not torch.equal(ours.float(), plain.float()), "the adapters did nothing"


@pytest.mark.parametrize(("save", "name"), {case[0]: (case[0], case[3]) for case in CASES}.values())
def test_every_text_encoder_makes_the_denoiser_ready(root, save, name):
    folder = saved(save, root)
    denoiser = "unet" if save is tiny_sdxl.save_sdxl else "transformer"
    base = pipeline(name, folder, "float32")
    file = tiny_lora.save_lora(root / "ready.safetensors", base, parts=[denoiser])
    klein = save is tiny_flux2_klein.save_flux2_klein
    defaults = {"text_encoder_out_layers": LAYERS} if klein else {}
    workflow = st2i.load(folder, dtype="float32", task="text-to-image", **defaults)
    request = workflow.request(prompt="a cat", loras=[(file, 0.3)])
    models = [unpack(task.args[0])[0] for task in request.tasks.values()]
    encoders = [made for made in models if any(p.startswith("text_encoder") for p in made.parts)]
    wanted = {made.model_key for made in models if denoiser in made.parts}
    assert len(wanted) == 1
    assert encoders
    for encoder in encoders:
        assert {soon.model_key for soon in encoder.soon()} == wanted
    assert not any(made.soon() for made in models if made not in encoders)


def test_adapters_of_one_family_are_refused_by_the_others(root):
    saves = list(dict.fromkeys(case[0] for case in CASES))
    names = {case[0]: case[3] for case in CASES[::-1]}
    for save in saves:
        base = pipeline(names[save], saved(save, root), "float32")
        # Of every linear layer: these tiny models have attention of the same names and widths.
        part = "unet" if save is tiny_sdxl.save_sdxl else "transformer"
        named = getattr(base, part).named_modules()
        layers = [name for name, module in named if isinstance(module, torch.nn.Linear)]
        path = root / "one.safetensors"
        file = tiny_lora.save_lora(path, base, parts=[part], targets=layers)
        for other in saves:
            klein = other is tiny_flux2_klein.save_flux2_klein
            defaults = {"text_encoder_out_layers": LAYERS} if klein else {}
            workflow = st2i.load(saved(other, root), task="text-to-image", **defaults)
            if other is save:
                assert workflow.request(prompt="a cat", loras=file).tasks
                continue
            with pytest.raises(st2i.ParameterError, match="use an adapter made for this model"):
                workflow.request(prompt="a cat", loras=file)


def test_kohyas_adapters_for_sdxl_equal_the_pipelines(root):
    """Blocks are numbered as in the original UNet there, and each module has an alpha."""
    folder = saved(tiny_sdxl.save_sdxl, root)
    base = pipeline("StableDiffusionXLPipeline", folder, "float32")
    file = tiny_lora.save_kohya_sdxl_lora(root / "kohya.safetensors", base)
    common = dict(prompt="a cat", height=32, width=32)
    ours = run_here(st2i.load(folder, dtype="float32"), num_steps=2, loras=file, **common)
    base.load_lora_weights(str(file))
    generator = torch.Generator("cpu").manual_seed(0)
    theirs = base(**common, num_inference_steps=2, output_type="pt", generator=generator).images[0]
    assert torch.equal(ours, theirs)
    base.unload_lora_weights()
    assert not torch.equal(
        ours, run_here(st2i.load(folder, dtype="float32"), num_steps=2, **common)
    )
