"""ComfyUI exports: what they become, which picture that is, and what is refused, by name."""

from __future__ import annotations

import copy
import json
import re

import diffusers
import pytest
import torch
from PIL import Image

import st2i_dask as st2i
from st2i_dask.catalogue import tiny, tiny_lora, tiny_sdxl
from st2i_dask.comfyui.graph import read_graph
from st2i_dask.comfyui.nodes import MEANING, evaluate

from .running import run_here

CHECKPOINT, CONTROLNET = "flux1-dev.safetensors", "canny.safetensors"


def node(kind, **inputs):
    return {"class_type": kind, "inputs": inputs, "_meta": {"title": kind}}


def plain(**sampler):
    """An export with every node that text to image needs."""
    sampler = {
        "seed": 7,
        "steps": 3,
        "cfg": 1,
        "sampler_name": "euler",
        "scheduler": "simple",
        "denoise": 1,
        "model": ["4", 0],
        "positive": ["10", 0],
        "negative": ["8", 0],
        "latent_image": ["5", 0],
        **sampler,
    }
    return {
        "3": node("KSampler", **sampler),
        "4": node("CheckpointLoaderSimple", ckpt_name=CHECKPOINT),
        "5": node("EmptyLatentImage", width=48, height=32, batch_size=1),
        "7": node("CLIPTextEncode", text="a cat", clip=["4", 1]),
        "8": node("CLIPTextEncode", text="", clip=["4", 1]),
        "9": node("VAEDecode", samples=["3", 0], vae=["4", 2]),
        "10": node("FluxGuidance", guidance=2.5, conditioning=["7", 0]),
        "11": node("SaveImage", images=["9", 0], filename_prefix="ComfyUI"),
        "99": node("PrimitiveNode", value=1),  # nothing needs it
    }


def lora_loader(file, strength, *, after="4", of_clip=None):
    """A LoraLoader behind that node; of_clip: its other strength."""
    return node(
        "LoraLoader",
        model=[after, 0],
        clip=[after, 1],
        lora_name=file,
        strength_model=strength,
        strength_clip=strength if of_clip is None else of_clip,
    )


#: What `plain` says, as parameters.
SETTINGS = dict(prompt="a cat", seed=7, num_steps=3, width=48, height=32, guidance_scale=2.5)


def controlled(**control):
    made = plain(positive=["20", 0], negative=["20", 1])
    made["20"] = node(
        "ControlNetApplyAdvanced",
        **{
            "positive": ["10", 0],
            "negative": ["8", 0],
            "control_net": ["21", 0],
            "image": ["22", 0],
            "strength": 0.7,
            "start_percent": 0,
            "end_percent": 0.5,
            **control,
        },
    )
    made["21"] = node("ControlNetLoader", control_net_name=CONTROLNET)
    made["22"] = node("LoadImage", image="edges.png [input]", upload="image")
    return made


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    root = tmp_path_factory.mktemp("models")
    flux = tiny.flux_controlnet(layers=(2, 2), control_layers=(1, 1))
    flux.controlnet.save_pretrained(root / "canny")
    return {CHECKPOINT: tiny.save_flux(root / "flux"), CONTROLNET: root / "canny"}


@pytest.fixture(scope="module")
def edges(tmp_path_factory):
    folder = tmp_path_factory.mktemp("images")
    noise = torch.rand(32, 48, 3, generator=torch.Generator().manual_seed(0))
    image = Image.fromarray((noise * 255).byte().numpy())
    image.save(folder / "edges.png")
    return folder


def load(value, folders, **options):
    return st2i.from_comfyui(value, models=folders, **options)


# ---------------------------------------------------------------- what it becomes


def test_its_picture_is_that_of_the_same_settings(folders):
    ours = run_here(load(plain(), folders))
    theirs = run_here(
        st2i.load(folders[CHECKPOINT]),
        **SETTINGS,
    )
    assert torch.equal(ours, theirs)
    assert ours.shape == (3, 32, 48)


def test_its_values_are_defaults(folders):
    made = load(plain(), folders)
    assert not any(parameter.required for parameter in made.parameters)
    assert torch.equal(run_here(made, seed=8), run_here(load(plain(seed=8), folders)))
    assert not torch.equal(run_here(made, prompt="a dog"), run_here(made))
    with pytest.raises(st2i.ParameterError, match="num_steps=0"):
        made.request(num_steps=0)


def test_a_controlnet_with_its_image(folders, edges):
    ours = run_here(load(controlled(), folders, images=edges))
    with Image.open(edges / "edges.png") as image:
        theirs = run_here(
            st2i.load(folders[CHECKPOINT], controlnet=folders[CONTROLNET]),
            **SETTINGS,
            control_image=image.convert("RGB"),
            controlnet_conditioning_scale=0.7,
            control_guidance_end=0.5,
        )
    assert torch.equal(ours, theirs)
    assert not torch.equal(ours, run_here(load(plain(), folders)))


def test_each_of_two_controlnets_has_its_window(folders, edges):
    graph = controlled()
    graph["30"] = node(
        "ControlNetApplyAdvanced",
        **{**graph["20"]["inputs"], "positive": ["20", 0], "negative": ["20", 1]},
    )
    graph["30"]["inputs"].update(start_percent=0.5, end_percent=1, strength=0.4)
    graph["3"]["inputs"].update(positive=["30", 0], negative=["30", 1])
    ours = run_here(load(graph, folders, images=edges))
    with Image.open(edges / "edges.png") as image:
        theirs = run_here(
            st2i.load(folders[CHECKPOINT], controlnet=[folders[CONTROLNET]] * 2),
            **SETTINGS,
            control_image=[image.convert("RGB")] * 2,
            controlnet_conditioning_scale=[0.7, 0.4],
            control_guidance_start=[0.0, 0.5],
            control_guidance_end=[0.5, 1.0],
        )
    assert torch.equal(ours, theirs)


def test_a_file_takes_its_name_and_the_pictures_beside_it(folders, edges):
    path = edges / "cat.json"
    path.write_text(json.dumps(controlled()))
    made = load(path, folders)
    assert made.name == "cat"
    assert st2i.workflows.get("cat") is made


def test_the_older_controlnet_node(folders):
    value = plain(positive=["20", 0])
    value["20"] = node(
        "ControlNetApply",
        conditioning=["10", 0],
        control_net=["21", 0],
        image=["22", 0],
        strength=1,
    )
    value["21"] = node("ControlNetLoader", control_net_name=CONTROLNET)
    value["22"] = node("LoadImage", image="edges.png")
    sampling = evaluate(read_graph(value))
    (control,) = sampling.positive.controls
    assert (control.file, control.image, control.strength) == (CONTROLNET, "edges.png", 1.0)
    assert (control.start, control.end) == (0.0, 1.0)
    assert sampling.positive.guidance == 2.5


def test_loras_in_the_order_of_the_chain():
    value = plain(model=["31", 0])
    value["30"] = lora_loader("a.safetensors", 0.5)
    value["31"] = lora_loader("b.safetensors", 1, after="30")
    loras = evaluate(read_graph(value)).model.loras
    assert [(lora.file, lora.scale) for lora in loras] == [
        ("a.safetensors", 0.5),
        ("b.safetensors", 1.0),
    ]


# ---------------------------------------------------------------- another family

XL = "sd_xl_base_1.0.safetensors"


def xl(**sampler):
    sampler = {
        "cfg": 5.5,
        "sampler_name": "dpmpp_2m",
        "scheduler": "karras",
        "positive": ["7", 0],
        **sampler,
    }
    made = plain(**sampler)
    del made["10"]
    made["4"] = node("CheckpointLoaderSimple", ckpt_name=XL)
    made["5"] = node("EmptyLatentImage", width=64, height=64, batch_size=2)
    made["8"] = node("CLIPTextEncode", text="blurred", clip=["4", 1])
    return made


@pytest.fixture(scope="module")
def xl_folders(tmp_path_factory):
    root = tmp_path_factory.mktemp("xl")
    folder = tiny_sdxl.save_sdxl(root / "xl")
    pipeline = diffusers.DiffusionPipeline.from_pretrained(folder)
    lora = tiny_lora.save_lora(root / "ink.safetensors", pipeline, parts=("unet",))
    return {XL: folder, "ink.safetensors": lora}


DRAWN = dict(prompt="a cat", seed=7, num_steps=3, guidance_scale=5.5, negative_prompt="blurred")
KARRAS = {"_class_name": "DPMSolverMultistepScheduler", "use_karras_sigmas": True}


def test_sampler_guidance_and_negative_text_of_stable_diffusion_xl(xl_folders):
    ours = run_here(load(xl(), xl_folders))
    base = st2i.load(xl_folders[XL], scheduler=KARRAS)
    assert torch.equal(ours, run_here(base, num_images=2, width=64, height=64, **DRAWN))
    assert ours.shape == (2, 3, 64, 64)
    other = run_here(load(xl(sampler_name="euler"), xl_folders))
    assert not torch.equal(ours, other)


def test_without_guidance_the_negative_text_has_no_say(xl_folders):
    made = load(xl(cfg=1), xl_folders)
    (negative,) = [p for p in made.parameters if p.name == "negative_prompt"]
    assert negative.default != "blurred"


def test_a_lora_and_a_picture_to_begin_with(xl_folders, edges):
    value = xl(denoise=0.7, model=["30", 0], latent_image=["31", 0])
    value["30"] = lora_loader("ink.safetensors", 0.6)
    value["31"] = node("VAEEncode", pixels=["32", 0], vae=["4", 2])
    value["32"] = node("LoadImage", image="edges.png")
    ours = run_here(load(value, xl_folders, images=edges))
    base = st2i.load(xl_folders[XL], task="image-to-image", scheduler=KARRAS)
    with Image.open(edges / "edges.png") as image:
        picture = image.convert("RGB")
    given = dict(image=picture, strength=0.7, **DRAWN)
    lora = xl_folders["ink.safetensors"]
    assert torch.equal(ours, run_here(base, loras=[(lora, 0.6)], **given))
    assert not torch.equal(ours, run_here(base, **given))


def test_guidance_of_flux_is_refused_elsewhere(xl_folders):
    value = xl(positive=["10", 0])
    value["10"] = node("FluxGuidance", guidance=2.5, conditioning=["7", 0])
    with pytest.raises(st2i.LoadError, match="FluxGuidance has no meaning for a StableDiffusionXL"):
        load(value, xl_folders)


# ---------------------------------------------------------------- what is refused


def changed(make=plain, **nodes):
    value = make()
    for key, change in nodes.items():
        value[key.lstrip("n")] = change
    return value


REFUSED = [
    (
        changed(n5=node("EmptyHunyuanLatentVideo"), n7=node("Fancy Text")),
        r"no counterpart here for: EmptyHunyuanLatentVideo \(node 5\), Fancy Text \(node 7\); supported",
    ),
    ({"nodes": [], "links": []}, r"file for its editor; export it with Workflow > Export \(API\)"),
    ({}, "no API-format workflow"),
    ([1, 2], "no API-format workflow"),
    ({"1": {"class_type": "SaveImage"}}, "no API-format workflow"),
    ({"4": plain()["4"]}, "must have one output, .* it has: none"),
    (
        changed(n12=node("PreviewImage", images=["9", 0])),
        r"it has: SaveImage \(node 11\), PreviewImage \(node 12\)",
    ),
    (plain(model=["77", 0]), r"KSampler \(node 3\) takes 'model' from node 77, which is not there"),
    (
        changed(n9=node("VAEDecode", samples=["9", 0], vae=["4", 2])),
        r"VAEDecode \(node 9\) needs its own output",
    ),
    (
        plain(model=["4", 1], positive=["4", 0]),
        r"KSampler \(node 3\): positive is a Model, wanted Con",
    ),
    (plain(model=["4", 5]), r"KSampler \(node 3\): model is a NoneType, wanted Model"),
    (plain(seed="7"), r"KSampler \(node 3\): seed is a str, wanted int"),
    (changed(n5=node("EmptyLatentImage", width=48, height=32)), "has no input 'batch_size'"),
    (plain(sampler_name="lcm"), "sampler_name='lcm' with scheduler='simple' .* euler with simple"),
    (plain(denoise=0.5), "denoise=0.5 with an empty latent"),
    (plain(steps=10_000), "num_steps=10000 is out of range; allowed: 1 to 1000"),
    (
        changed(n5=node("EmptyLatentImage", width=50, height=32, batch_size=1)),
        "width=50 is not an allowed size",
    ),
    (
        changed(n11=node("SaveImage", images=["22", 0]), n22=node("LoadImage", image="edges.png")),
        "there is nothing to draw",
    ),
    (controlled(image=["9", 0]), "its own output"),
]


@pytest.mark.parametrize(("value", "message"), REFUSED)
def test_refusals_say_what_is_wrong(folders, value, message):
    with pytest.raises(st2i.St2iError, match=message):
        load(value, folders)


def test_every_model_that_is_not_given_is_named(folders):
    with pytest.raises(st2i.LoadError, match=f"for '{CHECKPOINT}', '{CONTROLNET}'; pass models="):
        load(controlled(), {})
    with pytest.raises(st2i.LoadError, match=f"for '{CHECKPOINT}'; pass models="):
        st2i.from_comfyui(plain())


def test_a_lora_with_two_strengths_is_refused(folders):
    value = plain(model=["30", 0])
    value["30"] = lora_loader("a.safetensors", 0.5, of_clip=1)
    with pytest.raises(st2i.LoadError, match=r"LoraLoader \(node 30\): strength_model=0.5 and"):
        load(value, folders)


def test_a_picture_that_is_not_there_is_refused(folders, tmp_path):
    with pytest.raises(st2i.LoadError, match=re.escape(str(tmp_path / "edges.png"))):
        load(controlled(), folders, images=tmp_path)


@pytest.mark.parametrize(
    "text", ["a (cat:1.3) on a sofa", "a cat, embedding:easynegative", "(a ((cat)) : 0.5)"]
)
def test_texts_that_mean_more_than_they_say_are_refused(folders, text):
    value = changed(n7=node("CLIPTextEncode", text=text, clip=["4", 1]))
    with pytest.raises(st2i.LoadError, match=r"CLIPTextEncode \(node 7\): text has .* plain words"):
        load(value, folders)


@pytest.mark.parametrize("text", ["a cat (asleep)", "ratio 16:9", "(one) and: two 2", "10:30 (a)"])
def test_other_texts_are_taken_as_they_are(text):
    value = changed(n7=node("CLIPTextEncode", text=text, clip=["4", 1]))
    assert evaluate(read_graph(value)).positive.text == text


@pytest.mark.parametrize("text", ["", "{", "null", "[]", '{"1": 2}'])
def test_a_file_that_is_none_is_refused(folders, tmp_path, text):
    path = tmp_path / "x.json"
    path.write_text(text)
    with pytest.raises(st2i.LoadError):
        load(path, folders)


def test_a_missing_file_is_refused(folders, tmp_path):
    with pytest.raises(st2i.LoadError, match="cannot be read"):
        load(tmp_path / "none.json", folders)


def test_a_chain_of_thousands_is_read():
    value = plain(model=["c4999", 0])
    for number in range(5000):
        before = f"c{number - 1}" if number else "4"
        value[f"c{number}"] = lora_loader("a", 1, after=before)
    assert len(evaluate(read_graph(value)).model.loras) == 5000


def test_reading_changes_nothing(folders, edges):
    value = controlled()
    before = copy.deepcopy(value)
    load(value, folders, images=edges)
    assert value == before


def test_every_node_of_the_examples_has_a_meaning():
    kinds = {item["class_type"] for item in controlled().values()} - {"PrimitiveNode"}
    assert kinds <= set(MEANING)
