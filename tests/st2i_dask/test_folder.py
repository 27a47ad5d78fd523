"""Diffusers folders: what is read where, and a message for everything that can be wrong."""

from __future__ import annotations

import json
import os
import pickle
import shutil

import pytest

from st2i_dask import shapes
from st2i_dask.catalogue import tiny
from st2i_dask.catalogue.folder import (
    DTYPES,
    PACKAGED,
    check_dtype,
    load_component,
    load_parts,
    read_component,
    read_folder,
    stored_dtype,
)
from st2i_dask.errors import LoadError
from st2i_dask.quoting import quoted

INDEX = {
    "_class_name": "FluxPipeline",
    "_diffusers_version": "0.42.0",
    "_name_or_path": ["a", "b"],
    "scheduler": ["diffusers", "FlowMatchEulerDiscreteScheduler"],
    "transformer": ["diffusers", "FluxTransformer2DModel"],
    "tokenizer": ["transformers", "CLIPTokenizer"],
    "image_encoder": [None, None],
    "force_zeros": True,
}


@pytest.fixture(autouse=True)
def no_network(monkeypatch):
    import huggingface_hub.constants

    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")


@pytest.fixture
def path(tmp_path):
    """A folder with configurations and no weights."""
    path = tmp_path / "my-flux"
    for part in ("scheduler", "transformer", "tokenizer"):
        (path / part).mkdir(parents=True)
    (path / "model_index.json").write_text(json.dumps(INDEX))
    (path / "scheduler" / "scheduler_config.json").write_text('{"shift": 3.0}')
    (path / "transformer" / "config.json").write_text('{"in_channels": 64}')
    (path / "tokenizer" / "tokenizer.json").write_text("{")
    (path / "tokenizer" / "tokenizer_config.json").write_text("{}")
    return path


def refused(call):
    with pytest.raises(LoadError) as caught:
        call()
    return str(caught.value)


# ---------------------------------------------------------------- reading


def test_configurations_are_read(path):
    folder = read_folder(str(path))
    assert folder.source == str(path)
    assert folder.path == path
    assert folder.pipeline_class == "FluxPipeline"
    assert folder.scheduler_config == {"shift": 3.0}
    assert folder.config("transformer") == {"in_channels": 64}
    assert pickle.loads(pickle.dumps(folder)) == folder


def test_workers_get_a_path_that_does_not_depend_on_where_they_run(path, monkeypatch):
    monkeypatch.chdir(path.parent)
    for source in ("my-flux", f".{os.sep}my-flux"):
        assert read_folder(source).source == str(path)


@pytest.mark.parametrize("name", PACKAGED)
def test_a_packaged_model_keeps_its_name(name, tmp_path, monkeypatch):
    (tmp_path / name).mkdir()
    monkeypatch.chdir(tmp_path)
    if not shapes.PIPELINE.is_dir():
        pytest.skip("its weights are not here")
    folder = read_folder(name)
    assert (folder.source, folder.path) == (name, shapes.PIPELINE)


# ---------------------------------------------------------------- refusals


def test_a_folder_that_is_nowhere_is_refused_with_what_there_is():
    message = refused(lambda: read_folder("no/where"))
    assert (
        "'no/where' is neither a packaged model (shapes), nor a folder here, nor a hub" in message
    )
    assert "give a path to a folder with model_index.json" in message


@pytest.mark.parametrize("source", ["a b/c d", "nul\x00", "x" * 300, "../../etc", "a/b/c"])
def test_what_is_no_hub_id_is_refused_too(source, path, monkeypatch):
    monkeypatch.chdir(path.parent)
    assert quoted(source) in refused(lambda: read_folder(source))


def test_a_folder_without_index_is_refused(path):
    (path / "model_index.json").unlink()
    message = refused(lambda: read_folder(str(path)))
    assert f"{path / 'model_index.json'} cannot be read (No such file or directory)" in message
    assert "a Diffusers folder has model_index.json and one folder per component" in message


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "is not JSON"),
        ("", "is not JSON"),
        ("[]", "does not hold a JSON object; copy it again"),
        ("5", "does not hold a JSON object; copy it again"),
    ],
)
def test_a_broken_index_is_refused(path, text, message):
    (path / "model_index.json").write_text(text)
    assert message in refused(lambda: read_folder(str(path)))


def test_an_index_that_is_no_text_is_refused(path):
    (path / "model_index.json").write_bytes(b"\xff\xfe\x00")
    assert "is not JSON" in refused(lambda: read_folder(str(path)))


def test_a_missing_component_is_refused(path):
    shutil.rmtree(path / "tokenizer")
    message = refused(lambda: read_folder(str(path)))
    assert "model_index.json names 'tokenizer' but the folder" in message
    assert "is missing; copy the whole folder again" in message


def test_a_missing_configuration_is_refused(path):
    folder = read_folder(str(path))
    assert str(path / "vae" / "config.json") in refused(lambda: folder.config("vae"))
    (path / "scheduler" / "scheduler_config.json").unlink()
    assert "scheduler_config.json cannot be read" in refused(lambda: folder.scheduler_config)


def test_a_configuration_that_lacks_a_value_is_refused_with_its_file(path):
    config = read_folder(str(path)).config("transformer")
    config = pickle.loads(pickle.dumps(config))
    assert config.get("num_layers") is None
    message = refused(lambda: config["num_layers"])
    assert f"{path}/transformer/config.json does not say 'num_layers'; copy the file" in message


def test_a_clip_tokenizer_without_its_limit_is_refused(path):
    (path / "tokenizer" / "tokenizer_config.json").unlink()
    assert "has no tokenizer_config.json, which says how many" in refused(
        lambda: read_folder(str(path))
    )


def test_a_tokenizer_without_vocabulary_is_refused(path):
    """transformers would make one that maps every prompt to the same tokens."""
    (path / "tokenizer" / "tokenizer.json").unlink()
    message = refused(lambda: read_folder(str(path)))
    assert f"{path / 'tokenizer'} has no vocabulary" in message
    assert "copy the whole folder again" in message


def test_a_tokenizer_that_cannot_be_read_is_refused(path):
    message = refused(lambda: read_folder(str(path)).tokenizer("tokenizer"))
    assert "tokenizer cannot be read" in message
    assert "copy the whole folder again" in message


def test_parts_that_cannot_be_loaded_are_refused(path):
    message = refused(lambda: load_parts(str(path), {"transformer"}, "float32"))
    assert f"{str(path)!r}: transformer cannot be loaded" in message
    assert "check that the folder is whole and visible on every worker" in message


# ---------------------------------------------------------------- a model in a folder of its own


@pytest.fixture
def alone(tmp_path):
    """A VAE's folder, its weights in bfloat16."""
    import torch
    from diffusers import AutoencoderKL

    vae = AutoencoderKL(block_out_channels=(4,), norm_num_groups=2).to(torch.bfloat16)
    vae.save_pretrained(tmp_path / "my-vae")
    return tmp_path / "my-vae"


def test_a_component_is_found_and_its_configuration_read(alone, monkeypatch):
    monkeypatch.chdir(alone.parent)
    folder = read_component("my-vae")
    assert (folder.source, folder.path.absolute()) == (str(alone), alone)
    assert folder.config["_class_name"] == "AutoencoderKL"


@pytest.mark.parametrize(("dtype", "loaded"), [(None, "bfloat16"), ("float32", "float32")])
def test_a_component_is_loaded_as_stored_or_as_asked(alone, dtype, loaded):
    vae = load_component(str(alone), "AutoencoderKL", dtype)
    assert str(vae.dtype) == f"torch.{loaded}"
    assert not vae.training


def test_a_component_that_is_nowhere_or_broken_is_refused(alone, path):
    message = refused(lambda: read_component("no/where"))
    assert "give a path to a folder with config.json" in message
    assert str(path / "config.json") in refused(lambda: read_component(str(path)))
    for file in alone.glob("*.safetensors"):
        file.write_bytes(file.read_bytes()[:100])
    message = refused(lambda: load_component(str(alone), "AutoencoderKL", "float32"))
    assert f"{str(alone)!r}: AutoencoderKL cannot be loaded" in message


def test_a_component_that_was_cut_short_is_refused_by_file(alone):
    (file,) = alone.glob("*.safetensors")
    whole = file.stat().st_size
    os.truncate(file, whole - 100)
    message = refused(lambda: load_component(str(alone), "AutoencoderKL", None))
    assert f"AutoencoderKL cannot be loaded: {file} ends after {whole - 100} of {whole} " in message
    assert "copy or fetch the file again" in message


def test_a_part_that_was_cut_short_is_refused_by_file(path, alone):
    """Among whole ones: the one that is wrong is named."""
    shutil.copytree(alone, path / "vae")
    store(path, "F16", 2)
    (file,) = (path / "transformer").glob("*.safetensors")
    os.truncate(file, file.stat().st_size - 1)
    message = refused(lambda: load_parts(str(path), {"vae", "transformer", "tokenizer"}, None))
    assert f"transformer cannot be loaded: {file} ends after" in message


# ---------------------------------------------------------------- dtypes


def store(path, dtype, size, part="transformer"):
    (path / part).mkdir(exist_ok=True)
    header = json.dumps({"w": {"dtype": dtype, "shape": [1], "data_offsets": [0, size]}}).encode()
    file = path / part / "diffusion_pytorch_model.safetensors"
    file.write_bytes(len(header).to_bytes(8, "little") + header + bytes(size))


@pytest.mark.parametrize(
    ("stored", "size", "wanted"),
    [
        ("BF16", 2, "bfloat16"),
        ("F16", 2, "float16"),
        ("F32", 4, "float32"),
        ("F64", 8, "float32"),
    ],
)
def test_the_dtype_of_the_stored_weights_is_found(path, stored, size, wanted):
    store(path, stored, size)
    assert stored_dtype(read_folder(str(path))) == wanted


def test_without_weights_the_dtype_is_float32(path):
    assert stored_dtype(read_folder(str(path))) == "float32"


def test_a_unet_counts_as_the_denoiser(path):
    (path / "transformer" / "config.json").unlink()
    (path / "transformer").rmdir()
    index = {name: value for name, value in INDEX.items() if name != "transformer"}
    (path / "model_index.json").write_text(json.dumps(index))
    store(path, "F16", 2, "unet")
    assert stored_dtype(read_folder(str(path))) == "float16"


@pytest.mark.parametrize("dtype", [None, *DTYPES])
def test_dtypes_that_are_supported(dtype):
    check_dtype(dtype)


@pytest.mark.parametrize("dtype", ["float64", "bf16", "", "int8"])
def test_dtypes_that_are_not(dtype):
    message = refused(lambda: check_dtype(dtype))
    assert message == (
        f"dtype={dtype!r} is not supported; choose one of float32, bfloat16, float16"
    )


def test_a_damaged_denoiser_is_said_before_its_dtype_is_read(path):
    store(path, "F16", 2)
    (file,) = (path / "transformer").glob("*.safetensors")
    os.truncate(file, file.stat().st_size - 1)
    message = refused(lambda: stored_dtype(read_folder(str(path))))
    assert f"transformer cannot be loaded: {file} ends after" in message


# ---------------------------------------------------------------- another scheduler


def test_a_folder_with_another_scheduler(tmp_path):
    folder = read_folder(str(tiny.save_flux(tmp_path / "flux")))
    changed = folder.with_scheduler({"shift": 5.0})
    assert changed.scheduler_config == {**folder.scheduler_config, "shift": 5.0}
    other = folder.with_scheduler({"_class_name": "EulerDiscreteScheduler"})
    assert other.index["scheduler"][1] == other.scheduler_config["_class_name"]
    assert folder.index["scheduler"][1] == "FlowMatchEulerDiscreteScheduler", "left as it was"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"_class_name": "FluxPipeline"}, "scheduler 'FluxPipeline' is none of Diffusers"),
        ({"_class_name": "Nothing"}, "scheduler 'Nothing' is none of Diffusers"),
        ({"shifft": 5.0}, "FlowMatchEulerDiscreteScheduler takes no shifft"),
    ],
)
def test_a_scheduler_that_is_none_is_refused(tmp_path, changes, message):
    folder = read_folder(str(tiny.save_flux(tmp_path / "flux")))
    with pytest.raises(LoadError, match=message):
        folder.with_scheduler(changes)
