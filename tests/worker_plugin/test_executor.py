"""The executor in this process: results, seconds, models in the cache, refusals."""

from __future__ import annotations

import pickle
import re

import pytest
import torch

import st2i_dask as st2i
from st2i_dask.image import GeneratedImage
from st2i_dask.invocation import BoundTask
from st2i_dask.outputs import TaskOutputs
from worker_plugin.arena import Arena
from worker_plugin.executor import Executor
from worker_plugin.host_heap import HostHeap
from worker_plugin.tensor_store import TensorStore
from worker_plugin.weights import WeightStore

from .chains import ARENA, Linear, make_executor, run_chain, tasks


def test_a_chain_gives_what_the_models_give(executor):
    result, _ = run_chain(executor, Linear(), Linear())
    weight = Linear().load_model(None)["linear"].weight
    assert torch.equal(result, torch.ones(1, 2) @ weight.T @ weight.T)
    assert not result.requires_grad


def test_a_step_hands_on_outputs_and_the_last_one_its_value(executor):
    first, second = tasks(Linear(), Linear())
    value, _ = executor.run(BoundTask(first, {"x": torch.ones(1, 2)}, None, ()))
    assert isinstance(value, TaskOutputs)
    assert isinstance(value.values[0], torch.Tensor)
    value, _ = executor.run(BoundTask(second, {}, {}, (value,)))
    assert isinstance(value, torch.Tensor)


def test_gradients_are_off_and_come_back(executor):
    enabled, _ = run_chain(executor, Linear(kind="gradients"))
    assert not enabled
    assert torch.is_grad_enabled()


def test_the_models_seconds_are_told_apart(executor):
    _, (first, second) = run_chain(executor, Linear(seconds=0.05), Linear(seconds=0.05))
    assert first.load >= 0.05
    assert second.load == 0
    for seconds in (first, second):
        assert 0 <= seconds.transfer < 10
        assert 0 < seconds.compute < 10


def test_equal_models_are_loaded_once(executor):
    run_chain(executor, Linear("a"), Linear("a", kind=None), Linear("a"))
    rows = executor.models.models()
    assert [(row["runs"], row["hits"]) for row in rows] == [(1, 0), (2, 1)]
    assert [row["resident_bytes"] for row in rows] == [2 * 2 * 4] * 2


def test_an_image_gets_its_metadata(executor):
    image, _ = run_chain(executor, Linear(kind="image"), about={"prompt": "a"})
    assert isinstance(image, GeneratedImage)
    assert image.metadata == {"prompt": "a", "size": "4x6"}


def test_a_bfloat16_result_reaches_the_client_exactly(executor):
    x = torch.randn(5).to(torch.bfloat16)
    result, _ = run_chain(executor, Linear(kind="bfloat16"), x=x)
    assert result.dtype == torch.float32
    assert torch.equal(result, x.float())
    outputs, _ = executor.run(
        BoundTask(tasks(Linear(kind="bfloat16"), Linear())[0], {"x": x}, None, ())
    )
    assert outputs.values[0].dtype == torch.bfloat16


# ---------------------------------------------------------------- refusals


def test_a_model_that_loads_no_dict_is_refused_and_not_kept(executor):
    with pytest.raises(st2i.LoadError) as caught:
        run_chain(executor, Linear(kind="no dict"))
    assert str(caught.value) == (
        "Linear.load_model returned list; return a dict of components by name"
    )
    assert executor.models.models() == []


def test_a_failing_load_is_the_models_own_error_and_can_be_tried_again(executor):
    for _ in range(2):
        with pytest.raises(OSError, match="no such folder"):
            run_chain(executor, Linear(kind="load fails"))
    assert executor.models.models() == []


@pytest.mark.parametrize("kind", ["missing output", "undeclared output"])
def test_undeclared_outputs_are_refused_with_workflow_and_node(executor, kind):
    with pytest.raises(st2i.OutputError) as caught:
        run_chain(executor, Linear(kind=kind))
    assert str(caught.value).startswith("workflow 'portrait': Linear#1 returned [")
    assert "but declares ['y']; return a dict with exactly the declared outputs" in str(
        caught.value
    )


def test_an_error_in_the_model_stays_what_it_is_and_releases_it(executor):
    with pytest.raises(ZeroDivisionError, match="the model's own words") as caught:
        run_chain(executor, Linear(kind="raises"))
    # With whose they are, also on the way to a client.
    (note,) = pickle.loads(pickle.dumps(caught.value)).__notes__
    assert re.fullmatch(r"raised in workflow .\w+. by .*Linear.*", note)
    assert len(executor.models.models()) == 1


@pytest.mark.parametrize("followed", [True, False])
def test_what_cannot_be_sent_is_refused_also_as_the_result(executor, followed):
    models = [Linear(kind="unsendable")] + [Linear()] * followed
    with pytest.raises(st2i.OutputError) as caught:
        run_chain(executor, *models)
    assert "workflow 'portrait': Linear#1 hands on values (generator)" in str(caught.value)


def test_what_cannot_be_sent_is_found_in_any_request(executor):
    """Also when earlier requests of the same workflow gave what can be."""
    first, _ = tasks(Linear(kind="later unsendable"), Linear())
    executor.run(BoundTask(first, {"x": torch.ones(1, 2)}, None, ()))
    with pytest.raises(st2i.OutputError, match="cannot be sent to another worker"):
        executor.run(BoundTask(first, {"x": torch.zeros(1, 2)}, None, ()))
    executor.run(BoundTask(first, {"x": torch.ones(1, 2)}, None, ()))


def test_a_model_over_the_budget_is_refused():
    executor = Executor(WeightStore(memory=15), TensorStore(Arena(HostHeap(ARENA))))
    with pytest.raises(st2i.LoadError, match=r"Linear\(None\) does not fit.* 16 bytes.* 15 in fr"):
        run_chain(executor, Linear())
    executor.models.close()


class Hungry(Linear):
    """Its first attempts end as on a device without memory left."""

    attempts: list[str] = []  # noqa: RUF012

    def execute(self, model_components, x):
        self.attempts.append("")
        if len(self.attempts) <= self.options["failing"]:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 8 B. GPU 0 has")
        return {"y": x}


@pytest.mark.parametrize("failing", [1, 2])
def test_out_of_memory_evicts_and_is_tried_once_more(executor, failing):
    Hungry.attempts.clear()
    run_chain(executor, Linear("cached"))
    idle = executor.models.models()[0]
    assert idle["resident_layers"] == 1
    if failing == 1:
        run_chain(executor, Hungry(failing=failing))
    else:
        with pytest.raises(torch.OutOfMemoryError):
            run_chain(executor, Hungry(failing=failing))
    assert len(Hungry.attempts) == 2
    left = {row["model"]: row["resident_layers"] for row in executor.models.models()}
    assert left == {"Hungry(None)": 1}, "the idle model made room"


def test_out_of_memory_without_anything_to_evict_fails_at_once(executor):
    Hungry.attempts.clear()
    with pytest.raises(torch.OutOfMemoryError):
        run_chain(executor, Hungry(failing=1))
    assert len(Hungry.attempts) == 1


def test_models_are_given_back_when_the_last_one_who_uses_them_ends():
    executor = make_executor(1_000_000)
    run_chain(executor, Linear())
    with executor.in_use() as first:
        with executor.in_use() as second:
            assert first
            assert second
            executor.close()
        executor.close()
        with executor.in_use() as late:
            assert not late
        run_chain(executor, Linear())
        assert executor.models.models(), "in use"
    assert not executor.models.models()


def test_models_that_nobody_uses_are_given_back_at_once():
    executor = make_executor(1_000_000)
    run_chain(executor, Linear())
    with executor.in_use():
        pass
    executor.close()
    assert not executor.models.models()
