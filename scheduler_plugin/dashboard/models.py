"""What models cost, and how often they were where they were needed."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from bokeh.layouts import row
from bokeh.models import ColumnDataSource, HoverTool, UIElement
from bokeh.plotting import figure

from ..run_history import OTHERS, Spent
from ..watch import Facts
from . import labels
from .elements import Pager, fill, plot, put, replace, size, table
from .holdings import model_names
from .look import COMPUTE, FAILED, LOAD, TRANSFER, WAITS
from .page import Page

BARS = 12
ROWS = 12

_STALLED, _LOADS, _RUNS, _NAME = "longest stalls first", "most loads", "most runs", "name"

#: Of a plot of bars.
_FIELDS = ("line", "name", "kind", "left", "right", "color", "text")

_HITS, _WAITS = "Runs that found the model in memory", "Loading, and standing still for it"

_COLUMNS = (
    ("model", "model", 200),
    ("executors", "on executors", 90),
    ("whole", "whole on", 80),
    ("bytes", "bytes in memory", 120),
    ("nbytes", "bytes of one", 110),
    ("runs", "runs", 80),
    ("hits", "hits", 80),
    ("rate", "hits (%)", 80),
    ("loads", "layers loaded", 100),
    ("load_s", "load (s)", 90),
    ("stalled_s", "stalled (s)", 90),
    ("name", "whole name", 250),
)


@dataclass
class _Model:
    """One model on all executors, since it came there. Seconds as in WeightStore.models."""

    label: str
    name: str
    executors: int = 0
    whole: int = 0
    resident_bytes: int = 0
    nbytes: int = 0
    runs: int = 0
    hits: int = 0
    loads: int = 0
    load_s: float = 0.0
    stalled_s: float = 0.0


class ModelsPage(Page):
    path = "/st2i-models"
    title = "Models"
    about = (
        "A hit is a run that found all of the model in memory. Stalled: runs stood still until layers "
        "were there. Device seconds count from the plugin's start, the rest from when the model came to "
        "an executor that is still here."
    )
    period_ms = 2000
    asks = True

    def build(self) -> list[UIElement]:
        self._pager = Pager(ROWS, self.refresh, "find a model", (_STALLED, _LOADS, _RUNS, _NAME))
        self._table = table(_COLUMNS, right=[field for field, _, _ in _COLUMNS[1:-1]])
        self._spent, self._spent_bars = _bars(
            "Device seconds by ModelFn and workflow", "spent", "device seconds"
        )
        self._hits, self._hit_bars = _bars(_HITS, "hits", "runs")
        self._waits, self._wait_bars = _bars(_WAITS, "waits", "seconds")
        return [
            self._spent,
            row(self._hits, self._waits, sizing_mode="stretch_width"),
            self._pager.row,
            self._table,
        ]

    # -- bringing up to date -----------------------------------------------------------------------

    def update(self) -> None:
        assert self.board is not None
        watch = self.board.watch
        models = _by_model(watch.facts)
        spent = watch.requests.spent
        answered = len(watch.facts.answers)
        self.say(
            f"{len(models):,} models on the {answered:,} executors that have answered; "
            f"{len(watch.facts.silent):,} silent"
        )
        if not models and not spent:
            self.instead(
                "No model has been loaded yet. A first one: "
                '<code>st2i.load("shapes").submit(client, prompt="a red circle")</code>'
            )
            return
        self.instead(None)
        self._draw_spent(spent)
        self._draw_models(models)
        wanted = self._pager.wanted
        found = [
            m for m in _ranked(models, self._pager.order) if wanted in m.name or wanted in m.label
        ]
        shown = found[self._pager.part(len(found), "models")]
        rows = [_row(model) for model in shown]
        fill(self._table, _COLUMNS, rows)

    def _draw_spent(self, spent: dict[tuple[str, str], Spent]) -> None:
        def total(item: tuple[tuple[str, str], Spent]) -> float:
            return item[1].load_s + item[1].compute_s + item[1].transfer_s

        ranked = sorted(spent.items(), key=total, reverse=True)
        lines = [(_kind(*kind), cost) for kind, cost in ranked[:BARS]]
        if len(ranked) > BARS:
            rest = Spent()
            for _, cost in ranked[BARS:]:
                rest.load_s += cost.load_s
                rest.compute_s += cost.compute_s
                rest.transfer_s += cost.transfer_s
            lines.append((f"{len(ranked) - BARS} others", rest))
        short = labels.distinct([name for name, _ in lines], 50)
        stacks = [
            (
                label,
                name,
                [
                    ("transfer", cost.transfer_s, TRANSFER),
                    ("load", cost.load_s, LOAD),
                    ("compute", cost.compute_s, COMPUTE),
                ],
            )
            for label, (name, cost) in zip(short, lines, strict=True)
        ]
        _stack(self._spent, self._spent_bars, stacks, "s")

    def _draw_models(self, models: list[_Model]) -> None:
        hits = [
            (m.label, m.name, [("hits", m.hits, TRANSFER), ("others", m.runs - m.hits, WAITS)])
            for m in _ranked(models, _RUNS)[:BARS]
        ]
        _stack(self._hits, self._hit_bars, hits, "runs")
        waits = [
            (m.label, m.name, [("stalled", m.stalled_s, FAILED), ("loading", m.load_s, LOAD)])
            for m in _ranked(models, _STALLED)[:BARS]
        ]
        _stack(self._waits, self._wait_bars, waits, "s")
        more = f" ({BARS} of {len(models)} models)" if len(models) > BARS else ""
        put(self._hits.title, text=_HITS + more)
        put(self._waits.title, text=_WAITS + more)


def _bars(title: str, name: str, unit: str) -> tuple[figure, ColumnDataSource]:
    """A plot of stacked bars, one line each, with a legend above."""
    plotted = plot(title, 200, y_range=[], name=name)
    plotted.xaxis.axis_label = unit
    plotted.x_range.start = 0
    plotted.ygrid.visible = False
    source = ColumnDataSource({field: [] for field in _FIELDS})
    bars = plotted.hbar(
        "line",
        left="left",
        right="right",
        height=0.7,
        source=source,
        color="color",
        legend_field="kind",
    )
    plotted.add_layout(plotted.legend[0], "above")
    plotted.legend[0].orientation = "horizontal"
    plotted.add_tools(HoverTool(renderers=[bars], tooltips="@name, @kind: @text"))
    return plotted, source


def _stack(
    plotted: figure,
    source: ColumnDataSource,
    lines: list[tuple[str, str, list[tuple[str, float, str]]]],
    unit: str,
) -> None:
    """Draw these lines, from the top: a label unlike the others, the whole name, and a stack of (kind,
    value, colour)."""
    data: dict[str, list[Any]] = {field: [] for field in _FIELDS}
    for label, name, stack in lines:
        at = 0.0
        for kind, value, color in stack:
            data["line"].append(label)
            data["name"].append(name)
            data["kind"].append(kind)
            data["left"].append(at)
            data["right"].append(at + value)
            data["color"].append(color)
            data["text"].append(f"{value:,.2f} {unit}" if unit == "s" else f"{value:,} {unit}")
            at += value
    put(plotted, height=110 + 22 * max(3, len(lines)), visible=bool(lines))
    put(plotted.y_range, factors=[label for label, _, _ in reversed(lines)])
    replace(source, data)


def _kind(fn: str, workflow: str) -> str:
    return f"{fn} \u00b7 {workflow}" if (fn, workflow) != OTHERS else "all others"


def _by_model(facts: Facts) -> list[_Model]:
    names = model_names(facts.answers.values())
    label = labels.of_models(names)
    found = {key: _Model(label[key], name) for key, name in names.items()}
    for answer in facts.answers.values():
        for each in answer["models"]:
            model = found[each["model_key"]]
            model.executors += 1
            model.whole += each["resident_layers"] == each["layers"]
            model.resident_bytes += each["resident_bytes"]
            model.nbytes = max(model.nbytes, each["nbytes"])
            model.runs += each["runs"]
            model.hits += each["hits"]
            model.loads += each["loads"]
            model.load_s += each["load_s"]
            model.stalled_s += each["stalled_s"]
    return list(found.values())


def _ranked(models: list[_Model], order: str) -> list[_Model]:
    keys: dict[str, Any] = {
        _STALLED: lambda m: (-m.stalled_s, -m.load_s, m.label),
        _LOADS: lambda m: (-m.loads, m.label),
        _RUNS: lambda m: (-m.runs, m.label),
        _NAME: lambda m: m.label,
    }
    return sorted(models, key=keys[order])


def _row(model: _Model) -> tuple[str, ...]:
    return (
        model.label,
        f"{model.executors:,}",
        f"{model.whole:,}",
        size(model.resident_bytes),
        size(model.nbytes),
        f"{model.runs:,}",
        f"{model.hits:,}",
        f"{100 * model.hits / model.runs:.0f}" if model.runs else "",
        f"{model.loads:,}",
        f"{model.load_s:,.2f}",
        f"{model.stalled_s:,.2f}",
        model.name,
    )
