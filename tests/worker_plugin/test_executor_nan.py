"""NaN is an error that says where it began, in every dtype; infinite numbers are none."""

from __future__ import annotations

import pickle

import pytest
import torch

import st2i_dask as st2i
from st2i_dask.image import check_pixels
from st2i_dask.invocation import BoundTask

from .chains import Linear, run_chain, tasks


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
