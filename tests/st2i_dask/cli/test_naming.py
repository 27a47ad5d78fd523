"""File names: stable, readable, and different for different images."""

from __future__ import annotations

import subprocess
import sys

import pytest

from st2i_dask.cli.naming import SLUG_LENGTH, image_name, slug

PARAMETERS = {"prompt": "A red ring", "seed": 3, "num_steps": 8, "guidance_scale": 3.5}


def test_the_order_of_parameters_does_not_matter():
    backwards = dict(reversed(PARAMETERS.items()))
    assert image_name("shapes", PARAMETERS) == image_name("shapes", backwards)


def test_names_are_the_same_in_every_process():
    code = f"from st2i_dask.cli.naming import image_name; print(image_name('w', {PARAMETERS}))"
    printed = {
        subprocess.run(
            [sys.executable, "-c", code],
            env={"PYTHONHASHSEED": seed},
            capture_output=True,
            text=True,
            check=True,
            timeout=60,
        ).stdout.strip()
        for seed in ("1", "2")
    }
    # Written down: a change of this name would make every finished batch run again.
    assert printed == {image_name("w", PARAMETERS)} == {"a-red-ring-3-5e68abdc.png"}


@pytest.mark.parametrize(
    "change",
    [{"prompt": "a red ring"}, {"seed": 4}, {"num_steps": 9}, {"guidance_scale": 3.6}, {"new": 1}],
)
def test_every_parameter_counts(change):
    assert image_name("w", PARAMETERS) != image_name("w", {**PARAMETERS, **change})


def test_the_workflow_counts():
    assert image_name("a", PARAMETERS) != image_name("b", PARAMETERS)


def test_a_default_without_a_stable_text_gives_a_stable_name():
    names = {image_name("w", {"prompt": "x", "thing": object()}) for _ in range(2)}
    assert len(names) == 1


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("A cat, sitting!", "a-cat-sitting"),
        ("../../etc/passwd", "etc-passwd"),
        ("Übergröße", "übergröße"),
        ("一只猫", "一只猫"),
        ("--- !!", ""),
        ("a" * 99, "a" * SLUG_LENGTH),
    ],
)
def test_slugs(text, expected):
    assert slug(text) == expected


def test_a_long_prompt_is_cut_between_words():
    words = "a very long prompt about a small red ring on some background"
    assert slug(words) == "a-very-long-prompt-about-a-small-red-ring-on"


def test_names_fit_into_file_systems():
    name = image_name("w", {"prompt": "猫" * 500, "seed": 2**64 - 1})
    assert len(name.encode()) <= 255


def test_without_prompt_the_workflow_names_the_file():
    assert image_name("my flow", {}).startswith("my-flow-")
    assert image_name("w", {"prompt": "!!!"}).startswith("image-")
