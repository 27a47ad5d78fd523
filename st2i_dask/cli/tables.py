"""Plain text for a terminal: tables, counts, and the list of failed prompts."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence

from .prompts import Failure

#: Failed prompts that are listed one by one.
LISTED = 50


def table(
    header: Sequence[str], rows: Sequence[Sequence[str]], *, right: Sequence[int] = ()
) -> str:
    """Columns as wide as their widest cell, two blanks apart.

    right: indices of the columns to align right (numbers).

    >>> print(table(["who", "images"], [["alice", "12"], ["bob", "4"]], right=[1]))
      who    images
      alice      12
      bob         4
    """
    lines = [list(header), *(list(row) for row in rows)]
    widths = [max(len(line[column]) for line in lines) for column in range(len(header))]
    return "\n".join(
        "  "
        + "  ".join(
            cell.rjust(width) if column in right else cell.ljust(width)
            for column, (cell, width) in enumerate(zip(line, widths, strict=True))
        ).rstrip()
        for line in lines
    )


def count(number: int, noun: str) -> str:
    """
    >>> count(1, "image"), count(100_000, "image")
    ('1 image', '100,000 images')
    """
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


def failure_list(failures: Sequence[Failure], most: int = LISTED) -> str:
    """Where, which prompt, and why. A reason that several prompts share is given once.

    >>> print(failure_list([Failure("line 3", "", "is empty")]))
    1 prompt failed:
      line 3: '': is empty
    """
    groups: dict[str, Counter[str]] = {}
    for failure in sorted(failures, key=_in_order):
        prompt = " ".join(failure.prompt.split())
        prompt = prompt if len(prompt) <= 60 else prompt[:57] + "..."
        groups.setdefault(failure.reason, Counter())[f"{failure.where}: {prompt!r}"] += 1
    prompts = {failure.where for failure in failures}
    lines = [f"{count(len(prompts), 'prompt')} failed:"]
    room = most
    for reason, places in groups.items():
        shown = [
            place if images == 1 else f"{place} ({images:,} images)"
            for place, images in list(places.items())[:room]
        ]
        room -= len(shown)
        if len(places) == 1 and shown:
            lines.append(f"  {shown[0]}: {reason}")
            continue
        lines.append(f"  {count(len(places), 'prompt')}: {reason}")
        lines += [f"    {place}" for place in shown]
        if len(shown) < len(places):
            lines.append(f"    ... and {len(places) - len(shown):,} more")
    return "\n".join(lines)


def _in_order(failure: Failure) -> list[int]:
    return [int(number) for number in re.findall(r"\d+", failure.where)]
