"""The table "paper says, we get, how measured", as Markdown."""

from __future__ import annotations

from collections.abc import Iterable
from datetime import date

from .figures import Claim, Figure


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
