"""`st2i doctor`: whether a cluster is fit to serve, what is wrong with it, and the cure."""

from __future__ import annotations

import click

from .clusters import own_cluster, running_cluster
from .tables import count, table


@click.command()
@click.option("--scheduler", metavar="ADDR", help="Address of the Dask scheduler.")
@click.pass_context
def doctor(ctx: click.Context, scheduler: str | None) -> None:
    """Look at client, scheduler and workers: versions, devices, arenas, transports.

    Nothing is changed on the cluster. Without --scheduler, a small cluster on this machine is started
    and looked at. Exit status 1 if something is wrong.
    """
    from ..cluster import attach
    from ..doctor import examine

    with running_cluster(scheduler, or_own=True) if scheduler else own_cluster(2) as client:
        if scheduler is None:
            attach(client)
        found = examine(client)
    click.echo(table(("", "where", "what"), [(f.level, f.node, f.what) for f in found]))
    for level, title in (("note", "Notes"), ("wrong", "Wrong")):
        listed = [finding for finding in found if finding.level == level]
        if listed:
            click.echo(f"\n{title}:")
        for finding in listed:
            click.echo(f"  {finding.node}: {finding.what}\n    cure: {finding.cure}")
    wrong = sum(finding.level == "wrong" for finding in found)
    said = (
        f"{count(wrong, 'thing')} {'is' if wrong == 1 else 'are'} wrong"
        if wrong
        else "nothing is wrong"
    )
    click.echo(f"\n{said}")
    ctx.exit(1 if wrong else 0)
