"""One task: inputs bound, glue and model in order, undeclared outputs refused when they appear."""

from __future__ import annotations

import threading
import time

import pytest
import torch

import st2i_dask as st2i
from st2i_dask import invocation
from st2i_dask.dag import build
from st2i_dask.fusion import fuse
from st2i_dask.invocation import BoundTask
from st2i_dask.outputs import MAX_DEPTH, TaskOutputs
from st2i_dask.plan import pack
from st2i_dask.trace import Trace, tracing


class Model(st2i.ModelFn):
    """Returns what its option says."""

    def setup_io(self):
        self.add_input("x")
        self.add_input("mask", optional=True)
        self.add_output("a")
        self.add_output("b")

    def execute(self, model_components, **inputs):
        return RETURNED[self.options["returned"]](model_components, inputs)


RETURNED = {
    "right": lambda components, inputs: {"a": inputs, "b": components},
    "missing": lambda components, inputs: {"a": 1},
    "undeclared": lambda components, inputs: {"a": 1, "b": 2, "c": 3},
    "none": lambda components, inputs: None,
    "tuple": lambda components, inputs: (1, 2),
    "odd key": lambda components, inputs: {"a": 1, 5: 2},
    "no data": lambda components, inputs: {"a": [{"x": torch.empty(2, 3, device="meta")}], "b": 1},
    "endless": lambda components, inputs: {"a": endless(), "b": 1},
    "nested": lambda components, inputs: {"a": nested(MAX_DEPTH - 1), "b": 1},
}


def endless():
    """A list that contains itself, twice."""
    value = []
    value += [value, value]
    return value


def nested(depth):
    value = 1
    for _ in range(depth):
        value = (value,)
    return value


def run(function, *, components=(), **parameters):
    """The single task of a workflow, evaluated."""
    with tracing(Trace("portrait")) as trace:
        result = function(*(trace.parameter(name) for name in parameters))
    dag = build(trace, result)
    (task,) = pack(dag, fuse(dag))
    return BoundTask(task, parameters, None, ()).evaluate(dict(components))


def model(returned):
    return Model(returned=returned)


def refused(function):
    with pytest.raises(st2i.OutputError) as caught:
        run(function, x=1)
    assert str(caught.value).startswith("workflow 'portrait': ")
    return str(caught.value)


def test_every_declared_input_is_passed_and_an_absent_one_is_none():
    assert run(lambda x: model("right")(x).a, x=5) == {"x": 5, "mask": None}
    assert run(lambda x: model("right")(x, mask=[x, 1]).a, x=5) == {"x": 5, "mask": [5, 1]}


def test_components_are_passed():
    assert run(lambda x: model("right")(x).b, x=5, components={"unet": 1}) == {"unet": 1}


@pytest.mark.parametrize(
    ("returned", "what"),
    [
        ("missing", "['a']"),
        ("undeclared", "['a', 'b', 'c']"),
        ("none", "NoneType"),
        ("tuple", "tuple"),
        ("odd key", "['5', 'a']"),
    ],
)
def test_what_is_not_the_declared_outputs_is_refused(returned, what):
    message = refused(lambda x: model(returned)(x).a)
    assert f"Model#1 returned {what} but declares ['a', 'b']" in message
    assert "return a dict with exactly the declared outputs" in message


@pytest.mark.parametrize(
    ("returned", "what"), [("no data", "shape (2, 3) on the device 'meta'"), ("endless", "50 deep")]
)
def test_what_has_nothing_to_hand_on_is_refused(returned, what):
    assert what in refused(lambda x: model(returned)(x=x)["a"])


def test_values_may_be_nested():
    assert run(lambda x: model("nested")(x=x)["a"], x=1) == nested(MAX_DEPTH - 1)


@pytest.mark.parametrize("value", [(1,), (1, 2, 3), 5, "ab", None, {1: 2, 3: 4}])
def test_glue_that_returns_another_number_of_values_is_refused(value):
    @st2i.glue(outputs=2)
    def split(_):
        return value

    message = refused(lambda x: split(model("right")(x).a)[0])
    assert f"glue split#1 returned {type(value).__name__}" in message
    assert "declared with outputs=2; return a tuple of that length" in message


def test_glue_may_return_a_list_for_its_outputs():
    split = st2i.glue(outputs=2)(lambda inputs: [inputs["x"], 2])
    assert run(lambda x: split(model("right")(x).a)[0], x=7) == 7


def test_an_error_of_the_model_or_of_glue_stays_what_it_is():
    def broken(_):
        raise ZeroDivisionError("the model's own words")

    with pytest.raises(ZeroDivisionError, match="the model's own words"):
        run(lambda x: model("right")(st2i.glue(broken)(x)).a, x=1)


def test_imports_come_from_the_right_export_of_the_right_dependency():
    with tracing(Trace("portrait")) as trace:
        x = trace.parameter("x")
        first, second = model("right")(x), Model(returned="right", name="other")(x)
        last = Model(returned="right", name="last")([second.b, first.b, first.a])
        dag = build(trace, last.a)
    program = fuse(dag)
    packed = pack(dag, program)
    outputs = {
        task.position: TaskOutputs(tuple((task.position, ref.output) for ref in task.exports))
        for task in program.tasks
    }
    task = program.tasks[-1]
    bound = BoundTask(packed[-1], {}, None, tuple(outputs[d] for d in task.dependencies))
    result = bound.evaluate({})
    assert result["x"] == [(1, "b"), (0, "b"), (0, "a")]


# ---------------------------------------------------------------- a worker whose plugin changes


class Plugin:
    def __init__(self, runner=None, starting=True):
        self.runner, self.starting = runner, starting


class Worker:
    address = "tcp://10.0.0.1:9"

    def __init__(self, plugin=None):
        self.plugins = {} if plugin is None else {invocation.WORKER_PLUGIN: plugin}


@pytest.fixture
def worker(monkeypatch):
    import distributed

    made = Worker()
    monkeypatch.setattr(distributed, "get_worker", lambda: made)
    monkeypatch.setattr(invocation, "ABSENT_SECONDS", 0.2)
    monkeypatch.setattr(invocation, "START_SECONDS", 5.0)
    return made


def test_a_task_waits_for_a_plugin_that_is_being_replaced(worker):
    def replace():
        time.sleep(0.05)
        plugin = worker.plugins[invocation.WORKER_PLUGIN] = Plugin()
        time.sleep(0.4)  # longer than an absent one is waited for
        plugin.runner = "ready"

    thread = threading.Thread(target=replace)
    thread.start()
    assert invocation._runner() == "ready"
    thread.join()


def test_a_plugin_that_did_not_start_is_an_error_at_once(worker):
    worker.plugins[invocation.WORKER_PLUGIN] = Plugin(starting=False)
    start = time.monotonic()
    with pytest.raises(st2i.AttachError, match=r"10\.0\.0\.1:9 does not serve: .* did not start"):
        invocation._runner()
    assert time.monotonic() - start < 0.15


@pytest.mark.parametrize(("plugin", "what"), [(None, "is missing"), (Plugin(), "did not start")])
def test_waiting_for_a_plugin_is_bounded(worker, monkeypatch, plugin, what):
    monkeypatch.setattr(invocation, "START_SECONDS", 0.2)
    if plugin is not None:
        worker.plugins[invocation.WORKER_PLUGIN] = plugin
    with pytest.raises(st2i.AttachError, match=what):
        invocation._runner()
