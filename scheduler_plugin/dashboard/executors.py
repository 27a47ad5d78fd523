"""What executors run, and what their memory holds."""

from __future__ import annotations

from collections import Counter
from functools import lru_cache
from itertools import groupby
from typing import Any

from bokeh.layouts import row
from bokeh.models import ColumnDataSource, HoverTool, Legend, LegendItem, UIElement
from bokeh.transform import factor_cmap

from .. import glance
from ..glance import Occupant
from ..policy import FairPolicy
from ..watch import Facts
from .elements import (
    GIB,
    MIB,
    Pager,
    cut,
    fill,
    plot,
    put,
    replace,
    seconds,
    size,
    table,
)
from .look import ABSENT, COMPUTE, FAILED, LOAD, RUNS, TENANTS, TRANSFER
from .page import Page

ROWS = 15
#: Cells of the map in one line, and models beside each other.
ACROSS = 40
MODELS = 10

_STATES = {
    "idle": ABSENT,
    "running": COMPUTE,
    "assisting": RUNS,
    "ending a cancelled run": LOAD,
    "on plain Dask tasks": TENANTS[6],
    "silent": FAILED,
}
_OF = {
    "runs": "running",
    "assists": "assisting",
    "ends": "ending a cancelled run",
    "plain": "on plain Dask tasks",
}

_NAME, _LONGEST, _FULLEST = "name", "longest running first", "fullest arena first"

_COLUMNS = (
    ("executor", "executor", 140),
    ("state", "state", 150),
    ("tenant", "tenant", 130),
    ("fn", "ModelFn", 140),
    ("workflow", "workflow", 140),
    ("since", "for", 80),
    ("arena", "arena: used of", 140),
    ("framework", "framework: weights of", 150),
    ("pulled", "answered", 110),
)

#: Field, what it is, colour.
_MEMORY = (
    ("tensors", "arena: tensors", TRANSFER),
    ("weights", "arena: weights", LOAD),
    ("free", "arena: free", "#DDE9E4"),
    ("layers", "framework: weights", COMPUTE),
    ("rest", "framework: rest", "#DCE6EF"),
)


class ExecutorsPage(Page):
    path = "/st2i-executors"
    title = "Executors"
    about = (
        "An executor is a worker with one thread and one device. Its arena holds tensors, and weights as "
        "long as tensors leave room; weights lie in the framework region too, whose rest is for "
        "activations."
    )
    asks = True

    def build(self) -> list[UIElement]:
        self._pager = Pager(ROWS, self.refresh, "find an executor", (_NAME, _LONGEST, _FULLEST))
        self._table = table(_COLUMNS)
        return [
            self._build_map(),
            self._pager.row,
            self._table,
            row(self._build_memory(), self._build_models(), sizing_mode="stretch_width"),
        ]

    def _build_map(self) -> UIElement:
        figure = plot(
            "All executors", 120, x_range=(-0.6, ACROSS - 0.4), y_range=(0.6, -0.6), name="map"
        )
        figure.axis.visible = False
        figure.grid.visible = False
        self._map = figure
        self._map_cells = ColumnDataSource(
            {name: [] for name in ("x", "y", "executor", "state", "what", "memory")}
        )
        cells = figure.rect(
            "x",
            "y",
            0.86,
            0.86,
            source=self._map_cells,
            line_color="#B4BCC4",
            line_width=0.5,
            legend_field="state",
            color=factor_cmap("state", list(_STATES.values()), list(_STATES)),
        )
        figure.add_layout(figure.legend[0], "right")
        figure.legend[0].label_width = 140
        figure.add_tools(
            HoverTool(renderers=[cells], tooltips="@executor: @state<br>@what<br>@memory")
        )
        return figure

    def _build_memory(self) -> UIElement:
        figure = plot("Memory of the executors above", 200, y_range=[], name="memory")
        figure.x_range.start = 0
        figure.ygrid.visible = False
        self._memory = figure
        self._bars = ColumnDataSource(
            {name: [] for name in ("executor", "kind", "left", "right", "color", "text")}
        )
        bars = figure.hbar(
            "executor",
            left="left",
            right="right",
            height=0.75,
            source=self._bars,
            color="color",
            legend_field="kind",
        )
        figure.add_layout(figure.legend[0], "above")
        figure.legend[0].orientation = "horizontal"
        figure.add_tools(HoverTool(renderers=[bars], tooltips="@executor, @kind: @text"))
        return figure

    def _build_models(self) -> UIElement:
        figure = plot(
            "Models in their memory, layer by layer", 200, x_range=[], y_range=[], name="models"
        )
        figure.grid.visible = False
        figure.xaxis.major_label_orientation = 0.5
        self._models = figure
        names = ("model", "executor", "text")
        self._frames = ColumnDataSource({name: [] for name in names})
        self._layers = ColumnDataSource({"left": [], "right": [], "executor": []})
        frames = figure.rect(
            "model", "executor", 0.92, 0.7, source=self._frames, color=ABSENT, line_color="#B4BCC4"
        )
        layers = figure.hbar(
            "executor", left="left", right="right", height=0.7, source=self._layers, color=COMPUTE
        )
        figure.add_tools(HoverTool(renderers=[frames], tooltips="@executor<br>@text"))
        items = [
            LegendItem(label="layers in memory", renderers=[layers]),
            LegendItem(label="absent", renderers=[frames]),
        ]
        figure.add_layout(Legend(items=items, orientation="horizontal"), "above")
        return figure

    # -- bringing up to date -----------------------------------------------------------------------

    def update(self) -> None:
        assert self.board is not None
        policy, facts = self.board.watch.policy, self.board.watch.facts
        assert policy is not None
        executors = glance.executors(policy)
        occupants = glance.occupants(policy)
        if not executors:
            self.say("")
            self.instead(
                "No executor has joined this cluster yet. Start workers: "
                "<code>dask worker ADDRESS --nthreads 1</code>"
            )
            return
        self.instead(None)
        labels = {executor: self.board.label(executor) for executor in executors}
        states = {e: self._state(e, occupants.get(e), facts) for e in executors}
        counts = Counter(states.values())
        self.say(
            f"{len(executors):,} executors: "
            + ", ".join(f"{counts[state]:,} {state}" for state in _STATES if counts[state])
        )
        self._draw_map(executors, labels, states, occupants, facts)
        shown = self._shown(executors, labels, occupants, facts)
        self._fill_table(shown, labels, states, occupants, facts, policy)
        height = 120 + 24 * max(3, len(shown))
        self._draw_memory(shown, labels, facts, height)
        self._draw_models(shown, labels, facts, height + 30)

    @staticmethod
    def _state(executor: str, occupant: Occupant | None, facts: Facts) -> str:
        if executor in facts.silent:
            return "silent"
        return _OF[occupant.state] if occupant is not None else "idle"

    def _draw_map(
        self,
        executors: list[str],
        labels: dict[str, str],
        states: dict[str, str],
        occupants: dict[str, Occupant],
        facts: Facts,
    ) -> None:
        ordered = sorted(executors, key=lambda e: _natural(labels[e]))
        lines = (len(ordered) - 1) // ACROSS + 1
        put(self._map, height=max(170, 50 + 24 * lines), visible=len(executors) > ROWS)
        put(self._map.y_range, start=max(lines, 5) - 0.4, end=-0.6)
        data = {
            "x": [i % ACROSS for i in range(len(ordered))],
            "y": [i // ACROSS for i in range(len(ordered))],
            "executor": [labels[e] for e in ordered],
            "state": [states[e] for e in ordered],
            "what": [self._what(occupants.get(e)) for e in ordered],
            "memory": [_arena(facts.answers.get(e)) for e in ordered],
        }
        replace(self._map_cells, data)

    def _what(self, occupant: Occupant | None) -> str:
        if occupant is None or not occupant.fn:
            return ""
        return f"{occupant.fn} for {occupant.tenant}"

    def _shown(
        self,
        executors: list[str],
        labels: dict[str, str],
        occupants: dict[str, Occupant],
        facts: Facts,
    ) -> list[str]:
        found = [e for e in executors if self._pager.wanted in labels[e]]
        found.sort(key=lambda e: _natural(labels[e]))
        if self._pager.order == _LONGEST:
            found.sort(key=lambda e: occupants[e].since if e in occupants else float("inf"))
        elif self._pager.order == _FULLEST:
            found.sort(key=lambda e: -_fullness(facts.answers.get(e)))
        return found[self._pager.part(len(found), "executors")]

    def _fill_table(
        self,
        shown: list[str],
        labels: dict[str, str],
        states: dict[str, str],
        occupants: dict[str, Occupant],
        facts: Facts,
        policy: FairPolicy,
    ) -> None:
        rows = []
        for executor in shown:
            occupant, answer = occupants.get(executor), facts.answers.get(executor)
            state = states[executor]
            if occupant is not None and occupant.leader:
                state = f"assisting {labels.get(occupant.leader, occupant.leader)}"
            known = occupant is not None and bool(occupant.fn)
            rows.append(
                (
                    labels[executor],
                    state,
                    occupant.tenant if occupant is not None else "",
                    _fn(occupant),
                    occupant.workflow if occupant is not None else "",
                    seconds(self.now - occupant.since) if known and occupant is not None else "",
                    _arena(answer),
                    _framework(answer),
                    self._age(executor, facts),
                )
            )
        fill(self._table, _COLUMNS, rows)

    def _age(self, executor: str, facts: Facts) -> str:
        at = facts.answered.get(executor)
        if executor in facts.silent:
            last = f", last {seconds(self.now - at)} ago" if at is not None else ""
            return f"{facts.silent[executor]}{last}"
        return f"{seconds(max(1.0, self.now - at))} ago" if at is not None else "asked"

    def _draw_memory(
        self, shown: list[str], labels: dict[str, str], facts: Facts, height: int
    ) -> None:
        answers = [(e, facts.answers[e]) for e in shown if e in facts.answers]
        most = max((_whole(answer) for _, answer in answers), default=0)
        unit, name = (GIB, "GiB") if most >= GIB else (MIB, "MiB")
        data: dict[str, list[Any]] = {name: [] for name in self._bars.data}
        for field, kind, color in _MEMORY:
            for executor, answer in answers:
                left, right = _part(answer, field)
                data["executor"].append(labels[executor])
                data["kind"].append(kind)
                data["left"].append(left / unit)
                data["right"].append(right / unit)
                data["color"].append(color)
                data["text"].append(size(right - left))
        put(self._memory, height=height)
        put(self._memory.xaxis[0], axis_label=name)
        put(self._memory.y_range, factors=[labels[e] for e in reversed(shown)])
        replace(self._bars, data)

    def _draw_models(
        self, shown: list[str], labels: dict[str, str], facts: Facts, height: int
    ) -> None:
        answers = [(e, facts.answers[e]) for e in shown if e in facts.answers]
        count = Counter(r["model"] for _, answer in answers for r in answer["models"])
        known = [model for model, _ in sorted(count.items(), key=lambda c: (-c[1], c[0]))[:MODELS]]
        models = {model: cut(model, 24) for model in sorted(known)}
        frames: dict[str, list[Any]] = {"model": [], "executor": [], "text": []}
        layers: dict[str, list[Any]] = {"left": [], "right": [], "executor": []}
        factors = list(models.values())
        for executor, answer in answers:
            for row_ in answer["models"]:
                model = row_["model"]
                if model not in models:
                    continue
                frames["model"].append(models[model])
                frames["executor"].append(labels[executor])
                frames["text"].append(
                    f"{model}: {row_['resident_layers']} of {row_['layers']} layers, "
                    f"{size(row_['resident_bytes'])} of {size(row_['nbytes'])}"
                )
                # A category is 1 wide and begins at its index; the frame leaves 0.04 on each side.
                begin, width = factors.index(models[model]) + 0.04, 0.92 / max(1, row_["layers"])
                for first, last in _stretches(row_["by_layer"]):
                    layers["left"].append(begin + width * first)
                    layers["right"].append(begin + width * last)
                    layers["executor"].append(labels[executor])
        title = "Models in their memory, layer by layer"
        if len(count) > MODELS:
            title += f" (the {MODELS} most frequent of {len(count)})"
        put(self._models.title, text=title)
        put(self._models, height=height, visible=bool(frames["model"]))
        put(self._models.x_range, factors=factors)
        put(self._models.y_range, factors=[labels[e] for e in reversed(shown)])
        replace(self._frames, frames)
        replace(self._layers, layers)


@lru_cache(maxsize=4096)
def _natural(text: str) -> list[tuple[bool, int, str]]:
    """A key by which worker 10 comes after worker 9."""
    parts = ["".join(group) for _, group in groupby(text, str.isdigit)]
    return [(p.isdigit(), int(p) if p.isdigit() else 0, p) for p in parts]


def _stretches(flags: str) -> list[tuple[int, int]]:
    """Where the "1"s are, as [first, last).

    >>> _stretches("110100")
    [(0, 2), (3, 4)]
    """
    found, at = [], 0
    for flag, group in groupby(flags):
        length = len(list(group))
        if flag == "1":
            found.append((at, at + length))
        at += length
    return found


def _fn(occupant: Occupant | None) -> str:
    if occupant is None:
        return ""
    return f"{occupant.fn} ({occupant.steps} steps)" if occupant.steps > 1 else occupant.fn


def _fullness(answer: dict[str, Any] | None) -> float:
    if answer is None:
        return -1.0
    arena = answer["arena"]
    return float((arena["used"] + arena["weights"]) / max(1, arena["nbytes"]))


def _arena(answer: dict[str, Any] | None) -> str:
    if answer is None:
        return ""
    arena = answer["arena"]
    return f"{size(arena['used'] + arena['weights'])} of {size(arena['nbytes'])}"


def _framework(answer: dict[str, Any] | None) -> str:
    if answer is None:
        return ""
    region = answer["framework"]
    return f"{size(region['weights'])} of {size(region['nbytes'])}"


def _whole(answer: dict[str, Any]) -> int:
    return int(answer["arena"]["nbytes"] + answer["framework"]["nbytes"])


def _part(answer: dict[str, Any], field: str) -> tuple[int, int]:
    """From where to where a part of the memory is drawn, bytes."""
    arena, region = answer["arena"], answer["framework"]
    tensors, weights = arena["used"], arena["used"] + arena["weights"]
    end = max(weights, arena["nbytes"])
    places = {
        "tensors": (0, tensors),
        "weights": (tensors, weights),
        "free": (weights, end),
        "layers": (end, end + region["weights"]),
        "rest": (end + region["weights"], end + region["nbytes"]),
    }
    return places[field]
