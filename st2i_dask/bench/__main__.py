"""`python -m st2i_dask.bench NAME [--json F]`, the same as `st2i bench NAME`."""

from __future__ import annotations

import json
from pathlib import Path

import click

from . import describe, names, run


@click.command(help="Measure against the rival, in one run.")
@click.argument("name", type=click.Choice(names()), metavar="NAME")
@click.option(
    "--json",
    "json_file",
    type=click.Path(dir_okay=False, path_type=Path),
    help="Write the figures here.",
)
def bench(name: str, json_file: Path | None) -> None:
    click.echo(describe(name), err=True)
    figures = run(name)
    text = json.dumps(figures, indent=2)
    click.echo(text)
    if json_file is not None:
        json_file.write_text(text + "\n")


if __name__ == "__main__":
    bench()
