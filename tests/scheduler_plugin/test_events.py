"""Events check themselves: nonsense never reaches the policy."""

from __future__ import annotations

import math

import pytest

from scheduler_plugin import events as ev
from scheduler_plugin.outline import chain
from st2i_dask.errors import St2iError

OUTLINE = chain("w", [("Fn", "m", "1")])


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: ev.ExecutorLeft(-1.0, "w"), "now is -1.0"),
        (lambda: ev.ExecutorLeft(math.nan, "w"), "now is nan"),
        (lambda: ev.ExecutorLeft("1", "w"), "now is '1'"),
        (lambda: ev.ExecutorJoined(0.0, "w", -1), "-1 bytes"),
        (lambda: ev.ExecutorJoined(0.0, "w", 0, {"m": 1.5}), "missing share of model 'm' is 1.5"),
        (lambda: ev.ResidencyReported(0.0, "w", {"m": math.nan}, 0), "missing share"),
        (lambda: ev.RequestSubmitted(0.0, "r", "bad tenant", OUTLINE), "1 to 64 characters"),
        (lambda: ev.InvocationReady(0.0, "k", "r", 0, input_bytes=-5), "-5 bytes"),
        (lambda: ev.InvocationReady(0.0, "k", "r", 0, steps=0), "steps is 0"),
        (lambda: ev.Completed(0.0, "k", ev.Measured(), steps=0), "steps is 0"),
        (lambda: ev.Completed(0.0, "k", ev.Measured(), {"m": 2.0}), "missing share"),
        (lambda: ev.Measured(load_s=-0.1), "measured load is -0.1"),
        (lambda: ev.Measured(compute_s=math.inf), "measured compute is inf"),
        (lambda: ev.Measured(transfer_s=None), "measured transfer is None"),
    ],
)
def test_refused_with_the_value_and_the_range(make, message):
    with pytest.raises(St2iError, match=message):
        make()


def test_a_charge_is_load_and_compute_and_transfer():
    assert ev.Measured(1.0, 2.0, 0.5).total_s == 3.5


def test_the_stimulus_travels_with_the_event():
    assert ev.ExecutorLeft(0.0, "w", stimulus_id="s-1").stimulus_id == "s-1"
