"""deploy/grafana.json: it fits Grafana's schema, and asks for figures that live pages have."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from collections import Counter
from pathlib import Path

import pytest

from ..scheduler_plugin.live import chain, serving
from .metrics_rules import families, page

DASHBOARD = json.loads((Path(__file__).parents[2] / "deploy" / "grafana.json").read_text())
PANELS = DASHBOARD["panels"]
VARIABLES = {variable["name"]: variable for variable in DASHBOARD["templating"]["list"]}
QUERIES = [(panel["title"], t["expr"]) for panel in PANELS for t in panel.get("targets", ())]
#: As Grafana names units.
UNITS = {"s", "bytes", "Bps", "short", "percentunit", "reqps", "ops"}


@pytest.fixture(scope="module")
def live():
    """Pages of a scheduler and a worker that have served."""
    with serving(1) as client:
        chain.submit(client, value=0.0).result()
        worker = next(iter(client.cluster.workers.values()))
        yield page(client.cluster.scheduler), page(worker)


def named(expression):
    return set(re.findall(r"\bst2i_\w+", re.sub(r'"[^"]*"', "", expression)))


def test_it_can_be_imported():
    assert DASHBOARD["id"] is None, "a new one"
    assert re.fullmatch(r"[\w-]{1,40}", DASHBOARD["uid"])
    assert DASHBOARD["title"]
    assert DASHBOARD["schemaVersion"] >= 36
    assert {"time", "refresh", "annotations", "templating", "panels"} <= DASHBOARD.keys()
    assert "__inputs" not in DASHBOARD
    assert VARIABLES["datasource"]["type"] == "datasource"
    assert VARIABLES["datasource"]["query"] == "prometheus"
    for variable in VARIABLES.values():
        if variable["type"] == "query":
            assert variable["datasource"] == {"type": "prometheus", "uid": "${datasource}"}
            assert variable["query"]["query"] == variable["definition"]


def test_every_panel_is_whole_and_has_a_unit():
    ids = Counter(panel["id"] for panel in PANELS)
    assert set(ids.values()) == {1}
    for panel in PANELS:
        assert panel["title"]
        if panel["type"] == "row":
            assert panel["panels"] == []
            assert panel["gridPos"]["w"] == 24
            continue
        assert panel["type"] in ("timeseries", "stat")
        assert panel["description"].endswith(".")
        assert panel["fieldConfig"]["defaults"]["unit"] in UNITS
        references = [target["refId"] for target in panel["targets"]]
        assert references == sorted(set(references))
        assert references
        for node in (panel, *panel["targets"]):
            assert node["datasource"] == {"type": "prometheus", "uid": "${datasource}"}


def test_panels_are_on_the_grid_and_do_not_overlap():
    taken = {}
    for panel in PANELS:
        at = panel["gridPos"]
        assert min(at["w"], at["h"]) > 0
        assert 0 <= at["x"] <= at["x"] + at["w"] <= 24
        for x in range(at["x"], at["x"] + at["w"]):
            for y in range(at["y"], at["y"] + at["h"]):
                assert taken.setdefault((x, y), panel["id"]) == panel["id"], panel["title"]
    rows = {y for _, y in taken}
    assert rows == set(range(max(rows) + 1)), "no gaps"
    assert len(taken) == 24 * len(rows)


def test_every_figure_it_asks_for_is_on_a_live_page(live):
    exposed = set()
    for text in live:
        for family in families(text).values():
            exposed |= {sample.name for sample in family.samples}
    asked = set().union(*(named(expression) for _, expression in QUERIES))
    asked |= set().union(*(named(v["definition"]) for v in VARIABLES.values() if "definition" in v))
    # The names within a regular expression of a variable stand in quotes.
    assert asked
    assert asked <= exposed, asked - exposed
    assert len(asked) > 25


def test_the_page_of_documentation_names_every_figure_and_its_labels(live):
    text = (Path(__file__).parents[2] / "docs" / "deploy.md").read_text()
    documented = {}
    for names, labels in re.findall(r"^\| (`st2i_[^|]*) \| ([^|]*)\|", text, re.MULTILINE):
        for name in re.findall(r"`(st2i_\w+)`", names):
            assert name not in documented
            documented[name] = set(re.findall(r"\w+", labels))
    exposed = {}
    for served in live:
        for name, family in families(served).items():
            used = set().union(*(sample.labels for sample in family.samples)) - {"le"}
            exposed[f"{name}_total" if family.type == "counter" else name] = used
    assert documented.keys() == exposed.keys()
    for name, used in exposed.items():
        assert used <= documented[name], name


def test_labels_are_those_of_the_figures(live):
    labels = {}
    for text in live:
        for family in families(text).values():
            for sample in family.samples:
                labels.setdefault(sample.name, set()).update(sample.labels)
    target = {"job", "instance"}  # from Prometheus
    for title, expression in QUERIES:
        for name, matchers in re.findall(r"\b(st2i_\w+)\{([^}]*)\}", expression):
            used = set(re.findall(r"(\w+)\s*(?:=~|!=|!~|=)", matchers))
            assert used <= labels[name] | target, (title, name, used)
        variables = set(re.findall(r"\$(\w+)", expression)) - {"__rate_interval"}
        assert variables <= VARIABLES.keys()
        of_all = set().union(*(labels[name] for name in named(expression)))
        for clause in re.findall(r"\b(?:by|on) \(([^)]*)\)", expression):
            assert set(clause.split(", ")) <= of_all | target, (title, clause)


def test_counters_are_asked_for_as_rates():
    for title, expression in QUERIES:
        for name in named(expression):
            rated = re.search(rf"rate\({name}\{{[^}}]*\}}\[\$__rate_interval\]\)", expression)
            assert bool(rated) == name.endswith(("_total", "_bucket")), (title, name)


@pytest.mark.skipif(shutil.which("promtool") is None, reason="promtool is not installed")
def test_promtool_reads_queries_and_pages(live, tmp_path):
    rules = [
        {"record": f"test:{number}", "expr": re.sub(r"\$\w+", "5m", expression)}
        for number, (_, expression) in enumerate(QUERIES)
    ]
    path = tmp_path / "rules.yml"
    path.write_text(json.dumps({"groups": [{"name": "test", "rules": rules}]}))
    subprocess.run(["promtool", "check", "rules", path], check=True, timeout=60)
    for text in live:
        ours = "".join(line + "\n" for line in text.splitlines() if "st2i_" in line)
        done = subprocess.run(
            ["promtool", "check", "metrics"], input=ours, text=True, capture_output=True, timeout=60
        )
        assert (done.returncode, done.stderr) == (0, "")
