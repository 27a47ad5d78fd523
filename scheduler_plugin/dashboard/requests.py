"""When the runs of each request were, and what they were spent on."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from bokeh.models import ColumnDataSource, HoverTool, Legend, LegendItem, Range1d, Toggle, UIElement

from .. import glance
from ..glance import RunGlance
from ..run_history import Ended, RequestHistory, RunHistory
from . import labels
from .elements import Pager, cut, fill, plot, put, seconds, table
from .look import COMPUTE, FAILED, LOAD, RUNS, TRANSFER, WAITS
from .page import Page

#: Most characters of a line's label.
LABEL = 60
#: Requests on the screen, ModelFns of each that have a line, and bars in all.
REQUESTS = 8
FNS = 6
BARS = 3000

#: Seconds without any run that are always left between runs on the screen.
PAUSE_SECONDS = 1.0

#: A window that has moved by less is the same: the two clocks are not read at once.
SAME_MS = 100.0

#: What a bar is, its colour and how high it is.
_KINDS = {
    "waits, or on its way": (WAITS, 0.25),
    "transfer": (TRANSFER, 0.8),
    "load": (LOAD, 0.8),
    "compute": (COMPUTE, 0.8),
    "failed, lost or cancelled": (FAILED, 0.8),
    "runs now": (RUNS, 0.8),
}

_COLUMNS = (
    ("request", "request", 150),
    ("tenant", "tenant", 140),
    ("workflow", "workflow", 150),
    ("state", "state", 110),
    ("done", "invocations done", 110),
    ("waited", "waited for its first", 120),
    ("took", "since it was submitted", 140),
    ("transfer", "transfer", 80),
    ("load", "load", 80),
    ("compute", "compute", 80),
)


class RequestsPage(Page):
    path = "/st2i-requests"
    title = "Requests"
    about = (
        "One line for each ModelFn of a request, the latest request on top. Within a run, its device "
        "seconds are drawn one after the other: transfer, load, compute. Time begins after the last pause "
        "longer than all these runs: zoom out for earlier ones. Hold it still to zoom."
    )
    period_ms = 2000

    def build(self) -> list[UIElement]:
        self._pager = Pager(REQUESTS, self._again, "find a tenant or a request")
        self._still = Toggle(label="hold still", width=100)
        self._still.on_change("active", lambda attribute, old, new: self._hold(new))
        self._window: tuple[float, float] | None = None
        self._pager.row.children.append(self._still)
        self._table = table(_COLUMNS, right=[field for field, _, _ in _COLUMNS[4:]])
        return [self._pager.row, self._build_timeline(), self._table]

    def _build_timeline(self) -> UIElement:
        figure = plot(
            "Runs of the latest requests",
            400,
            x_axis_type="datetime",
            x_range=Range1d(0, 1),
            y_range=[],
            name="timeline",
            tools="pan,box_zoom,xwheel_zoom,xzoom_out,reset,save",
        )
        figure.xaxis.axis_label = "time (UTC)"
        figure.ygrid.visible = False
        self._figure = figure
        names = ("line", "left", "right", "text")
        self._bars: dict[str, ColumnDataSource] = {}
        self._items: dict[str, LegendItem] = {}
        for kind, (color, height) in _KINDS.items():
            source = ColumnDataSource({name: [] for name in names})
            bars = figure.hbar(
                "line",
                left="left",
                right="right",
                height=height,
                source=source,
                color=color,
                line_color=None,
                name=kind,
            )
            self._bars[kind] = source
            self._items[kind] = LegendItem(label=kind, renderers=[bars])
        figure.add_tools(HoverTool(tooltips="@text"))
        figure.add_layout(
            Legend(items=list(self._items.values()), orientation="horizontal"), "above"
        )
        return figure

    # -- bringing up to date -----------------------------------------------------------------------

    def _again(self) -> None:
        self._refresh(True)

    def _hold(self, still: bool) -> None:
        if not still:
            self._window = None
        self._again()

    def update(self) -> None:
        self._refresh(not self._still.active)

    def _refresh(self, draw: bool) -> None:
        if self.board is None or self.board.watch.policy is None:
            return
        watch = self.board.watch
        policy = watch.policy
        assert policy is not None
        watch.requests.forget(self.now)
        totals = watch.tenants.totals
        self.say(
            f"{totals.queued:,} requests queued, {totals.running:,} running; "
            f"{len(watch.requests):,} kept here, at most 15 minutes after their last end"
        )
        running: dict[str, list[RunGlance]] = {}
        for run in glance.runs(policy):
            running.setdefault(run.request, []).append(run)
        if not len(watch.requests) and not running:
            self.instead(
                "No request has run in the last 15 minutes. A first one: "
                '<code>st2i.load("shapes").submit(client, prompt="a red circle")</code>'
            )
            return
        self.instead(None)
        if not draw:
            return
        shown = self._shown(watch.requests, running)
        self._draw(shown, running)
        rows = [self._row(history, running.get(history.request, [])) for history in shown]
        fill(self._table, _COLUMNS, rows)

    def _shown(
        self, known: RunHistory, running: dict[str, list[RunGlance]]
    ) -> list[RequestHistory]:
        """Those on the screen: the one of which something was heard last is first."""
        wanted = self._pager.wanted
        new = [
            RequestHistory(run.request, run.tenant, run.workflow, run.positions, run.submitted)
            for run, *_ in running.values()
            if run.request not in known and (wanted in run.tenant or wanted in run.request)
        ]
        part = self._pager.part(known.count(wanted) + len(new), "requests")
        heard = known.latest(part.stop, wanted) + new

        def last(history: RequestHistory) -> float:
            starts = [run.started for run in running.get(history.request, ())]
            return max([*starts, history.last])

        return sorted(heard, key=last, reverse=True)[part]

    def _draw(self, shown: list[RequestHistory], running: dict[str, list[RunGlance]]) -> None:
        assert self.board is not None
        drawing = _Drawing(self.board.wall_ms(0.0))
        for history in shown:
            drawing.request(history, running.get(history.request, []), self.now)
        lines = drawing.lines
        put(self._figure, height=130 + 17 * max(6, len(lines)))
        put(self._figure.y_range, factors=list(reversed(lines)))
        put(self._figure, visible=bool(lines))
        if not lines:
            return
        self._show(_window(_spans(shown, running, self.now)))
        title = "Runs of the latest requests"
        if drawing.left_out:
            title += f" ({drawing.left_out:,} runs are left out)"
        put(self._figure.title, text=title)
        for kind, source in self._bars.items():
            source.data = drawing.bars[kind]
            put(self._items[kind], visible=bool(drawing.bars[kind]["line"]))

    def _show(self, window: tuple[float, float]) -> None:
        """Show this window, policy's seconds; the viewer's own zoom stays while it is the same."""
        assert self.board is not None
        begin_ms, end_ms = map(self.board.wall_ms, window)
        if self._window is not None:
            before_ms, after_ms = self._window
            if max(abs(begin_ms - before_ms), abs(end_ms - after_ms)) < SAME_MS:
                return
        self._window = begin_ms, end_ms
        margin_ms = max(100.0, 0.02 * (end_ms - begin_ms))
        start, end = begin_ms - margin_ms, end_ms + margin_ms
        put(self._figure.x_range, start=start, end=end, reset_start=start, reset_end=end)

    def _row(self, history: RequestHistory, running: list[RunGlance]) -> tuple[str, ...]:
        runs = history.runs
        done = sum(run.steps for run in runs if run.outcome == "done") + history.left_out
        until = self.now if history.over is None else history.over
        first = min([run.started for run in [*runs, *running]], default=until)
        state = history.outcome or ("runs" if running else "waits")
        return (
            history.request,
            history.tenant,
            history.workflow,
            state,
            f"{done:,} of {history.positions:,}",
            seconds(first - history.submitted),
            seconds(until - history.submitted),
            seconds(sum(run.transfer_s for run in runs)),
            seconds(sum(run.load_s for run in runs)),
            seconds(sum(run.compute_s for run in runs)),
        )


def _spans(
    shown: Sequence[RequestHistory], running: dict[str, list[RunGlance]], now: float
) -> list[tuple[float, float]]:
    """When runs on the screen began and ended; where nothing ran, when requests waited."""
    spans = [(run.started, run.stopped) for history in shown for run in history.runs]
    spans += [(run.started, now) for h in shown for run in running.get(h.request, ())]
    return spans or [(history.submitted, history.last) for history in shown]


def _window(spans: list[tuple[float, float]]) -> tuple[float, float]:
    """What to show of these (begin, end): from the end of the last back to the first pause that is longer
    than all of them took together. Where runs overlap, their time counts once.

    >>> _window([(0.0, 5.0), (100.0, 102.0), (101.0, 103.0), (107.0, 108.0)])
    (100.0, 108.0)
    """
    latest_first = sorted(spans, key=lambda span: span[1], reverse=True)
    pauses, took = [], 0.0
    begin = end = latest_first[0][1]
    for start, stop in latest_first:
        if stop < begin:
            pauses.append((begin, begin - stop))
        took += max(0.0, min(stop, begin) - start)
        begin = min(begin, start)
    for after, length in pauses:
        if length > max(took, PAUSE_SECONDS):
            return after, end
    return begin, end


class _Drawing:
    """Bars by kind. origin_ms: what turns the policy's seconds into wall time."""

    def __init__(self, origin_ms: float) -> None:
        self._origin_ms = origin_ms
        self.bars: dict[str, dict[str, list[Any]]] = {
            kind: {"line": [], "left": [], "right": [], "text": []} for kind in _KINDS
        }
        self._count = 0
        self.left_out = 0
        self.lines: list[str] = []  # from the top

    def request(self, history: RequestHistory, running: list[RunGlance], now: float) -> None:
        """Draw one, below the others."""
        began: dict[str, int] = {}
        for run in [*history.runs, *running]:
            began[run.fn] = min(run.position, began.get(run.fn, run.position))
        fns = sorted(began, key=began.__getitem__)[:FNS]
        about = f"{cut(history.tenant, 18)} \u00b7 {history.request[:6]}"
        if not fns:
            self._never_ran(history, about)
            return
        names = [f"{about} \u00b7 {fn}" for fn in labels.distinct(fns, 26)]
        lines = dict(zip(fns, self._add(names), strict=True))
        first = min(r.started for r in [*history.runs, *running])
        waited = f"{history.tenant}: waited for {seconds(first - history.submitted)}"
        self._bar("waits, or on its way", lines[fns[0]], history.submitted, first, waited)
        for run in history.runs:
            if run.fn in lines:
                self._ended(lines[run.fn], run)
        for busy in running:
            if busy.fn in lines:
                text = f"{busy.fn}, position {busy.position}: {seconds(now - busy.started)} so far"
                self._bar("runs now", lines[busy.fn], busy.started, now, text)
        self.left_out += history.left_out

    def _never_ran(self, history: RequestHistory, about: str) -> None:
        assert history.over is not None
        (line,) = self._add([f"{about} \u00b7 {history.outcome}"])
        waited = seconds(history.over - history.submitted)
        text = f"{history.tenant}: {history.outcome} after {waited}, without a run"
        self._bar("waits, or on its way", line, history.submitted, history.over, text)

    def _add(self, texts: list[str]) -> list[str]:
        """New lines below the others, unlike any of them."""
        before = len(self.lines)
        self.lines = labels.distinct([*self.lines, *texts], LABEL)
        return self.lines[before:]

    def _ended(self, line: str, run: Ended) -> None:
        if self._count > BARS:
            self.left_out += 1
            return
        steps = f", {run.steps} steps" if run.steps > 1 else ""
        text = (
            f"{run.fn}, position {run.position}{steps}, {run.outcome}: "
            f"transfer {seconds(run.transfer_s)}, load {seconds(run.load_s)}, "
            f"compute {seconds(run.compute_s)}"
        )
        if run.outcome != "done":
            self._bar("failed, lost or cancelled", line, run.started, run.stopped, text)
            return
        spent = [("transfer", run.transfer_s), ("load", run.load_s), ("compute", run.compute_s)]
        # Clocks differ a little between machines: never longer than the run.
        scale = min(1.0, (run.stopped - run.started) / max(1e-9, sum(s for _, s in spent)))
        at = run.stopped - scale * sum(s for _, s in spent)
        self._bar("waits, or on its way", line, run.started, at, text)
        for kind, value in spent:
            if value > 0:
                self._bar(kind, line, at, at + scale * value, text)
                at += scale * value

    def _bar(self, kind: str, line: str, start: float, stop: float, text: str) -> None:
        bars = self.bars[kind]
        bars["line"].append(line)
        bars["left"].append(self._origin_ms + 1e3 * start)
        bars["right"].append(self._origin_ms + 1e3 * stop)
        bars["text"].append(text)
        self._count += 1
