"""What one worker holds, in one answer: arena, framework region, and every model layer by layer."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from .arena import Arena
from .weights import WeightStore


def holdings(arena: Arena, models: WeightStore) -> dict[str, Any]:
    """arena: see ArenaStatistics. framework: bytes of torch's own region within the budget, and how
    many of them hold layers (what tensors and activations there take is torch's own affair). models: see
    WeightStore.models."""
    statistics = arena.statistics()
    outside = max(0, models.memory - statistics.nbytes)
    free = models.free_bytes()
    weights = max(0, models.memory - free - statistics.used - statistics.weights)
    return {
        "arena": asdict(statistics),
        "framework": {"nbytes": outside, "weights": min(outside, weights)},
        "models": models.models(),
    }
