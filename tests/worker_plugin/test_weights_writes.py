"""Model code that changes weights in place: an error of its own, and of nobody else."""

from __future__ import annotations

import pytest
import torch

from st2i_dask.errors import OutputError

from .leases import (
    give,
    use,
)
from .models import (
    same,
)


def write(store, model, error=None):
    """Use the model, and change it."""
    with torch.no_grad(), store.lease(model) as lease:
        lease.components["model"].blocks[0].weight.mul_(0.5)
        if error is not None:
            raise error
        return give(lease)


def test_a_parameter_that_is_changed_in_place_is_an_error_and_nobody_elses_result(store, even):
    model, copy = even("a"), even("b", seed=ord("a"))
    for _ in range(4):
        good = use(store, model)
    assert same(use(store, copy), good), "the same weights under another name"
    with pytest.raises(OutputError, match=r"changed a parameter in place.*clone"):
        write(store, model)
    for other in (copy, model):
        assert same(use(store, other), good)
    store._check()


def test_an_error_of_the_model_goes_before_that(store, even):
    model = even("a")
    good = use(store, model)
    with pytest.raises(ZeroDivisionError):
        write(store, model, ZeroDivisionError())
    assert same(use(store, model), good)


def test_a_run_beside_one_that_writes_is_not_trusted(store, even):
    model = even("a")
    good = use(store, model)

    def beside():
        with store.lease(model), pytest.raises(OutputError, match="in place"):
            write(store, model)

    with pytest.raises(OutputError, match="in place"):
        beside()
    assert same(use(store, model), good)
