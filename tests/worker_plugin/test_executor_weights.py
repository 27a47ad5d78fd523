"""Weights in files under an executor: never old and new ones in one request, and never one that is absent."""

from __future__ import annotations

import os
import pickle
from unittest.mock import patch

import pytest
import torch
from safetensors.torch import load_file, save_file

import st2i_dask as st2i
from st2i_dask.image import check_pixels
from st2i_dask.invocation import BoundTask
from worker_plugin.arena import Arena
from worker_plugin.executor import Executor
from worker_plugin.host_heap import HostHeap
from worker_plugin.tensor_store import TensorStore
from worker_plugin.weights import WeightStore

from .chains import ARENA, run_chain, tasks


class Stored(st2i.ModelFn):
    """Two blocks whose weights come from a file; `way` says how execute uses them."""

    def setup_io(self):
        self.add_input("x")
        self.add_output("y")

    def load_model(self, model_path):
        net = torch.nn.Module()
        net.blocks = torch.nn.ModuleList([torch.nn.Linear(64, 64) for _ in range(2)])
        net.load_state_dict(load_file(model_path), assign=True)
        return {"net": net}

    def execute(self, model_components, x):
        for block in model_components["net"].blocks:
            way = self.options.get("way")
            if way == "parameters":
                x = torch.nn.functional.linear(x, block.weight, block.bias)
            else:
                x = block.forward(x) if way == "forward" else block(x)
        return {"y": x}


X = torch.linspace(-1, 1, 64).reshape(1, 64)


def save(path, seed):
    generator = torch.Generator().manual_seed(seed)
    shapes = {"weight": (64, 64), "bias": (64,)}
    state = {
        f"blocks.{i}.{name}": torch.randn(*shape, generator=generator)
        for i in range(2)
        for name, shape in shapes.items()
    }
    save_file(state, f"{path}.new")
    os.replace(f"{path}.new", path)


@pytest.fixture
def file(tmp_path):
    path = str(tmp_path / "net.safetensors")
    save(path, 0)
    return path


def test_a_request_never_mixes_old_and_new_weights(executor, file):
    first, second = tasks(Stored(file), Stored(file))
    begun, _ = executor.run(BoundTask(first, {"x": X}, None, ()))
    travelled = pickle.loads(pickle.dumps(begun, protocol=5))
    save(file, 1)
    for outputs in (begun, travelled):
        with pytest.raises(st2i.LoadError, match=r"net\.safetensors.*changed while the request"):
            executor.run(BoundTask(second, {}, {}, (outputs,)))
    new, _ = executor.run(BoundTask(first, {"x": X}, None, ()))
    result, _ = executor.run(BoundTask(second, {}, {}, (new,)))
    net = Stored(file).load_model(file)["net"]
    with torch.no_grad():
        assert torch.equal(result, net.blocks[1](net.blocks[0](net.blocks[1](net.blocks[0](X)))))


@pytest.mark.parametrize("way", ["parameters", "forward"])
def test_code_that_goes_round_the_hooks_gets_its_weights_where_they_fit(file, way):
    arena = Arena(HostHeap(ARENA))
    executor = Executor(WeightStore(memory=40_000), TensorStore(arena))
    model, usual = Stored(file, way=way), Stored(file)
    wanted, _ = run_chain(executor, usual, x=X)
    for _ in range(3):
        executor.models.trim(usual, 0)  # the same weights: none is in memory
        result, _ = run_chain(executor, model, x=X)
        assert torch.equal(result, wanted)
    executor.models._check()
    executor.models.close()


class Counted(Stored):
    """Its output is no number, or it is refused as an image is; its runs are counted."""

    runs: list[bool] = []  # noqa: RUF012

    def execute(self, model_components, x):
        net = model_components["net"]
        y = net.blocks[1](net.blocks[0](x))
        self.runs.append(bool(net.blocks[0].weight.isnan().any()))
        if self.options["refused"] == "NaN":
            check_pixels(y, lowest=-1e9, where="Counted")
        elif self.options["refused"]:
            raise st2i.OutputError("all black")
        return {"y": y}


def undivided(executor):
    return [skeleton.is_undivided for skeleton in executor.models._shelf]


def test_a_model_that_gives_nan_gives_it_whatever_is_in_memory(executor, file):
    Counted.runs.clear()
    nan = torch.full((1, 64), float("nan"))
    with pytest.raises(
        st2i.NotFiniteError, match=r"the result of Counted#1 has NaN in it; the first"
    ):
        run_chain(executor, Counted(file, refused=""), x=nan)
    assert len(Counted.runs) == 2, "it might have been a layer that was not there"
    assert undivided(executor) == [False], "but was not"


@pytest.mark.parametrize(("refused", "runs"), [("NaN", 2), ("black", 1)])
def test_only_what_may_come_of_an_absent_layer_is_run_again(executor, file, refused, runs):
    Counted.runs.clear()
    nan = torch.full((1, 64), float("nan"))
    with pytest.raises(st2i.OutputError, match=r"Counted produced 64 of 64|all black"):
        run_chain(executor, Counted(file, refused=refused), x=nan)
    assert len(Counted.runs) == runs
    assert undivided(executor) == [False]
    executor.models._check()


def test_an_image_that_is_refused_for_an_absent_layer_is_drawn_again(file):
    # So slow that nothing is there yet when the model runs.
    store = WeightStore(memory=40_000, bandwidth=2e5)
    executor = Executor(store, TensorStore(Arena(HostHeap(ARENA))))

    class Draws(Stored):
        def execute(self, model_components, x):
            result = super().execute(model_components, x)
            check_pixels(result["y"], lowest=-1e9, where="Draws")
            return result

    wanted, _ = run_chain(executor, Stored(file), x=X)
    executor.models.trim(Stored(file), 0)
    result, _ = run_chain(executor, Draws(file, way="forward"), x=X)
    assert torch.equal(result, wanted)
    assert undivided(executor) == [False, True]
    executor.models.close()


def test_a_model_that_is_wanted_whole_and_finds_no_room_leaves_nothing_behind(file):
    store = WeightStore(memory=40_000, wait_s=0.2)
    model, other = Stored(file, way="forward"), Stored(file)
    with store.lease(model) as lease:
        store.keep_undivided(lease)
    store.trim(model, 0)

    lost = []
    with (
        patch.object(store._layers._loader, "submit", lambda load, *_: lost.append(load)),
        pytest.raises(st2i.LoadError, match=r"no room for model Stored"),
        store.lease(model),
    ):
        pass
    store._layers._failed(lost.pop(), OSError())
    assert not store._leases
    with store.lease(other) as lease, torch.no_grad():
        other.execute(lease.components, X)
    store._check()
    store.close()
