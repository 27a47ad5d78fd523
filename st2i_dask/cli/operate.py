"""`st2i tenants`, `st2i settings`, `st2i costs`: for the operator of a shared cluster."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from ..quoting import quoted
from .clusters import running_cluster, scheduler_option
from .tables import table


@click.command(
    help="""Who has what.

vTime: device seconds used, divided by the tenant's weight; who has least goes first. Requests are
queued until their first step is dispatched, and started after that."""
)
@scheduler_option
def tenants(scheduler: str) -> None:
    from .. import operate

    with running_cluster(scheduler) as client:
        rows = operate.tenants(client)
    if not rows:
        click.echo("no tenant has submitted anything yet")
        return
    header = (
        "tenant",
        "vTime (s)",
        "weight",
        "requests queued",
        "requests started",
        "last minute (%)",
        "device time (s)",
    )
    cells = [
        (
            row["tenant"],
            f"{row['vtime_s']:.2f}",
            f"{row['weight']:g}",
            str(row["queued"]),
            str(row["running"]),
            f"{100 * row['share']:.1f}",
            f"{row['service_s']:.2f}",
        )
        for row in rows
    ]
    click.echo(table(header, cells, right=range(1, 7)))


@click.command(
    help="""Show what every worker has of every model.

Layers and MiB: in the worker's memory, of all. Hits: runs that found the whole model there. Loads: layers
copied in from host memory, and the seconds that took; waited: seconds that runs stood still for it."""
)
@scheduler_option
def models(scheduler: str) -> None:
    from .. import operate

    with running_cluster(scheduler) as client:
        rows = operate.models(client)
    if not rows:
        click.echo("no worker has loaded a model yet")
        return
    header = ("worker", "model", "layers", "MiB", "runs", "hits", "loads", "load (s)", "waited (s)")
    cells = [
        (
            row["worker"],
            row["model"],
            f"{row['resident_layers']}/{row['layers']}",
            f"{row['resident_bytes'] / 2**20:.1f}/{row['nbytes'] / 2**20:.1f}",
            str(row["runs"]),
            str(row["hits"]),
            str(row["loads"]),
            f"{row['load_s']:.2f}",
            f"{row['stalled_s']:.2f}",
        )
        for row in sorted(rows, key=lambda row: (row["worker"], row["model"]))
    ]
    click.echo(table(header, cells, right=range(2, len(header))))


@click.command(help="Show the scheduler's settings, after changing those that are given.")
@scheduler_option
@click.option("--slack", type=float, metavar="SECONDS", help="vTime a tenant may be ahead.")
@click.option("--weight", "weights", multiple=True, metavar="TENANT=W", help="Share of a tenant.")
@click.option("--cap", "caps", multiple=True, metavar="TENANT=N", help="Queued requests allowed.")
@click.option("--default-cap", type=int, metavar="N", help="Cap of tenants without their own.")
@click.option("--steps-per-task", type=int, metavar="N", help="Steps run as one task when alone.")
def settings(
    scheduler: str,
    slack: float | None,
    weights: tuple[str, ...],
    caps: tuple[str, ...],
    default_cap: int | None,
    steps_per_task: int | None,
) -> None:
    from .. import operate

    given: dict[str, Any] = {
        "slack_s": slack,
        "default_cap": default_cap,
        "steps_per_task": steps_per_task,
        "weights": dict(_pair(text, float) for text in weights) or None,
        "caps": dict(_pair(text, int) for text in caps) or None,
    }
    changes = {name: value for name, value in given.items() if value is not None}
    with running_cluster(scheduler) as client:
        rows = operate.settings(client, **changes)
    click.echo(table(("setting", "value", "unit"), rows, right=[1]))


@click.command(help="Save what the scheduler has learned about costs, or give it saved costs.")
@scheduler_option
@click.argument("what", type=click.Choice(["save", "load"]))
@click.argument("file", type=click.Path(dir_okay=False, path_type=Path))
def costs(scheduler: str, what: str, file: Path) -> None:
    from .. import operate

    with running_cluster(scheduler) as client:
        if what == "save":
            click.echo(f"{file}: {operate.save_costs(client, file)} costs")
        else:
            operate.load_costs(client, file)
            click.echo(f"{file}: loaded")


def _pair(text: str, number: type[int] | type[float]) -> tuple[str, float]:
    name, equals, value = text.partition("=")
    try:
        if not equals:
            raise ValueError
        return name, number(value)
    except ValueError:
        raise click.BadParameter(
            f"{quoted(text)}: write TENANT=VALUE with {'a whole number' if number is int else 'a number'}"
        ) from None
