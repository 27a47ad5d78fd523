"""Elements that several pages use: plots, tables of one screen, and the row of controls that pages them."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

from bokeh.layouts import row
from bokeh.models import (
    Button,
    ColumnDataSource,
    DataTable,
    Div,
    HTMLTemplateFormatter,
    Select,
    TableColumn,
    TextInput,
)
from bokeh.plotting import figure

from .look import STYLE

GIB = float(1 << 30)
MIB = float(1 << 20)


def plot(title: str, height: int, **options: Any) -> figure:
    """A figure as wide as its place; the tools show when the pointer is on it."""
    options = {"tools": "pan,box_zoom,reset,save", "sizing_mode": "stretch_width", **options}
    return figure(title=title, height=height, **options)


#: Field, heading and width in pixels.
Columns = Sequence[tuple[str, str, int]]


def table(columns: Columns, *, right: Sequence[str] = ()) -> DataTable:
    """A table of texts, as high as the rows that `fill` gives it. right: fields aligned to the right."""
    source = ColumnDataSource({field: [] for field, _, _ in columns})
    numbers = HTMLTemplateFormatter(template='<div style="text-align:right"><%- value %></div>')
    made = [
        TableColumn(
            field=field,
            title=heading,
            width=width,
            sortable=False,
            **({"formatter": numbers} if field in right else {}),
        )
        for field, heading, width in columns
    ]
    return DataTable(
        source=source,
        columns=made,
        index_position=None,
        height=_height(1),
        sizing_mode="stretch_width",
        autosize_mode="force_fit",
        selectable=False,
        reorderable=False,
        stylesheets=[".bk-data-table, .slick-header { z-index: 0; }"],
    )


def fill(widget: DataTable, columns: Columns, rows: Sequence[Sequence[str]]) -> None:
    """Show these rows: a text for each column."""
    data = {field: [row[i] for row in rows] for i, (field, _, _) in enumerate(columns)}
    if widget.source.data == data:
        return
    put(widget, height=_height(len(rows)))
    widget.source.data = data
    # BokehJS draws a table again when its view changes, and takes other data in as many rows for no
    # change of it.
    widget.view.tags = [time.monotonic()]


def _height(rows: int) -> int:
    return 30 + 25 * max(1, rows)


class Pager:
    """Find, order, and turn pages of a long list: only what is on the screen is sent to it.

    changed: called when the viewer wants something else. orders: names to choose from.
    """

    def __init__(
        self, size: int, changed: Callable[[], None], find: str, orders: Sequence[str] = ()
    ) -> None:
        self.size = size
        self._changed = changed
        self._first = 0
        self._find = TextInput(placeholder=find, width=220)
        self._order = Select(options=list(orders), value=orders[0] if orders else "", width=230)
        self._before = Button(label="\u2039 previous", width=90)
        self._after = Button(label="next \u203a", width=90)
        self._shown = Div(text="", stylesheets=[STYLE], width=180)
        self._find.on_change("value", self._restart)
        self._order.on_change("value", self._restart)
        self._before.on_click(lambda: self._turn(-1))
        self._after.on_click(lambda: self._turn(1))
        controls = [self._find, *([self._order] if orders else [])]
        self.row = row(
            *controls, self._before, self._after, self._shown, sizing_mode="stretch_width"
        )

    @property
    def wanted(self) -> str:
        """The text to find, maybe empty."""
        return str(self._find.value).strip()

    @property
    def order(self) -> str:
        return str(self._order.value)

    def part(self, total: int, what: str) -> slice:
        """Which of `total` things are on the screen; says so beside the buttons."""
        self._first = max(0, min(self._first, (total - 1) // self.size * self.size))
        last = min(total, self._first + self.size)
        numbers = f"{self._first + 1} to {last} of {total:,}" if total else "none"
        put(self._shown, text=f'<div class="hint">{numbers} {what}</div>')
        put(self._before, disabled=self._first == 0)
        put(self._after, disabled=last >= total)
        return slice(self._first, last)

    def _restart(self, attribute: str, old: Any, new: Any) -> None:
        self._first = 0
        self._changed()

    def _turn(self, pages: int) -> None:
        self._first = max(0, self._first + pages * self.size)
        self._changed()


def put(model: Any, **properties: Any) -> None:
    """Set what differs: nothing is sent for the rest."""
    for name, value in properties.items():
        if getattr(model, name) != value:
            setattr(model, name, value)


def replace(source: ColumnDataSource, data: dict[str, list[Any]]) -> None:
    """Give the source this data, if it is another."""
    if source.data != data:
        source.data = data


def cut(text: str, most: int) -> str:
    """The text, or as much of it as fits.

    >>> cut("a-tenant-with-a-long-name", 10)
    'a-tenan...'
    """
    return text if len(text) <= most else text[: most - 3] + "..."


def seconds(value: float) -> str:
    """
    >>> seconds(0.0421), seconds(3.21), seconds(75), seconds(7300)
    ('42 ms', '3.2 s', '75 s', '2 h 2 min')
    """
    if value < 1:
        return f"{1e3 * value:.0f} ms"
    if value < 10:
        return f"{value:.1f} s"
    if value < 120:
        return f"{value:.0f} s"
    minutes = int(value // 60)
    return f"{minutes} min" if minutes < 120 else f"{minutes // 60} h {minutes % 60} min"


def size(nbytes: float) -> str:
    """
    >>> size(3 << 20), size(5 << 30)
    ('3.0 MiB', '5.0 GiB')
    """
    return f"{nbytes / GIB:.1f} GiB" if nbytes >= GIB else f"{nbytes / MIB:.1f} MiB"
