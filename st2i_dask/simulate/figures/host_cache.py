"""Appendix A: how many workflows in host memory serve how many requests."""

from __future__ import annotations

import os
from collections import Counter, OrderedDict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from .. import generate, traces
from ..workload import POPULARITY
from . import Claim, Effort, Figure

#: Read in place, in the folder of traces that the variable ST2I_TRACES names; without it a generated
#: trace of its shape stands in.
TRACE = Path(os.environ.get("ST2I_TRACES", "traces"), "genai_trace", "requests.csv")
SIZES = (1, 2, 3, 5, 8, 10, 12, 15, 20, 25, 30, 40)


def run(effort: Effort) -> Figure:
    asked = _trace()
    source = "Alibaba's production trace" if asked else "a generated trace of its shape"
    kinds = asked or _generated()
    rows = [(n, lru_misses(kinds, n), lfu_misses(kinds, n)) for n in SIZES]
    at = {n: 100 * lru for n, lru, _ in rows}
    lfu = {n: 100 * misses for n, _, misses in rows}
    claims = [
        Claim(
            "Appendix A: miss rate with 10 and 15 workflows in host memory (LRU)",
            "0.37 %, 0.09 %",
            f"{at[10]:.1f} %, {at[15]:.1f} % (LFU {lfu[10]:.1f} %, {lfu[15]:.1f} %); "
            f"99 % are served with {next((n for n in SIZES if at[n] <= 1), '> 40')}",
            f"simulated with {source}, {len(set(kinds))} workflows; the paper's own trace is skewed more",
        )
    ]

    def draw(canvas: Any) -> None:
        axes = canvas.subplots()
        axes.plot(SIZES, [100 * r[1] for r in rows], "o-", label="LRU")
        axes.plot(SIZES, [100 * r[2] for r in rows], "s--", label="LFU")
        axes.set_xlabel("workflows in host memory")
        axes.set_ylabel("misses (%)")
        axes.set_ylim(bottom=0)
        axes.grid(alpha=0.3)
        axes.legend()

    return Figure("A", f"Host memory, {source}", ("workflows", "lru", "lfu"), rows, claims, draw)


def lru_misses(kinds: Sequence[str], size: int) -> float:
    """Share of requests whose workflow is not among the `size` last used."""
    kept: OrderedDict[str, None] = OrderedDict()
    misses = 0
    for kind in kinds:
        misses += kind not in kept
        kept[kind] = None
        kept.move_to_end(kind)
        if len(kept) > size:
            kept.popitem(last=False)
    return misses / len(kinds)


def lfu_misses(kinds: Sequence[str], size: int) -> float:
    """The same with the `size` most often used so far."""
    uses: Counter[str] = Counter()
    kept: dict[str, None] = {}  # in order of arrival: among equals the one that came first goes
    misses = 0
    for kind in kinds:
        uses[kind] += 1
        if kind in kept:
            continue
        misses += 1
        if len(kept) == size:
            del kept[min(kept, key=lambda k: uses[k])]
        kept[kind] = None
    return misses / len(kinds)


def _trace() -> list[str]:
    if not TRACE.is_file():
        return []
    return [asked.workflow for asked in traces.read(TRACE)]


def _generated() -> list[str]:
    rest = 1 - sum(POPULARITY)
    shares = {f"m{n}": share for n, share in enumerate(POPULARITY)}
    shares |= {f"r{n}": rest / 67 for n in range(67)}
    return [a.tenant for a in generate.production(23, 1, shares=shares)]
