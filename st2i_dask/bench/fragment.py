"""Fragment: two hours of loading and evicting in full memory: layers that find no room.

Virtual time, the real policy, the real allocator in the arena; no bytes are moved. Twenty models of real
layer sizes, at Zipf popularity, one pass each, loads at 25 GB/s throughout; meanwhile tensors come and
go in the arena. The framework region is virtual memory, where a block needs free pages and no gap; in
the arena a layer takes several blocks where no gap is large enough, as on the host heap.
Rivals: one block for each layer, as in device memory over NVSHMEM, and with it the arena first, a block
for each tensor, or the buddy; that in both regions; and virtual memory in both: what that loads is what
all the others can reach.
Found: no layer is refused, and what is loaded is within 0.1 % of the least; with one block each, a third
of the attempts is refused. A layer in the arena takes 2.5 blocks on average, all layers there 232 at
most. Tensors, which other workers read, need one block each: of these attempts 1.4 % find their gap only
after a layer has made way; none goes without.
"""

from __future__ import annotations

import math
from typing import Any

from worker_plugin.weight_cache import REGIONS

from ._churn import Churn

SECONDS, RIVAL_SECONDS = 7200.0, 40.0


def run(seconds: float = SECONDS, rival_seconds: float = RIVAL_SECONDS) -> dict[str, Any]:
    """`failed`: attempts to place a layer that found no gap though the free bytes of its region would
    do; `failed_tensors`: the same of tensors; shares are of all attempts. `fallbacks`: tensors that
    found none after evictions either.

    `fill`: bytes of weights and tensors per byte of memory, on average since it was full. `blocks`: of a
    layer in the arena, on average; `most_blocks`: of all layers there at a time. Rivals serve the same
    requests, as many as `paged_both` serves in its time; `extra_loading`: what they load more.
    """
    figures = Churn().run(seconds)
    ideal = Churn(**IDEAL).run(rival_seconds)
    rivals = {
        name: Churn(**options).run(math.inf, ideal["requests"]) for name, options in RIVALS.items()
    }
    rivals["paged_both"] = ideal
    for rival in rivals.values():
        rival["extra_loading"] = round(rival["request_bytes"] / ideal["request_bytes"] - 1, 4)
    return {
        **figures,
        "extra_loading": rivals["same"]["extra_loading"],
        "failed_contiguous_share": rivals["contiguous"]["failed_share"],
        **rivals,
    }


#: What `Churn` is asked for.
IDEAL: dict[str, Any] = {"paged": REGIONS}
CONTIGUOUS: dict[str, Any] = {"scattered": False}
NO_PAGES: dict[str, Any] = {"scattered": False, "paged": ()}
RIVALS: dict[str, dict[str, Any]] = {
    "same": {},
    "same_buddy": {"kind": "buddy"},
    "contiguous": CONTIGUOUS,
    "arena_first": CONTIGUOUS | {"swapped": True},
    "per_tensor": CONTIGUOUS | {"per_tensor": True},
    "buddy": CONTIGUOUS | {"kind": "buddy"},
    "no_pages": NO_PAGES,
    "no_pages_90": NO_PAGES | {"fill": 0.90},
    "no_pages_80": NO_PAGES | {"fill": 0.80},
    "no_pages_per_tensor": NO_PAGES | {"per_tensor": True},
    "no_pages_per_tensor_80": NO_PAGES | {"per_tensor": True, "fill": 0.80},
    "no_pages_buddy": NO_PAGES | {"kind": "buddy"},
}
