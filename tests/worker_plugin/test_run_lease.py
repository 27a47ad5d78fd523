"""The lease of a task's calls: one for all of them where the model is in memory, else one each."""

from __future__ import annotations

from contextlib import closing

import pytest
import torch

from st2i_dask.errors import OutputError
from worker_plugin.run_lease import RunLease

from .leases import LAYER, NO_LIMIT, give, reference, row, use
from .models import Model, inputs, outputs, same, save_plain, store_of

CALLS = 5
#: Leases that measure a model's layers; these end with their calls.
MEASURING = 3


def call(kept, model, **names):
    with kept.of(model, **names) as lease:
        return lease, give(lease)


def runs(store, model):
    figures = row(store, model)
    assert figures["hits"] <= figures["runs"] == store.residency.totals.runs
    return figures["runs"]


@pytest.fixture
def measured(store, even):
    model = even("a")
    for _ in range(MEASURING + 1):
        use(store, model)
    return model


def test_calls_of_a_model_in_memory_share_a_lease(store, measured):
    before = runs(store, measured)
    with closing(RunLease(store)) as kept:
        found = [call(kept, measured) for _ in range(CALLS)]
        assert store._leases, "it is kept between calls"
    assert len({lease.number for lease, _ in found}) == 1
    assert all(same(output, reference(measured)) for _, output in found)
    assert runs(store, measured) == before + CALLS, "each counts"
    assert not store._leases


def test_another_model_or_shape_gets_a_lease_of_its_own(store, even, measured):
    other = even("b")
    for _ in range(MEASURING + 1):
        use(store, other)
        use(store, other, bucket="2")
    with closing(RunLease(store)) as kept:
        given = [
            call(kept, measured)[0],
            call(kept, other)[0],
            call(kept, other, bucket="2")[0],
        ]
        assert len({lease.number for lease in given}) == 3
        assert len(store._leases) == 1, "one at a time"


def test_a_model_that_is_measured_or_not_all_there_is_leased_by_the_call(even):
    model = even("a")
    with store_of(3 * LAYER) as store:
        with closing(RunLease(store)) as kept:
            for number in range(1, MEASURING + 4):
                lease, output = call(kept, model)
                assert same(output, reference(model))
                assert not lease.held
                assert runs(store, model) == number
        assert not store._leases


def test_pipelined_mode_keeps_nothing_between_calls_not_even_of_one_layer(tmp_path):
    path = tmp_path / "single.safetensors"
    save_plain(path, "single")
    model, given = Model(str(path), kind="single"), inputs("single")
    with store_of(NO_LIMIT, mode="pipelined") as store, closing(RunLease(store)) as kept:
        for _ in range(MEASURING + 2):
            with kept.of(model) as lease:
                outputs(lease.components["model"], "single", given)
            assert not store._leases
        assert lease.held


def test_seconds_of_loads_are_charged_once(store, even):
    model = even("a")
    with closing(RunLease(store)) as kept:
        lease, _ = call(kept, model)
        assert lease.charge() == lease.load_s > 0
        assert lease.charge() == 0
        lease.stall(0.0)
        assert 0 < lease.charge() < lease.load_s


def test_a_call_that_fails_ends_the_lease(store, measured):
    kept = RunLease(store)
    first, _ = call(kept, measured)
    with pytest.raises(ZeroDivisionError), kept.of(measured):
        raise ZeroDivisionError
    assert not store._leases
    kept.close()
    second, _ = call(kept, measured)
    assert second.number != first.number
    kept.close()
    assert not store._leases


def write(kept, model):
    """A call that uses the model, and changes it; its lease."""
    with kept.of(model) as lease, torch.no_grad():
        give(lease)
        lease.components["model"].blocks[0].weight.mul_(0.5)
    return lease


def test_weights_that_a_call_wrote_to_are_an_error_at_the_end(store, measured):
    kept = RunLease(store)
    write(kept, measured)
    call(kept, measured)
    with pytest.raises(OutputError, match="in place"):
        kept.close()
    assert not store._leases
    assert same(use(store, measured), reference(measured))


def test_also_where_a_later_call_fails_with_something_else(store, measured):
    kept = RunLease(store)
    write(kept, measured)
    with pytest.raises(ZeroDivisionError), kept.of(measured):
        raise ZeroDivisionError
    with pytest.raises(OutputError, match="in place"):
        kept.close()
    kept.drop()
    assert not store._leases
    assert same(use(store, measured), reference(measured))


def test_a_call_whose_lease_is_not_kept_gets_the_error_itself(store, even):
    model = even("a")  # not measured yet
    with closing(RunLease(store)) as kept:
        with pytest.raises(OutputError, match="in place"):
            write(kept, model)
        lease, output = call(kept, model)
        assert not lease.held
        assert same(output, reference(model))
