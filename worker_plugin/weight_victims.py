"""In which order layers are evicted, and how few of them make room.

Elastic: (a) idle weights, least recently used first, layers beyond their prefix, last layer first: their
load hides behind compute; (b) what else is idle; (c) the wanting run's own layers, furthest next use
first; (d) for a layer somebody waits for, those of other runs. The part of a prefix that the run's share
of the memory can hold goes after everything else in (c) and (d). Whole models or workflows: units that
no run uses, least recently used first. Pinned layers and the one being copied in never.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator, Mapping
from typing import NamedTuple

from .weight_books import Books, Region, Weights
from .weight_runs import Run

#: Layers ahead of the cursor for which a run's own layers may go.
AHEAD = 2
#: Layers of a streaming run that are no prefix: one computes while another is copied in.
BUFFERS = 2

#: What goes together.
Group = list[tuple[Weights, int]]


class Want(NamedTuple):
    """A layer that a run wants. distance: layers from now until it executes it. urgent: it waits."""

    run: Run
    weights: Weights
    layer: int
    distance: int
    urgent: bool


def elastic(books: Books, runs: Mapping[int, Run], want: Want | None) -> Iterator[Group]:
    """want: who needs the room; None for somebody else, who may have all that is not pinned."""
    yield from _idle(books, beyond=True)
    yield from _idle(books, beyond=False)
    if want is None or want.urgent or want.distance <= AHEAD:
        yield from _active(books, runs, want)


def _idle(books: Books, beyond: bool) -> Iterator[Group]:
    """Idle weights' layers beyond their prefix, or within it and their root layers."""
    if not any(books.idle.values()):
        return
    for weights in books.weights.values():
        if weights.users:
            continue
        there, prefix = weights.there, weights.prefix
        within = len(there) if prefix is None else bisect_left(there, prefix)
        if beyond and within == len(there):
            continue
        positions = there[within:] if beyond else there[:within]
        for position in reversed(positions):
            layer = weights.order[position]
            if books.evictable(weights, layer):
                yield [(weights, layer)]
        if not beyond:
            for layer in weights.roots:
                if books.evictable(weights, layer):
                    yield [(weights, layer)]


def _active(books: Books, runs: Mapping[int, Run], want: Want | None) -> Iterator[Group]:
    """Layers of weights that runs use, in order of rank, then the furthest next use first."""
    shares = max(1, sum(run.admitted for run in runs.values()))
    share = sum(books.capacity.values()) // shares
    bases = [(run, run.bases()) for run in runs.values()]
    found: list[tuple[int, int, Weights, int]] = []
    for weights in books.weights.values():
        if not weights.users or not any(weights.nbytes.values()):
            continue
        users = [(run, base[weights.name]) for run, base in bases if weights.name in base]
        kept = _kept_prefix(weights, share)
        passed = all(
            run.current is not weights and weights.name in run.begun for run, _ in users
        )  # such as the text encoder of a run that denoises: nothing of it is worth a stall
        own = want is not None and any(run is want.run for run, _ in users)
        for layer in weights.from_the_last():
            if not books.evictable(weights, layer):
                continue
            distance = min(run.distance(weights, layer, base) for run, base in users)
            protected = weights.position[layer] < kept and not passed
            if want is None:
                rank = int(protected)
            elif distance <= want.distance:
                rank = 4
            else:
                rank = 2 * protected + (not own)
            if want is None or want.urgent or rank == 0:
                found.append((rank, -distance, weights, layer))
    found.sort(key=lambda entry: entry[:2])
    for _, _, weights, layer in found:
        yield [(weights, layer)]


def _kept_prefix(weights: Weights, share: int) -> int:
    """How many first layers of its prefix fit into a share of the memory, beside its buffers unless
    all of it fits."""
    room = share - weights.root_bytes
    if weights.cumulative[-1] > room:
        room -= BUFFERS * weights.largest
    fitting = max(0, bisect_right(weights.cumulative, room) - 1)
    return fitting if weights.prefix is None else min(fitting, weights.prefix)


def whole(books: Books) -> Iterator[Group]:
    """Units without a run, least recently used first; then what else is not pinned, by weights."""
    units: dict[str, list[Weights]] = {}
    for weights in reversed(books.weights.values()):
        units.setdefault(weights.unit, []).append(weights)
    for unit in reversed(units.values()):
        if not any(weights.users for weights in unit):
            group = [pair for weights in unit for pair in _all_of(books, weights)]
            if group:
                yield group
    in_use = {weights.unit for weights in books.weights.values() if weights.users}
    for weights in sorted(books.weights.values(), key=lambda weights: weights.users > 0):
        if weights.unit in in_use:
            group = _all_of(books, weights)
            if group:
                yield group


def _all_of(books: Books, weights: Weights) -> Group:
    if not any(weights.nbytes.values()):
        return []
    return [
        (weights, layer) for layer in weights.from_the_last() if books.evictable(weights, layer)
    ]


def fewest(groups: Iterable[Group], needed: Mapping[Region, int]) -> tuple[Region, Group] | None:
    """The region that the first few groups make room in, and just those of them that do.

    needed: bytes to free, at least 1, in either of these regions. None when all groups are too few.
    """
    freed = dict.fromkeys(needed, 0)
    chosen: dict[Region, list[tuple[int, Group]]] = {region: [] for region in needed}
    for group in groups:
        in_group: dict[Region, int] = {}
        for weights, layer in group:
            there = weights.region[layer]
            if there in freed:
                in_group[there] = in_group.get(there, 0) + weights.sizes[layer]
        for region, nbytes in in_group.items():
            freed[region] += nbytes
            chosen[region].append((nbytes, group))
            if freed[region] >= needed[region]:
                return region, _without_the_needless(chosen[region], freed[region] - needed[region])
    return None


def _without_the_needless(chosen: list[tuple[int, Group]], excess: int) -> Group:
    """Spares what a later, larger one has made needless, the most valuable first."""
    taken: list[Group] = []
    for nbytes, group in reversed(chosen):
        if nbytes <= excess:
            excess -= nbytes
        else:
            taken.append(group)
    return [pair for group in reversed(taken) for pair in group]
