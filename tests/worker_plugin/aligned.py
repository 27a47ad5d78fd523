"""Safetensors files whose data begins where torch's allocator would let it begin."""

from __future__ import annotations

from pathlib import Path

_LENGTH_BYTES = 8
_ALIGNMENT = 64
# One large write makes pages of 2 MiB in the page cache; a library that touches a byte of each tensor
# would seem to have mapped them all.
_SMALL = 1 << 16


def align(path: Path, phase: int = 0) -> None:
    """Pad the header of a file, or of all in a folder, so that its data starts at a multiple of 64 bytes, or
    `phase` bytes later.

    Layers are then as large as their tensors, and kernels that sum by alignment give what they give for
    a model that was never saved.
    """
    path = Path(path)
    if path.is_dir():
        for file in path.rglob("*.safetensors"):
            align(file, phase)
        return
    raw = path.read_bytes()
    length = int.from_bytes(raw[:_LENGTH_BYTES], "little")
    end = _LENGTH_BYTES + length
    padding = (phase - end) % _ALIGNMENT
    header = raw[_LENGTH_BYTES:end] + b" " * padding
    with open(path, "wb", buffering=_SMALL) as file:  # many small writes
        file.write((length + padding).to_bytes(_LENGTH_BYTES, "little") + header)
        for start in range(end, len(raw), _SMALL):
            file.write(raw[start : start + _SMALL])
