"""`st2i workflows`: what can be drawn with, and what each takes."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from ..errors import LoadError
from .clusters import quiet_logs
from .sources import find_workflow
from .tables import table

if TYPE_CHECKING:
    from ..workflow import Workflow


@click.command()
@click.argument("source", metavar="[NAME]", required=False)
def workflows(source: str | None) -> None:
    """Show the packaged models, or one workflow, with all parameters.

    NAME is what `st2i generate --workflow` takes: a packaged model, a Diffusers folder, a hub id,
    or FILE.py:WORKFLOW.
    """
    quiet_logs()
    if source is not None:
        click.echo(describe(find_workflow(source)))
        return
    from ..catalogue.folder import PACKAGED

    for name in sorted(PACKAGED):
        try:
            click.echo(describe(find_workflow(name)))
        except LoadError as error:
            click.echo(f"{name}: not available here: {error}")
        click.echo()
    click.echo("Also: any Diffusers folder, hub id, or FILE.py:WORKFLOW (st2i workflows NAME).")


def describe(workflow: Workflow) -> str:
    """The workflow's name, description and parameters, as text.

    A static parameter makes another graph for each value; a data parameter does not.
    """
    rows = [
        [parameter.name, parameter.kind.value, parameter.describe()]
        for parameter in workflow.parameters
    ]
    return f"{workflow.title}\n{table(['parameter', 'kind', 'type, default, rule'], rows)}"
