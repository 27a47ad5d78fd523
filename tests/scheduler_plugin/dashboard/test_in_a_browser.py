"""Pages as Chromium draws them: nothing empty, nothing over something else, no complaint of the console."""

import time

import pytest

pytest.importorskip("selenium")

import st2i_dask as st2i
from scheduler_plugin.dashboard.board import PAGES
from scheduler_plugin.dashboard.tenants import TenantsPage

from ..live import chain, serving, until
from .browser import MISSING, WHY, browser, complaints, overlaps, plots, table, visit
from .crowded import showing

pytestmark = pytest.mark.skipif(MISSING, reason=WHY)

PATHS = [page.path for page in PAGES[1:]]

#: Glyphs of a plot that may be without data: what did not happen.
MAY_BE_EMPTY = {"timeline": {1, 2, 4, 5}}


@pytest.fixture(scope="module")
def one_browser():
    with browser() as driver:
        yield driver


@pytest.fixture
def chromium(one_browser):
    """Nothing of the page of an earlier test is open, nor its complaints that its server has gone."""
    complaints(one_browser)
    return one_browser


def leave(driver):
    """Close the page, before its server goes."""
    driver.get("about:blank")


async def hang_up(dask_scheduler):
    """Dask leaves connections of its HTTP server open when it ends."""
    await dask_scheduler.http_server.close_all_connections()


def look(driver, address, *, drawn):
    """Visit a page; what it draws, after the checks that hold for all pages."""
    visit(driver, address)
    until(lambda: _there(driver) == drawn, lambda: f"plots: {_there(driver)}")
    found = plots(driver)
    assert overlaps(found) == []
    for plot in (p for p in found if p["visible"]):
        assert plot["right"] - plot["left"] > 100, plot
        assert plot["bottom"] - plot["top"] > 40, plot
        assert plot["left"] >= 0
        assert plot["right"] <= driver.execute_script("return window.innerWidth")
        for index, count in enumerate(plot["counts"]):
            assert count or index in MAY_BE_EMPTY.get(plot["name"], ()), plot
    resources = driver.execute_script(
        "return performance.getEntriesByType('resource').map((entry) => entry.name)"
    )
    host = address.rpartition("/")[0]
    assert [name for name in resources if not name.startswith(host)] == []
    assert complaints(driver) == []
    return {plot["name"]: plot for plot in found if plot["visible"]}


def _there(driver):
    return {plot["name"] for plot in plots(driver) if plot["visible"]}


DRAWN = {
    "/st2i-tenants": {"vtime", "queued", "running", "shares", "DataTable"},
    "/st2i-executors": {"map", "memory", "models", "DataTable"},
    "/st2i-requests": {"timeline", "DataTable"},
    "/st2i-models": {"spent", "hits", "waits", "DataTable"},
}


@pytest.fixture(scope="module")
def crowd():
    with showing(200, 1000) as shown:
        yield shown


@pytest.mark.parametrize("path", PATHS)
def test_many_executors_and_tenants(chromium, crowd, path):
    shown = look(chromium, crowd.address + path, drawn=DRAWN[path])
    for name, plot in shown.items():
        if name not in ("DataTable", "map"):
            assert plot["title"]
            assert plot["axes"][0] or name == "models", f"{name}: the x axis has no unit"


def test_a_viewer_turns_pages_and_finds_a_tenant(chromium, crowd):
    """The table that is drawn follows: also where it has as many rows as before."""
    visit(chromium, f"{crowd.address}/st2i-tenants")
    until(lambda: len(table(chromium)) == 15)
    first = table(chromium)
    press(chromium, "next")
    until(lambda: len(table(chromium)) == 15 and not _names(table(chromium)) & _names(first))
    press(chromium, "previous")
    until(lambda: _names(table(chromium)) == _names(first))
    chromium.execute_script(_FIND, "tenant-0777")
    until(lambda: _names(table(chromium)) == {"tenant-0777"})
    assert complaints(chromium) == []


def _names(rows):
    return {row[0] for row in rows}


def press(driver, label):
    driver.execute_script(_PRESS, label)


_PRESS = """
const label = arguments[0];
const visit = (view) => {
  if (view.model.type === "Button" && view.model.label.includes(label)) {
    view.shadow_el.querySelector("button").click();
  }
  for (const child of (view.child_views || [])) visit(child);
};
for (const view of Object.values(Bokeh.index.roots || Bokeh.index)) visit(view);
"""

_FIND = """
for (const model of Bokeh.documents[0]._all_models.values()) {
  if (model.type === "TextInput") model.value = arguments[0];
}
"""


@pytest.mark.parametrize("path", PATHS)
def test_an_empty_cluster(chromium, path):
    with showing(0, 0) as shown:
        look(chromium, shown.address + path, drawn=set())
        text = chromium.execute_script(_TEXT)
        assert "first one" in text or "Start workers" in text
        leave(chromium)


def test_the_page_that_leads_to_the_others(chromium, crowd):
    visit(chromium, f"{crowd.address}/st2i")
    text = chromium.execute_script(_TEXT)
    assert all(page.title in text for page in PAGES)
    assert "200 executors, 200 of them busy" in text
    assert complaints(chromium) == []


def alike():
    """Names of models, by key, that begin alike, or end alike, or are equal."""
    base = "/tmp/models-of-everybody-here/z-image"
    names = [f"ZImageTransformer('{base}', style-{n:02d}.safetensors)" for n in range(24)]
    names += [f"ZImageTransformer('/tmp/models-of-{n}/z-image')" for n in ("ann", "bob")]
    names += ["ZImageTransformer('/tmp/models-of-ann/z-image')"]  # in another dtype
    return {f"key-{n}": name for n, name in enumerate(names)}


def test_models_with_names_alike_are_drawn_apart(chromium):
    with showing(4, 6, seconds=5) as shown:

        def answer():
            facts = shown.board.watch.facts
            for executor, answer in list(facts.answers.items()):
                like = answer["models"][0]
                rows = [{**like, "model": n, "model_key": k} for k, n in alike().items()]
                facts.answer(shown.board.clock(), executor, {**answer, "models": rows})

        shown.on_loop(answer)
        plotted = look(
            chromium, f"{shown.address}/st2i-executors", drawn={"memory", "models", "DataTable"}
        )
        assert plotted["models"]["counts"][0] == 10 * 2
        assert len(table(chromium)) == 4
        plotted = look(chromium, f"{shown.address}/st2i-models", drawn=DRAWN["/st2i-models"])
        for plot in ("hits", "waits"):
            places = chromium.execute_script(_PLACES, plot)
            assert len(places) == len(set(places)) == 12
        found = set()
        for rows in (12, 12, len(alike()) - 24):
            until(lambda rows=rows, found=found: len(_names(table(chromium)) - found) == rows)
            found |= _names(table(chromium))
            press(chromium, "next")
        assert complaints(chromium) == []
        leave(chromium)


#: Labels of the bars' places of a plot.
_PLACES = """
for (const model of Bokeh.documents[0]._all_models.values()) {
  if (model.type === "Figure" && model.name === arguments[0]) return model.y_range.factors;
}
"""


def test_a_live_cluster_is_drawn_and_goes_on(chromium):
    """Three tenants, small enough that nothing is left out."""
    with serving(2) as client:
        address = client.dashboard_link.rpartition("/")[0]
        st2i.settings(client, slack_s=0.5)

        def submit(first):
            return [
                chain.submit(client, tenant=tenant, value=float(i), steps=3, seconds=0.08)
                for i in range(first, first + 5)
                for tenant in ("ann", "bob", "eve")
            ]

        futures = submit(0)
        client.gather(futures)
        time.sleep(1.2)  # a sample
        drawn = DRAWN["/st2i-tenants"]
        shown = look(chromium, f"{address}/st2i-tenants", drawn=drawn)
        assert shown["vtime"]["counts"][2] == 3
        look(chromium, f"{address}/st2i-models", drawn=DRAWN["/st2i-models"])
        look(chromium, f"{address}/st2i-executors", drawn={"memory", "models", "DataTable"})
        look(chromium, f"{address}/st2i-requests", drawn=DRAWN["/st2i-requests"])
        bars = plots(chromium)[0]["counts"][3]
        futures += submit(5)
        client.gather(futures)
        until(lambda: plots(chromium)[0]["counts"][3] != bars)
        leave(chromium)
        client.run_on_scheduler(hang_up)
        del futures


def test_cancelled_requests_are_not_said_to_wait(chromium):
    with serving(1) as client:
        address = client.dashboard_link.rpartition("/")[0]
        futures = [chain.submit(client, value=float(i), steps=3, seconds=0.3) for i in range(5)]
        futures[0].result(timeout=60)
        client.cancel(futures[1:])
        visit(chromium, f"{address}/st2i-requests")
        until(
            lambda: sorted(row[3] for row in table(chromium)) == ["cancelled"] * 4 + ["done"],
            lambda: str(table(chromium)),
        )
        assert complaints(chromium) == []
        leave(chromium)
        client.run_on_scheduler(hang_up)
        del futures


def test_a_page_that_is_open_says_when_the_plugin_has_gone(chromium):
    with serving(1, at_rest=False) as client:
        address = client.dashboard_link.rpartition("/")[0]
        assert chain.submit(client, value=0.0).result(timeout=60) == 3.0
        visit(chromium, f"{address}{TenantsPage.path}")
        client.unregister_scheduler_plugin("st2i-scheduler")
        until(lambda: "no longer live" in chromium.execute_script(_TEXT))
        chromium.get(f"{address}{TenantsPage.path}")
        assert "404" in chromium.execute_script("return document.body.innerText")
        leave(chromium)
        client.run_on_scheduler(hang_up)


_TEXT = """
const texts = [document.body.innerText];
const visit = (element) => {
  if (element.shadowRoot) texts.push(...[...element.shadowRoot.children].map((e) => e.innerText));
  for (const child of [...element.children, ...(element.shadowRoot || {children: []}).children]) {
    visit(child);
  }
};
visit(document.body);
return texts.join(" ");
"""
