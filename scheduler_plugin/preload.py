"""`dask scheduler --preload scheduler_plugin.preload`: the scheduler serves workflows from its start.

Options, after the preload, say what the configuration `st2i.scheduler` says otherwise:

    dask scheduler --preload scheduler_plugin.preload --slack-s 2 --default-cap 100
"""

from __future__ import annotations

from contextlib import suppress
from typing import Any

import click
import dask.config

from st2i_dask import logs
from st2i_dask.config import check_node
from st2i_dask.errors import AttachError, St2iError

from .plugin import SCHEDULER_PLUGIN, ServingSchedulerPlugin, configured_settings

# Dask imports this module before it logs more than its name. What is wrong in the configuration is said
# when it parses the options.
with suppress(AttachError):
    logs.set_up()


class _Checked(click.Command):
    """Dask parses the options before it starts the scheduler, and logs what fails later: so options
    and configuration are checked while parsing."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        rest = super().parse_args(ctx, args)
        try:
            check_node()
            with dask.config.set(_configuration(ctx.params)):
                configured_settings()
        except St2iError as error:
            raise click.UsageError(str(error)) from error
        return rest


@click.command(cls=_Checked)
@click.option("--slack-s", type=float, help="vTime seconds a tenant may be ahead.")
@click.option("--default-weight", type=float, help="Share of a tenant without one of its own.")
@click.option("--default-cap", type=int, help="Requests of one tenant that may wait.")
@click.option("--steps-per-task", type=int, help="Steps run as one task while nobody else waits.")
@click.option("--bandwidth", type=float, help="Bytes per second assumed for a first pull.")
def dask_setup(scheduler: Any, **options: Any) -> None:
    dask.config.set(_configuration(options))
    # Dask starts the plugins it has after the preloads; one that fails ends the scheduler.
    scheduler.add_plugin(ServingSchedulerPlugin(), name=SCHEDULER_PLUGIN, idempotent=True)


def _configuration(options: dict[str, Any]) -> dict[str, Any]:
    return {
        f"st2i.scheduler.{name.replace('_', '-')}": value
        for name, value in options.items()
        if value is not None
    }
