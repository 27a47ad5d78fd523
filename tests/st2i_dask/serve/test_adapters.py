"""Adapters by name, in every form that clients write."""

from __future__ import annotations

import pytest

from st2i_dask.serve.adapters import adapters

KNOWN = {"frame": "/a/frame.safetensors", "night": "/a/night.safetensors"}


@pytest.mark.parametrize(
    "asked",
    [
        ["frame", {"name": "night", "scale": 0.5}],
        [{"name": "frame"}, {"name": "night", "scale": 0.5}],
        '["frame", {"name": "night", "scale": 0.5}]',
    ],
)
def test_several(asked):
    assert adapters(asked, KNOWN) == [(KNOWN["frame"], 1.0), (KNOWN["night"], 0.5)]


@pytest.mark.parametrize("asked", ["frame", {"name": "frame", "scale": 1}, '{"name": "frame"}'])
def test_one(asked):
    assert adapters(asked, KNOWN) == [(KNOWN["frame"], 1.0)]
