"""Adapters of a request: images equal the pipeline's with `load_lora_weights`; the base is loaded once."""

from __future__ import annotations

import re
import shutil

import numpy as np
import pytest
import torch
from distributed import Client

import st2i_dask as st2i
from st2i_dask.catalogue import tiny
from st2i_dask.catalogue.flux.parts import FluxTransformer
from st2i_dask.catalogue.folder import read_folder
from st2i_dask.catalogue.lora import Loras, adapted

from .adapters import COMMON, expected, reference, save_adapters
from .running import run_here

TIMEOUT = 120


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tiny.save_flux(tmp_path_factory.mktemp("base") / "dev")


@pytest.fixture(scope="module")
def files(tmp_path_factory, folder):
    return save_adapters(tmp_path_factory.mktemp("adapters"), folder)


def check(ours, theirs, plain):
    assert torch.equal(ours.float(), theirs.float())
    assert ours.std() > 0.01  # not a constant picture, which would prove nothing
    assert not torch.equal(ours.float(), plain.float()), "the adapters did nothing"


CASES = [
    # dtype, adapters, parameters
    ("float32", [("peft", 1.0)], {}),
    ("bfloat16", [("peft", 0.7)], dict(seed=4)),
    ("float32", [("half", 1.0)], dict(height=20, width=48)),
    ("bfloat16", [("half", -1.5)], {}),
    ("float32", [("alpha", 0.5)], dict(seed=-3)),
    ("float32", [("old", 2.0)], dict(num_steps=3)),
    ("bfloat16", [("old", 1.0)], {}),
    ("float32", [("kohya", 0.8)], {}),
    ("bfloat16", [("kohya", 1.0)], dict(num_images=2)),
    ("float32", [("text", 1.0)], {}),
    ("float32", [("peft", 0.3), ("kohya", 0.9), ("alpha", -0.4)], dict(true_cfg_scale=2.0)),
    ("bfloat16", [("kohya", 0.5), ("peft", 0.5)], dict(num_steps=3)),
]


@pytest.mark.parametrize(("dtype", "adapters", "parameters"), CASES)
def test_image_equals_the_pipelines(folder, files, dtype, adapters, parameters):
    loras = tuple((files[name], scale) for name, scale in adapters)
    given = {"num_steps": 2, **COMMON, **parameters}
    if "true_cfg_scale" in given:
        given["negative_prompt"] = "fog"
    ours = run_here(st2i.load(folder, dtype=dtype), loras=list(loras), **given)
    check(
        ours,
        expected(reference(folder, dtype, loras), **given),
        expected(reference(folder, dtype, ()), **given),
    )


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("other", ["peft", "half", "alpha", "old", "kohya", "text"])
@pytest.mark.parametrize("name", ["peft", "half", "alpha", "old", "kohya", "text"])
def test_every_pair_equals_the_pipelines(folder, files, name, other, dtype):
    loras = ((files[name], 0.8),) + (((files[other], -0.6),) if other != name else ())
    given = dict(seed=6, num_steps=2, height=36, width=20)
    ours = run_here(st2i.load(folder, dtype=dtype), loras=loras, **{**COMMON, **given})
    theirs = expected(reference(folder, dtype, loras), **given)
    reference.cache_clear()
    check(ours, theirs, expected(reference(folder, dtype, ()), **given))


def test_with_a_controlnet_it_equals_the_pipelines(tmp_path, files):
    folder = tiny.save_flux_controlnet(tmp_path / "controlled")
    image = np.random.default_rng(0).random((32, 32, 3), dtype=np.float32)
    loras = ((files["peft"], 0.6), (files["old"], 1.0))
    given = dict(control_image=image, num_steps=2, guidance_scale=3.5, **COMMON)
    ours = run_here(st2i.load(folder, dtype="float32"), loras=loras, **given)
    theirs = reference(folder, "float32", loras, "FluxControlNetPipeline")
    plain = reference(folder, "float32", (), "FluxControlNetPipeline")
    check(ours, expected(theirs, **given), expected(plain, **given))


def test_order_of_adapters_is_the_pipelines(folder, files):
    """Shares are added one after another: another order may round otherwise."""
    one = ((files["peft"], 1.0), (files["kohya"], 1.0))
    workflow = st2i.load(folder, dtype="bfloat16")
    given = dict(num_steps=4, seed=2)
    for loras in (one, one[::-1]):
        ours = run_here(workflow, loras=loras, **COMMON, **given)
        assert torch.equal(
            ours.float(), expected(reference(folder, "bfloat16", loras), **given).float()
        )


def test_a_copy_elsewhere_is_the_same_model_and_a_scale_makes_no_other(folder, files, tmp_path):
    copy = shutil.copy(files["peft"], tmp_path / "copy.safetensors")
    rule = Loras(read_folder(str(folder)))

    def key(*loras, part="transformer"):
        return FluxTransformer("m", **adapted({}, rule.carry("loras", list(loras)), part)).model_key

    assert key((files["peft"], 1.0)) == key((files["peft"], -0.3)) == key((copy, 2.0))
    different = [key(), key(files["peft"]), key(files["kohya"]), key(files["peft"], files["kohya"])]
    assert len(set(different)) == 4
    assert key(files["kohya"], files["peft"]) not in different
    assert key(files["text"]) == key(), "it does not touch the transformer"
    assert key(files["kohya"], part="text_encoder_2") == key(), "reading ahead is no other model"


def test_scale_changes_neither_load_nor_bucket(folder, files):
    workflow = st2i.load(folder)
    composed = [
        workflow.bind(prompt="a cat", num_steps=2, loras=loras)[0]
        for loras in ([(files["peft"], 1.0)], [(files["peft"], 0.1)], [files["alpha"]], [])
    ]
    assert composed[0].model_keys == composed[1].model_keys
    assert composed[0].bucket == composed[1].bucket == composed[2].bucket != composed[3].bucket
    assert composed[0].packed[2].model_fn != composed[1].packed[2].model_fn
    again = workflow.bind(prompt="a dog", num_steps=2, loras=[(files["peft"], 1.0)])[0]
    assert again is composed[0], "composed once per combination"


def test_changing_the_scale_costs_far_less_than_a_load(folder, files, monkeypatch):
    loads = []
    load = FluxTransformer.load_model
    monkeypatch.setattr(
        FluxTransformer, "load_model", lambda self, path: loads.append(self) or load(self, path)
    )
    workflow = st2i.load(folder, dtype="float32")
    for scale in (0.11, 0.12, 0.11):
        loras = ((files["alpha"], scale), (files["old"], -scale))
        ours = run_here(workflow, loras=loras, num_steps=1, **COMMON)
        theirs = expected(reference(folder, "float32", loras), num_steps=1)
        assert torch.equal(ours, theirs)
    assert len(loads) == 1


def test_on_a_cluster_the_base_is_loaded_once_per_worker(folder, files):
    """Two tenants, two adapters and the plain model at once; images, rows and metadata."""
    with (
        st2i.local_cluster(2, dashboard_address=None) as cluster,
        Client(cluster) as client,
    ):
        st2i.attach(client)
        workflow = st2i.load(folder, dtype="float32")
        used = [(), ((files["peft"], 0.9),), ((files["kohya"], 0.4),), ((files["peft"], -0.9),)]
        given = dict(num_steps=2, output_type="pt", **COMMON)
        futures = [
            workflow.submit(client, tenant=f"t{n % 2}", loras=used[n % 4], seed=n, **given)
            for n in range(8)
        ]
        for n, future in enumerate(futures):
            theirs = expected(reference(folder, "float32", used[n % 4]), seed=n)
            assert torch.equal(future.result(timeout=TIMEOUT), theirs)
        rows = [r for r in st2i.models(client) if r["model"].startswith("FluxTransformer(")]
        assert len({row["model"] for row in rows}) > 1
        for worker in {row["worker"] for row in rows}:
            of_worker = [row for row in rows if row["worker"] == worker]
            # Layers of the base: each was copied in once, whoever ran first.
            plain = min(row["layers"] for row in rows)
            assert all(row["loads"] <= plain for row in of_worker)
            assert len({row["loads"] for row in of_worker}) == 1
        image = workflow.submit(client, loras=used[2], num_steps=1, **COMMON)
        told = image.result(timeout=TIMEOUT).metadata["parameters"]
        assert re.fullmatch(r"kohya.safetensors \([0-9a-f]{12}\) 0.4", told["loras"])
