"""`python -m st2i_dask.bench NAME [--json FILE] [--plot FILE]`, the same as `st2i bench NAME`."""

from __future__ import annotations

import json
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import click

from . import describe, names, plotter, run


@click.command(
    help="Measure against the rival, in one run.\n\n\b\n"
    + "\n".join(f"{name:<12}{describe(name)}" for name in names())
)
@click.argument("name", type=click.Choice(names()), metavar="NAME")
@click.option(
    "--json",
    "json_file",
    type=click.Path(dir_okay=False, path_type=Path),
    help="Write the figures here.",
)
@click.option(
    "--plot",
    "plot_file",
    type=click.Path(dir_okay=False, path_type=Path),
    help="Draw the figures into this PNG.",
)
def bench(name: str, json_file: Path | None, plot_file: Path | None) -> None:
    draw = _plotter(name) if plot_file is not None else None
    click.echo(describe(name), err=True)
    figures = run(name)
    # Series are for the file and the plot.
    shown = {key: value for key, value in figures.items() if not isinstance(value, (dict, list))}
    click.echo(json.dumps(shown, indent=2))
    if json_file is not None:
        json_file.write_text(json.dumps(figures, indent=2) + "\n")
    if draw is not None and plot_file is not None:
        draw(figures, plot_file)


def _plotter(name: str) -> Callable[[dict[str, Any], Path], None]:
    """What draws it. Refused before anything is measured."""
    draw = plotter(name)
    if draw is None:
        drawn = ", ".join(other for other in names() if plotter(other) is not None)
        raise click.UsageError(f"benchmark {name!r} draws nothing; --plot works with: {drawn}")
    if find_spec("matplotlib") is None:
        raise click.UsageError(
            "--plot needs matplotlib, which is not installed; pip install 'st2i_dask[plot]'"
        )
    return draw


if __name__ == "__main__":
    bench()
