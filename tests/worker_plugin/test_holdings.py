"""What a worker says it holds adds up, and is what the other questions say."""

from __future__ import annotations

import pytest
from distributed import Client

import st2i_dask as st2i

MEMORY, ARENA = 256 << 20, 64 << 20


class Two(st2i.ModelFn):
    """Two linear layers."""

    def setup_io(self):
        self.add_input("value")
        self.add_output("sum")

    def load_model(self, model_path):
        import torch

        return {"net": torch.nn.Sequential(*(torch.nn.Linear(256, 256) for _ in range(2)))}

    def execute(self, model_components, value):
        import torch

        return {"sum": model_components["net"](torch.full((64, 256), value))}


@st2i.workflow(name="holdings-two", replace=True)
def two(value: float):
    return Two()(value)


@pytest.fixture(scope="module")
def client():
    with (
        st2i.local_cluster(1, processes=False, dashboard_address=":0") as cluster,
        Client(cluster) as client,
    ):
        st2i.attach(client, memory_bytes=MEMORY, arena_bytes=ARENA)
        yield client


def test_holdings(client):
    future = two.submit(client, value=1.0)
    future.result(timeout=60)
    (found,) = client.sync(client.scheduler.broadcast, msg={"op": "st2i_holdings"}).values()
    (plane,) = st2i.data_plane(client).values()
    assert found["arena"] == plane["arena"]
    assert found["arena"]["nbytes"] + found["framework"]["nbytes"] == MEMORY
    (row,) = found["models"]
    assert {**row, "worker": "w"} == {**st2i.models(client)[0], "worker": "w"}
    assert row["by_layer"].count("1") == row["resident_layers"] == row["layers"] > 0
    weights = found["framework"]["weights"] + found["arena"]["weights"]
    assert weights == row["resident_bytes"] == row["nbytes"] > 0
