"""Fixtures of several modules: a cluster of two workers; a hub and a node that fetches from it."""

from __future__ import annotations

import pytest
import torch
from distributed import Client
from safetensors.torch import save

import st2i_dask as st2i

from .fake_hub import FakeHub
from .hub_node import LARGE_FILE, MIB, SMALL_FILE, Node


@pytest.fixture(scope="module")
def client():
    """Of a cluster with two workers, attached."""
    with (
        st2i.local_cluster(2, dashboard_address=None) as cluster,
        Client(cluster) as client,
    ):
        st2i.attach(client)
        yield client


@pytest.fixture(scope="module")
def files():
    """A small file of weights and one that is fetched in pieces."""
    generator = torch.Generator().manual_seed(0)
    big = torch.rand(24 * MIB // 4, generator=generator)
    return {
        "model_index.json": b'{"_class_name": "FluxPipeline"}',
        "transformer/config.json": b"{}",
        LARGE_FILE: save({"blocks.0.weight": big}),
        "vae/config.json": b'{"_class_name": "AutoencoderKL"}',
        SMALL_FILE: save({"conv.weight": torch.arange(1000.0), "conv.bias": torch.ones(8)}),
    }


@pytest.fixture
def hub(files):
    with FakeHub(dict(files)) as hub:
        yield hub


@pytest.fixture
def node(hub, tmp_path):
    return Node(hub, tmp_path)
