"""How many first layers must be resident so that copying in the others hides behind compute.

Layers that are not resident are copied in one after the other, in order of execution, from the start of
a run; a layer computes once it is there and all before it have computed. Seconds throughout.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from math import isfinite

from st2i_dask.errors import PolicyError

#: Stalls below this share of all the loading are rounding errors of sums.
_ROUNDING = 1e-12


def resident_prefix(load_s: Sequence[float], compute_s: Sequence[float]) -> int:
    """The fewest first layers that must be resident so that a run stalls for no load. O(layers).

    load_s, compute_s: per layer, in order of execution, finite and not negative, else PolicyError.
    Equal layers whose load is slower than their compute give Eq. 2 of the paper.

    >>> resident_prefix([3.0] * 10, [1.0] * 10)
    7
    >>> resident_prefix([1.0] * 10, [3.0] * 10)
    1
    """
    _refuse_unusable(load_s, compute_s)
    loaded = [0.0, *accumulate(load_s)]
    computed = [0.0, *accumulate(compute_s)]
    rounding = _ROUNDING * loaded[-1]
    # Layer j >= k is there in time iff loaded[j + 1] - loaded[k] <= computed[j]. With each further
    # resident layer the left side of all of these only falls: the last k that fails settles it.
    latest = 0.0
    for k in reversed(range(len(load_s))):
        latest = max(latest, loaded[k + 1] - computed[k])
        if loaded[k] + rounding < latest:
            return k + 1
    return 0


def exposed_s(
    load_s: Sequence[float], compute_s: Sequence[float], resident: Sequence[bool]
) -> float:
    """Seconds a run stalls when these layers are resident at its start. O(layers).

    As for `resident_prefix`; `resident` has one entry per layer, else PolicyError.

    >>> exposed_s([3.0, 3.0, 3.0], [1.0, 1.0, 1.0], [True, False, False])
    4.0
    """
    _refuse_unusable(load_s, compute_s)
    if len(resident) != len(load_s):
        raise PolicyError(
            f"residency of {len(resident)} layers for {len(load_s)} layers; give one per layer"
        )
    stall = loaded = computed = 0.0
    for load, compute, there in zip(load_s, compute_s, resident, strict=True):
        if not there:
            loaded += load
            stall = max(stall, loaded - computed)
        computed += compute
    return stall if stall > _ROUNDING * sum(load_s) else 0.0


def _refuse_unusable(load_s: Sequence[float], compute_s: Sequence[float]) -> None:
    if len(load_s) != len(compute_s):
        raise PolicyError(
            f"{len(load_s)} load times for {len(compute_s)} compute times; give both per layer"
        )
    for seconds in (*load_s, *compute_s):
        if not (isfinite(seconds) and seconds >= 0):
            raise PolicyError(f"a layer takes {seconds} s; give finite seconds, at least 0")
