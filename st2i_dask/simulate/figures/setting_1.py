"""Figure 10: setting 1, five basic workflows."""

from __future__ import annotations

from . import Effort, Figure
from .sweeps import sweep

PAPER = {
    "default": "ours 100 %, MCache below 90 %",
    "rate": "ours 1.5 (at 100 %), MCache below 1.0; up to 2x in all",
    "slo": "ours 3.0 (at 100 %), MCache and WCache 24: up to 7x in all",
    "executors": "ours 8, the rivals 24 to 32: 3x",
    "cv": "ours 4.0, MCache 2.4 at most: 2x",
    "memory": "at rate 1.5: 88 %, 71 %, 29 %, 13 %",
    "accelerated": "99 % of loads",
}


def run(effort: Effort) -> Figure:
    return sweep("S1", "10", PAPER, effort)
