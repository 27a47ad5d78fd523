"""The prefix benchmark's figures follow from what it measured, with the layers in memory it says."""

from __future__ import annotations

import pytest

from st2i_dask.bench import _transformers, prefix
from st2i_dask.bench._experts import Experts
from st2i_dask.bench._transformers import Shape

pytestmark = pytest.mark.slow

TINY = Shape(layers=(2, 3), heads=2, tokens=2)
EXPERTS = Experts(layers=(1, 3), heads=16, experts=8)
SECONDS = {"full": 0.1, "prefix0": 0.2, "prefix": 0.11, "half": 0.14, "no_pipeline": 0.3}
STALLED = {"prefix0": 0.08, "prefix": 0.004}
CPU = {"prefix": 0.052, "full": 0.05}


def test_figures_follow_from_the_times():
    assert prefix.figures(SECONDS, STALLED, CPU, 0.1, 7) == {
        "hidden_fraction": 0.9,
        "vs_full": 1.1,
        "half_hidden_fraction": 0.6,
        "stall_hidden_fraction": 0.95,
        "cpu_vs_full": 1.04,
        "copy_over_compute": 2.0,
        "prefix_layers": 7,
        "full_s": 0.1,
        "prefix0_s": 0.2,
        "prefix_s": 0.11,
        "half_s": 0.14,
        "no_pipeline_s": 0.3,
    }


@pytest.mark.parametrize(
    ("load_s", "layers", "half"),
    [
        ([1.0] * 8, 6, 3),
        ([1.0] * 8, 0, 0),
        ([0.1, 0.1, 4.0, 2.0, 2.0, 9.0], 5, 3),
        ([9.0, 1.0, 1.0], 3, 1),
        ([0.1, 9.0], 2, 2),
        ([1.0] * 8, 7, 4),
    ],
)
def test_half_of_a_prefix_is_half_of_its_loading(load_s, layers, half):
    assert prefix.half_of(load_s, layers) == half


def test_it_measures_with_and_without_throttling():
    figures = prefix.run(rounds=1, shape=EXPERTS, h800=TINY)
    names = set(prefix.figures(SECONDS, STALLED, CPU, 0.1, 0))
    assert set(figures) == names | {f"h800_{name}" for name in names}
    # Beside blocks: FLUX has 5 other layers; HiDream 4, and one for each text that a block gets.
    for kind, layers in {"": 4 + 4 + 5, "h800_": 5 + 5}.items():
        assert 0 <= figures[f"{kind}prefix_layers"] <= layers
        assert all(figures[f"{kind}{name}_s"] > 0 for name in SECONDS)
        assert figures[f"{kind}copy_over_compute"] > 0


def test_a_throttled_load_takes_as_long_as_asked(tmp_path):
    from contextlib import closing

    _transformers.save(tmp_path / "model", 0, TINY)
    given = TINY.inputs(0)
    size = _transformers.nbytes(_transformers.read(tmp_path / "model"))
    figures = prefix._measured(tmp_path / "model", TINY, 1, 0.2)
    assert figures["no_pipeline_s"] >= 0.18
    assert figures["full_s"] < figures["prefix0_s"]
    assert figures["prefix_s"] < figures["prefix0_s"]
    with closing(prefix._Worker(tmp_path / "model", 2 * size, "elastic", None)) as worker:
        worker.run(given)
        worker.trim(3)
        (row,) = worker.store.models()
        assert row["resident_layers"] == 3
