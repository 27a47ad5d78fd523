"""What executors run, and what their memory holds."""

from __future__ import annotations

from collections import Counter
from functools import lru_cache
from itertools import groupby

from bokeh.models import ColumnDataSource, HoverTool, UIElement
from bokeh.transform import factor_cmap

from .. import glance
from ..glance import Occupant
from ..policy import FairPolicy
from ..watch import Facts
from .elements import (
    Pager,
    fill,
    plot,
    put,
    replace,
    seconds,
    table,
)
from .holdings import Holdings, arena_text, framework_text, fullness
from .look import ABSENT, COMPUTE, FAILED, LOAD, RUNS, TENANTS
from .page import Page

ROWS = 15
#: Cells of the map in one line.
ACROSS = 40

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
        self._holdings = Holdings()
        return [
            self._build_map(),
            self._pager.row,
            self._table,
            self._holdings.root,
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
        answers = {labels[executor]: facts.answers.get(executor) for executor in shown}
        self._holdings.draw(answers)

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
            "memory": [arena_text(facts.answers.get(e)) for e in ordered],
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
            found.sort(key=lambda e: -fullness(facts.answers.get(e)))
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
                    arena_text(answer),
                    framework_text(answer),
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


@lru_cache(maxsize=4096)
def _natural(text: str) -> list[tuple[bool, int, str]]:
    """A key by which worker 10 comes after worker 9."""
    parts = ["".join(group) for _, group in groupby(text, str.isdigit)]
    return [(p.isdigit(), int(p) if p.isdigit() else 0, p) for p in parts]


def _fn(occupant: Occupant | None) -> str:
    if occupant is None:
        return ""
    return f"{occupant.fn} ({occupant.steps} steps)" if occupant.steps > 1 else occupant.fn
