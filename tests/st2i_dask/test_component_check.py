"""Components that are not what their configurations say: refused before anything is built of them."""

from __future__ import annotations

import json
import shutil

import pytest

import st2i_dask as st2i
from st2i_dask import catalogue
from st2i_dask.catalogue import tiny, tiny_qwen_image, tiny_sd3, tiny_sdxl, tiny_z_image
from st2i_dask.catalogue.folder import load_component, load_parts

NAME = "damaged component"
SAVE = {
    "flux": tiny.save_flux_controlnet,
    "sd3": tiny_sd3.save_sd3_controlnet,
    "sdxl": tiny_sdxl.save_sdxl,
    "z-image": tiny_z_image.save_z_image_controlnet,
    "qwen": tiny_qwen_image.save_qwen_image_controlnet,
}


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    return tiny_z_image.save_z_image(tmp_path_factory.mktemp("whole") / "z")


@pytest.fixture
def folder(whole, tmp_path):
    return shutil.copytree(whole, tmp_path / "z")


def refused(call):
    with pytest.raises(st2i.LoadError) as caught:
        call()
    return str(caught.value)


def load(folder):
    return st2i.load(folder, name=NAME)


def change(file, **values):
    said = json.loads(file.read_text())
    file.write_text(json.dumps({**said, **values}))


# ---------------------------------------------------------------- more weights than the files hold


def test_an_empty_configuration_of_a_text_encoder_is_refused(folder):
    file = folder / "text_encoder" / "config.json"
    file.write_text("{}")
    message = refused(lambda: load(folder))
    assert f"{file} does not say 'model_type'; copy the file again" in message
    assert message == refused(lambda: load_parts(str(folder), {"text_encoder"}, None))


def test_a_model_of_the_librarys_own_size_is_refused_before_it_is_built(folder):
    file = folder / "text_encoder" / "config.json"
    file.write_text('{"model_type": "qwen3", "hidden_size": 4096}')
    message = refused(lambda: load(folder))
    assert f"{file} says a Qwen3Model of 11,427,131,392 weights" in message
    assert "the files beside it hold 27,008; copy" in message
    assert "copy the folder again" in message
    assert message == refused(lambda: load_parts(str(folder), {"text_encoder"}, None))


@pytest.mark.parametrize("family", SAVE)
def test_every_component_of_every_family_is_compared_with_its_files(family, tmp_path):
    from safetensors.numpy import load_file, save_file

    folder = SAVE[family](tmp_path / family)
    load(folder)
    weights = sorted(folder.glob("*/*.safetensors"))
    assert len(weights) >= 3
    for file in weights:
        tensors = load_file(file)
        largest = max(tensors, key=lambda name: tensors[name].size)
        kept = shutil.copy(file, tmp_path / "kept")
        save_file({largest: tensors[largest]}, file, {"format": "pt"})
        part = file.parent.name
        if part == "controlnet":
            message = refused(lambda: load_parts(str(folder), {"controlnet"}, "float32"))
        else:
            message = refused(lambda: load(folder))
        assert f"{file.parent / 'config.json'} says a" in message
        shutil.copy(kept, file)
    load(folder)


def test_a_model_in_a_folder_of_its_own_is_compared_too(folder):
    file = folder / "vae" / "config.json"
    change(file, layers_per_block=9)
    message = refused(lambda: load_component(str(folder / "vae"), "AutoencoderKL", None))
    assert f"{file} says a AutoencoderKL of" in message


# ---------------------------------------------------------------- values of another kind


@pytest.mark.parametrize(
    ("part", "key"),
    [
        ("transformer", key)
        for key in (
            *("dim", "all_f_patch_size", "all_patch_size", "axes_dims", "cap_feat_dim", "n_heads"),
            *("n_refiner_layers", "norm_eps", "rope_theta", "siglip_feat_dim", "t_scale"),
        )
    ]
    + [("vae", "scaling_factor"), ("vae", "shift_factor"), ("text_encoder", "num_hidden_layers")],
)
def test_a_value_of_another_kind_is_refused_with_its_file(folder, part, key):
    file = folder / part / "config.json"
    change(file, **{key: "x"})
    message = refused(lambda: load(folder))
    assert str(file) in message
    assert "copy the file again" in message
    assert str(file) in refused(lambda: load_parts(str(folder), {part}, "float32"))


@pytest.mark.parametrize("key", ["scaling_factor", "shift_factor"])
@pytest.mark.parametrize("value", [None, [], float("nan"), True])
def test_factors_of_the_vae_are_numbers(folder, key, value):
    change(folder / "vae" / "config.json", **{key: value})
    assert f"config.json has {key}={value!r}, wanted a" in refused(lambda: load(folder))


@pytest.mark.parametrize("text", ["[]", "null", "3", '"x"'])
def test_a_configuration_that_is_no_object_is_refused(folder, text):
    file = folder / "text_encoder" / "config.json"
    file.write_text(text)
    assert f"{file} does not hold a JSON object" in refused(lambda: load(folder))


@pytest.mark.parametrize(
    ("named", "said"),
    [
        (["os", "system"], "wanted a class of diffusers or transformers"),
        (["diffusers", "NoSuchModel"], "this diffusers has no such class"),
    ],
)
def test_a_component_of_another_library_or_of_no_class_is_refused(folder, named, said):
    change(folder / "model_index.json", transformer=named)
    message = refused(lambda: load(folder))
    assert f"model_index.json has transformer={named!r}" in message
    assert said in message


# ---------------------------------------------------------------- loaded again


def test_an_unchanged_folder_is_the_same_workflow_and_is_not_read_again(folder, monkeypatch):
    first = load(folder)
    monkeypatch.setattr(catalogue, "read_folder", None)
    assert load(folder) is first


def test_a_folder_that_was_damaged_deleted_or_replaced_is_read_again(folder, tmp_path):
    first = load(folder)
    file = folder / "transformer" / "config.json"
    text = file.read_text()
    file.write_text("{")
    assert f"{file} is not JSON" in refused(lambda: load(folder))
    file.write_text(text)
    again = load(folder)
    assert again is not first
    assert load(folder) is again
    shutil.rmtree(folder)
    assert "is neither a packaged model" in refused(lambda: load(folder))
    tiny.save_flux(folder)
    other = {parameter.name for parameter in load(folder).parameters}
    assert other != {parameter.name for parameter in first.parameters}
