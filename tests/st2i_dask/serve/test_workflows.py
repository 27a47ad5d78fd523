"""POST /v1/workflows: by reference, and only what the operator has put there."""

from __future__ import annotations

import shutil

import pytest

from .conftest import ADMIN, SKETCH, front
from .test_generations import error, picture


@pytest.fixture(scope="module")
def served(path_as_before, tmp_path_factory):
    root = tmp_path_factory.mktemp("root")
    outside = tmp_path_factory.mktemp("outside")
    shutil.copy(SKETCH, root / "mine.py")
    shutil.copy(SKETCH, outside / "theirs.py")
    (root / "link.py").symlink_to(outside / "theirs.py")
    (root / "empty").mkdir()
    (root / "broken.py").write_text("1 / 0\n")
    with front(root=root) as made:
        made.outside = outside
        yield made


def register(served, source, name="new", **more):
    return served.post("/v1/workflows", key=ADMIN, json={"id": name, "source": source, **more})


def test_a_workflow_below_the_root_can_be_drawn_with(served, fresh_registry):
    answer = register(served, "mine.py:sketch", "mine")
    assert answer.status_code == 201, answer.text
    assert answer.json()["workflow"] == "sketch"
    assert picture(served.draw(model="mine")).size == (16, 16)
    assert register(served, "mine.py:sketch", "mine").status_code == 201
    assert error(register(served, "mine.py:unseeded", "mine"), 409)["code"] == "exists"
    assert error(register(served, "shapes", "sketch"), 409)["param"] == "id"


@pytest.mark.parametrize(
    "source",
    [
        "../outside0/theirs.py:sketch",
        "OUTSIDE/theirs.py:sketch",
        "link.py:sketch",
        "/etc",
        "none.py:sketch",
        "owner/repository",
        "mine.py\0:sketch",
        ".",
        "empty",
        "broken.py:sketch",
        "mine.py:nothing",
    ],
)
def test_what_is_not_there_or_not_below_the_root(served, source):
    source = source.replace("OUTSIDE", str(served.outside))
    assert error(register(served, source), 400)["param"] == "source"
    assert error(served.get("/v1/models/new"), 404)
