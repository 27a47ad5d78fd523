"""Cutting a layer into windows: every byte once, wherever tensors begin and end."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from worker_plugin.device_copier import windows
from worker_plugin.file_identity import FileIdentity
from worker_plugin.host_tier import Memory, Part
from worker_plugin.mappings import FileRange

FILE = FileIdentity("/weights.safetensors", 1, 2, 1 << 20, 3)


@given(
    sizes=st.lists(st.integers(1, 50), min_size=1, max_size=8),
    gaps=st.lists(st.integers(0, 9), min_size=8, max_size=8),
    window=st.integers(1, 64),
    in_file=st.booleans(),
)
def test_every_byte_of_every_part_is_in_one_window(sizes, gaps, window, in_file):
    parts, end = [], 0
    for number, (size, gap) in enumerate(zip(sizes, gaps, strict=False)):
        at = 1000 * number
        source = FileRange(FILE, at, size) if in_file else Memory(at, size, None)
        parts.append(Part(source, end))
        end += size + gap
    found = {}
    for start, nbytes, pieces in windows(parts, end, window):
        assert 0 < nbytes <= window
        for piece in pieces:
            first = piece.source.offset if in_file else piece.source.address
            assert piece.offset + piece.source.nbytes <= nbytes
            for i in range(piece.source.nbytes):
                assert start + piece.offset + i not in found
                found[start + piece.offset + i] = first + i
    expected = {
        part.offset + i: 1000 * number + i
        for number, part in enumerate(parts)
        for i in range(sizes[number])
    }
    assert found == expected
