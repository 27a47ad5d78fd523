"""How fast one worker pulls from another: a task that needs a small and a large result of two others."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

from .. import operate
from ..model_fn import ModelFn
from ..workflow import Workflow, workflow
from .meter import Done, done
from .profiles import Profile

if TYPE_CHECKING:
    from distributed import Client

#: Bytes of a pull that hardly takes more than its latency, and of one that takes much more.
SMALL, LARGE = 1 << 17, 32 << 20
ROUNDS = 6
#: Of a round, seconds.
LONGEST_S = 60.0


class Make(ModelFn):
    """So many bytes. Takes long enough that the other worker makes the other ones."""

    def setup_io(self) -> None:
        self.add_input("seconds")
        self.add_output("tensor")

    def execute(self, model_components: Any, seconds: Any) -> dict[str, Any]:
        import torch

        time.sleep(seconds)
        return {"tensor": torch.zeros(self.options["nbytes"], dtype=torch.uint8)}


class Take(ModelFn):
    """Both."""

    def setup_io(self) -> None:
        self.add_input("here")
        self.add_input("there")
        self.add_output("nbytes")

    def execute(self, model_components: Any, here: Any, there: Any) -> dict[str, Any]:
        return {"nbytes": here.numel() + there.numel()}


def pulls(client: Client, tenant: str) -> tuple[float, float]:
    """Latency of a pull (s) and bandwidth (bytes/s) between two workers of the cluster. A meter listens
    to the tenant. With one worker, or where nothing was pulled, what `Profile` assumes."""
    assumed = Profile({}).link_latency_s, Profile({}).link_bandwidth
    if len(client.nthreads()) < 2:
        return assumed
    arena = min(row["arena"]["nbytes"] for row in operate.data_plane(client).values())
    large = min(LARGE, arena // 4)
    if large < 8 * SMALL:
        return assumed
    small_s, large_s = (_pull_s(client, tenant, nbytes) for nbytes in (SMALL, large))
    if small_s is None or large_s is None:
        return assumed
    # A busy machine may have been slow with the small ones only.
    return small_s, (large - SMALL) / max(large_s - small_s, large_s / 2)


def _pull_s(client: Client, tenant: str, nbytes: int) -> float | None:
    """The least seconds in which so many bytes came; None: nothing ever did."""
    probe, before = _probe(nbytes), len(client.run_on_scheduler(done))
    for _ in range(ROUNDS):
        probe.submit(client, tenant=tenant, seconds=0.05).result(timeout=LONGEST_S)
    tasks: list[Done] = client.run_on_scheduler(done)[before:]
    return min((task.pull_s for task in tasks if task.pull_s), default=None)


def _probe(nbytes: int) -> Workflow:
    @workflow(name=f"st2i-pull-{nbytes}", replace=True)
    def pull(seconds: float) -> Any:
        there = Make(name="MakeThere", nbytes=nbytes)(seconds)
        return Take()(Make(name="MakeHere", nbytes=nbytes + 4096)(seconds), there)

    made: Workflow = pull
    return made
