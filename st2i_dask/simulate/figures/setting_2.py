"""Figure 11: setting 2, twenty workflows, fourteen of them with a ControlNet or a LoRA."""

from __future__ import annotations

from . import Effort, Figure
from .sweeps import sweep

PAPER = {
    "default": "ours above 90 %, then MCache, WCache, NoCache",
    "rate": "ours above 1.5, MCache 85 % there",
    "slo": "ours 8.0 (at 97 %), MCache 16, WCache 18",
    "executors": "ours 16 (at 98 %), the rivals 24 and more",
    "cv": "ours 5.0, MCache below 2.5",
    "memory": "at rate 1.75: 84 %, 62 %, 41 %, 30 %",
    "accelerated": "86 % of loads",
}


def run(effort: Effort) -> Figure:
    return sweep("S2", "11", PAPER, effort)
