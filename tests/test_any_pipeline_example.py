"""The example of a whole pipeline runs as it is written."""

from __future__ import annotations

from PIL import Image

from .test_examples import judge, run


def test_any_pipeline_draws_its_star(tmp_path):
    printed = run("any_pipeline.py", "shapes", "star.png", cwd=tmp_path)
    assert "ann used" in printed
    with Image.open(tmp_path / "star.png") as image:
        assert image.text["workflow"] == "shapes"
        assert image.text["tenant"] == "ann"
        verdict = judge(image, image.text["prompt"])
    assert verdict.background
    assert verdict.colour
