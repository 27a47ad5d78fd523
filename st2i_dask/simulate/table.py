"""The table "paper says, we get, how measured", as Markdown, and the page around it."""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from datetime import date
from pathlib import Path

from ..errors import ParameterError
from .figures import Claim, Figure

#: What lies between these lines of a page is made; what lies around them is written.
BEGIN, END = "<!-- made: begin -->", "<!-- made: end -->"


def markdown(figures: Iterable[Figure], command: str) -> str:
    """All claims of the figures, dated, with the command that made them."""
    claims = [claim for figure in figures for claim in figure.claims]
    head = f"Made by `{command}` on {date.today().isoformat()}.\n\n"
    return head + table(claims)


def table(claims: Iterable[Claim]) -> str:
    lines = ["| what | paper says | we get | how measured |", "|---|---|---|---|"]
    for claim in claims:
        lines.append("| " + " | ".join(cell.replace("|", "/") for cell in claim) + " |")
    return "\n".join(lines) + "\n"


def check_page(page: Path) -> None:
    """ParameterError unless it can be filled: it does not exist yet, or has the two marks."""
    text = page.read_text() if page.exists() else f"{BEGIN}{END}"
    if text.count(BEGIN) != 1 or text.count(END) != 1 or text.index(BEGIN) > text.index(END):
        raise ParameterError(f"page {page} lacks the lines {BEGIN} and {END}; put both in, once")


def fill(page: Path, figures: Sequence[Figure], command: str, options: str, folder: Path) -> None:
    """Puts the table and the plots, which are in `folder`, between the page's marks."""
    check_page(page)
    text = page.read_text() if page.exists() else f"{BEGIN}\n{END}\n"
    parts = [markdown(figures, command)]
    for figure in figures:
        heading = f"Section {figure.name}" if figure.name[0] == "8" else f"Figure {figure.name}"
        heading = "Appendix A" if figure.name == "A" else heading
        parts.append(f"### {heading}: {figure.title}\n")
        parts.append(f"`st2i reproduce --figure {figure.name}{options} --out DIR`\n")
        plot = folder / f"{figure.stem}.png"
        if plot.exists():
            where = Path(os.path.relpath(plot, page.parent)).as_posix()
            parts.append(f"![{heading}]({where})\n")
    before, _, rest = text.partition(BEGIN)
    after = rest.partition(END)[2]
    page.write_text(f"{before}{BEGIN}\n" + "\n".join(parts) + f"{END}{after}")
