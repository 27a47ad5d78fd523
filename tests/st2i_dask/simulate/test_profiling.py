"""`st2i profile` on a live cluster of two workers, and what plan and replay make of the file."""

from __future__ import annotations

import json
import re
from types import SimpleNamespace

import pytest
from click.testing import CliRunner

import st2i_dask as st2i
from st2i_dask.cli import main
from st2i_dask.errors import ParameterError
from st2i_dask.shapes import PIPELINE
from st2i_dask.simulate import measured, traces
from st2i_dask.simulate.measured import Measured
from st2i_dask.simulate.meter import Done
from st2i_dask.simulate.plan import alone
from st2i_dask.simulate.profiles import Model, Profile
from st2i_dask.simulate.profiling import Alone, _put_together, _Weights
from st2i_dask.simulate.traces import Asked
from st2i_dask.simulate.workflows import Position, Workflow

from .small import EXACT
from .small import workload as small

# ---------------------------------------------------------------- live


@pytest.fixture(scope="module")
def scheduler():
    with st2i.local_cluster(2, dashboard_address=":0") as cluster:
        yield cluster.scheduler_address


def st2i_command(*arguments):
    return CliRunner().invoke(main, [str(argument) for argument in arguments])


def simulated_alone_s(path):
    found = measured.read(path)
    (workflow,) = found.workflows
    workload, _ = found.asked([Asked(0.0, "a", workflow)])
    (seconds,) = alone(workload).values()
    return seconds


def test_a_profile_of_shapes_predicts_a_request_alone(scheduler, tmp_path):
    path = tmp_path / "p.json"
    command = (
        "profile",
        "--scheduler",
        scheduler,
        "--workflow",
        "shapes",
        "--runs",
        3,
        "--out",
        path,
    )
    for _ in range(4):  # a busy machine is not the same from one request to the next
        path.unlink(missing_ok=True)
        run = st2i_command(*command)
        assert run.exit_code == 0, run.output
        live_s = float(re.search(r"shapes: ([\d.]+) s alone", run.output)[1])
        ratio = simulated_alone_s(path) / live_s
        if 0.8 <= ratio <= 1.2:
            break
    assert 0.8 <= ratio <= 1.2
    assert st2i_command("plan", "--profile", path, "--seconds", 20, "--rate", 0.1).exit_code == 0
    found = measured.read(path)
    positions = found.workflows["shapes"].positions
    fns = [position.fn for position in positions]
    assert sorted(set(fns)) == ["ClipText", "FluxTransformer", "T5Text", "VaeDecoder"]
    assert fns.count("FluxTransformer") == 8
    assert all(position.deps for position in positions if position.fn.startswith(("Flux", "Vae")))
    (name,) = {p.models[-1] for p in positions if p.fn == "FluxTransformer"}
    transformer = found.profile.models[name]
    files = sum(f.stat().st_size for f in (PIPELINE / "transformer").glob("*.safetensors"))
    assert transformer.nbytes == pytest.approx(2 * files, rel=0.02)  # float16 there, float32 here
    assert transformer.layers > 4
    assert transformer.load_s > 0
    assert 0 < transformer.compute_s < live_s / 8
    assert 0 < found.profile.hop_s < live_s
    assert 1e8 < found.profile.link_bandwidth < 1e11
    assert found.profile.link_latency_s < 0.2


def test_replay_tells_what_the_simulator_says_of_the_same_requests(scheduler, tmp_path):
    path, trace, figures = tmp_path / "p.json", tmp_path / "t.csv", tmp_path / "f.json"
    source = ("--scheduler", scheduler, "--workflow", "popular=shapes")
    assert st2i_command("profile", *source, "--runs", 2, "--out", path).exit_code == 0
    more = ("--workflow", "short=shapes", "--param", "num_steps=2", "--runs", 1, "--out", path)
    assert st2i_command("profile", "--scheduler", scheduler, *more).exit_code == 0
    both = measured.read(path)
    assert {n: len(w.positions) for n, w in both.workflows.items()} == {"popular": 11, "short": 5}
    assert len({both.profile.weights_of(m) for w in both.workflows.values() for m in w.models}) == 4
    traces.write([Asked(0.5 * n, "ab"[n % 2], "popular") for n in range(6)], trace)
    run = st2i_command(
        *("replay", "--trace", trace, *source, "--profile", path, "--slo", 50, "--json", figures)
    )
    assert run.exit_code == 0, run.output
    found = json.loads(figures.read_text())
    assert found["simulated"]["executors"] == 2
    assert found["simulated"]["attainment"] == 1.0
    assert 0 < found["simulated"]["p99_s"] < 60
    assert "simulated on 2 workers" in run.output
    other = tmp_path / "other.csv"
    traces.write([Asked(0.0, "a", "rare")], other)
    arguments = ("--scheduler", scheduler, "--workflow", "rare=shapes", "--profile", path)
    refused = st2i_command("replay", "--trace", other, *arguments)
    assert refused.exit_code == 2
    assert "the profile has no workflow 'shapes'" in refused.output


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--workflow", "shapes", "--workflow", "shapes"], "two are called 'shapes'"),
        (["--workflow", "=shapes"], "one is called ''"),
        (["--workflow", "shapes", "--param", "num_steps=0"], "num_steps"),
        (["--workflow", "shapes", "--param", "nope=1"], "has no parameter 'nope'"),
        (["--workflow", "shapes", "--out", "/nowhere/p.json"], "there is no folder /nowhere"),
        (["--workflow", "shapes", "--out", __file__], "cannot be read"),
    ],
)
def test_what_cannot_be_profiled_is_refused_before_anything_runs(tmp_path, arguments, message):
    out = ("--out", tmp_path / "p.json")
    run = st2i_command("profile", "--scheduler", "tcp://127.0.0.1:1", *out, *arguments)
    assert run.exit_code == 2, run.output
    assert message in run.output


# ---------------------------------------------------------------- by hand


def ran(position, fn, stopped, compute_s, *, steps=1, pull_s=0.0, load_s=0.0):
    nbytes = {position + n: 100 + n for n in range(steps)}
    seconds = (load_s, compute_s, 0.0, pull_s)
    return Done("r", position, fn, f"key {fn}", "8x8", "w", stopped, *seconds, nbytes)


def request(deps):
    """A chain; deps by position."""
    keys = [f"Fn{at}@m-{at:03d}-r" for at in range(len(deps))]
    tasks = {
        key: SimpleNamespace(dependencies=[keys[dep] for dep in own])
        for key, own in zip(keys, deps, strict=True)
    }
    notes = {key: {"position": at, "request": "r", "callbacks": ()} for at, key in enumerate(keys)}
    return SimpleNamespace(key=keys[-1], tasks=tasks, annotations=notes)


def row(fn, content, *, loads=4, load_s=0.4, layers=4, nbytes=1000):
    return {
        "model_key": f"key {fn}",
        "content": content,
        "nbytes": nbytes,
        "layers": layers,
        "loads": loads,
        "load_s": load_s,
    }


def test_seconds_are_put_where_they_belong():
    """Text (1 s) and a hop of 0.25 s, three steps as one task (3 s) after a pull of 0.5 s, a hop, decode
    (2 s); the client waited 0.75 s more."""
    tasks = [
        ran(0, "Text", 11.0, 1.0),
        ran(1, "Step", 11.25 + 0.5 + 3.0, 3.0, steps=3, pull_s=0.5),
        ran(4, "Decode", 14.75 + 0.25 + 2.0, 2.0),
    ]
    steps = request([[], [0], [0, 1], [0, 2], [3]])
    runs = Alone([steps, steps], [99.0, 7.0 + 0.75])
    weights = _Weights([row("Text", ["a"]), row("Step", ["b", "c"], loads=8), row("Decode", ["a"])])
    found = _put_together(
        {"w": runs}, {"r": {t.position: t for t in tasks}}, weights, ("cpu", 10**6, 10), (0.5, 1e3)
    )
    profile, positions = found.profile, found.workflows["w"].positions
    assert [p.deps for p in positions] == [(), (0,), (0, 1), (0, 2), (3,)]
    assert [p.out_bytes for p in positions] == [100, 100, 101, 102, 100]
    by_fn = {p.fn: profile.models[p.models[-1]] for p in positions}
    assert [by_fn[fn].compute_s for fn in ("Text", "Step", "Decode")] == [1.0, 1.0, 2.0]
    assert by_fn["Step"].load_s == pytest.approx(0.4 / 8 * 4)
    assert by_fn["Text"].weights == by_fn["Decode"].weights != by_fn["Step"].weights
    assert profile.hop_s == pytest.approx(0.25)
    assert profile.request_s == pytest.approx(0.75 - 0.25)
    assert profile.tensor_bytes == 10


def test_a_model_that_was_never_copied_in_loads_nothing():
    weights = _Weights([row("Text", [], loads=0, layers=0, nbytes=0)])
    assert weights.model(ran(0, "Text", 1.0, 1.0), 1.0) == Model(1, 0.0, 1.0, 1)


# ---------------------------------------------------------------- the file


def two_workflows():
    workflows = {
        name: Workflow(name, (Position("Text", ("text",)), Position("Step", ("unet",), (0,))))
        for name in ("one", "two")
    }
    return Measured(EXACT, workflows)


def test_a_file_keeps_profile_and_workflows(tmp_path):
    measured.write(two_workflows(), tmp_path / "p")
    assert measured.read(tmp_path / "p") == two_workflows()


def test_more_is_added_and_the_newer_counts():
    newer = Profile({"unet": Model(8 << 20, 8.0, 5.0, 4), "extra": Model(5, 0.0, 1.0, 5)})
    both = two_workflows().with_more(
        Measured(newer, {"two": Workflow("two", (Position("Extra", ("extra",)),))})
    )
    assert both.profile.models["unet"].compute_s == 5.0
    assert both.profile.models["text"] == EXACT.models["text"]
    assert both.profile.memory_bytes == newer.memory_bytes
    assert [len(both.workflows[name].positions) for name in ("one", "two")] == [2, 1]


def test_requests_get_the_workflow_they_name_and_the_others_one_by_popularity():
    trace = [("a", "two"), ("a", "x"), ("b", "y"), ("b", "y"), ("c", "")]
    asked = [Asked(float(n), tenant, name) for n, (tenant, name) in enumerate(trace)]
    workload, arrivals = two_workflows().asked(asked)
    assert [a.tenant for a in arrivals] == ["t0", "t0", "t1", "t1", "t2"]
    assert [workload.workflows[t].name for t in ("t0", "t1", "t2")] == ["two", "one", "one"]
    assert workload.shares == {"t0": 2.0, "t1": 2.0, "t2": 1.0}
    assert [a.at for a in arrivals] == [0.0, 1.0, 2.0, 3.0, 4.0]
    with pytest.raises(ParameterError, match="no workflows; measure some"):
        Measured(EXACT).asked(asked)


@pytest.mark.parametrize(
    ("positions", "message"),
    [
        ([], "give a list of positions"),
        ([{"fn": "a"}], "missing"),
        ([{"fn": "a", "models": ["text"], "size": 1}], "may have: fn, models"),
        ([{"fn": "a", "models": ["text"], "deps": [0]}], r"needs \[0\]; give earlier"),
        ([{"fn": "a", "models": ["none"]}], "the profile has no model 'none'"),
        ([{"fn": "a", "models": ["text"], "out_bytes": -1}], "out_bytes is -1"),
        ([{"fn": "a", "models": []}], "models ()"),
        ([{"fn": "a", "models": "text"}], "models 'text'"),
        ([7], "is 7"),
    ],
)
def test_workflows_that_make_no_sense_are_refused(tmp_path, positions, message):
    measured.write(Measured(EXACT), tmp_path / "p")
    saved = json.loads((tmp_path / "p").read_text()) | {"workflows": {"w": positions}}
    (tmp_path / "p").write_text(json.dumps(saved))
    with pytest.raises(ParameterError, match=message.replace("()", r"\(\)")):
        measured.read(tmp_path / "p")


def test_models_with_the_same_weights_take_their_memory_once():
    """At two sizes, in turns, on one executor that holds one copy: nothing is loaded twice."""
    from st2i_dask.simulate.cluster import Cluster
    from st2i_dask.simulate.systems import MCACHE, OURS
    from st2i_dask.simulate.tasks import Arrival

    models = {
        **EXACT.models,
        "unet small": Model(8 << 20, 8.0, 1.0, 4, "unet"),
        "unet large": Model(8 << 20, 8.0, 3.0, 4, "unet"),
    }
    room = EXACT.tensor_bytes + (9 << 20)
    profile = Profile(models, memory_bytes=room, activation_bytes=0, link_latency_s=0.0, hop_s=0.0)
    flows = {
        size: Workflow(size, (Position("Step", (f"unet {size}",)),)) for size in ("small", "large")
    }
    for system in (OURS, MCACHE):
        cluster = Cluster(system, small(profile, **flows), 1)
        report = cluster.run([Arrival(100.0 * n, ("small", "large")[n % 2]) for n in range(4)])
        assert report.loaded_bytes == 8 << 20
        assert [round(f.latency_s, 6) for f in report.finished[1:]] == [3.0, 1.0, 3.0]


def test_a_size_that_computes_for_longer_hides_more_of_its_load():
    from st2i_dask.simulate.cluster import Cluster
    from st2i_dask.simulate.systems import OURS
    from st2i_dask.simulate.tasks import Arrival

    models = {
        "short": Model(4, 4.0, 2.0, 4, "weights"),
        "long": Model(4, 4.0, 8.0, 4, "weights"),
    }
    profile = Profile(models, hop_s=0.0)
    for size, ends in (("short", 1 + 3 + 0.5), ("long", 1 + 8.0)):
        flows = {
            "a": Workflow("a", (Position("Step", (size,)),)),
            "b": Workflow("b", (Position("Step", ("short",)),)),
        }
        report = Cluster(OURS, small(profile, **flows), 1).run([Arrival(0.0, "a")])
        assert report.finished[0].latency_s == pytest.approx(ends)
