"""Previews of a real family: the pipeline's own latents between its steps, decoded by its own VAE."""

from __future__ import annotations

import numpy as np
import pytest
import torch

import st2i_dask as st2i
from st2i_dask.catalogue import tiny
from st2i_dask.errors import ComposeError
from st2i_dask.invocation import BoundTask
from st2i_dask.outputs import TaskOutputs
from st2i_dask.previews import preview_tasks, previewed

ASKED = dict(prompt="a red cube", seed=3, num_steps=4, height=32, width=32)


@pytest.fixture(scope="module", autouse=True)
def one_thread():
    """As workers compute, and the order of a sum is the same."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tiny.save_flux(tmp_path_factory.mktemp("flux"))


@pytest.fixture
def flux(folder, fresh_registry):
    return st2i.load(folder, dtype="float32")


@pytest.fixture(scope="module")
def reference(folder):
    """What the pipeline has after each step, as pictures, and its result."""
    from diffusers import FluxPipeline

    pipeline = FluxPipeline.from_pretrained(folder, dtype=torch.float32)
    pipeline.set_progress_bar_config(disable=True)
    pictures = []

    def note(pipe, step, timestep, values):
        latents = pipe._unpack_latents(values["latents"], 32, 32, pipe.vae_scale_factor)
        latents = (latents / pipe.vae.config.scaling_factor) + pipe.vae.config.shift_factor
        pixels = pipe.vae.decode(latents, return_dict=False)[0]
        pictures.append(np.asarray(pipe.image_processor.postprocess(pixels)[0]))
        return {}

    asked = {("num_inference_steps" if n == "num_steps" else n): v for n, v in ASKED.items()}
    generator = torch.Generator().manual_seed(asked.pop("seed"))
    with torch.no_grad():
        result = pipeline(**asked, generator=generator, callback_on_step_end=note)
    return pictures, np.asarray(result.images[0])


@torch.no_grad()
def outputs(request):
    results, models = {}, {}
    for key, task in request.tasks.items():
        packed, values, about, _, *dependencies = task.args
        made = BoundTask(packed, values, about, [results[d.key] for d in dependencies])
        function = made.model_fn
        if function.model_key not in models:
            models[function.model_key] = function.load_model(function.model_path)
        result = made.evaluate(models[function.model_key])
        results[key] = result if key == request.key else TaskOutputs(result)
    return results


@pytest.mark.parametrize(("count", "steps"), [(1, [2]), (3, [1, 2, 3])])
def test_a_preview_is_the_pipelines_latents_decoded(flux, reference, count, steps):
    pictures, result = reference
    shown = previewed(flux, count, **ASKED)
    request = shown.request("alice", **ASKED)
    made = outputs(request)
    tasks = preview_tasks(shown, request, **ASKED)
    previews = [made[task.key].values[task.export] for task in tasks]
    assert [preview.number for preview in previews] == list(range(len(steps)))
    for preview, step in zip(previews, steps, strict=True):
        image = np.asarray(preview.image)
        assert image.std() > 1
        assert np.array_equal(image, pictures[step - 1])
    assert not np.array_equal(pictures[steps[-1] - 1], result)
    assert np.array_equal(np.asarray(made[request.key]), result)


def test_the_version_stays_the_workflows_own(flux):
    shown = previewed(flux, 1, **ASKED)
    assert shown.bind(**ASKED)[0].version == flux.bind(**ASKED)[0].version
    assert shown.name == flux.name


def test_one_step_has_nothing_between(flux):
    with pytest.raises(ComposeError, match="repeats no step"):
        previewed(flux, 1, **{**ASKED, "num_steps": 1})
