"""Plain text tables."""

from __future__ import annotations

from collections.abc import Sequence


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
