"""Requests: one task per invocation, keys that group by ModelFn, and a graph that is quick to send."""

from __future__ import annotations

import pickle
import time

import pytest
from dask._task_spec import TaskRef
from dask.utils import key_split

import st2i_dask as st2i
from st2i_dask.request import ANNOTATION, RequestGraph
from st2i_dask.workflow import Workflow


class Step(st2i.ModelFn):
    def setup_io(self):
        self.add_input("x")
        self.add_input("text", optional=True)
        self.add_output("y")

    def execute(self, model_components, x, text):
        return {"y": x}


@st2i.glue(outputs=2)
def scheduler_step(latents, scheduler, step):
    return latents, scheduler


def flux(prompt: str, seed: int = 0, num_steps: int = 28, width: int = 64, height: int = 32):
    text, latents, scheduler = Step(name="clip")(prompt), seed, 0
    transformer = Step("folder", name="transformer", dtype="bfloat16")
    for step in range(num_steps):
        latents, scheduler = scheduler_step(transformer(latents, text), scheduler, step)
    return Step(name="vae")(latents, Step(name="t5")(prompt))


@pytest.fixture(scope="module")
def workflow():
    return Workflow(flux, "flux", None)


def named(*names):
    """A workflow with one ModelFn of each name, two invocations each."""

    def chain(x):
        for name in names:
            x = Step(name=name)(Step(name=name)(x))
        return x

    return Workflow(chain, "named", None).request(x=1)


# ---------------------------------------------------------------- tasks


def test_one_task_per_invocation(workflow):
    request = workflow.request(prompt="a", num_steps=28)
    assert len(request.tasks) == 31
    assert set(request.annotations) == set(request.tasks)
    assert all(task.key == key for key, task in request.tasks.items())


def test_the_graph_is_closed_and_leads_to_the_result(workflow):
    request = workflow.request(prompt="a", num_steps=3)
    reached, stack = set(), [request.key]
    while stack:
        key = stack.pop()
        if key not in reached:
            reached.add(key)
            stack.extend(request.tasks[key].dependencies)
    assert reached == set(request.tasks)
    assert all(isinstance(d, str) for task in request.tasks.values() for d in task.dependencies)
    assert any(isinstance(a, TaskRef) for a in request.tasks[request.key].args)


def test_two_requests_share_no_key(workflow):
    first, second = (workflow.request(prompt="a") for _ in range(2))
    assert not set(first.tasks) & set(second.tasks)


def test_annotations_say_whose_and_what(workflow):
    assert ANNOTATION == "st2i"
    request = workflow.request(tenant="alice", prompt="a", num_steps=2)
    positions = []
    for key, annotation in request.annotations.items():
        assert annotation["tenant"] == "alice"
        assert annotation["workflow"] == "flux"
        assert annotation["request"] == key.rpartition("-")[2]
        assert key.startswith((annotation["fn"] + "-", annotation["fn"] + "@folder-"))
        assert "64x32" in annotation["bucket"]
        assert "num_steps" not in annotation["bucket"]
        positions.append(annotation["position"])
    assert sorted(positions) == list(range(5))
    models = {a["fn"]: a["model"] for a in request.annotations.values()}
    assert len(set(models.values())) == 2
    assert models["clip"] == models["vae"] != models["transformer"]


def test_annotations_are_plain(workflow):
    import msgpack

    request = workflow.request(prompt="a")
    msgpack.packb(list(request.annotations.values()))


def test_a_task_gets_only_the_parameters_it_reads(workflow):
    request = workflow.request(prompt="the prompt", seed=5, num_steps=2)
    for key, task in request.tasks.items():
        expected = {
            "clip": {"prompt": "the prompt"},
            "t5": {"prompt": "the prompt"},
            "transformer": {"seed": 5} if "-002-" in key else {},
            "vae": {},
        }[key_split(key).partition("@")[0]]
        assert task.args[1] == expected


# ---------------------------------------------------------------- key groups


@pytest.mark.parametrize(
    "name",
    [
        *("transformer", "T5", "flux-transformer", "two words", "1st", "2", "_private", "x-1"),
        *("a.b@c", "x(y)", "'quoted'", "a,b", "<object>", "Größe", "模型", "-", "--", "x/y"),
        *("deadbeef", "text-deadbeef", "a" * 200, "tab\there"),
    ],
)
def test_all_invocations_of_a_model_are_in_one_group(name):
    request = named(name)
    groups = {key_split(key) for key in request.tasks}
    assert len(groups) == 1
    (group,) = groups
    assert next(iter(request.annotations.values()))["fn"] == name
    assert key_split(next(iter(named(name).tasks))) == group


@pytest.mark.parametrize(
    "names",
    [
        ("clip", "t5", "transformer", "vae"),
        ("flux-transformer", "flux-vae"),
        ("encoder 1", "encoder 2"),
        ("1", "2", "x1"),
        ("sd3_a", "sd3_b"),
        ("T5", "t5"),
    ],
)
def test_models_of_other_names_are_in_other_groups(names):
    groups = {}
    for annotation, key in zip(
        named(*names).annotations.values(), named(*names).tasks, strict=True
    ):
        groups.setdefault(annotation["fn"], set()).add(key_split(key))
    assert len(groups) == len(names)
    assert all(len(found) == 1 for found in groups.values())


# ---------------------------------------------------------------- time


def test_31_invocations_are_built_and_pickled_in_no_time(workflow):
    workflow.request(prompt="a")
    times = []
    for seed in range(5):
        start = time.perf_counter()
        request = workflow.request(prompt="a", seed=seed)
        data = pickle.dumps(request.tasks)
        times.append(time.perf_counter() - start)
    assert len(request.tasks) == 31
    assert min(times) < 0.1
    assert len(data) < 200_000


def test_a_graph_is_named_by_its_keys(workflow, monkeypatch):
    """Dask would go through all that every task holds."""
    from dask._expr import LLGExpr
    from dask._task_spec import Task

    def unwanted(self):
        raise AssertionError("a task was looked through")

    graphs = [RequestGraph(workflow.request(prompt="a").tasks) for _ in range(2)]
    monkeypatch.setattr(Task, "_get_token", unwanted)
    names = [LLGExpr(graph)._name for graph in graphs]
    assert names[0] != names[1]
    assert (
        LLGExpr(graphs[0])._name == names[0] == pickle.loads(pickle.dumps(LLGExpr(graphs[0])))._name
    )
    with pytest.raises(AssertionError, match="looked through"):
        LLGExpr(dict(graphs[0]))
