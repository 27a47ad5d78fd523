"""Any pipeline as a workflow: images equal those of its own call, whatever the family."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from PIL import Image

import st2i_dask as st2i

from .here import run_pipeline_here
from .odd_pipelines import save

PIXELS = np.random.default_rng(0).integers(0, 255, (32, 32, 3), dtype=np.uint8)
PICTURE = Image.fromarray(PIXELS)
SMALL = dict(prompt="a cat", num_inference_steps=3, height=32, width=32)
GUIDED = dict(SMALL, negative_prompt="bad", guidance_scale=5.0)
#: By pipeline class: arguments of its call.
CASES = {
    "FluxPipeline": dict(SMALL, max_sequence_length=16),
    "FluxControlNetPipeline": dict(SMALL, max_sequence_length=16, control_image=PICTURE),
    "StableDiffusionPipeline": dict(GUIDED, num_images_per_prompt=2),
    "StableDiffusionXLPipeline": GUIDED,
    "StableDiffusion3ControlNetPipeline": dict(
        GUIDED, max_sequence_length=16, control_image=PICTURE
    ),
    "PixArtSigmaPipeline": dict(GUIDED, use_resolution_binning=False, max_sequence_length=16),
    "SanaPipeline": dict(
        GUIDED,
        use_resolution_binning=False,
        max_sequence_length=16,
        complex_human_instruction=None,
    ),
    "AuraFlowPipeline": dict(GUIDED, max_sequence_length=16),
    "Lumina2Pipeline": dict(GUIDED, max_sequence_length=16, system_prompt="draw"),
    "Flux2KleinPipeline": dict(SMALL, max_sequence_length=64, text_encoder_out_layers=(0, 1, 2)),
    "ZImageControlNetPipeline": dict(
        SMALL, max_sequence_length=32, control_image=PICTURE, guidance_scale=0.0
    ),
}
_folders = {}


@pytest.fixture
def folder_of(tmp_path_factory):
    def folder(name):
        if name not in _folders:
            _folders[name] = save(name, tmp_path_factory.mktemp(name) / "pipeline")
        return _folders[name]

    return folder


def classic(folder, dtype, seed, **arguments):
    """What the unmodified pipeline gives, loaded from the same folder."""
    import diffusers

    pipeline = diffusers.DiffusionPipeline.from_pretrained(folder, dtype=getattr(torch, dtype))
    pipeline.set_progress_bar_config(disable=True)
    torch.manual_seed(seed)
    generator = torch.Generator("cpu").manual_seed(seed)
    return pipeline(**arguments, output_type="pt", generator=generator)[0]


IN_HALF = ("FluxControlNetPipeline", "Flux2KleinPipeline", "StableDiffusion3ControlNetPipeline")


@pytest.mark.parametrize(
    ("name", "dtype"),
    [(name, "float32") for name in CASES]
    + [
        pytest.param(name, "bfloat16", marks=() if name in IN_HALF else pytest.mark.slow)
        for name in CASES
    ],
)
def test_images_equal_those_of_the_classic_call(folder_of, name, dtype):
    folder = folder_of(name)
    workflow = st2i.from_pipeline(folder, dtype=dtype)
    assert workflow.source.pipeline_class[1] == name
    ours, calls = run_pipeline_here(workflow, seed=3, output_type="pt", **CASES[name])
    theirs = classic(folder, dtype, 3, **CASES[name])
    assert len(calls) >= 5  # a text encoder, three steps, the decoder
    assert torch.equal(ours, theirs)
    assert ours.float().std() > 0.01
