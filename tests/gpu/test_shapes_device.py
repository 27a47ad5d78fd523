"""The packaged model on a device: every image equals, bit for bit, the pipeline's on the same device."""

from __future__ import annotations

import time

import pytest
import torch
from distributed import Client

import st2i_dask as st2i
from st2i_dask.shapes import DEFAULT_SIZE, DEFAULT_STEPS, MAX_PROMPT_TOKENS, PIPELINE

pytestmark = pytest.mark.gpu

PROMPTS = (
    ("a small yellow star on a purple background", 7),
    ("a large red ring on a white background", 0),
    ("a large blue cross on a yellow background", 3),
)


def images_of_pipeline(device, dtype):
    from diffusers import FluxPipeline

    pipeline = FluxPipeline.from_pretrained(PIPELINE, dtype=dtype).to(device)
    pipeline.set_progress_bar_config(disable=True)
    return [
        pipeline(
            prompt=prompt,
            height=DEFAULT_SIZE,
            width=DEFAULT_SIZE,
            num_inference_steps=DEFAULT_STEPS,
            max_sequence_length=MAX_PROMPT_TOKENS,
            guidance_scale=0.0,
            output_type="pt",
            generator=torch.Generator("cpu").manual_seed(seed),
        )
        .images[0]
        .cpu()
        .float()
        for prompt, seed in PROMPTS
    ]


@pytest.fixture(scope="module")
def client(device):
    with st2i.local_cluster(2, dashboard_address=":0") as cluster, Client(cluster) as client:
        st2i.attach(client, device=f"cuda:{device}")
        yield client


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_pictures_equal_the_pipelines(client, device, dtype):
    theirs = images_of_pipeline(f"cuda:{device}", getattr(torch, dtype))
    workflow = st2i.load("shapes", dtype=dtype)
    start = time.perf_counter()
    futures = [
        workflow.submit(client, prompt=prompt, seed=seed, output_type="pt")
        for prompt, seed in PROMPTS
    ]
    ours = [future.result(timeout=120) for future in futures]
    print(f"\n{len(ours)} pictures, {dtype}, loading included: {time.perf_counter() - start:.1f} s")
    for one, other in zip(ours, theirs, strict=True):
        assert torch.equal(one, other), (one - other).abs().max()
        assert one.std() > 0.01
