"""Copies from the host tier into CUDA memory: through pinned windows, on a stream of its own.

A copy from ordinary memory would be staged by the driver and hold up the device. Two windows take turns:
one is filled from the mapped files while the other is on its way.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from .host_tier import HostTier, Memory, Part
from .mappings import FileRange

#: Bytes of each window of pinned host memory.
WINDOW = 32 << 20


class DeviceCopier:
    """Belongs to the loader's thread."""

    def __init__(self, host: HostTier, device: str):
        import torch

        self._host = host
        self.stream = torch.cuda.Stream(device)
        self._windows = [torch.empty(WINDOW, dtype=torch.uint8).pin_memory() for _ in range(2)]
        self._sent: list[Any] = [None, None]  # events: a window may be filled again

    def copy(self, parts: Sequence[Part], into: Any) -> None:
        """Into a torch.uint8 tensor on the device; ready for any stream when it returns.

        LoadError as `HostTier.copy`.
        """
        import torch

        with torch.cuda.stream(self.stream):
            for number, (start, nbytes, pieces) in enumerate(windows(parts, into.numel(), WINDOW)):
                turn = number % 2
                if self._sent[turn] is not None:
                    self._sent[turn].synchronize()
                window = self._windows[turn]
                self._host.copy(pieces, window.data_ptr())
                into[start : start + nbytes].copy_(window[:nbytes], non_blocking=True)
                self._sent[turn] = self.stream.record_event()
        self.stream.synchronize()

    def empty(self, nbytes: int) -> Any:
        """Device memory of torch's allocator for a layer. It belongs to this stream: see `retire`."""
        import torch

        with torch.cuda.stream(self.stream):
            return torch.empty(nbytes, dtype=torch.uint8, device=self.stream.device)


def retire(tensor: Any) -> None:
    """Before a layer's memory is given back: kernels that still read it go first."""
    import torch

    tensor.record_stream(torch.cuda.default_stream(tensor.device))


def windows(
    parts: Sequence[Part], nbytes: int, window: int
) -> Iterator[tuple[int, int, list[Part]]]:
    """A layer of so many bytes in pieces: start, bytes, and what of the parts lies there, with
    offsets from that start. Gaps between parts are padding."""
    for start in range(0, nbytes, window):
        end = min(nbytes, start + window)
        pieces = []
        for part in parts:
            first = max(part.offset, start)
            last = min(part.offset + part.source.nbytes, end)
            if first < last:
                pieces.append(Part(_cut(part, first, last), first - start))
        yield start, end - start, pieces


def _cut(part: Part, first: int, last: int) -> FileRange | Memory:
    source, skip = part.source, first - part.offset
    if isinstance(source, Memory):
        return Memory(source.address + skip, last - first, source.owner)
    return FileRange(source.file, source.offset + skip, last - first)
