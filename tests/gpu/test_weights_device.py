"""Weights that come and go on a device: outputs equal, bit for bit, those of the whole model there."""

from __future__ import annotations

import time

import pytest
import torch

from st2i_dask.catalogue import tiny
from st2i_dask.catalogue.flux.parts import FluxTransformer
from worker_plugin.weights import WeightStore

pytestmark = pytest.mark.gpu

LAYERS = (4, 8)
HEADS = 32
MIB = 1 << 20


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    path = tmp_path_factory.mktemp("flux")
    tiny.flux(layers=LAYERS, heads=HEADS).to(torch.bfloat16).save_pretrained(path)
    return FluxTransformer(str(path))


def step(transformer, device):
    generator = torch.Generator().manual_seed(0)

    def noise(*shape):
        return torch.randn(*shape, generator=generator).to(device, torch.bfloat16)

    with torch.no_grad():
        return transformer(
            hidden_states=noise(1, 256, 16),
            encoder_hidden_states=noise(1, 64, 32),
            pooled_projections=noise(1, 32),
            timestep=torch.ones(1, device=device),
            guidance=torch.full((1,), 3.5, device=device),
            txt_ids=torch.zeros(64, 3, device=device),
            img_ids=torch.zeros(256, 3, device=device),
            return_dict=False,
        )[0]


@pytest.mark.parametrize("mode", ["elastic", "pipelined", "mcache"])
def test_streamed_outputs_equal(model, device, mode):
    device = f"cuda:{device}"
    whole = model.load_model(model.model_path)["pipeline"].transformer.to(device)
    wanted = step(whole, device)
    sizes = sum(p.numel() * p.element_size() for p in whole.parameters())
    del whole
    for share in (1.5, 0.6) if mode != "mcache" else (1.5,):
        store = WeightStore(memory=int(share * sizes), device=device, mode=mode)
        seconds = []
        for _ in range(8):
            with store.lease(model) as lease:
                transformer = lease.components["pipeline"].transformer
                start = time.perf_counter()
                output = step(transformer, device)
                torch.cuda.synchronize(device)
                seconds.append(time.perf_counter() - start)
            assert torch.equal(output, wanted), (output - wanted).abs().max()
            store._check()
        print(f"\n{mode}, {share} of {sizes / MIB:.0f} MiB: {1e3 * min(seconds):.1f} ms a step")
        (row,) = store.models()
        assert row["resident_bytes"] <= share * sizes
        store.close()
    torch.cuda.empty_cache()


def test_a_model_that_is_evicted_while_its_kernels_run(model, device):
    """The host is ahead of the device: memory is given back before the device has read it."""
    device = f"cuda:{device}"
    whole = model.load_model(model.model_path)["pipeline"].transformer.to(device)
    wanted = step(whole, device)
    store = WeightStore(memory=1 << 30, device=device)
    for _ in range(20):
        with store.lease(model) as lease:
            output = step(lease.components["pipeline"].transformer, device)
        store.trim(model, 0)
        torch.full((256 * MIB,), 255, dtype=torch.uint8, device=device)
        assert torch.equal(output, wanted)
    store.close()
