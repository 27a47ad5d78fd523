"""Whether layers can lie in two regions at once. Pure arithmetic on bytes."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from .weight_books import REGIONS, Region


def divides(room: Mapping[Region, int], fixed: Sequence[int], largest: int) -> bool:
    """Whether the fixed ones lie somewhere, none cut in two, so that there is still room for one of
    `largest` bytes. O(2^len(fixed)): models have few root layers.
    """
    first, second = (room[region] for region in REGIONS)
    total = sum(fixed)
    sums = {0}
    for size in fixed:
        sums |= {s + size for s in sums if s + size <= first}
    return any(
        total - s <= second and largest <= max(first - s, second - (total - s))
        for s in sums
        if s <= first
    )


def packs(room: Mapping[Region, int], sizes: Iterable[int]) -> bool:
    """Whether all of them lie in the regions when each in turn takes the first region with room."""
    left = dict(room)
    for size in sizes:
        region = next((region for region in REGIONS if size <= left[region]), None)
        if region is None:
            return False
        left[region] -= size
    return True
