"""Every page answers with a document and stays up to date: of an empty cluster, and of 200 x 1,000."""

import json
import re

import numpy as np
import pytest
from bokeh.document import Document
from bokeh.models import ColumnDataSource, DataTable

from scheduler_plugin import glance
from scheduler_plugin.dashboard.board import PAGES, PAGES_SHARE, SENDING
from scheduler_plugin.dashboard.executors import ExecutorsPage
from scheduler_plugin.dashboard.models import ModelsPage
from scheduler_plugin.dashboard.requests import RequestsPage
from scheduler_plugin.dashboard.tenants import TenantsPage, _Standing

from .crowded import SILENT, showing
from .looking import cells, data, got, opened

PATHS = [page.path for page in PAGES]


@pytest.fixture(scope="module")
def crowd():
    with showing(200, 1000) as shown:
        yield shown


@pytest.fixture(scope="module")
def empty():
    with showing(0, 0) as shown:
        yield shown


def words(page):
    return page.root.select_one({"name": "notice"}).text


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.title)
def test_a_page_answers_with_a_document_that_leads_to_the_others(crowd, page):
    assert '"token"' in got(crowd.address + page.path)  # a session of its own
    links = opened(crowd, page)._head.text
    assert {f'href="{other[1:]}"' in links for other in PATHS if other != page.path} == {True}
    assert f"<b>{page.title}</b>" in links


@pytest.mark.parametrize("path", ["/st2i", "/status", "/workers"])
def test_dasks_navigation_leads_there(crowd, path):
    assert re.search(r'<a href="st2i">\s*St2i\s*</a>', got(crowd.address + path))


def test_bokeh_comes_from_the_server_itself(crowd):
    scripts = re.findall(r'<script[^>]*src="([^"]+)"', got(f"{crowd.address}/st2i-tenants"))
    assert scripts
    assert all(script.startswith("static/") for script in scripts)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.title)
def test_an_empty_cluster_says_so_in_words(empty, page):
    made = opened(empty, page)
    if page.path != "/st2i":
        assert re.search("first one|Start workers", words(made))
        assert not list(made.root.select({"type": DataTable}))


def test_many_tenants_are_a_few_lines_and_the_rest(crowd):
    page = opened(crowd, TenantsPage)
    assert "1,000 tenants active" in page.status.text
    band, _, lines = data(page, "vtime")
    assert len(lines["tenant"]) == 9
    assert lines["tenant"][-1] == "all others (mean)"
    assert all(len(y) == len(x) == 66 for x, y in zip(lines["xs"], lines["ys"], strict=True))
    assert (band["high"] - band["low"] == 1.0).all()
    queued, _ = data(page, "queued"), data(page, "running")
    assert sum(queued[0]["now"]) == crowd.board.watch.tenants.totals.queued
    assert len(cells(page)["tenant"]) == 15


def test_the_band_of_the_slack_does_not_break_off_where_nobody_was_active():
    from scheduler_plugin.dashboard.tenants import _without_gaps

    gaps = np.array([np.nan, 2.0, np.nan, np.nan, 3.0])
    assert _without_gaps(gaps).tolist() == [0.0, 2.0, 2.0, 2.0, 3.0]


def test_a_tenant_finds_itself_and_turns_pages(crowd):
    page = opened(crowd, TenantsPage)

    def use():
        page._pager._find.value = "tenant-0777"
        found = list(cells(page)["tenant"])
        page._pager._find.value = ""
        page._pager._order.value = "name"
        first = list(cells(page)["tenant"])
        page._pager._turn(2)
        return found, first, list(cells(page)["tenant"])

    found, first, third = crowd.on_loop(use)
    assert found == ["tenant-0777"]
    assert first == [f"tenant-{n:04d}" for n in range(15)]
    assert third == [f"tenant-{n:04d}" for n in range(30, 45)]


def test_shares_are_those_of_the_policy(crowd):
    page = opened(crowd, TenantsPage)
    (bars, _) = data(page, "shares")
    rows = {row.tenant: row for row in crowd.board.watch.policy.tenants(crowd.board.clock())}
    for tenant, used in zip(bars["tenant"], bars["used"], strict=True):
        assert used == pytest.approx(100 * rows[tenant].share, rel=0.1)
    heavy = 3.0 / sum(row.weight for row in rows.values())
    assert bars["fair"][0] == pytest.approx(100 * heavy)


def test_executors_say_what_they_run_and_hold_and_who_is_silent(crowd):
    page = opened(crowd, ExecutorsPage)
    assert f"200 executors: {200 - SILENT} running, {SILENT} silent" in page.status.text
    assert len(data(page, "map")[0]["executor"]) == 200
    table = cells(page)
    assert table["state"][:SILENT] == ["silent"] * SILENT
    assert all("no answer" in text for text in table["pulled"][:SILENT])
    assert all(table["tenant"])
    assert all("of 4.0 GiB" in text for text in table["arena"][SILENT:])
    (bars,) = data(page, "memory")
    assert len(bars["left"]) == 5 * (15 - SILENT)
    assert max(bars["right"]) == pytest.approx(16)
    frames, layers = data(page, "models")
    assert len(frames["model"]) == 3 * (15 - SILENT)
    for left, right in zip(layers["left"], layers["right"], strict=True):
        assert int(left) == int(right - 1e-9)  # within its own model's frame


def test_requests_are_drawn_run_by_run(crowd):
    page = opened(crowd, RequestsPage)
    kinds = dict(
        zip(
            ["waits", "transfer", "load", "compute", "failed", "now"],
            data(page, "timeline"),
            strict=True,
        )
    )
    known = {history.request: history for history in crowd.board.watch.requests.latest(9999)}
    names = cells(page)["request"]
    assert len(set(names)) == 8
    shown = [known[name] for name in names if name in known]
    done = sum(len(history.runs) for history in shown)
    assert len(kinds["compute"]["left"]) == done > 8
    assert len(kinds["waits"]["left"]) == 8 + done
    running = {r.request: r for r in glance.runs(crowd.board.watch.policy)}
    assert len(kinds["now"]["left"]) == len(running.keys() & set(names))
    spent = sum(run.compute_s for history in shown for run in history.runs)
    bars = zip(kinds["compute"]["left"], kinds["compute"]["right"], strict=True)
    assert sum(right - left for left, right in bars) / 1e3 == pytest.approx(spent)
    assert not kinds["failed"]["left"]


def test_a_request_that_has_only_begun_is_there(crowd):
    page = opened(crowd, RequestsPage)
    policy = crowd.board.watch.policy
    invocation = next(
        i
        for i in policy._fleet.running.values()
        if i.position == 0 and i.request.name not in crowd.board.watch.requests
    )

    def find():
        page._pager._find.value = invocation.request.name
        return list(cells(page)["state"]), data(page, "timeline")[-1]["left"]

    states, now = crowd.on_loop(find)
    assert states == ["runs"]
    assert len(now) == 1


def test_nobody_is_behind_the_least_served():
    """One with a long history goes on, one that came back with less leaves between two samples."""
    with showing(0, 0) as shown:

        def live():
            shown.board.sampler.stop()
            watch, policy = shown.board.watch, shown.board.watch.policy
            policy.ledger.activate("long")
            policy.ledger.settle(policy.ledger.charge("long", 100.0), 100.0)
            policy.ledger.deactivate("long")
            policy.ledger.activate("new")
            policy.ledger.deactivate("new")
            for vtimes in ((100.0, 57.0), (100.5, 58.0)):
                now = shown.board.clock.now = shown.board.clock.now + 1.0
                glances = [
                    glance.TenantGlance(vtimes[0], 9.0, 1, 1, True, True),
                    glance.TenantGlance(vtimes[1], 9.0, 0, 0, False, False),
                ]
                watch.tenants.sample(now, ["long", "new"], glances, {"new": 1.0})

        shown.on_loop(live)
        page = opened(shown, TenantsPage)
        _, _, lines = data(page, "vtime")
        assert np.nanmin(lines["ys"]) == 0.0
        assert np.nanmax(lines["ys"]) == 43.0


def test_tenants_with_alike_names_have_bars_of_their_own(crowd):
    page = opened(crowd, TenantsPage)
    long = [f"a-tenant-with-a-long-name-{n}-of-the-same-end" for n in range(4)]

    def draw():
        standing = _Standing(crowd.board.watch.tenants, crowd.board.watch.policy)
        standing.names[:4] = long
        standing.used_share[:4] = 0.2
        page._draw_shares(standing, long)
        return list(data(page, "shares")[0]["tenant"])

    names = crowd.on_loop(draw)
    factors = page.root.select_one({"name": "shares"}).y_range.factors
    assert len(set(names)) == 8
    assert factors == names[::-1]


def test_nothing_found_is_no_error(crowd):
    for kind in (TenantsPage, ExecutorsPage, RequestsPage, ModelsPage):
        page = opened(crowd, kind)

        def find(page=page):
            page._pager._find.value = "nobody-is-called-so"
            return page._pager._shown.text

        assert "none" in crowd.on_loop(find)


def test_models_add_up(crowd):
    page = opened(crowd, ModelsPage)
    (bars,) = data(page, "spent")
    spent = crowd.board.watch.requests.spent
    total = sum(s.load_s + s.compute_s + s.transfer_s for s in spent.values())
    widths = [r - left for left, r in zip(bars["left"], bars["right"], strict=True)]
    assert sum(widths) == pytest.approx(total)
    assert bars["line"][-1] == f"{len(spent) - 12} others"
    table = cells(page)
    assert sum(int(n) for n in table["executors"]) == 3 * (200 - SILENT)
    assert set(table["rate"]) == {"80"}


def test_what_is_sent_is_bounded_whatever_the_cluster(crowd):
    """Not one source has an item per tenant, request or run that is known."""
    for kind in PAGES:
        page = opened(crowd, kind)
        for source in page.root.select({"type": ColumnDataSource}):
            for column in source.data.values():
                assert len(column) <= 310
        assert len(json.dumps(page.root.document.to_json(), default=str)) < 2_000_000


def test_pages_wait_the_longer_the_dearer_they_are_and_the_more_are_open(crowd):
    board = crowd.board

    def pauses():
        one, two = TenantsPage(board), TenantsPage(board)
        for page in (one, two):
            page.show({}, Document())
        open_, both = len(board._open), board.pause_s(0.01)
        board.left(two)
        one_less = board.pause_s(0.01)
        board.left(one)
        return open_, both, one_less

    open_, both, one_less = crowd.on_loop(pauses)
    alone_s = 0.01 * SENDING / PAGES_SHARE
    assert both == pytest.approx(alone_s * open_)
    assert one_less == pytest.approx(alone_s * (open_ - 1))
