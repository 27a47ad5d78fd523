"""A value of a wrong kind in any configuration of any family is refused by name, or does no harm."""

from __future__ import annotations

import json
import random
import shutil

import pytest

import st2i_dask as st2i
from st2i_dask import catalogue
from st2i_dask.catalogue import (
    tiny,
    tiny_flux2_klein,
    tiny_qwen_image,
    tiny_sd3,
    tiny_sdxl,
    tiny_z_image,
)

from .originals import picture

SAVE = {
    "flux": tiny.save_flux_controlnet,
    "klein": tiny_flux2_klein.save_flux2_klein,
    "sd3": tiny_sd3.save_sd3_controlnet,
    "sdxl": tiny_sdxl.save_sdxl,
    "z-image": tiny_z_image.save_z_image_controlnet,
    "qwen": tiny_qwen_image.save_qwen_image_controlnet,
}
OPTIONS = {"klein": {"text_encoder_out_layers": (0, 1, 2)}}
WRONG = ["x", None, [], ["x"], {}, -1, 0, 2.5, True, float("nan")]


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    root = tmp_path_factory.mktemp("kinds")
    return {name: save(root / name) for name, save in SAVE.items()}


@pytest.fixture(autouse=True)
def nothing_loaded(monkeypatch):
    monkeypatch.setattr(catalogue, "_loaded", {})


def compose(family, folder):
    """As far as it goes without a worker."""
    workflow = st2i.load(folder, name=f"damaged {family}", **OPTIONS.get(family, {}))
    names = {parameter.name for parameter in workflow.parameters}
    more = {"control_image": picture(32, 32)} if "control_image" in names else {}
    workflow.request(prompt="a cat", height=32, width=32, num_steps=4, **more)


def damages(folder):
    files = [folder / "model_index.json", *sorted(folder.glob("*/*config.json"))]
    return [
        (file, key, wrong)
        for file in files
        for key, value in json.loads(file.read_text()).items()
        for wrong in WRONG
        if wrong is not value
    ]


def check_damages(family, folder, chosen):
    for file, key, wrong in chosen:
        whole = file.read_text()
        file.write_text(json.dumps({**json.loads(whole), key: wrong}))
        try:
            compose(family, folder)
        except st2i.St2iError:
            pass
        except Exception as error:
            error.add_note(f"{file.relative_to(folder)}: {key}={wrong!r}")
            raise
        finally:
            file.write_text(whole)
            catalogue._loaded.clear()


@pytest.mark.parametrize("family", SAVE)
def test_wrong_values_are_refused_or_do_no_harm(folders, family):
    compose(family, folders[family])
    possible = damages(folders[family])
    check_damages(family, folders[family], random.Random(0).sample(possible, 60))


@pytest.mark.slow
@pytest.mark.parametrize("family", SAVE)
def test_all_wrong_values_are_refused_or_do_no_harm(folders, family):
    check_damages(family, folders[family], damages(folders[family]))


@pytest.mark.parametrize(
    ("family", "file", "key", "wrong", "message"),
    [
        ("flux", "transformer/config.json", "in_channels", "64", r"'64', wanted a whole number"),
        ("flux", "vae/config.json", "block_out_channels", 8, r"=8, wanted a list of whole"),
        ("flux", "model_index.json", "vae", "vae", r"='vae', wanted the library and the class"),
        ("flux", "controlnet/config.json", "num_mode", "x", r"='x', wanted"),
        ("klein", "model_index.json", "is_distilled", "no", r"='no', wanted true or false"),
        ("klein", "text_encoder/config.json", "hidden_size", None, r"=None, wanted a whole number"),
        ("sd3", "transformer/config.json", "sample_size", [8, 8], r"=\[8, 8\], wanted a whole"),
        ("sdxl", "unet/config.json", "layers_per_block", "2", r"='2', wanted a whole number"),
        ("qwen", "vae/config.json", "temperal_downsample", 3, r"=3, wanted a list of true and"),
        ("z-image", "transformer/config.json", "axes_lens", [8], r"=\[8\], wanted a list of 3"),
    ],
)
def test_file_key_and_value_are_named(folders, tmp_path, family, file, key, wrong, message):
    path = shutil.copytree(folders[family], tmp_path / "copy") / file
    path.write_text(json.dumps({**json.loads(path.read_text()), key: wrong}))
    with pytest.raises(st2i.LoadError, match=rf"{file} has {key}.*{message}.*copy the file again"):
        compose(family, tmp_path / "copy")
