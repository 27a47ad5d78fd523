"""ModelFn.gang: checked when it is made and composed, carried to the scheduler, part of the version."""

from __future__ import annotations

import pytest

import st2i_dask as st2i

from .test_model_fn import Upscale


class Wide(Upscale):
    gang = 4


class Asked(Upscale):
    @property
    def gang(self):
        return self.options.get("executors", 1)


def composed(model, name="gang-attribute"):
    @st2i.workflow(name=name, replace=True)
    def workflow(prompt: str):
        return model(prompt)

    return workflow


def test_one_executor_is_the_default():
    assert Upscale().gang == 1


@pytest.mark.parametrize(
    ("model", "gang"), [(Upscale(), 1), (Wide(), 4), (Asked(executors=16), 16)]
)
def test_the_tasks_annotation_says_it(model, gang):
    request = composed(model).request(prompt="a")
    assert [annotation["gang"] for annotation in request.annotations.values()] == [gang]


@pytest.mark.parametrize("gang", [0, 17, -1, True, 2.0, "2", None])
def test_a_gang_out_of_range_is_refused(gang):
    with pytest.raises(st2i.ComposeError, match=r"gang is .*; give .* from 1 to 16"):
        Asked(executors=gang)


def test_one_that_was_changed_is_refused_when_it_is_composed():
    model = Upscale()
    model.gang = 0
    with pytest.raises(st2i.ComposeError, match="gang is 0"):
        composed(model).request(prompt="a")


def test_the_size_is_part_of_what_is_composed_and_not_of_the_model():
    """Weights are shared by gangs of any size; results may depend on how an invocation is split."""
    one, two = Upscale("folder"), Upscale("folder")
    two.gang = 2
    assert one.model_key == two.model_key
    versions = [composed(model).bind(prompt="a")[0].version for model in (one, two, one)]
    assert versions[0] == versions[2] != versions[1]
