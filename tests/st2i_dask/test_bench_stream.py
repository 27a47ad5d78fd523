"""The streaming benchmark compares like with like, and its figures follow from what it measured."""

from __future__ import annotations

import pytest

from st2i_dask.bench import stream
from st2i_dask.catalogue import tiny
from st2i_dask.catalogue.flux.parts import FluxTransformer


def test_figures_follow_from_the_times():
    times = {"sequential": 0.3, "overlapped": 0.25, "controlnet": 0.1, "transformer": 0.2}
    assert stream.figures(times) == {
        "sequential_s": 0.3,
        "overlapped_s": 0.25,
        "ideal_s": 0.2,
        "controlnet_s": 0.1,
        "transformer_s": 0.2,
        "hidden_fraction": 0.5,
    }
    assert stream.figures({**times, "controlnet": 0.22})["ideal_s"] == 0.22


@pytest.fixture(scope="module")
def requests(tmp_path_factory):
    folder = str(tmp_path_factory.mktemp("bench") / "bench")
    tiny.save_flux_controlnet(folder)
    workflow = stream._steps(folder, tokens=16)
    return {kind: workflow.request(kind=kind, num_steps=3, value=0.0) for kind in stream.KINDS}


@pytest.mark.parametrize(
    ("kind", "controlnets", "transformers", "callbacks"),
    [
        ("sequential", 3, 3, 0),
        ("overlapped", 3, 3, 1),
        ("controlnet", 3, 0, 0),
        ("transformer", 0, 3, 0),
    ],
)
def test_each_way_runs_what_it_says(requests, kind, controlnets, transformers, callbacks):
    annotations = list(requests[kind].annotations.values())
    names = [a["fn"] for a in annotations]
    assert names.count("FluxControlNet") == controlnets
    assert sum("Transformer" in name for name in names) == transformers
    assert {len(a["callbacks"]) for a in annotations if "Transformer" in a["fn"]} <= {callbacks}
    assert len(names) == controlnets + transformers + 1


def test_waiting_is_all_that_differs():
    one, other = stream.WaitingTransformer("x"), FluxTransformer("x")
    assert list(one.inputs) == list(other.inputs)
    assert not any(declared.callback for declared in one.inputs.values())
    assert type(one).execute is type(other).execute


def test_it_measures_all_four_ways():
    figures = stream.run(steps=2, rounds=1, layers=(2, 2), heads=2, tokens=16)
    assert all(figures[f"{kind}_s"] > 0 for kind in stream.KINDS)
    assert figures["ideal_s"] == max(figures["controlnet_s"], figures["transformer_s"])
