"""What `--workflow SOURCE` is called with, again and again: the same parameters, another seed each time."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import click

from ..workflow import Workflow
from .options import checked, parameter_values, parse_assignments
from .sources import find_workflow

PROMPT = "a red circle on a white background"


def call_options(help: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """--workflow, which may be repeated, --param and --prompt: of a command that gets them as `sources`,
    `assignments` and `prompt`. help: what the workflows are for."""
    options = (
        click.option(
            "--workflow",
            "sources",
            multiple=True,
            required=True,
            metavar="[NAME=]SOURCE",
            help=help,
        ),
        click.option(
            "--param", "assignments", multiple=True, metavar="NAME=VALUE", help="Repeatable."
        ),
        click.option(
            "--prompt", default=PROMPT, show_default=True, help="Of workflows that take one."
        ),
    )

    def decorate(command: Callable[..., Any]) -> Callable[..., Any]:
        for option in reversed(options):
            command = option(command)
        return command

    return decorate


@dataclass(frozen=True)
class Call:
    """A workflow and the values it is called with; `seeded`: it takes a seed and none is given."""

    workflow: Workflow
    values: dict[str, Any]
    seeded: bool

    def submit(self, client: Any, tenant: str, number: int) -> Any:
        """A future of call number so-and-so."""
        return self.workflow.submit(client, tenant=tenant, **self._values(number))

    def request(self, tenant: str, number: int) -> Any:
        """Its graph; nothing is submitted."""
        return self.workflow.request(tenant, **self._values(number))

    def _values(self, number: int) -> dict[str, Any]:
        return {**self.values, "seed": number} if self.seeded else self.values


def call_of(source: str, assignments: Sequence[str], prompt: str) -> Call:
    """assignments: NAME=VALUE each. prompt: for a workflow that takes one. ParameterError, LoadError."""
    workflow = find_workflow(source)
    names = {parameter.name for parameter in workflow.parameters}
    written = parse_assignments(workflow, assignments)
    values = checked(workflow, parameter_values(workflow, written))
    if "prompt" in names:
        values.setdefault("prompt", prompt)
    return Call(workflow, values, "seed" in names and "seed" not in values)
