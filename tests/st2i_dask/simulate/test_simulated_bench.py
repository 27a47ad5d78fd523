"""The benchmark of the simulator, shortened: its figures."""

from __future__ import annotations

from st2i_dask import bench


def test_figures_are_there_and_fit_together():
    from st2i_dask.bench import simulate

    figures = simulate.run(requests=60)
    for kind in ("", "loading_"):
        assert figures[f"{kind}events_per_s"] > figures[f"{kind}dispatches_per_s"] > 100
        assert figures[f"{kind}invocations_per_s"] >= figures[f"{kind}dispatches_per_s"]
    assert "simulate" in bench.names()
