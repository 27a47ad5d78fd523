"""The page of requests, of a policy that serves while it is looked at."""

import pytest

from scheduler_plugin import events as ev
from scheduler_plugin.dashboard.requests import RequestsPage
from scheduler_plugin.journal import Journal
from scheduler_plugin.outline import chain

from .crowded import showing
from .looking import cells, data, opened


class Serving:
    """A policy that serves one executor and tells the board of it; the test's clock."""

    def __init__(self, shown):
        self.board, self.journal = shown.board, Journal()
        self.policy = shown.board.watch.policy
        self.journal.watch(shown.board.watch)
        self.tell(ev.ExecutorJoined(self.at(0.0), "tcp://0", 1 << 30))

    def at(self, later):
        """The time, so many seconds later."""
        self.board.clock.now += later
        return self.board.clock.now

    def tell(self, event):
        self.policy.handle(event)
        self.journal.happened(event)

    def submit(self, request, model="Step"):
        outline = chain("pair", [(model, "m", "b"), ("Last", "m", "b")])
        self.tell(ev.RequestSubmitted(self.at(0.0), request, "ann", outline))

    def run(self, request, position, took_s):
        key = f"{request}-{position}"
        self.tell(ev.InvocationReady(self.at(0.0), key, request, position, 1 << 20))
        self.journal.dispatched(self.policy.next_decision(self.at(0.0)), self.at(0.0))
        self.tell(ev.Completed(self.at(took_s), key, ev.Measured(0.0, took_s, 0.0)))


def test_a_cancelled_request_has_an_end_and_idle_minutes_are_no_part_of_the_axis():
    with showing(0, 0) as shown:

        def live():
            serving = Serving(shown)
            began = serving.at(0.0)
            for request in ("ran", "never-ran"):
                serving.submit(request)
            serving.run("ran", 0, 2.0)
            for request in ("ran", "never-ran"):
                serving.tell(ev.RequestClosed(serving.at(1.0), request))
            serving.at(300.0)
            serving.submit("done")
            serving.run("done", 0, 2.0)
            serving.run("done", 1, 1.0)
            shown.board.sample()
            return serving, began

        serving, began = shown.on_loop(live)
        page = opened(shown, RequestsPage)
        serving.at(200.0)
        before = dict(cells(page))
        shown.on_loop(page.refresh)
        table = cells(page)
        assert table == before
        assert table["request"] == ["done", "never-ran", "ran"]
        assert table["state"] == ["done", "cancelled", "cancelled"]
        assert table["took"] == ["3.0 s", "4.0 s", "3.0 s"]
        assert table["done"] == ["2 of 2", "0 of 2", "1 of 2"]
        x = page.root.select_one({"name": "timeline"}).x_range
        first = shown.board.wall_ms(began + 304.0)
        assert x.start == pytest.approx(first, abs=2000)
        assert x.end == pytest.approx(first + 3000.0, abs=2000)
        assert (x.reset_start, x.reset_end) == (x.start, x.end)

        def zoom():
            x.start = 5.0  # as the viewer's browser says
            page.refresh()
            zoomed = x.start
            page._still.active = True
            page._still.active = False
            return zoomed, x.start

        zoomed, released = shown.on_loop(zoom)
        assert zoomed == 5.0
        assert released == pytest.approx(x.reset_start)


def test_modelfns_and_requests_with_alike_names_have_lines_of_their_own():
    with showing(0, 0) as shown:

        def live():
            serving = Serving(shown)
            for request in ("request-1", "request-2"):
                serving.submit(request, model="AModelFnWithAVeryLongNameOne")
                serving.run(request, 0, 1.0)
            shown.board.sample()

        shown.on_loop(live)
        page = opened(shown, RequestsPage)
        factors = page.root.select_one({"name": "timeline"}).y_range.factors
        assert len(set(factors)) == len(factors) == 2
        assert set(data(page, "timeline")[3]["line"]) == set(factors)
