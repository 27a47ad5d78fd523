"""How long a gang takes: a transformer whose tokens are split over executors (sequence parallelism).

Each of n executors computes one n-th of the tokens. In every block it needs the keys and values of all
of them, and pulls those of the others when they are there: nothing else waits meanwhile, and nothing is
computed. So of an invocation that takes C seconds on one executor, each of n takes

    C / n  +  blocks * (n - 1) * (latency + kv_bytes / n / bandwidth)

kv_bytes: keys and values of all tokens in one block, of which each executor makes an n-th and pulls the
rest, from n - 1 others one after the other; latency and bandwidth of one pull. All of C divides: what
the blocks do not (embeddings, the last projection) is about a hundredth of a step.
"""

from __future__ import annotations

from typing import NamedTuple

from .profiles import Profile


class Split(NamedTuple):
    """A model that at most `executors` can compute together: blocks with attention, and the bytes of
    all keys and values in one."""

    executors: int
    blocks: int
    kv_bytes: int

    def seconds(self, compute_s: float, n: int, profile: Profile) -> float:
        """What each of n executors takes; compute_s: one alone."""
        pull_s = profile.link_latency_s + self.kv_bytes / n / profile.link_bandwidth
        return compute_s / n + self.blocks * (n - 1) * pull_s


def z_image(executors: int, *, guided: bool) -> Split:
    """Z-Image at 1024x1024 in bfloat16: 4096 tokens of 3840 numbers, thirty blocks and the two that refine
    the image's tokens. guided: two of everything. Tokens of the text are few, and left out."""
    return Split(executors, 32, 2 * 4096 * 3840 * 2 * (2 if guided else 1))
