"""FLUX.2 Klein: every image equals, bit for bit, what the unmodified pipelines make."""

from __future__ import annotations

import functools
import itertools
import json
import shutil

import numpy as np
import pytest
import torch

import st2i_dask as st2i
from st2i_dask.catalogue import tiny
from st2i_dask.catalogue.flux2_klein.references import MAX_AREA, OwnSizeImage, shrunk
from st2i_dask.catalogue.tiny_flux2_klein import LAYERS, save_flux2_klein

from .originals import expected as of_pipeline
from .originals import picture
from .running import run_here

torch.set_num_threads(1)

TIMEOUT = 120
TEXT, EDIT, INPAINT = "text-to-image", "image-to-image", "inpainting"
CLASSES = {
    TEXT: "Flux2KleinPipeline",
    EDIT: "Flux2KleinPipeline",
    INPAINT: "Flux2KleinInpaintPipeline",
}


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    root = tmp_path_factory.mktemp("klein")
    return {
        "distilled": save_flux2_klein(root / "klein", distilled=True),
        "base": save_flux2_klein(root / "klein-base", distilled=False),
    }


@functools.cache
def reference(folder, cls, dtype):
    import diffusers

    pipeline = getattr(diffusers, cls).from_pretrained(folder, dtype=getattr(torch, dtype))
    pipeline.set_progress_bar_config(disable=True)
    return pipeline


def load(folder, task=TEXT, dtype="float32", **options):
    return st2i.load(folder, task=task, dtype=dtype, text_encoder_out_layers=LAYERS, **options)


def expected(folder, task, dtype, **parameters):
    pipeline = reference(folder, CLASSES[task], dtype)
    return of_pipeline(pipeline, text_encoder_out_layers=LAYERS, **parameters)


def completed(task, parameters):
    made = dict(prompt="a cat", seed=3, num_steps=3, max_sequence_length=64)
    if task == TEXT:
        made |= dict(height=32, width=48)
    if task == EDIT:
        made["image"] = picture(66, 101)
    if task == INPAINT:
        made |= dict(image=picture(51, 40), mask_image=picture(30, 60, seed=1).convert("L"))
    return {**made, **parameters}


def check(folder, task, dtype, parameters):
    parameters = completed(task, parameters)
    ours = run_here(load(folder, task, dtype), **parameters)
    theirs = expected(folder, task, dtype, **parameters)
    assert str(theirs.dtype) == f"torch.{dtype}"
    assert torch.equal(ours.float(), theirs.float())
    assert ours.std() > 0.01  # not a constant picture, which would prove nothing
    return ours


THREE = [picture(64, 80), picture(90, 65, seed=1), picture(64, 64, seed=2)]
CASES = [
    ("distilled", TEXT, "float32", dict(num_steps=1)),
    ("distilled", TEXT, "bfloat16", dict(num_steps=12, height=20, width=64)),
    ("distilled", TEXT, "float32", dict(num_images=2, seed=2**63)),
    ("base", TEXT, "float32", dict(guidance_scale=4.0)),
    ("base", TEXT, "bfloat16", dict(guidance_scale=2.5, num_images=2, height=36)),
    ("base", TEXT, "float32", dict(guidance_scale=1.0)),
    ("distilled", EDIT, "float32", {}),
    ("distilled", EDIT, "bfloat16", dict(image=THREE, num_images=2, width=32)),
    ("base", EDIT, "float32", dict(image=THREE[:2], height=48, width=32)),
    ("distilled", INPAINT, "float32", dict(strength=1.0)),
    ("distilled", INPAINT, "bfloat16", dict(num_images=2, image_reference=picture(20, 33, seed=2))),
    ("base", INPAINT, "float32", dict(mask_image=picture(9, 30).convert("1"), num_steps=5)),
    ("base", INPAINT, "bfloat16", dict(mask_image=picture(70, 90, seed=4), strength=0.5)),
]


@pytest.mark.parametrize(("form", "task", "dtype", "parameters"), CASES)
def test_images_equal_the_pipelines(folders, form, task, dtype, parameters):
    check(folders[form], task, dtype, parameters)


@pytest.mark.slow
@pytest.mark.parametrize("num_images", [1, 2])
@pytest.mark.parametrize(
    ("form", "task", "dtype", "seed", "num_steps"),
    list(
        itertools.product(
            ("distilled", "base"), (TEXT, EDIT, INPAINT), ("float32", "bfloat16"), (0, 7), (1, 3, 8)
        )
    ),
)
def test_images_equal_the_pipelines_everywhere(
    folders, form, task, dtype, seed, num_steps, num_images
):
    parameters = dict(seed=seed, num_steps=num_steps, num_images=num_images)
    check(folders[form], task, dtype, parameters)


@pytest.mark.slow
@pytest.mark.parametrize("task", [EDIT, INPAINT])
def test_pictures_above_a_megapixel_are_shrunk_as_the_pipelines_do(folders, task):
    large = picture(900, 1301)
    more = dict(mask_image=picture(300, 411)) if task == INPAINT else dict(height=32, width=32)
    check(folders["distilled"], task, "float32", {"image": large, "num_steps": 1, **more})


@pytest.mark.parametrize("task", [TEXT, EDIT, INPAINT])
def test_spread_images_are_those_of_their_seeds(folders, task):
    parameters = completed(task, dict(num_steps=2))
    ours = run_here(load(folders["base"], task), **parameters, num_images=2, spread=True)
    for number, image in enumerate(ours):
        theirs = expected(folders["base"], task, "float32", **{**parameters, "seed": 3 + number})
        assert torch.equal(image, theirs)
    assert not torch.equal(*ours)


@pytest.mark.parametrize("task", [TEXT, EDIT, INPAINT])
def test_every_parameter_changes_the_picture(folders, task):
    """Otherwise equality would say little about it."""
    common = completed(task, dict(num_steps=4))
    variants = [{}, {"prompt": "a dog"}, {"guidance_scale": 1.0}, {"guidance_scale": 2.0}]
    variants += [{"seed": 4}, {"num_steps": 5}]
    if task == EDIT:
        variants += [{"image": [common["image"], each]} for each in THREE]
    if task == INPAINT:
        variants += [{"strength": 0.5}, {"mask_image": picture(30, 60, seed=2)}]
        variants += [{"image_reference": each} for each in THREE]
    workflow = load(folders["base"], task)
    images = [run_here(workflow, **{**common, **more}) for more in variants]
    for i, image in enumerate(images):
        assert not any(torch.equal(image, other) for other in images[:i]), variants[i]


def test_images_from_a_cluster_equal_the_pipelines(client, folders, tmp_path):
    """Three tenants on two workers: text with guidance, editing, and another family beside them."""
    other = tiny.save_flux(tmp_path / "beside", guidance=False)
    first = completed(TEXT, dict(num_steps=4))
    second = completed(EDIT, dict(image=THREE, num_images=2))
    third = completed(INPAINT, {})
    futures = [
        load(folders["base"]).submit(client, output_type="pt", tenant="a", **first),
        load(folders["distilled"], EDIT, "bfloat16").submit(
            client, output_type="pt", tenant="b", **second
        ),
        load(folders["distilled"], INPAINT, "bfloat16").submit(
            client, output_type="pt", tenant="b", **third
        ),
        st2i.load(other, dtype="float32").submit(
            client, output_type="pt", tenant="c", prompt="a cat", num_steps=4, height=32, width=32
        ),
    ]
    ours = [future.result(timeout=TIMEOUT) for future in futures]
    assert torch.equal(ours[0], expected(folders["base"], TEXT, "float32", **first))
    theirs = expected(folders["distilled"], EDIT, "bfloat16", **second)
    assert torch.equal(ours[1], theirs.float())
    theirs = expected(folders["distilled"], INPAINT, "bfloat16", **third)
    assert torch.equal(ours[2], theirs.float())
    assert ours[3].std() > 0.01


# ---------------------------------------------------------------- what is composed


def names(folder, task, **parameters):
    request = load(folder, task).request(**completed(task, parameters))
    return [annotation["fn"] for annotation in request.annotations.values()]


def test_guidance_is_two_invocations_a_step_and_two_texts(folders):
    made = names(folders["base"], TEXT, num_steps=5)
    assert made.count("KleinTransformer") == 10
    assert made.count("QwenText") == 2
    for form, more in (("base", dict(guidance_scale=1.0)), ("distilled", {})):
        made = names(folders[form], TEXT, num_steps=5, **more)
        assert made.count("KleinTransformer") == 5
        assert made.count("QwenText") == 1


@pytest.mark.parametrize(("spread", "decoders"), [(False, 1), (True, 3)])
def test_texts_and_pictures_are_encoded_once_for_all_images(folders, spread, decoders):
    made = names(folders["distilled"], EDIT, num_images=3, spread=spread, num_steps=2)
    assert made.count("QwenText") == made.count("ReferenceEncoder") == 1
    assert made.count("VaeDecoder") == decoders
    assert made.count("KleinTransformer") == 2 * decoders


def test_one_vae_serves_encoders_and_decoder(folders):
    request = load(folders["base"], EDIT).request(**completed(EDIT, {}))
    models = {about["fn"]: about["model"] for about in request.annotations.values()}
    assert models["ReferenceEncoder"] == models["VaeDecoder"]


def test_parameters_of_each_form(folders):
    made = {
        (form, task): {p.name: p.default for p in load(folders[form], task).parameters}
        for form in folders
        for task in CLASSES
    }
    assert {key for key in made if "guidance_scale" in made[key]} == {
        ("base", task) for task in CLASSES
    }
    assert {key[1] for key in made if "image" in made[key]} == {EDIT, INPAINT}
    assert {key[1] for key in made if "height" in made[key]} == {TEXT, EDIT}
    assert made["base", TEXT]["num_steps"] == 50
    assert made["distilled", TEXT]["num_steps"] == 4
    assert made["base", INPAINT]["guidance_scale"] == 8.0
    assert made["base", EDIT]["height"] is None


@pytest.mark.parametrize(
    ("task", "parameters", "message"),
    [
        (TEXT, dict(prompt=""), "empty"),
        # The template and the message's frame count too.
        (TEXT, dict(prompt="x" * 64), r"prompt is too long: \d\d+ tokens, limit 64"),
        (TEXT, dict(prompt="x" * 500, max_sequence_length=512), r"tokens, limit 512"),
        (TEXT, dict(num_steps=0), "1 to 1000"),
        (TEXT, dict(num_steps=10_000), "1 to 1000"),
        (TEXT, dict(height=33), "multiples of 4.*nearest: 32"),
        (TEXT, dict(guidance_scale=float("nan")), "0 to 100"),
        (TEXT, dict(negative_prompt="a dog"), "no parameter 'negative_prompt'"),
        (TEXT, dict(image=picture(64, 64)), "no parameter 'image'"),
        (TEXT, dict(height=None), "wanted int"),
        (EDIT, dict(image=[]), "image holds 0 images, wanted 1 to 10 images"),
        (EDIT, dict(image=[picture(64, 64)] * 11), "image holds 11 images"),
        (EDIT, dict(image=picture(63, 80)), r"image\[0\] has 80x63 pixels, wanted at least 64"),
        (EDIT, dict(image=picture(64, 513)), r"image\[0\] has 513x64 .* ratio of 8.0; allowed: up"),
        (EDIT, dict(image=np.zeros((64, 64, 3))), r"image\[0\] has type ndarray, wanted one RGB"),
        (EDIT, dict(image=picture(64, 64).convert("L")), "mode 'L'"),
        (EDIT, dict(height=33), "multiples of 4"),
        (INPAINT, dict(image=picture(3, 64)), "image has 64x3 pixels, wanted at least 4"),
        (INPAINT, dict(mask_image=np.zeros((8, 8))), "mask_image has type ndarray"),
        (INPAINT, dict(image_reference=picture(3, 3)), "image_reference has 3x3 pixels"),
        (INPAINT, dict(strength=0.0), "strength=0.0 leaves none of 3 steps"),
        (INPAINT, dict(height=32), "no parameter 'height'"),
    ],
)
def test_bad_parameters_are_refused_before_anything_is_sent(folders, task, parameters, message):
    with pytest.raises(st2i.ParameterError, match=message):
        load(folders["base"], task).request(**completed(task, parameters))


@pytest.mark.parametrize("task", [EDIT, INPAINT])
def test_pictures_are_wanted(folders, task):
    with pytest.raises(st2i.ParameterError, match="parameter 'image' is missing"):
        load(folders["base"], task).request(prompt="a cat")


def test_a_picture_keeps_its_size_up_to_a_megapixel():
    rule = OwnSizeImage(least=4)
    assert rule.carry("image", picture(70, 90), {"height": 8, "width": 8}).shape == (70, 90, 3)
    for size in ((1300, 900), (1025, 1024), (40_000, 30)):
        width, height = shrunk(size)
        assert width * height <= MAX_AREA
        assert abs(width / height - size[0] / size[1]) < 0.05 * size[0] / size[1]
    assert shrunk((1024, 1024)) == (1024, 1024)
    large = picture(900, 1301)
    assert rule.carry("image", large, {}).shape[:2] == shrunk(large.size)[::-1]


# ---------------------------------------------------------------- folders


def edited(folder, path, file, **changes):
    shutil.copytree(folder, path)
    file = path / file
    file.write_text(json.dumps({**json.loads(file.read_text()), **changes}))
    return path


def test_layers_that_the_text_encoder_has_not_are_refused(folders):
    with pytest.raises(st2i.LoadError, match=r"layers=\(9, 18, 27\), but its text encoder has 2"):
        st2i.load(folders["base"])
    with pytest.raises(st2i.LoadError, match=r"layers=\(0, 1\) give embeddings of 64 .* takes 96"):
        st2i.load(folders["base"], text_encoder_out_layers=(0, 1))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (dict(_class_name="DDIMScheduler"), "cannot use the scheduler DDIMScheduler"),
        (dict(_class_name="FlowMatchLCMScheduler"), "LCMScheduler, which draws noise that no seed"),
        (dict(stochastic_sampling=True), "stochastic_sampling=True"),
    ],
)
def test_a_scheduler_that_the_pipeline_cannot_use_is_refused(folders, changes, message):
    with pytest.raises(st2i.LoadError, match=message):
        load(folders["base"], scheduler=changes)


def test_a_folder_without_its_tokenizers_vocabulary_is_refused(folders, tmp_path):
    shutil.copytree(folders["base"], tmp_path / "wordless")
    for file in (tmp_path / "wordless" / "tokenizer").iterdir():
        if file.name not in ("tokenizer_config.json", "chat_template.jinja"):
            file.unlink()
    with pytest.raises(st2i.LoadError, match=r"wordless.*vocabulary"):
        load(tmp_path / "wordless")


def test_a_folder_of_the_inpainting_pipeline_has_its_task(folders, tmp_path):
    index = dict(_class_name="Flux2KleinInpaintPipeline")
    folder = edited(folders["distilled"], tmp_path / "painted", "model_index.json", **index)
    made = st2i.load(folder, text_encoder_out_layers=LAYERS)
    assert "mask_image" in {p.name for p in made.parameters}
    assert run_here(made, **completed(INPAINT, {})).std() > 0.01


def test_no_controlnet_goes_with_it(folders):
    with pytest.raises(st2i.LoadError, match="no workflow for task='text-to-image' with a Control"):
        load(folders["base"], controlnet=folders["base"])
