"""The version of a workflow, what an image says of it, and its name, which is one workflow's alone."""

from __future__ import annotations

import pytest

import st2i_dask as st2i

from .portraits import Step, about

pytestmark = pytest.mark.usefixtures("fresh_registry")


def define(source):
    """Define workflows of a text, in a namespace of its own."""
    exec(source, {"st2i": st2i, "Step": Step, "__name__": "__main__"})


VERSIONED = """
@st2i.glue
def half(value): return value / 2

@st2i.workflow(name="portrait", replace=True)
def portrait(prompt: str, num_steps: int = 2):
    for step in range(num_steps): prompt = half(Step("folder", dtype="f")(prompt, step))
    return prompt
"""


def version(source=VERSIONED, **static):
    define(source)
    return st2i.workflows.get("portrait").request(prompt="a", **static)


def test_the_version_is_a_digest_of_what_is_composed():
    first = about(version())["version"]
    assert len(first) == 16
    assert about(version("\n\n" + VERSIONED))["version"] == first
    for edited in (
        VERSIONED.replace("/ 2", "/ 3"),
        VERSIONED.replace("/ 2", "* 2"),
        VERSIONED.replace('"folder"', '"other"'),
        VERSIONED.replace('"f"', '"g"'),
        VERSIONED.replace("(prompt, step)", "(prompt)"),
        VERSIONED.replace("(prompt, step)", "(prompt, 0)"),
    ):
        assert about(version(edited))["version"] != first, edited


def test_a_given_version_is_kept():
    @st2i.workflow(version="2.1")
    def portrait(prompt: str):
        return Step()(prompt)

    assert about(portrait.request(prompt="a"))["version"] == "2.1"


def test_metadata_says_how_the_image_was_made():
    request = version(num_steps=3)
    found = about(request)
    assert found["workflow"] == "portrait"
    assert found["prompt"] == "a"
    assert found["steps"] == 3
    assert found["tenant"] == "default"
    assert found["parameters"] == {"prompt": "a", "num_steps": 3}
    assert found["software"].startswith("st2i_dask ")
    assert "seed" not in found
    others = [task for key, task in request.tasks.items() if key != request.key]
    assert all(task.args[2] is None for task in others)


PORTRAIT = "@st2i.workflow\ndef portrait(prompt: str): return Step()(prompt)\n"


def test_the_name_description_and_registration(fresh_registry):
    @st2i.workflow
    def portrait(prompt: str, n: int = 1):
        """A face.

        More about it.
        """
        return Step()(prompt)

    assert fresh_registry.get("portrait") is portrait
    assert portrait in list(fresh_registry)
    assert portrait.description == "A face."
    assert portrait.__name__ == "portrait"
    assert repr(portrait) == "<workflow portrait(prompt, n=1)>"
    assert fresh_registry.get("nobody") is None


def test_the_same_lines_may_be_evaluated_again(fresh_registry):
    define(PORTRAIT)
    first = fresh_registry.get("portrait")
    define(PORTRAIT)
    assert fresh_registry.get("portrait") is not first


def test_another_workflow_of_the_same_name_is_refused(fresh_registry):
    define(PORTRAIT)
    first = fresh_registry.get("portrait")
    with pytest.raises(st2i.RegistrationError) as caught:
        define(PORTRAIT.replace("Step()(prompt)", "Step()(prompt, 1)"))
    assert "a workflow named 'portrait' is already registered (defined in <string>" in str(
        caught.value
    )
    assert "@st2i.workflow(name=...), or replace it with replace=True" in str(caught.value)
    assert fresh_registry.get("portrait") is first


def test_another_workflow_may_replace_it_or_take_another_name(fresh_registry):
    define(PORTRAIT)
    other = PORTRAIT.replace("Step()(prompt)", "Step()(prompt, 1)")
    define(other.replace("workflow", "workflow(name='another')"))
    first = fresh_registry.get("portrait")
    define(other.replace("workflow", "workflow(replace=True)"))
    assert fresh_registry.get("portrait") is not first
    assert [w.name for w in fresh_registry if w.name in ("portrait", "another")] == [
        "another",
        "portrait",
    ]


def test_two_workflows_from_one_factory_are_two():
    def define_with(model):
        @st2i.workflow(name="portrait")
        def portrait(prompt: str):
            return model(prompt)

    define_with(Step("a"))
    with pytest.raises(st2i.RegistrationError, match="'portrait' is already registered"):
        define_with(Step("b"))


def test_another_default_is_another_definition(fresh_registry):
    def define_with(default):
        @st2i.workflow(name="defaults")
        def chosen(prompt: str, steps: int = default):
            return prompt

    define_with(1)
    define_with(1)
    with pytest.raises(st2i.RegistrationError, match="'defaults' is already registered"):
        define_with(2)
