"""FLUX with ControlNet on two workers: residuals are read from boards while the ControlNet runs."""

from __future__ import annotations

import os
import signal
import time

import numpy as np
import pytest
import torch

import st2i_dask as st2i
from st2i_dask.catalogue import tiny

from .tensors import TIMEOUT, cluster, moved, used

SIDE, STEPS, SEED, PROMPT = 64, 3, 11, "a cat"
# How much longer the ControlNet takes after its double blocks, seconds.
LATE = 0.25


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    torch.set_num_threads(1)  # as the workers
    path = tmp_path_factory.mktemp("streams") / "controlled"
    return str(tiny.save_flux_controlnet(path, layers=(3, 3), control_layers=(2, 1)))


@pytest.fixture(scope="module")
def two(folder):
    with cluster(2) as client:
        submit(client, folder).result(timeout=TIMEOUT)  # warm: imports, models
        yield client


def edges():
    return np.random.default_rng(1).random((SIDE, SIDE, 3), dtype=np.float32)


def submit(client, folder, seed=SEED):
    workflow = st2i.load(folder, name="controlnet-streams", dtype="float32")
    return workflow.submit(
        client,
        prompt=PROMPT,
        control_image=edges(),
        controlnet_conditioning_scale=0.7,
        seed=seed,
        num_steps=STEPS,
        height=SIDE,
        width=SIDE,
        output_type="pt",
    )


def check(future, folder, seed=SEED):
    from diffusers import FluxControlNetPipeline

    pipeline = FluxControlNetPipeline.from_pretrained(folder, dtype=torch.float32)
    pipeline.set_progress_bar_config(disable=True)
    image = pipeline(
        prompt=PROMPT,
        control_image=edges(),
        controlnet_conditioning_scale=0.7,
        num_inference_steps=STEPS,
        height=SIDE,
        width=SIDE,
        output_type="pt",
        generator=torch.Generator("cpu").manual_seed(seed),
    ).images[0]
    assert torch.equal(future.result(timeout=TIMEOUT), image)


def record(dask_worker, late):
    """Note when the models' forwards and the transformer's double blocks begin and end."""
    import time

    from diffusers import FluxControlNetModel, FluxTransformer2DModel
    from diffusers.models.transformers import transformer_flux as flux

    log = dask_worker.st2i_log = []
    inside = []

    def timed(cls, name):
        plain = cls.forward

        def forward(self, *args, **kwargs):
            inside.append(name)
            start = time.time()
            try:
                if name == "single" and "controlnet" in inside:
                    time.sleep(late)
                return plain(self, *args, **kwargs)
            finally:
                inside.pop()
                log.append((name, inside[-1] if inside else None, start, time.time()))

        forward.plain = plain
        cls.forward = forward

    timed(FluxControlNetModel, "controlnet")
    timed(FluxTransformer2DModel, "transformer")
    timed(flux.FluxTransformerBlock, "double")
    timed(flux.FluxSingleTransformerBlock, "single")


def recorded(dask_worker):
    from diffusers import FluxControlNetModel, FluxTransformer2DModel
    from diffusers.models.transformers import transformer_flux as flux

    for cls in (
        FluxControlNetModel,
        FluxTransformer2DModel,
        flux.FluxTransformerBlock,
        flux.FluxSingleTransformerBlock,
    ):
        cls.forward = cls.forward.plain
    return dask_worker.st2i_log


def test_transformer_blocks_run_before_the_controlnet_has_ended(two, folder):
    by_host = moved(two, "host")
    two.run(record, late=LATE)
    try:
        future = submit(two, folder)
        future.result(timeout=TIMEOUT)
    finally:
        logs = two.run(recorded)
    check(future, folder)
    controlnets = [
        (start, end, worker)
        for worker, log in logs.items()
        for name, _, start, end in log
        if name == "controlnet"
    ]
    blocks = [
        (start, end, worker)
        for worker, log in logs.items()
        for name, within, start, end in log
        if name == "double" and within == "transformer"
    ]
    assert len(controlnets) == STEPS
    assert len(blocks) == 3 * STEPS
    for start, end, worker in controlnets:
        early = [b for b in blocks if start < b[0] and b[1] < end and b[2] != worker]
        # Block 1 runs once residual 0 was read; block 2 reads the last double residual after it.
        assert len(early) >= 2, "the transformer waited for the end of the ControlNet"
    assert moved(two, "host") > by_host
    del future
    assert set(used(two).values()) == {0}


def test_kill_9_while_residuals_are_streamed(two, folder):
    two.run(record, late=LATE)
    futures = [submit(two, folder, seed) for seed in (1, 2)]
    time.sleep(0.5)
    os.kill(sorted(two.run(os.getpid).values())[0], signal.SIGKILL)
    for seed, future in zip((1, 2), futures, strict=True):
        check(future, folder, seed)
    two.wait_for_workers(2, timeout=TIMEOUT)
    del futures, future
    assert set(used(two).values()) == {0}
