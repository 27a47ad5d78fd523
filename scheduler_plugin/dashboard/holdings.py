"""What executors hold, as their last answers say: memory by use, and models layer by layer."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from itertools import groupby
from typing import Any

from bokeh.layouts import row
from bokeh.models import ColumnDataSource, HoverTool, Legend, LegendItem, UIElement

from . import labels
from .elements import GIB, MIB, plot, put, replace, size
from .look import ABSENT, COMPUTE, LOAD, TRANSFER

#: Models beside each other.
MODELS = 10

#: An answer, see worker_plugin.holdings; None: there was none yet.
Answer = dict[str, Any] | None

#: Field, what it is, colour.
_MEMORY = (
    ("tensors", "arena: tensors", TRANSFER),
    ("weights", "arena: weights", LOAD),
    ("free", "arena: free", "#DDE9E4"),
    ("layers", "framework: weights", COMPUTE),
    ("rest", "framework: rest", "#DCE6EF"),
)


class Holdings:
    """Two plots with a line for each executor on the screen."""

    def __init__(self) -> None:
        self.root = row(self._build_memory(), self._build_models(), sizing_mode="stretch_width")

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

    def draw(self, answers: Mapping[str, Answer]) -> None:
        """answers: by the label of the executor, from the top."""
        height = 120 + 24 * max(3, len(answers))
        known = {label: answer for label, answer in answers.items() if answer is not None}
        lines = list(reversed(answers))
        self._draw_memory(known, lines, height)
        self._draw_models(known, lines, height + 30)

    def _draw_memory(
        self, answers: dict[str, dict[str, Any]], lines: list[str], height: int
    ) -> None:
        most = max(map(_whole, answers.values()), default=0)
        unit, name = (GIB, "GiB") if most >= GIB else (MIB, "MiB")
        data: dict[str, list[Any]] = {name: [] for name in self._bars.data}
        for field, kind, color in _MEMORY:
            for executor, answer in answers.items():
                left, right = _part(answer, field)
                data["executor"].append(executor)
                data["kind"].append(kind)
                data["left"].append(left / unit)
                data["right"].append(right / unit)
                data["color"].append(color)
                data["text"].append(size(right - left))
        put(self._memory, height=height)
        put(self._memory.xaxis[0], axis_label=name)
        put(self._memory.y_range, factors=lines)
        replace(self._bars, data)

    def _draw_models(
        self, answers: dict[str, dict[str, Any]], lines: list[str], height: int
    ) -> None:
        names = model_names(answers.values())
        count = Counter(r["model_key"] for answer in answers.values() for r in answer["models"])
        known = sorted(count, key=lambda key: (-count[key], names[key], key))[:MODELS]
        models = labels.of_models({key: names[key] for key in known})
        frames: dict[str, list[Any]] = {"model": [], "executor": [], "text": []}
        layers: dict[str, list[Any]] = {"left": [], "right": [], "executor": []}
        factors = list(models.values())
        for executor, answer in answers.items():
            for row_ in answer["models"]:
                key = row_["model_key"]
                if key not in models:
                    continue
                frames["model"].append(models[key])
                frames["executor"].append(executor)
                frames["text"].append(
                    f"{names[key]}: {row_['resident_layers']} of {row_['layers']} layers, "
                    f"{size(row_['resident_bytes'])} of {size(row_['nbytes'])}"
                )
                # A category is 1 wide and begins at its index; the frame leaves 0.04 on each side.
                begin, width = factors.index(models[key]) + 0.04, 0.92 / max(1, row_["layers"])
                for first, last in _stretches(row_["by_layer"]):
                    layers["left"].append(begin + width * first)
                    layers["right"].append(begin + width * last)
                    layers["executor"].append(executor)
        title = "Models in their memory, layer by layer"
        if len(count) > MODELS:
            title += f" (the {MODELS} most frequent of {len(count)})"
        put(self._models.title, text=title)
        put(self._models, height=height, visible=bool(frames["model"]))
        put(self._models.x_range, factors=factors)
        put(self._models.y_range, factors=lines)
        replace(self._frames, frames)
        replace(self._layers, layers)


def model_names(answers: Iterable[dict[str, Any]]) -> dict[str, str]:
    """By key, what workers call a model. Those that use it for several things call it by the last one:
    the first in the alphabet is taken, so that names stay."""
    names: dict[str, str] = {}
    for answer in answers:
        for each in answer["models"]:
            key, name = each["model_key"], each["model"]
            names[key] = min(name, names.get(key, name))
    return names


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


def fullness(answer: Answer) -> float:
    if answer is None:
        return -1.0
    arena = answer["arena"]
    return float((arena["used"] + arena["weights"]) / max(1, arena["nbytes"]))


def arena_text(answer: Answer) -> str:
    if answer is None:
        return ""
    arena = answer["arena"]
    return f"{size(arena['used'] + arena['weights'])} of {size(arena['nbytes'])}"


def framework_text(answer: Answer) -> str:
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
