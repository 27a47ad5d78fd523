"""A model is made anew when a configuration that it was made with changes; its weights stay the same."""

from __future__ import annotations

import json
import os
import shutil
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

import st2i_dask
from st2i_dask.catalogue.flux.parts import ClipText, VaeDecoder
from st2i_dask.errors import LoadError
from worker_plugin.configurations import Configurations, configurations

from .models import Model, inputs, outputs, read, same, save_pipeline, store_of

NO_LIMIT = 1 << 30


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    root = tmp_path_factory.mktemp("configurations")
    save_pipeline(root)
    return root / "float32"


@pytest.fixture
def clip(saved, tmp_path):
    return Path(shutil.copytree(saved / "clip", tmp_path / "clip"))


@pytest.fixture
def pipeline(tmp_path):
    folder = Path(st2i_dask.__file__).parent / "shapes" / "pipeline"
    return Path(shutil.copytree(folder, tmp_path / "pipeline"))


def edit(file, **changes):
    file.write_text(json.dumps({**json.loads(file.read_text()), **changes}))


def settled(components):
    return configurations(components, time.time_ns() + 10**9)


def component(folder):
    return SimpleNamespace(name_or_path=str(folder))


# ---------------------------------------------------------------- the files


def test_those_of_models_tokenizers_and_pipelines_are_found(pipeline):
    inner = {"vae": component(pipeline / "vae"), "tokenizer": component(pipeline / "tokenizer")}
    whole = component(pipeline)
    whole.components = inner
    # Others tell nothing, or a hub id, and are looked through all the same.
    found = settled({"pipeline": whole, "number": 3, "hub": component("org/model")})
    names = {str(Path(file.path).relative_to(pipeline)) for file in found.files}
    assert names == {
        "model_index.json",
        "vae/config.json",
        "tokenizer/tokenizer.json",
        "tokenizer/tokenizer_config.json",
    }
    found.check()


def test_a_copy_has_the_same_digest_and_another_content_another(clip, tmp_path):
    found = settled({"text": component(clip)})
    copy = Path(shutil.copytree(clip, tmp_path / "elsewhere"))
    (copy / "README.md").write_text("of no meaning")
    assert settled({"text": component(copy)}).digest == found.digest != ""
    edit(copy / "config.json", eos_token_id=7)
    assert settled({"text": component(copy)}).digest != found.digest
    assert settled({"text": component(tmp_path)}) == Configurations()
    Configurations().check()


@pytest.mark.parametrize("way", ["written", "replaced", "deleted"])
def test_a_change_is_told_with_the_name_of_the_file(clip, way):
    found, file = settled({"text": component(clip)}), clip / "config.json"
    if way == "written":
        edit(file, eos_token_id=7)
    elif way == "replaced":
        shutil.copy2(file, clip / "new")
        os.replace(clip / "new", file)
    else:
        file.unlink()
    with pytest.raises(LoadError, match=r"clip/config\.json was changed since.*submit again"):
        found.check()


def test_what_was_written_while_it_was_read_is_not_trusted(clip):
    text, began = {"text": component(clip)}, time.time_ns()
    assert settled(text).is_settled
    edit(clip / "config.json", eos_token_id=7)
    os.utime(clip / "config.json", ns=(began, began + 1))
    found = configurations(text, began)
    assert found.digest != settled(text).digest
    with pytest.raises(LoadError, match=r"config\.json was changed"):
        found.check()


# ---------------------------------------------------------------- models


def test_an_edited_configuration_makes_another_model_of_the_same_weights(clip):
    model, given = Model(str(clip), kind="clip"), inputs("clip")
    with store_of(NO_LIMIT) as store:
        for _ in range(2):
            with store.lease(model) as lease:
                before = outputs(lease.components["model"], "clip", given)
                old, shared = lease.version, [w.id for w in lease.skeleton.weights]
        edit(clip / "config.json", hidden_act="relu")
        with store.lease(model) as lease:
            after = outputs(lease.components["model"], "clip", given)
            assert lease.version != old
            assert [w.id for w in lease.skeleton.weights] == shared
        assert same(after, outputs(read(clip, "clip"), "clip", given))
        assert not same(after, before)
        assert len(store.models()) == 1
        assert store.residency.totals.reads == 2
        with store.lease(model) as again:
            assert again.skeleton is lease.skeleton


def test_folders_that_differ_in_their_configuration_share_weights(clip, tmp_path):
    other = Path(shutil.copytree(clip, tmp_path / "other"))
    edit(other / "config.json", hidden_act="relu")
    with store_of(NO_LIMIT) as store:
        versions, ids = set(), set()
        for folder in (clip, other):
            with store.lease(Model(str(folder), kind="clip")) as lease:
                versions.add(lease.version)
                ids |= {w.id for w in lease.skeleton.weights}
        assert (len(versions), len(ids)) == (2, 1)


def test_a_model_in_use_stays_as_it_is_until_its_run_ends(clip):
    model, given = Model(str(clip), kind="clip"), inputs("clip")
    with store_of(NO_LIMIT) as store:
        with store.lease(model) as first:
            before = outputs(first.components["model"], "clip", given)
            edit(clip / "config.json", hidden_act="relu")
            with store.lease(model) as second:
                after = outputs(second.components["model"], "clip", given)
            assert not same(after, before)
            assert same(outputs(first.components["model"], "clip", given), before)
        assert len(store.models()) == 1


def test_a_configuration_that_cannot_be_read_fails_its_lease_only(clip):
    model = Model(str(clip), kind="clip")
    good = (clip / "config.json").read_text()
    with store_of(NO_LIMIT) as store:
        with store.lease(model) as lease:
            version = lease.version
        (clip / "config.json").write_text("{")
        with pytest.raises(OSError, match=r"config\.json"), store.lease(model):
            pass
        (clip / "config.json").write_text(good)
        with store.lease(model) as lease:
            assert lease.version == version


def test_parts_of_a_pipeline_notice_theirs_and_the_pipelines(pipeline):
    vae, text = (cls(str(pipeline), dtype="float32") for cls in (VaeDecoder, ClipText))

    def skeletons(store):
        found = []
        for model in (vae, text):
            with store.lease(model) as lease:
                found.append(lease.skeleton)
        return found

    with store_of(NO_LIMIT) as store, torch.no_grad():
        first = skeletons(store)
        assert skeletons(store) == first
        edit(pipeline / "vae" / "config.json", scaling_factor=7.0)
        second = skeletons(store)
        assert second[0].components["pipeline"].vae.config.scaling_factor == 7.0
        assert second[0] is not first[0]
        assert second[1] is first[1]
        edit(pipeline / "tokenizer" / "tokenizer_config.json", model_max_length=5)
        third = skeletons(store)
        assert third[1].components["pipeline"].tokenizer.model_max_length == 5
        assert third[0] is second[0]
        edit(pipeline / "model_index.json", anything=1)
        assert not set(map(id, skeletons(store))) & set(map(id, third))
