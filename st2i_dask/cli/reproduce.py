"""`st2i reproduce`: the paper's figures from the simulator, with a table of what it says and we get."""

from __future__ import annotations

import time
from pathlib import Path

import click


@click.command(
    help="""Reproduce the paper's figures on a simulated cluster that the serving code drives.

Writes a CSV for each, a plot where matplotlib is installed, and table.md: paper says, we get, how
measured. All take up to half an hour on two idle cores, with --quick some minutes."""
)
@click.option(
    "--figure", "names", multiple=True, metavar="N", help="Only this one; repeat for several."
)
@click.option(
    "--out",
    required=True,
    type=click.Path(file_okay=False, path_type=Path),
    metavar="DIR",
    help="Where everything is written.",
)
@click.option(
    "--page",
    type=click.Path(dir_okay=False, path_type=Path),
    help="Also put table and plots into this Markdown page, between its marks.",
)
@click.option("--quick", is_flag=True, help="Short traces, few points: shapes, not values.")
@click.option("--processes", type=click.IntRange(1), help="At once; default: one a core.")
def reproduce(
    names: tuple[str, ...], out: Path, page: Path | None, quick: bool, processes: int | None
) -> None:
    from ..simulate import figures
    from ..simulate.table import check_page, fill, markdown

    if page is not None:
        check_page(page)

    chosen = names or tuple(figures.NAMES)
    for name in chosen:
        figures.describe(name)  # refused before anything is simulated
    effort = (figures.QUICK if quick else figures.FULL)._replace(processes=processes)
    found = []
    for name in chosen:
        began = time.monotonic()
        click.echo(f"{name:<9} {figures.describe(name)}", err=True)
        figure = figures.run(name, effort)
        written = figure.write(out)
        click.echo(
            f"{'':<9} {', '.join(str(path) for path in written)}, {time.monotonic() - began:.0f} s",
            err=True,
        )
        found.append(figure)
    options = " --quick" if quick else ""
    chosen_names = "".join(f" --figure {name}" for name in names)
    command = f"st2i reproduce{chosen_names}{options} --out DIR"
    text = markdown(found, command)
    (out / "table.md").write_text(text)
    if page is not None:
        fill(page, found, command, options, out)
    click.echo(text)
