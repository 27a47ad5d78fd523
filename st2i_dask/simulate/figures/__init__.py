"""The paper's figures, each a module here: `run(effort) -> Figure`, and a first line that says what.

fig = run("10", QUICK)
fig.write(Path("out"))                   figure-10.csv, figure-10.png if matplotlib is there
"""

from __future__ import annotations

import csv
import importlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

from ...errors import ParameterError

#: Modules by the paper's number.
NAMES = {
    "9-right": "service_difference",
    "10": "setting_1",
    "11": "setting_2",
    "12-left": "loading",
    "12-right": "parallel",
    "13-left": "regions",
    "13-right": "slack",
    "8.5": "overhead",
    "A": "host_cache",
}


class Effort(NamedTuple):
    """seconds: of arrivals in each run. dense: all points of a sweep, not every other one."""

    seconds: float
    dense: bool
    processes: int | None = None

    def some(self, points: Sequence[float], few: Sequence[float]) -> Sequence[float]:
        return points if self.dense else few


FULL = Effort(180.0, True)
QUICK = Effort(40.0, False)


class Claim(NamedTuple):
    """A line of the table. how: simulated, live, or not possible here and why; what explains it."""

    what: str
    paper: str
    ours: str
    how: str


@dataclass
class Figure:
    """rows: under `columns`. draw: with matplotlib's module-free Figure; None: nothing to draw."""

    name: str
    title: str
    columns: tuple[str, ...]
    rows: list[tuple[Any, ...]]
    claims: list[Claim]
    draw: Callable[[Any], None] | None = None
    size: tuple[float, float] = (8.0, 4.2)
    notes: list[str] = field(default_factory=list)

    @property
    def stem(self) -> str:
        return f"figure-{self.name.replace('.', '-').lower()}"

    def write(self, folder: Path) -> list[Path]:
        """The CSV, and the plot where matplotlib is installed."""
        folder.mkdir(parents=True, exist_ok=True)
        made = [folder / f"{self.stem}.csv"]
        with made[0].open("w", newline="") as file:
            out = csv.writer(file, lineterminator="\n")
            out.writerow(self.columns)
            out.writerows([[_rounded(cell) for cell in row] for row in self.rows])
        if self.draw is not None and find_spec("matplotlib") is not None:
            from matplotlib.figure import Figure as Canvas

            canvas = Canvas(figsize=self.size, dpi=110, layout="constrained")
            self.draw(canvas)
            made.append(folder / f"{self.stem}.png")
            canvas.savefig(made[1], format="png")
        return made


def run(name: str, effort: Effort = FULL) -> Figure:
    """ParameterError lists the names."""
    figure: Figure = _module(name).run(effort)
    return figure


def describe(name: str) -> str:
    """First line of its docstring."""
    return (_module(name).__doc__ or "").partition("\n")[0]


def _module(name: str) -> Any:
    if name not in NAMES:
        raise ParameterError(f"no figure is called {name!r}; there are {', '.join(NAMES)}")
    return importlib.import_module(f"{__name__}.{NAMES[name]}")


def _rounded(cell: Any) -> Any:
    return f"{cell:.6g}" if isinstance(cell, float) else cell
