"""ControlNet residuals, published one by one while the ControlNet still runs.

Diffusers' ControlNets run their blocks first and project what each gave at the very end of `forward`.
Hooks project it as soon as a block has run, with the same operations, so the bits are the same; the
projections at the end then get no tokens to work on, and their results are dropped.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from ..stream import OutputStream, stream


@dataclass
class _Run:
    """One forward of a ControlNet in one thread."""

    scale: float
    streams: dict[str, OutputStream]
    projected: set[int] = field(default_factory=set)  # ids of projections already made


#: Hooks stay on a model that several threads may share; each thread publishes its own run.
_run: ContextVar[_Run | None] = ContextVar("st2i-residuals", default=None)


def tap(blocks: Any, projections: Any, output: str, pick: Callable[[Any], Any]) -> None:
    """Make a loaded ControlNet publish, under `output`, what its blocks give. Once per model.

    blocks, projections: module lists of one length, the projection of each block's result.
    pick: the image tokens (batch, tokens, width) among what a block returns.

    Outside of `publishing` the model does what it did before.
    """
    for block, projection in zip(blocks, projections, strict=True):
        block.register_forward_hook(partial(_publish, projection, output, pick))
        projection.register_forward_pre_hook(_only_once)


@contextmanager
def publishing(scale: float, lengths: Mapping[str, int]) -> Iterator[dict[str, list[Any]]]:
    """While the body runs a tapped ControlNet, its residuals times `scale` are published.

    lengths: residuals by output; outputs without any are left out. Gives the residuals by output,
    complete when the body is done. The return value of the ControlNet means nothing meanwhile.
    """
    run = _Run(scale, {output: stream(output, n) for output, n in lengths.items() if n})
    token = _run.set(run)
    try:
        yield {output: made.items for output, made in run.streams.items()}
    finally:
        _run.reset(token)
    for output, made in run.streams.items():
        assert len(made.items) == lengths[output], f"{output}: {len(made.items)} residuals"


def _publish(
    projection: Any, output: str, pick: Callable[[Any], Any], block: Any, args: Any, result: Any
) -> None:
    run = _run.get()
    if run is not None:
        run.streams[output].append(projection(pick(result)) * run.scale)
        run.projected.add(id(projection))


def _only_once(projection: Any, args: tuple[Any, ...]) -> tuple[Any, ...] | None:
    run = _run.get()
    if run is not None and id(projection) in run.projected:
        return (args[0][:, :0], *args[1:])
    return None


def summed(parts: Sequence[Any], length: int | None = None) -> Any:
    """The residuals of several ControlNets, item by item the sum of theirs; None of none.

    An item is fetched when it is read. length: what is after it is left out; None: of one ControlNet
    nothing is.
    """
    if not parts:
        return None
    if len(parts) == 1 and length is None:
        return parts[0]
    return _Summed(parts, min(map(len, parts)) if length is None else length)


class _Summed:
    """Models measure and index it, no more."""

    def __init__(self, parts: Sequence[Any], length: int):
        self._parts = parts
        self._length = length
        self._made: dict[int, Any] = {}

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, index: int) -> Any:
        if not 0 <= index < self._length:
            raise IndexError(f"index {index} of {self._length} residuals")
        if index not in self._made:
            first, *others = self._parts
            made = first[index]
            for other in others:  # in order: another one would round otherwise
                made = made + other[index]
            self._made[index] = made
        return self._made[index]
