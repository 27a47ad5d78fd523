"""SLO attainment by rate, SLO, number of executors and burstiness, and memory use: figures 10 and 11.

Every system serves the same requests. The rivals serve them with FIFO, as the paper's frameworks do,
and once more with shortest job first, which they could do if they knew how long jobs take: the claims
compare with both. Ours runs with a slack of 20 s, with which the paper's figure 13 attains most.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from itertools import pairwise
from typing import Any

from .. import h800
from ..experiment import SLO_SCALES, Outcome, Point, measure, spread
from ..systems import MCACHE, NOCACHE, OURS, WCACHE, System
from . import Claim, Effort, Figure

EVALUATED = OURS.with_slack(20.0)
FIFO = (MCACHE, WCACHE, NOCACHE)
SJF = tuple(system.with_order("sjf") for system in FIFO)
SERIES: tuple[System, ...] = (EVALUATED, *FIFO, *SJF)
TARGET = 0.9

RATES = (0.25, 0.5, 0.75, 1.0, 1.15, 1.3, 1.5)
EXECUTORS = (12, 16, 20, 24, 28, 32, 40, 48)
VARIATIONS = (1.0, 2.0, 3.0, 4.0, 5.0)
#: Where a factor of the paper's is not reached.
WHY_SHORT = "these rivals place requests by what is cached and load from pinned memory"
COLOURS = {"ours": "tab:green", "mcache": "tab:blue", "wcache": "tab:orange", "nocache": "tab:red"}


def points(setting: str, effort: Effort) -> list[Point]:
    """All that is run: every sweep passes through the default point once."""
    default = Point(EVALUATED, setting, seconds=effort.seconds)
    swept = [default]
    swept += [default.at(rate=rate) for rate in effort.some(RATES, (0.5, 1.3))]
    swept += [default.at(executors=int(n)) for n in effort.some(EXECUTORS, (20, 28))]
    swept += [default.at(cv_scale=cv) for cv in effort.some(VARIATIONS, (4.0,))]
    swept = [default, *(point for point in swept if point != default)]
    order = sorted(swept, key=lambda p: (p.rate, p.executors, p.cv_scale))
    found = [point.at(system=system) for point in order for system in SERIES]
    # The same default point with the loads that were measured without pinned memory.
    return found + [default.at(system=s, profile=h800.UNPINNED) for s in SERIES]


def sweep(setting: str, number: str, paper: dict[str, str], effort: Effort) -> Figure:
    """Everything of one setting."""
    # The long runs first: no process waits for one at the end.
    todo = sorted(points(setting, effort), key=lambda p: (p.system.whole, -p.rate))
    outcomes = spread(measure, todo, effort.processes)
    columns = (
        *("link", "system", "order", "rate", "executors", "cv_scale", "slo_scale", "attainment"),
        *("p50_s", "p99_s", "memory_share", "accelerated", "loaded_gb_per_request"),
    )
    rows = []
    for o in sorted(outcomes, key=lambda o: _place(o.point)):
        p = o.point
        head = (p.profile.device, p.system.name, p.system.order, p.rate, p.executors, p.cv_scale)
        tail = (o.p50_s, o.p99_s, o.memory_share, o.accelerated, o.loaded_gb_per_request)
        rows += [(*head, scale, attained, *tail) for scale, attained in o.attained.items()]
    found = Sweeps(setting, outcomes)
    return Figure(
        number,
        f"Setting {setting[-1]}: SLO attainment, ours and monolithic functions",
        columns,
        rows,
        found.claims(number, paper),
        found.draw,
        (13.0, 6.6),
    )


def _place(point: Point) -> tuple[Any, ...]:
    return (
        point.profile.device,
        point.rate,
        point.executors,
        point.cv_scale,
        point.system.name,
        point.system.order,
    )


class Sweeps:
    """The outcomes of a setting, asked along one axis at a time."""

    def __init__(self, setting: str, outcomes: Iterable[Outcome]) -> None:
        self.outcomes = list(outcomes)
        self.setting = setting
        self._default = Point(EVALUATED, setting, seconds=self.outcomes[0].point.seconds)

    def along(self, system: System, axis: str) -> list[tuple[float, Outcome]]:
        """(value, outcome) where everything but `axis` is the default, ascending."""
        found = []
        for outcome in self.outcomes:
            value = getattr(outcome.point, axis)
            if outcome.point == self._default.at(system=system, **{axis: value}):
                found.append((float(value), outcome))
        return sorted(found, key=lambda pair: pair[0])

    def default(self, system: System, unpinned: bool = False) -> Outcome:
        profile = h800.UNPINNED if unpinned else h800.PROFILE
        wanted = self._default.at(system=system, profile=profile)
        return next(o for o in self.outcomes if o.point == wanted)

    def last(self, axis: str, sign: int = 1) -> float:
        """The largest value of the sweep; with sign -1 the smallest."""
        return sign * max(sign * value for value, _ in self.along(EVALUATED, axis))

    # Where the target is met

    def most(self, system: System, axis: str) -> float | None:
        """The largest value up to which attainment stays at the target, between points linear."""
        return reached([(v, o.attainment) for v, o in self.along(system, axis)])

    def fewest(self, system: System) -> float | None:
        """The smallest number of executors that reach it."""
        down = [(-v, o.attainment) for v, o in reversed(self.along(system, "executors"))]
        found = reached(down)
        return None if found is None else -found

    def tightest(self, system: System) -> float | None:
        """The smallest SLO scale at the default point."""
        attained = self.default(system).attained
        found = reached([(-scale, attained[scale]) for scale in sorted(SLO_SCALES, reverse=True)])
        return None if found is None else -found

    def claims(self, number: str, paper: dict[str, str]) -> list[Claim]:

        def compared(question: Callable[[System], float | None], more: bool, limit: float) -> str:
            ours, fifo, sjf = (question(s) for s in (EVALUATED, FIFO[0], SJF[0]))
            shown = [_shown(value, more, limit) for value in (ours, fifo, sjf)]
            text = f"ours {shown[0]}, MCache {shown[1]} with FIFO, {shown[2]} with SJF"
            ratios = [_ratio(ours, other, more) for other in (fifo, sjf)]
            return f"{text}: {ratios[0]} and {ratios[1]}"

        def how(question: Callable[[System], float | None], more: bool, factor: float) -> str:
            ours, fifo = question(EVALUATED), question(FIFO[0])
            if ours and (not fifo or (ours / fifo if more else fifo / ours) >= factor):
                return "simulated"
            return f"simulated; short of the paper's {factor:g}x with FIFO: {WHY_SHORT}"

        default = {s: self.default(s).attainment for s in SERIES}
        listed = ", ".join(
            f"{s.name} {100 * default[s]:.0f} %"
            + (f" ({100 * default[t]:.0f} % with SJF)" if t is not s else "")
            for s, t in zip((EVALUATED, *FIFO), (EVALUATED, *SJF), strict=True)
        )
        slow = {s: self.default(s, True).attainment for s in SERIES}
        listed_slow = ", ".join(f"{s.name} {100 * slow[s]:.0f} %" for s in (EVALUATED, *FIFO))
        kept = [self.default(s).memory_share for s in (EVALUATED, *FIFO)]
        shares = ", ".join(f"{100 * share:.0f} %" for share in kept)
        name = f"Figure {number}"
        return [
            Claim(
                f"{name}: attainment at the default point", paper["default"], listed, "simulated"
            ),
            Claim(
                f"{name}a: largest rate scale at 90 %",
                paper["rate"],
                compared(lambda s: self.most(s, "rate"), True, self.last("rate")),
                how(lambda s: self.most(s, "rate"), True, 2.0),
            ),
            Claim(
                f"{name}b: tightest SLO scale at 90 %",
                paper["slo"],
                compared(self.tightest, False, min(SLO_SCALES)),
                how(self.tightest, False, 7.0),
            ),
            Claim(
                f"{name}c: fewest executors at 90 %",
                paper["executors"],
                compared(self.fewest, False, self.last("executors", -1)),
                how(self.fewest, False, 3.0),
            ),
            Claim(
                f"{name}d: largest CoV scale at 90 %",
                paper["cv"],
                compared(lambda s: self.most(s, "cv_scale"), True, self.last("cv_scale")),
                how(lambda s: self.most(s, "cv_scale"), True, 2.0),
            ),
            Claim(
                f"{name}e: memory that holds weights (ours, MCache, WCache, NoCache)",
                paper["memory"],
                shares,
                "simulated",
            ),
            Claim(
                f"{name}: runs that hardly wait for a load",
                paper["accelerated"],
                f"{100 * self.default(EVALUATED).accelerated:.0f} %",
                "simulated",
            ),
            Claim(
                f"{name}: the default point, loads at 8 GB/s",
                "-",
                listed_slow,
                "simulated; from memory that is not pinned, 4 times as long. An executor that would have to "
                "load waits for one that has the model, if that is free within a tenth of the load",
            ),
        ]

    def draw(self, canvas: Any) -> None:
        axes = canvas.subplots(2, 3)
        panels = [
            ("rate", "rate scale", axes[0][0]),
            ("executors", "executors", axes[0][2]),
            ("cv_scale", "CoV scale", axes[1][0]),
        ]
        for axis, label, panel in panels:
            for system in SERIES:
                line = self.along(system, axis)
                _line(panel, system, [v for v, _ in line], [o.attainment for _, o in line])
            _panel(panel, label)
        for system in SERIES:
            attained = self.default(system).attained
            _line(axes[0][1], system, list(attained), list(attained.values()))
        _panel(axes[0][1], "SLO scale")
        for system in (EVALUATED, *FIFO):
            line = self.along(system, "rate")
            _line(axes[1][1], system, [v for v, _ in line], [o.memory_share for _, o in line])
        _panel(axes[1][1], "rate scale", "memory that holds weights (%)", None)
        axes[1][2].axis("off")
        handles, labels = axes[0][0].get_legend_handles_labels()
        axes[1][2].legend(handles, labels, loc="center", frameon=False)
        canvas.suptitle(
            f"{self.setting}: requests within their deadline, 32 executors, SLO scale 3"
        )


def reached(line: list[tuple[float, float]], target: float = TARGET) -> float | None:
    """How far along the line attainment stays at the target; None if it never is there."""
    if not line or line[0][1] < target:
        return None
    for (at, before), (next_at, after) in pairwise(line):
        if after < target:
            return at + (next_at - at) * (before - target) / (before - after)
    return line[-1][0]


def _shown(value: float | None, more: bool, limit: float) -> str:
    """limit: the sweep's own end, beyond which nothing is known."""
    if value is None:
        return "never"
    if value == limit:
        return f"{'at least' if more else 'at most'} {value:.3g}"
    return f"{value:.3g}"


def _ratio(ours: float | None, other: float | None, more: bool) -> str:
    if ours is None or other is None:
        return "no ratio"
    return f"{(ours / other if more else other / ours):.2g}x"


def _line(panel: Any, system: System, x: list[float], y: list[float]) -> None:
    style = "--" if system.order == "sjf" else "-"
    label = system.name + ("" if system.order == "fair" else f", {system.order.upper()}")
    panel.plot(
        x, [100 * v for v in y], style, color=COLOURS[system.name], marker="o", ms=3, label=label
    )


def _panel(panel: Any, x: str, y: str = "attainment (%)", target: float | None = TARGET) -> None:
    panel.set_xlabel(x)
    panel.set_ylabel(y)
    panel.set_ylim(0, 103)
    panel.grid(alpha=0.3)
    if target is not None:
        panel.axhline(100 * target, color="black", lw=0.6, ls=":")
