"""Operating a cluster while it runs: tenants, settings, caps, saved costs, and their commands."""

from __future__ import annotations

import time

import pytest
from click.testing import CliRunner
from distributed import Client

import st2i_dask as st2i
from st2i_dask.cli import main

TIMEOUT = 60


class Nap(st2i.ModelFn):
    def setup_io(self):
        self.add_input("value")
        self.add_input("seconds")
        self.add_output("same")

    def execute(self, model_components, value, seconds):
        time.sleep(seconds)
        return {"same": value}


@st2i.workflow(name="test-operate", replace=True)
def naps(value: float, seconds: float = 0.0, steps: int = 1):
    nap = Nap()
    for _ in range(steps):
        value = nap(value, seconds)
    return value


@pytest.fixture(scope="module")
def client():
    with st2i.local_cluster(1, dashboard_address=":0") as cluster, Client(cluster) as client:
        st2i.attach(client)
        yield client


@pytest.fixture
def address(client):
    return client.scheduler.address


def row(client, tenant):
    return {r["tenant"]: r for r in st2i.tenants(client)}.get(tenant)


def test_tenants_show_what_was_used(client):
    naps.submit(client, value=1.0, seconds=0.05, steps=3, tenant="ann").result(timeout=TIMEOUT)
    ann = row(client, "ann")
    assert ann["service_s"] == pytest.approx(0.15, abs=0.1)
    assert ann["vtime_s"] >= ann["service_s"] / ann["weight"] - 1e-6
    assert (ann["queued"], ann["running"], ann["weight"]) == (0, 0, 1.0)
    assert 0 < ann["share"] <= 1


def test_settings_are_shown_with_units_and_change_while_it_runs(client):
    before = {name: value for name, value, _ in st2i.settings(client)}
    rows = st2i.settings(client, slack_s=2.5, weights={"bob": 3}, steps_per_task=4)
    shown = {name: (value, unit) for name, value, unit in rows}
    assert shown["slack_s"] == ("2.5", "s of vTime")
    assert shown["weight bob"] == ("3", "share")
    assert shown["steps_per_task"] == ("4", "denoising steps")
    assert before["slack_s"] != "2.5"
    rows = st2i.settings(client, weights={"eve": 2})  # bob keeps his
    assert {"weight bob", "weight eve"} <= {name for name, _, _ in rows}
    rows = st2i.settings(client, weights={"bob": None, "eve": None})
    assert not [name for name, _, _ in rows if name.startswith("weight ")]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"weights": {"bob": -1}}, r"weight of bob is -1.*above 0"),
        ({"weights": {"a b": 1}}, r"tenant 'a b'.*allowed"),
        ({"slack_s": float("nan")}, r"slack_s is nan.*at least 0"),
        ({"slack_s": -1}, r"slack_s is -1"),
        ({"caps": {"bob": 0}}, r"cap of bob is 0.*at least 1"),
        ({"default_cap": 0}, r"default_cap is 0.*at least 1"),
        ({"steps_per_task": 0}, r"steps_per_task is 0"),
        ({"slak": 1}, r"no setting is called 'slak'"),
    ],
)
def test_bad_settings_are_refused_and_change_nothing(client, changes, message):
    before = st2i.settings(client)
    with pytest.raises(st2i.PolicyError, match=message):
        st2i.settings(client, **changes)
    assert st2i.settings(client) == before


def test_a_submit_over_the_cap_is_refused_at_once_and_names_the_limit(client):
    st2i.settings(client, caps={"greedy": 3})
    running = naps.submit(client, value=1.0, seconds=3.0, tenant="greedy")
    deadline = time.monotonic() + TIMEOUT
    while not (row(client, "greedy") or {}).get("running"):
        assert time.monotonic() < deadline
        time.sleep(0.01)
    queued = [naps.submit(client, value=v, tenant="greedy") for v in range(3)]
    with pytest.raises(st2i.LimitError, match=r"'greedy' has \d queued requests.*limit is 3"):
        naps.submit(client, value=9.0, tenant="greedy")
    other = naps.submit(client, value=5.0, tenant="modest")  # others are not held up by it
    assert other.result(timeout=TIMEOUT) == 5.0
    assert client.gather([running, *queued]) == [1.0, 0.0, 1.0, 2.0]
    with pytest.raises(st2i.LimitError, match="4 more"):
        naps_map(client, 4)
    assert naps.submit(client, value=9.0, tenant="greedy").result(timeout=TIMEOUT) == 9.0
    st2i.settings(client, caps={"greedy": None})


def naps_map(client, count):
    from st2i_dask.submission import submit_requests

    return submit_requests(client, [naps.request("greedy", value=float(v)) for v in range(count)])


def test_whoever_does_not_ask_gets_the_refusal_as_the_result(client):
    import dask

    st2i.settings(client, caps={"rude": 1})
    requests = [naps.request("rude", value=float(v), seconds=0.2, steps=2) for v in range(3)]
    futures = []
    for request in requests:
        with dask.annotate(st2i=request.annotations.get):
            futures.append(client.get(request.tasks, request.key, sync=False))
    results = [f.exception(timeout=TIMEOUT) for f in futures]
    assert any(isinstance(error, st2i.LimitError) for error in results)
    assert results[0] is None
    st2i.settings(client, caps={"rude": None})


def test_costs_survive_a_restart_of_everything(client, tmp_path):
    naps.submit(client, value=1.0, seconds=0.05).result(timeout=TIMEOUT)
    file = tmp_path / "costs.json"
    assert st2i.save_costs(client, file) > 0
    with st2i.local_cluster(1, dashboard_address=":0") as cluster, Client(cluster) as fresh:
        st2i.attach(fresh)
        assert st2i.save_costs(fresh, tmp_path / "none.json") == 0
        st2i.load_costs(fresh, file)
        assert st2i.save_costs(fresh, tmp_path / "again.json") > 0
    assert (tmp_path / "again.json").read_text() == file.read_text()


def test_broken_cost_files_are_refused(client, tmp_path):
    file = tmp_path / "costs.json"
    with pytest.raises(st2i.LoadError, match="cannot be read"):
        st2i.load_costs(client, file)
    for text, error in (("{", st2i.LoadError), ("[]", st2i.PolicyError), ("{}", st2i.PolicyError)):
        file.write_text(text)
        with pytest.raises(error, match=r"costs\.json"):
            st2i.load_costs(client, file)


def test_models_show_what_is_where_and_what_it_cost(client, address):
    prompt = "a red circle on a white background"
    for seed in range(2):
        st2i.load("shapes").submit(client, prompt=prompt, seed=seed, num_steps=2).result(
            timeout=TIMEOUT
        )
    rows = {row["model"].partition("(")[0]: row for row in st2i.models(client)}
    assert {"ClipText", "T5Text", "FluxTransformer", "VaeDecoder"} <= set(rows)
    transformer = rows["FluxTransformer"]
    assert transformer["worker"] in client.scheduler_info()["workers"]
    assert transformer["layers"] == transformer["resident_layers"] > 4
    assert transformer["nbytes"] == transformer["resident_bytes"] > 1_000_000
    assert transformer["loads"] == transformer["layers"]
    assert transformer["runs"] == 4
    assert 0 < transformer["hits"] < 4
    assert 0 < transformer["load_s"] < 60
    assert 0 <= transformer["stalled_s"] < 60

    done = CliRunner().invoke(main, ["models", "--scheduler", address])
    assert done.exit_code == 0, done.output
    (line,) = [line for line in done.output.splitlines() if "FluxTransformer" in line]
    layers = str(transformer["layers"])
    assert f"{layers}/{layers}" in line
    assert line.split()[0] == transformer["worker"]


def test_commands(client, address, tmp_path):
    naps.submit(client, value=1.0, tenant="ann").result(timeout=TIMEOUT)

    def run(*arguments):
        return CliRunner().invoke(main, [*arguments, "--scheduler", address])

    shown = run("tenants")
    assert shown.exit_code == 0, shown.output
    assert "vTime (s)" in shown.output
    assert "ann" in shown.output
    shown = run("settings", "--slack", "3", "--weight", "ann=2")
    assert shown.exit_code == 0, shown.output
    assert "s of vTime" in shown.output
    assert "weight ann" in shown.output
    assert run("settings", "--weight", "ann=-2").exit_code == 2
    assert run("settings", "--weight", "ann").exit_code == 2
    saved = run("costs", "save", str(tmp_path / "c.json"))
    assert saved.exit_code == 0, saved.output
    assert run("costs", "load", str(tmp_path / "c.json")).exit_code == 0
    assert run("costs", "load", str(tmp_path / "absent.json")).exit_code == 2


def test_nobody_at_the_address():
    done = CliRunner().invoke(main, ["tenants", "--scheduler", "tcp://127.0.0.1:9"])
    assert done.exit_code == 2
    assert "cannot connect" in done.output + (done.stderr or "")
