"""HTML for notebooks: an image with its parameters under it, and a workflow's parameters as a table."""

from __future__ import annotations

import base64
from collections.abc import Iterable, Mapping, Sequence
from html import escape
from typing import Any

# Of an image's metadata, what stands under it beside the prompt; some with their name.
_CAPTION = {"seed": "seed {}", "steps": "{} steps", "size": "{}", "workflow": "{}", "tenant": "{}"}


def image_html(png: bytes, metadata: Mapping[str, Any]) -> str:
    """The image, its prompt, and how it was made."""
    prompt = str(metadata.get("prompt") or "")
    told = [form.format(metadata[n]) for n, form in _CAPTION.items() if metadata.get(n) is not None]
    source = base64.b64encode(png).decode()
    return (
        f'<figure style="margin:0"><img src="data:image/png;base64,{source}" alt="{escape(prompt)}">'
        f"<figcaption>{escape(prompt)}<br><small>{escape(' · '.join(told))}</small></figcaption>"
        "</figure>"
    )


def table_html(title: str, head: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """A table below a title."""
    lines = [_row("th", head), *(_row("td", row) for row in rows)]
    return f"<div>{escape(title)}<table>{''.join(lines)}</table></div>"


def _row(tag: str, cells: Iterable[object]) -> str:
    made = (f'<{tag} style="text-align:left">{escape(str(cell))}</{tag}>' for cell in cells)
    return f"<tr>{''.join(made)}</tr>"
