"""The paper's settings: which workflows they have, and that each draws with tiny models."""

from __future__ import annotations

import pytest
import torch
from PIL import Image

import st2i_dask as st2i
from st2i_dask.catalogue.paper import SETTINGS
from st2i_dask.simulate.workload import setting

from .running import run_here


@pytest.fixture(scope="module")
def workflows(tmp_path_factory):
    return st2i.load_setting("S2", tiny=tmp_path_factory.mktemp("tiny"))


def test_the_first_is_part_of_the_second():
    assert len(SETTINGS["S1"]) == 5
    assert len(SETTINGS["S2"]) == 20
    assert SETTINGS["S1"].items() <= SETTINGS["S2"].items()


@pytest.mark.parametrize("name", SETTINGS)
def test_the_simulator_knows_them_by_the_same_names(name):
    simulated = {workflow.name for workflow in setting(name).workflows.values()}
    assert simulated == set(SETTINGS[name])


@pytest.mark.parametrize("name", SETTINGS["S2"])
def test_every_one_draws(workflows, name):
    values = {"prompt": "a cat", "seed": 1}
    if SETTINGS["S2"][name].controlnet:
        values["control_image"] = Image.effect_noise((64, 64), 80).convert("RGB")
    drawn = run_here(workflows[name], **values)
    assert drawn.shape == (3, 64, 64)
    assert drawn.std() > 0.01


def test_adapters_make_other_pictures(workflows):
    values = {"prompt": "a cat", "seed": 1}
    plain, one, other = (
        run_here(workflows[name], **values)
        for name in ("flux-dev", "flux-dev-lora-4", "flux-dev-lora-5")
    )
    assert not torch.equal(plain, one)
    assert not torch.equal(one, other)
    assert torch.equal(run_here(workflows["flux-dev-lora-4"], loras=[], **values), plain)


def test_a_second_load_builds_nothing_anew(workflows, tmp_path):
    st2i.load_setting("S1", tiny=tmp_path)
    before = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*") if path.is_file()}
    st2i.load_setting("S1", tiny=tmp_path)
    after = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*") if path.is_file()}
    assert before == after != {}


def test_another_name_is_refused():
    with pytest.raises(st2i.LoadError, match="no setting is called 'S3'; there are S1, S2"):
        st2i.load_setting("S3")
