"""Who is served: vTime over time, queues, and the share of device seconds against the fair one."""

from __future__ import annotations

import numpy as np
from bokeh.layouts import row
from bokeh.models import (
    ColumnDataSource,
    HoverTool,
    Legend,
    LegendItem,
    RadioButtonGroup,
    UIElement,
)
from numpy.typing import NDArray

from .. import glance
from ..policy import FairPolicy
from ..tenant_history import TenantHistory
from . import labels
from .elements import Pager, fill, plot, put, table
from .look import INK, REST, TENANTS
from .page import Page

#: Tenants with a line of their own; the rest are one line.
LINES = len(TENANTS)
BARS = len(TENANTS)
ROWS = 15
#: Height of the plots beside each other, pixels.
STACKED = 280

_USED, _QUEUED, _MOST, _LEAST, _NAME = (
    "most device time, last minute",
    "most requests queued",
    "vTime: furthest ahead first",
    "vTime: least served first",
    "name",
)

_COLUMNS = (
    ("tenant", "tenant", 200),
    ("state", "state", 150),
    ("weight", "weight", 60),
    ("queued", "queued", 70),
    ("running", "running", 70),
    ("vtime", "vTime (s)", 90),
    ("ahead", "ahead of the least served (s)", 150),
    ("share", "last minute (%)", 100),
    ("fair", "fair share (%)", 100),
    ("service", "device time (s)", 110),
)


class TenantsPage(Page):
    path = "/st2i-tenants"
    title = "Tenants"
    about = (
        "vTime is device seconds divided by the tenant's weight. Whoever is at most the slack ahead of "
        "the least served may run. Queued requests have not started."
    )

    def build(self) -> list[UIElement]:
        self._drawn = -1.0
        self._pager = Pager(
            ROWS, self._again, "find a tenant", (_USED, _QUEUED, _MOST, _LEAST, _NAME)
        )
        self._scale = RadioButtonGroup(
            labels=["ahead of the least served", "absolute"], active=0, width=320
        )
        self._scale.on_change("active", lambda attribute, old, new: self._again())
        self._table = table(_COLUMNS, right=[field for field, _, _ in _COLUMNS[2:]])
        return [
            self._scale,
            self._build_vtime(),
            row(
                self._build_stack("queued", "Requests queued"),
                self._build_stack("running", "Requests running"),
                self._build_shares(),
                sizing_mode="stretch_width",
            ),
            self._pager.row,
            self._table,
        ]

    def _build_vtime(self) -> UIElement:
        figure = plot("vTime", 300, x_axis_type="datetime", name="vtime")
        figure.xaxis.axis_label = "time (UTC)"
        self._vtime = figure
        self._lines = ColumnDataSource({"xs": [], "ys": [], "tenant": [], "color": []})
        self._band = ColumnDataSource({"x": [], "low": [], "high": []})
        band = figure.varea("x", "low", "high", source=self._band, color="#56B4E9", alpha=0.2)
        least = figure.line("x", "low", source=self._band, color=INK, line_dash="dashed")
        lines = figure.multi_line(
            "xs", "ys", source=self._lines, color="color", line_width=2, name="lines"
        )
        figure.add_tools(HoverTool(renderers=[lines], tooltips="@tenant: $y{0.00} s"))
        fixed = [
            LegendItem(label="within the slack", renderers=[band]),
            LegendItem(label="least served", renderers=[least]),
        ]
        self._legend = [*fixed, *(LegendItem(label="", visible=False) for _ in range(LINES + 1))]
        for index, item in enumerate(self._legend[2:]):
            item.renderers, item.index = [lines], index
        figure.add_layout(Legend(items=self._legend, label_width=160), "right")
        return figure

    def _build_stack(self, what: str, title: str) -> UIElement:
        figure = plot(title, STACKED, x_axis_type="datetime", name=what)
        figure.xaxis.axis_label = "time (UTC)"
        figure.yaxis.axis_label = "requests"
        figure.y_range.start = 0
        source = ColumnDataSource({"xs": [], "ys": [], "tenant": [], "color": [], "now": []})
        areas = figure.patches(
            "xs", "ys", source=source, color="color", alpha=0.75, line_width=0, name="areas"
        )
        figure.add_tools(HoverTool(renderers=[areas], tooltips="@tenant: @now now"))
        if what == "queued":
            self._queued = source
        else:
            self._running = source
        return figure

    def _build_shares(self) -> UIElement:
        figure = plot(
            "Share of the last minute's device seconds", STACKED, y_range=[], name="shares"
        )
        figure.xaxis.axis_label = "%"
        figure.x_range.start = 0
        figure.ygrid.grid_line_color = None
        self._shares = ColumnDataSource({"tenant": [], "used": [], "fair": [], "color": []})
        self._share_figure = figure
        bars = figure.hbar(
            "tenant", right="used", height=0.7, source=self._shares, color="color", alpha=0.8
        )
        marks = figure.scatter(
            "fair",
            "tenant",
            source=self._shares,
            marker="dash",
            angle=np.pi / 2,
            size=16,
            color=INK,
        )
        marks.glyph.line_width = 2
        figure.add_tools(
            HoverTool(
                renderers=[bars, marks], tooltips="@tenant: @used{0.00} %, fair share @fair{0.00} %"
            )
        )
        items = [
            LegendItem(label="used", renderers=[bars]),
            LegendItem(label="fair share (by weight)", renderers=[marks]),
        ]
        figure.add_layout(Legend(items=items, orientation="horizontal"), "below")
        return figure

    # -- bringing up to date -----------------------------------------------------------------------

    def _again(self) -> None:
        self._drawn = -1.0
        self.refresh()

    def update(self) -> None:
        assert self.board is not None
        policy, history = self.board.watch.policy, self.board.watch.tenants
        assert policy is not None
        totals = history.totals
        if totals.now == self._drawn:
            return
        self._drawn = totals.now
        slack_s = policy.settings.slack_s
        rest = f", {totals.omitted:,} of them in sums only" if totals.omitted else ""
        self.say(
            f"{totals.active:,} tenants active{rest}; {totals.queued:,} requests queued, "
            f"{totals.running:,} running; slack {slack_s:g} s"
        )
        if not history.tenants:
            self.instead(
                "Nobody has submitted a request in the last minutes. "
                'A first one: <code>st2i.load("shapes").submit(client, prompt="a red circle", '
                'tenant="alice")</code>'
            )
            return
        self.instead(None)
        standing = _Standing(history, policy)
        top = [standing.names[i] for i in standing.ranked(self._pager.order)[:LINES]]
        x = 1e3 * (history.times() - totals.now) + self.board.wall_ms(totals.now)
        self._draw_vtimes(history, x, top, slack_s)
        everybody = history.everybody()
        _stack(self._queued, x, top, history.queued(top), everybody[:, 0])
        _stack(self._running, x, top, history.running(top), everybody[:, 1])
        self._draw_shares(standing, top)
        self._fill_table(standing, policy)

    def _draw_vtimes(
        self, history: TenantHistory, x: NDArray[np.float64], top: list[str], slack_s: float
    ) -> None:
        least = _without_gaps(history.least())
        vtimes = history.vtimes(top)
        everybody = history.everybody()
        others = everybody[:, 2] - np.count_nonzero(~np.isnan(vtimes), axis=1)
        sums = everybody[:, 3] - np.nansum(vtimes, axis=1)
        mean = np.where(others > 0, sums / np.maximum(others, 1), np.nan)
        relative = self._scale.active == 0
        base = least if relative else np.zeros_like(least)
        ys = [vtimes[:, i] - base for i in range(len(top))]
        names, colors = labels.distinct(top, 28), list(TENANTS[: len(top)])
        if others.any():
            ys.append(mean - base)
            names.append("all others (mean)")
            colors.append(REST)
        self._lines.data = {"xs": [x] * len(ys), "ys": ys, "tenant": names, "color": colors}
        self._band.data = {"x": x, "low": least - base, "high": least - base + slack_s}
        for index, item in enumerate(self._legend[2:]):
            there = index < len(names)
            put(item, label={"value": names[index]} if there else {"value": ""}, visible=there)
        how = "ahead of the least served (s)" if relative else "(s)"
        put(self._vtime.yaxis[0], axis_label=f"vTime {how}")

    def _draw_shares(self, standing: _Standing, top: list[str]) -> None:
        order = np.argsort(-standing.used_share, kind="stable")[:BARS]
        colors = dict(zip(top, TENANTS, strict=False))
        names = labels.distinct([standing.names[i] for i in order], 18)
        put(self._share_figure.y_range, factors=names[::-1])
        self._shares.data = {
            "tenant": names,
            "used": 100 * standing.used_share[order],
            "fair": 100 * standing.fair_share[order],
            "color": [colors.get(standing.names[i], REST) for i in order],
        }

    def _fill_table(self, standing: _Standing, policy: FairPolicy) -> None:
        wanted = self._pager.wanted
        order = [int(i) for i in standing.ranked(self._pager.order)]
        names = [standing.names[i] for i in order if wanted in standing.names[i]]
        if wanted:  # also whoever has been away for longer
            known = set(names)
            names += [n for n in glance.tenant_names(policy, wanted, 200) if n not in known]
        shown = names[self._pager.part(len(names), "tenants")]
        rows = [standing.row(name, policy) for name in shown]
        fill(self._table, _COLUMNS, rows)


class _Standing:
    """All tenants with a column in the history, as arrays in the same order."""

    def __init__(self, history: TenantHistory, policy: FairPolicy) -> None:
        self.names, self.vtime, self.queued, self.running = history.latest()
        _, used = history.used()
        # Of this moment, like the vTime beside them: a sample may be a second old.
        self.least_s = policy.ledger.least()
        self.least_ready_s = policy.ledger.least(ready=True)
        self.slack_s = policy.settings.slack_s
        weight = policy.ledger.weight
        self.weight = np.array([weight(name) for name in self.names])
        total = float(used.sum())
        self.used_share = used / total if total else used
        counts = (used > 0) | ~np.isnan(self.vtime)
        entitled = np.where(counts, self.weight, 0.0)
        self.fair_share = entitled / max(float(entitled.sum()), 1e-12)
        self._index = {name: i for i, name in enumerate(self.names)}

    def ranked(self, order: str) -> NDArray[np.intp]:
        """Indices of the tenants in this order; ties by name do not matter."""
        if order == _NAME:
            return np.argsort(np.array(self.names), kind="stable")
        keys = {
            _USED: -self.used_share,
            _QUEUED: -self.queued,
            _MOST: -np.nan_to_num(self.vtime, nan=-np.inf),
            _LEAST: np.nan_to_num(self.vtime, nan=np.inf),
        }
        return np.argsort(keys[order], kind="stable")

    def row(self, name: str, policy: FairPolicy) -> tuple[str, ...]:
        """The tenant's line of the table."""
        now = glance.standings(policy, [name])[0]
        index = self._index.get(name)
        ahead = now.vtime_s - self.least_s
        if not now.active:
            state = "nothing to do"
        elif not now.ready:
            state = "has nothing waiting"
        elif now.vtime_s - self.least_ready_s > self.slack_s:
            state = "lets others go first"
        else:
            state = "may run"
        return (
            name,
            state,
            f"{policy.ledger.weight(name):g}",
            f"{now.queued:,}",
            f"{now.running:,}",
            f"{now.vtime_s:,.2f}",
            f"{ahead:,.2f}" if now.active else "",
            f"{100 * self.used_share[index]:.2f}" if index is not None else "",
            f"{100 * self.fair_share[index]:.2f}" if index is not None else "",
            f"{now.service_s:,.1f}",
        )


def _without_gaps(values: NDArray[np.float64]) -> NDArray[np.float64]:
    """The last known value where there is none; 0 before the first: an area must not break off.

    >>> _without_gaps(np.array([np.nan, 2.0, np.nan])).tolist()
    [0.0, 2.0, 2.0]
    """
    known = ~np.isnan(values)
    last = np.maximum.accumulate(np.where(known, np.arange(len(values)), -1))
    return np.where(last >= 0, values[last], 0.0)


def _stack(
    source: ColumnDataSource,
    x: NDArray[np.float64],
    top: list[str],
    counts: NDArray[np.int64],
    total: NDArray[np.float64],
) -> None:
    """Areas on top of each other: these tenants, and the rest as one. counts: [samples, tenants]."""
    rest = np.maximum(total - counts.sum(axis=1), 0)
    layers = [counts[:, i].astype(float) for i in range(len(top))]
    names, colors = labels.distinct(top, 28), list(TENANTS[: len(top)])
    if rest.any():
        layers.append(rest)
        names.append("all others")
        colors.append(REST)
    around = np.concatenate([x, x[::-1]])
    low = np.zeros_like(x)
    ys, now = [], []
    for layer in layers:
        high = low + layer
        ys.append(np.concatenate([low, high[::-1]]))
        now.append(float(layer[-1]))
        low = high
    source.data = {
        "xs": [around] * len(ys),
        "ys": ys,
        "tenant": names,
        "color": colors,
        "now": now,
    }
