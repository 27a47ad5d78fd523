"""Notebook work: cells are edited and run again, in any order, and the new code is what runs."""

from __future__ import annotations

import pytest

import st2i_dask as st2i
from st2i_dask.references import references

MODEL = """
FACTOR = 1

def helper():
    return 2

class Model(st2i.ModelFn):
    def setup_io(self):
        self.add_input("prompt")
        self.add_output("text")

    def load_model(self, model_path):
        return {"k": helper()}

    def execute(self, model_components, prompt):
        return {"text": prompt * FACTOR}
"""

WORKFLOW = """
@st2i.workflow
def notebook(prompt: str):
    return Model()(prompt)
"""


@pytest.fixture
def cells(fresh_registry):
    """Runs cells as a notebook does: one namespace, a file name of its own for each run."""
    space = {"__name__": "__main__", "st2i": st2i}
    count = 0

    def run(*sources):
        nonlocal count
        for source in sources:
            count += 1
            exec(compile(source, f"/tmp/ipykernel_0/{count}.py", "exec"), space)
        return space.get("notebook")

    return run


def identity(workflow):
    """What decides which loaded model runs, and the version in the metadata."""
    composed = workflow.bind(prompt="a")[0]
    return composed.model_keys[0], composed.version


def test_running_the_same_cells_again_is_the_same_workflow(cells):
    first = identity(cells(MODEL, WORKFLOW))
    assert identity(cells(MODEL, WORKFLOW)) == first
    assert identity(cells("\n\n" + MODEL, WORKFLOW)) == first  # line numbers do not count


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ('"k": helper()', '"k": helper() + 1'),  # the class
        ("prompt * FACTOR", "prompt + prompt"),
        ("FACTOR = 1", "FACTOR = 3"),  # a constant that it reads
        ("    return 2", "    return 4"),  # a function that it calls
    ],
)
def test_an_edited_model_cell_counts_without_running_the_workflow_cell(cells, old, new):
    first = identity(cells(MODEL, WORKFLOW))
    edited = MODEL.replace(old, new)
    assert edited != MODEL
    second = identity(cells(edited))
    assert second[0] != first[0]
    assert second[1] != first[1]
    assert identity(cells(MODEL)) == first


def test_an_edited_workflow_cell_replaces_the_workflow(cells):
    first = cells(MODEL, WORKFLOW)
    second = cells(WORKFLOW.replace("(prompt)\n", '(prompt if True else "b")\n'))
    assert second is not first
    assert st2i.workflows.get("notebook") is second


def test_nothing_is_composed_again_while_nothing_changes(cells):
    workflow = cells(MODEL, WORKFLOW)
    composed = workflow.bind(prompt="a")[0]
    assert workflow.bind(prompt="b")[0] is composed
    cells("unrelated = 1")
    assert workflow.bind(prompt="b")[0] is composed


def test_arrays_count_whole():
    import numpy as np

    @st2i.glue
    def weigh(text, weights):
        return text

    class Upper(st2i.ModelFn):
        def setup_io(self):
            self.add_input("text")
            self.add_output("upper")

    def version(weights):
        @st2i.workflow(name="test-arrays", replace=True)
        def arrays(prompt: str):
            return Upper()(weigh(prompt, weights))

        return arrays.bind(prompt="a")[0].version

    one, other = np.zeros(10_000), np.zeros(10_000)
    other[5_000] = 1
    assert version(one) == version(one.copy())
    assert version(one) != version(other)


def test_references_follow_the_functions_own_module_only():
    def function():
        return references(pytest)

    names = {r.name for r in references(function)}
    assert {"references", "pytest"} <= names
    assert "functions" not in names  # used inside another module


def test_the_only_output_answers_to_its_name(fresh_registry):
    class One(st2i.ModelFn):
        def setup_io(self):
            self.add_input("text")
            self.add_output("upper")

    @st2i.workflow(name="test-one")
    def one(prompt: str):
        return One()(prompt).upper

    assert len(one.request(prompt="a").tasks) == 1


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ("def __init__(self): pass", r"an __init__ of its own"),
        ("def execute(self, m, other): pass", r"execute takes no 'text'.*declared inputs: text"),
        ("def execute(self, m, text, more): pass", r"execute wants 'more'"),
    ],
)
def test_beginners_mistakes_are_found_while_composing(fresh_registry, body, message):
    space = {"st2i": st2i}
    exec(
        "class Mine(st2i.ModelFn):\n"
        "    def setup_io(self):\n"
        "        self.add_input('text'); self.add_output('upper')\n"
        f"    {body}\n",
        space,
    )

    @st2i.workflow(name="test-beginner")
    def beginner(prompt: str):
        return space["Mine"]()(prompt)

    with pytest.raises(st2i.ComposeError, match=message):
        beginner.request(prompt="a")


def test_calling_the_class_instead_of_the_instance(fresh_registry):
    class Mine(st2i.ModelFn):
        def setup_io(self):
            self.add_output("x")

    @st2i.workflow(name="test-class-call")
    def called(prompt: str):
        return Mine(prompt)

    with pytest.raises(st2i.ComposeError, match=r"write Mine\(model_path\)\(inputs"):
        called.request(prompt="a")


def test_a_wrong_parameter_of_a_nested_workflow(fresh_registry):
    class Mine(st2i.ModelFn):
        def setup_io(self):
            self.add_input("text")
            self.add_output("x")

    @st2i.workflow(name="test-inner")
    def inner(prompt: str):
        return Mine()(prompt)

    @st2i.workflow(name="test-outer")
    def outer(prompt: str):
        return inner(promp=prompt)

    with pytest.raises(st2i.ComposeError, match=r"'test-inner' inside another.*it takes: prompt"):
        outer.request(prompt="a")
