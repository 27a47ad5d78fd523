"""Traces: formats, shape of what is generated, scaling and resampling."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from st2i_dask.errors import ParameterError
from st2i_dask.simulate import generate, traces, workload
from st2i_dask.simulate.traces import Asked

DATA = Path(os.environ.get("ST2I_TRACES", "traces"))
needs_data = pytest.mark.skipif(not DATA.is_dir(), reason="ST2I_TRACES names no folder of traces")


def test_own_format_comes_back_as_it_was_written(tmp_path):
    asked = [Asked(0.0, "a", "flux"), Asked(0.1 + 0.2, "b"), Asked(7.0, "a", "sd3")]
    traces.write(asked, tmp_path / "t.csv")
    assert traces.read(tmp_path / "t.csv") == asked


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "has no request"),
        (
            "at,tenant,workflow\n0,a,b\n1.0\n",
            "line 3, column tenant: tenant None is not a tenant name",
        ),
        ("at,tenant,shape\n0,b,c\nxx,a,s\n", "line 3, column at: 'xx' is no finite number$"),
        ("at,tenant,workflow\n0,<b>,c\n", "line 2, column tenant: tenant '<b>' is not a tenant"),
        (
            "A 1.5\nB soon\n",
            "line 2, word 2: 'soon' is no finite number; its first line is 'A 1.5', w",
        ),
        (
            "gmt_create,groupId,num_lora\nMonday,a,0\n",
            "line 2, column gmt_create: 'Monday' is no date",
        ),
        ('at,tenant\n"0\n"x,a\n', "line 3, column at"),
        ("a b c\n", "'a b c' is no tenant and seconds"),
        ("when,who\n0,a\n", "'when,who' is no tenant and seconds"),
        ("at,workflow\n0,a\n", "line 1: there is no column 'tenant'"),
        ("at,tenant\nnan,a\n", "line 2, column at: 'nan' is no finite number"),
    ],
)
def test_what_is_no_trace_is_refused(tmp_path, text, message):
    (tmp_path / "t").write_text(text)
    with pytest.raises(ParameterError, match=message):
        traces.read(tmp_path / "t")
    with pytest.raises(ParameterError, match="cannot be read"):
        traces.read(tmp_path / "none")


def test_gaps_and_sizes(tmp_path):
    (tmp_path / "gaps").write_text("A 1.5\nB 0.0\nA 2.0\n")
    assert traces.read(tmp_path / "gaps") == [Asked(0.0, "A"), Asked(0.0, "B"), Asked(2.0, "A")]
    (tmp_path / "vtc").write_text(
        "req_time_s,tenant,prompt_len,output_len\n2.5,T1,1,2\n1.0,T0,3,4\n"
    )
    assert traces.read(tmp_path / "vtc") == [Asked(0.0, "T0"), Asked(1.5, "T1")]


def test_scaling_keeps_order_and_shortens_time():
    asked = [Asked(float(n), "a") for n in range(5)]
    assert [a.at for a in traces.scaled(asked, 2.0)] == [0.0, 0.5, 1.0, 1.5, 2.0]
    with pytest.raises(ParameterError, match="rate scale is 0"):
        traces.scaled(asked, 0)


@pytest.mark.parametrize("cv", [0.5, 1.0, 4.0])
def test_gamma_arrivals_have_their_rate_and_variation(cv):
    import random

    times = generate.gamma(random.Random(1), 0.0, 50_000.0, 2.0, cv)
    assert len(times) == pytest.approx(100_000, rel=0.05)
    assert traces.cv_of(times) == pytest.approx(cv, rel=0.05)


def test_resampling_changes_the_variation_and_little_else():
    load = workload.s1()
    made = [Asked(*a) for a in generate.evaluation(load, 5.0, 2400.0, seed=1)]
    before = traces.shape(made, 100.0)
    for scale in (0.5, 1.0, 3.0):
        again = traces.resampled(made, scale, window_s=100.0, seed=2)
        found = traces.shape(again, 100.0)
        assert found.requests == pytest.approx(before.requests, rel=0.1)
        assert found.window_cv == pytest.approx(scale * before.window_cv, rel=0.15)
    assert traces.resampled(made, 2.0, window_s=100.0, seed=2) == traces.resampled(
        made, 2.0, window_s=100.0, seed=2
    )


def test_the_generator_has_the_published_shape():
    """Gaps vary with 12; 0.92 to 1 within ten minutes."""
    shares = {f"m{n}": share for n, share in enumerate(workload.POPULARITY)}
    made = [
        Asked(a.at, a.tenant, a.tenant)
        for a in generate.production(23, seed=4, rate=generate.RATE, shares=shares)
    ]
    found = traces.shape(made)
    assert found.requests == pytest.approx(26_823, rel=0.5)
    assert 7 < found.gap_cv < 17
    assert 0.85 < found.window_cv < 1.1
    assert found.top5 == pytest.approx(0.70, abs=0.06)


def test_shares_of_an_evaluation_are_the_workloads():
    load = workload.s2(seed=5)
    made = generate.evaluation(load, 10.0, 2000.0, seed=1)
    assert len(made) == pytest.approx(20_000, rel=0.05)
    for tenant, share in load.shares.items():
        assert sum(a.tenant == tenant for a in made) / len(made) == pytest.approx(share, abs=0.012)
    adapted = sum(share for t, share in load.shares.items() if "lora" in t)
    assert 0 < adapted < 1
    for wrong in ({"rate": 0.0}, {"seconds": float("nan")}, {"cv_scale": -1.0}):
        options = {"rate": 1.0, "seconds": 1.0, "seed": 1, "cv_scale": 1.0} | wrong
        with pytest.raises(ParameterError, match=r"give a finite number above 0"):
            generate.evaluation(load, **options)


def test_a_trace_becomes_the_requests_of_a_workload():
    asked = [Asked(0.0, "x"), Asked(1.0, "y"), Asked(2.0, "y"), Asked(3.0, "z")]
    assert [tuple(a) for a in traces.arrivals(asked, ["p", "q"])] == [
        (0.0, "q"),
        (1.0, "p"),
        (2.0, "p"),
    ]


@needs_data
def test_the_production_trace_is_what_the_generator_says():
    found = traces.shape(traces.read(DATA / "genai_trace" / "requests.csv"))
    assert found.requests == 26_823
    assert found.gap_cv == pytest.approx(12.0, abs=0.1)
    assert found.window_cv == pytest.approx(0.95, abs=0.05)
    assert found.top5 == pytest.approx(0.705, abs=0.005)
    assert found.adapted == pytest.approx(generate.ADAPTER_SHARE, abs=0.005)


@needs_data
def test_the_tenant_traces_are_read():
    found = traces.read(DATA / "tenant_traces" / "lmsys_27_tenants.csv")
    assert len(found) == 1_500
    assert len({a.tenant for a in found}) == 27
    found = traces.read(DATA / "tenant_traces" / "three_tenants_rate8.0.txt")
    assert {a.tenant for a in found} == {"A", "B", "C"}
    assert found[-1].at == pytest.approx(120, abs=1)
