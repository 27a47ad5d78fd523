"""What an error says on one line."""

from __future__ import annotations

import pytest

from st2i_dask.errors import LoadError, said


@pytest.mark.parametrize(
    ("error", "note", "line"),
    [
        (ValueError("two\n  lines"), None, "ValueError: two lines"),
        (AssertionError(), None, "AssertionError"),
        (AssertionError(), "raised by Vae@sdxl", "AssertionError (raised by Vae@sdxl)"),
        (LoadError("'a' is no folder; give one"), None, "'a' is no folder; give one"),
    ],
)
def test_type_message_and_whose_it_is(error, note, line):
    if note:
        error.add_note(note)
    assert said(error) == line
