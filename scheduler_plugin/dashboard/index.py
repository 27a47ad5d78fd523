"""The entry in Dask's navigation: what pages there are."""

from __future__ import annotations

from bokeh.models import Div, UIElement

from .. import glance
from .look import STYLE
from .page import Page


class IndexPage(Page):
    path = "/st2i"
    title = "Workflows"
    about = "Text-to-image workflows on this cluster."
    period_ms = 2000

    def build(self) -> list[UIElement]:
        from .board import PAGES

        entries = [
            f'<p><a href="{page.path.strip("/")}"><b>{page.title}</b></a><br>{page.about}</p>'
            for page in PAGES
            if page is not IndexPage
        ]
        return [Div(text="".join(entries), stylesheets=[STYLE], sizing_mode="stretch_width")]

    def update(self) -> None:
        assert self.board is not None
        policy = self.board.watch.policy
        assert policy is not None
        totals = self.board.watch.tenants.totals
        executors = len(glance.executors(policy))
        self.say(
            f"{executors:,} executors, {len(glance.occupants(policy)):,} of them busy; "
            f"{totals.active:,} tenants active; {totals.queued:,} requests queued, "
            f"{totals.running:,} running; slack {policy.settings.slack_s:g} s"
        )
