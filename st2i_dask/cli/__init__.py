"""The command line: `st2i --help` lists the commands.

Exit status: 0 done; 1 some prompts failed, the rest is done (plan: no size is enough); 2 refused, nothing was done; 130
interrupted. Commands are imported when they run, so that `st2i --help` answers at once.
"""

from __future__ import annotations

import importlib
from importlib.util import find_spec
from typing import Any

import click

from ..errors import St2iError

#: Command: (module, attribute, one line for the overview).
_COMMANDS = {
    "bench": ("st2i_dask.bench.__main__", "bench", "Measure and compare."),
    "costs": ("st2i_dask.cli.operate", "costs", "Save or load learned costs."),
    "demo": ("st2i_dask.cli.demo", "demo", "Draw a gallery on a local cluster for two tenants."),
    "doctor": ("st2i_dask.cli.doctor", "doctor", "Look for what is wrong with a cluster."),
    "generate": ("st2i_dask.cli.generate", "generate", "Make images from prompts; resumable."),
    "models": ("st2i_dask.cli.operate", "models", "Show what every worker has of every model."),
    "serve": ("st2i_dask.cli.serve", "serve", "Serve the OpenAI images API over HTTP."),
    "plan": ("st2i_dask.cli.plan", "plan", "How many executors a workload needs."),
    "profile": ("st2i_dask.cli.profile", "profile", "Measure workflows on a cluster, for plan."),
    "replay": ("st2i_dask.cli.replay", "replay", "Submit a trace to a cluster, and report."),
    "reproduce": ("st2i_dask.cli.reproduce", "reproduce", "The paper's figures, simulated."),
    "settings": ("st2i_dask.cli.operate", "settings", "Show and change the scheduler's settings."),
    "tenants": ("st2i_dask.cli.operate", "tenants", "Show what every tenant has and used."),
    "workflows": ("st2i_dask.cli.workflows", "workflows", "Show workflows and their parameters."),
}


class Refused(click.ClickException):
    """One line on stderr, exit status 2."""

    exit_code = 2

    def show(self, file: Any = None) -> None:
        click.echo(f"st2i: {' '.join(self.message.split())}", err=True)


class _Group(click.Group):
    """Commands by name, imported on use. Errors of the package become one line."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return [name for name, (module, _, _) in _COMMANDS.items() if _exists(module)]

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in self.list_commands(ctx):
            return None
        module, attribute, _ = _COMMANDS[cmd_name]
        command: click.Command = getattr(importlib.import_module(module), attribute)
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl([(name, _COMMANDS[name][2]) for name in self.list_commands(ctx)])

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except St2iError as error:
            raise Refused(str(error)) from error
        except KeyboardInterrupt:
            click.echo("st2i: interrupted", err=True)
            ctx.exit(130)


def _exists(module: str) -> bool:
    try:
        return find_spec(module) is not None
    except ModuleNotFoundError:
        return False


@click.group(cls=_Group, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(package_name="st2i_dask", prog_name="st2i")
def main() -> None:
    """Fair, fast text-to-image workflows on a shared Dask cluster."""
