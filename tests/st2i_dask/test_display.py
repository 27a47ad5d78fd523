"""What a notebook shows of images and workflows: through IPython's own formatter."""

from __future__ import annotations

import base64
import io
import re

import pytest
from PIL import Image

import st2i_dask as st2i
from st2i_dask.image import finish

ABOUT = {
    "workflow": "flux",
    "prompt": 'a <b>cat</b> & "dog"',
    "seed": 7,
    "steps": 4,
    "tenant": "alice",
}


@pytest.fixture(scope="module")
def shown():
    """The forms of an object by MIME type."""
    formatters = pytest.importorskip("IPython.core.formatters")
    formatter = formatters.DisplayFormatter()
    return lambda value: formatter.format(value)[0]


@pytest.fixture
def picture():
    return finish(Image.new("RGB", (8, 6), "red"), ABOUT)


def test_an_image_shows_itself_and_how_it_was_made(shown, picture):
    forms = shown(picture)
    assert set(forms) == {"text/plain", "text/html", "image/png"}  # no JPEG beside it
    html = forms["text/html"]
    (source,) = re.findall(r'src="data:image/png;base64,([^"]+)"', html)
    assert base64.b64decode(source) == forms["image/png"]
    with Image.open(io.BytesIO(forms["image/png"])) as image:
        assert image.tobytes() == picture.tobytes()
        assert image.text["prompt"] == ABOUT["prompt"]
    assert "a &lt;b&gt;cat&lt;/b&gt; &amp; &quot;dog&quot;" in html
    assert "seed 7 · 4 steps · 8x6 · flux · alice" in html
    assert "<b>" not in html


def test_an_image_that_png_cannot_hold_has_no_html(shown, picture):
    odd = finish(Image.new("F", (4, 4)), ABOUT)
    assert set(shown(odd)) == {"text/plain"}


def test_an_image_without_a_prompt(shown):
    html = shown(finish(Image.new("L", (4, 4)), {"workflow": "noise"}))["text/html"]
    assert "4x4 · noise" in html
    assert "None" not in html


def test_a_workflow_shows_its_parameters_and_defaults(shown, fresh_registry):
    class Draw(st2i.ModelFn):
        def setup_io(self):
            self.add_input("prompt")
            self.add_output("pixels")

    @st2i.workflow
    def doodle(prompt: str, num_steps: int = 4, style: str = "<plain>"):
        """Draws & more."""
        return Draw()(prompt)

    assert repr(doodle) == "<workflow doodle(prompt, num_steps=4, style='<plain>')>"
    html = shown(doodle)["text/html"]
    assert "doodle: Draws &amp; more." in html
    cells = re.findall(r"<td[^>]*>(.*?)</td>", html)
    assert cells[0] == "prompt"
    assert cells[2:] == [
        *("num_steps", "int, default 4"),
        *("style", "str, default &#x27;&lt;plain&gt;&#x27;"),
    ]


def test_a_pipeline_shows_what_its_call_takes(shown, fresh_registry):
    html = shown(st2i.from_pipeline("shapes"))["text/html"]
    assert "a FluxPipeline" in html
    cells = re.findall(r"<td[^>]*>(.*?)</td>", html)
    assert cells[:2] == ["seed", "int, default 0"]
    assert "num_inference_steps" in cells
    assert "generator" not in cells
