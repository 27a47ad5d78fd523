"""Reading prompt files: texts, JSON lines, and lines that are neither."""

from __future__ import annotations

import json

import pytest

from st2i_dask.cli.prompts import MAX_IMAGES, read_prompts
from st2i_dask.cli.sources import find_workflow

from .conftest import PAINT


@pytest.fixture
def read(fresh_registry):
    workflow = find_workflow(f"{PAINT}:paint")

    def run(data, **options):
        lines = data.encode() if isinstance(data, str) else data
        options = {"common": {}, "images": 1, "tenant": "default", **options}
        return read_prompts(workflow, lines.splitlines(keepends=True), **options)

    return run


def test_texts_comments_and_blank_lines(read):
    wanted, failures = read("\ufeffa cat\r\n\n# no\n   \n  a dog # yes \n")
    assert not failures
    assert [(w.where, w.values["prompt"]) for w in wanted] == [
        ("line 1", "a cat"),
        ("line 5", "a dog # yes"),
    ]


def test_json_fields_become_parameters_and_win_over_options(read):
    line = {"prompt": "x", "seed": 5, "steps": 7, "size": "32x8", "images": 2, "tenant": "bob"}
    wanted, failures = read(json.dumps({**line, "strength": 0.1}), common={"seed": 1, "width": 64})
    assert not failures
    assert (wanted[0].images, wanted[0].tenant) == (2, "bob")
    assert wanted[0].values == {
        "prompt": "x",
        "seed": 5,
        "num_steps": 7,
        "width": 32,
        "height": 8,
        "strength": 0.1,
    }


def test_options_hold_where_a_line_says_nothing(read):
    wanted, _ = read('a\n{"prompt": "b"}', common={"seed": 9}, images=3, tenant="eve")
    assert [(w.values["seed"], w.images, w.tenant) for w in wanted] == [(9, 3, "eve")] * 2


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        ('{"prompt": "x"', "not a JSON object"),
        ("{'prompt': 'x'}", "not a JSON object"),
        ('{"prompt": "x", "sed": 1}', "no parameter 'sed'"),
        ('{"prompt": "x", "size": "big"}', "not a size"),
        ('{"prompt": "x", "images": 0}', f"allowed: whole numbers from 1 to {MAX_IMAGES:,}"),
        ('{"prompt": "x", "images": "2"}', "images='2' is out of range"),
        ('{"prompt": "x", "images": true}', "images=True is out of range"),
        ('{"prompt": "x", "prompt": "y"}', "field 'prompt' twice"),
        ('{"prompt": "\\ud800"}', "half of a surrogate pair"),
        ('{"a":' * 100_000, "not a JSON object"),
    ],
)
def test_a_bad_line_fails_with_its_number_and_the_rest_is_read(read, line, reason):
    wanted, failures = read(f"a\n{line}\nb\n")
    assert [w.where for w in wanted] == ["line 1", "line 3"]
    assert [f.where for f in failures] == ["line 2"]
    assert reason in failures[0].reason


def test_bytes_that_are_no_text(read):
    wanted, failures = read(b"a\nb\xff\nc\n")
    assert [w.values["prompt"] for w in wanted] == ["a", "c"]
    assert (failures[0].where, failures[0].reason) == (
        "line 2",
        "is not UTF-8 text (byte 2); save it as UTF-8",
    )
