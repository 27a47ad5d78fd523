"""The executor in this process: results, seconds, models in the cache, refusals."""

from __future__ import annotations

import os
import pickle
import time
from unittest.mock import patch

import pytest
from PIL import Image

import st2i_dask as st2i
from st2i_dask.dag import build
from st2i_dask.fusion import fuse
from st2i_dask.image import GeneratedImage, check_pixels
from st2i_dask.invocation import BoundTask
from st2i_dask.outputs import TaskOutputs
from st2i_dask.plan import pack
from st2i_dask.trace import Trace, tracing
from worker_plugin.arena import Arena
from worker_plugin.executor import Executor
from worker_plugin.host_heap import HostHeap
from worker_plugin.tensor_store import TensorStore
from worker_plugin.weights import WeightStore

torch = pytest.importorskip("torch")
from safetensors.torch import load_file, save_file  # noqa: E402


class Linear(st2i.ModelFn):
    """x times a weight of torch; `kind` says how its load or result goes wrong."""

    def setup_io(self):
        self.add_input("x")
        self.add_output("y")

    def load_model(self, model_path):
        kind = self.options.get("kind")
        time.sleep(self.options.get("seconds", 0))
        if kind == "no dict":
            return [torch.nn.Linear(2, 2)]
        if kind == "load fails":
            raise OSError("no such folder")
        with torch.random.fork_rng():
            torch.manual_seed(0)
            return {"linear": torch.nn.Linear(2, 2, bias=False)}

    def execute(self, model_components, x):
        kind = self.options.get("kind")
        if kind == "missing output":
            return {}
        if kind == "undeclared output":
            return {"y": x, "z": x}
        if kind == "gradients":
            return {"y": torch.is_grad_enabled()}
        if kind == "unsendable":
            return {"y": (i for i in ())}
        if kind == "later unsendable":
            return {"y": x if x.sum() > 0 else [{"deep": (i for i in ())}]}
        if kind == "image":
            return {"y": Image.new("RGB", (4, 6), "red")}
        if kind == "raises":
            raise ZeroDivisionError("the model's own words")
        if kind == "bfloat16":
            return {"y": x.to(torch.bfloat16)}
        return {"y": model_components["linear"](x)}


ARENA = 1 << 20


def make_executor(memory):
    arena = Arena(HostHeap(ARENA))
    return Executor(WeightStore(memory=ARENA + memory, arena=arena, wait_s=1), TensorStore(arena))


@pytest.fixture
def executor():
    executor = make_executor(1_000_000)
    yield executor
    executor.models._check()
    executor.models.close()
    assert executor.models.models() == [], "a model is still in use"
    del executor.models, executor.store  # pytest keeps the executor for longer than the module


def tasks(*models):
    """The packed tasks of a chain of models."""
    with tracing(Trace("portrait")) as trace:
        value = trace.parameter("x")
        for model in models:
            value = model(value)
        dag = build(trace, value)
    return pack(dag, fuse(dag))


def run_chain(executor, *models, x=None, about=None):
    """The last result and the seconds of every step."""
    x = torch.ones(1, 2) if x is None else x
    value, seconds = None, []
    packed = tasks(*models)
    for task in packed:
        last = task is packed[-1]
        dependencies = () if value is None else (value,)
        bound = BoundTask(task, {"x": x}, about if last else None, dependencies)
        value, spent = executor.run(bound)
        seconds.append(spent)
    return value, seconds


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
    with pytest.raises(ZeroDivisionError, match="the model's own words"):
        run_chain(executor, Linear(kind="raises"))
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


# ---------------------------------------------------------------- weights in files


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
        with pytest.raises(st2i.LoadError, match=r"net\.safetensors.*replaced while the request"):
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


class Spoiling(Linear):
    """Divides by nothing where its option says so."""

    def execute(self, model_components, x):
        y = super().execute(model_components, x)["y"]
        return {"y": y * float("nan") if self.options.get("here") else y}


class Refusing(Linear):
    def execute(self, model_components, x):
        check_pixels(x, lowest=-1e9, where="Refusing")
        return super().execute(model_components, x)


@pytest.mark.parametrize("last", [Spoiling(), Refusing()])
@pytest.mark.parametrize("travels", [False, True])
def test_nan_is_an_error_that_names_where_it_began(executor, last, travels):
    *packed, end = tasks(Spoiling(), Spoiling(here=True), Spoiling(), last)
    value = ()
    for task in packed:
        outputs, _ = executor.run(BoundTask(task, {"x": torch.ones(1, 2)}, None, value))
        value = (pickle.loads(pickle.dumps(outputs, protocol=5)) if travels else outputs,)
    with pytest.raises(st2i.NotFiniteError, match=r"the first NaN came out of Spoiling#2$"):
        executor.run(BoundTask(end, {"x": torch.ones(1, 2)}, {}, value))


@pytest.mark.parametrize("dtype", ["float8_e4m3fn", "float8_e5m2", "float16", "bfloat16"])
@pytest.mark.parametrize("value", [1.0, float("nan")])
def test_nan_is_seen_in_every_dtype(executor, dtype, value):
    class Narrowing(Linear):
        def execute(self, model_components, x):
            return {"y": torch.full((1, 2), value).to(getattr(torch, dtype))}

    narrow, _ = tasks(Narrowing(), Linear())
    outputs, _ = executor.run(BoundTask(narrow, {"x": torch.ones(1, 2)}, None, ()))
    assert outputs.spoilt == (None if value == 1.0 else "Narrowing#1")


def test_infinite_numbers_between_models_are_no_error(executor):
    class Masking(Linear):
        def execute(self, model_components, x):
            return {"y": torch.tensor([[float("inf"), float("-inf")]])}

    class Counting(Linear):
        def execute(self, model_components, x):
            return {"y": x.isinf().sum().float()}

    result, _ = run_chain(executor, Masking(), Counting())
    assert result == 2


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
