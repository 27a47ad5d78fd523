"""Options of `st2i.load` on the command line: --task, --controlnet, --load-option."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import Any

import click

from ..errors import ParameterError
from ..quoting import quoted


def load_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Adds them to a command, which gets them as `loaded`: keyword arguments of `st2i.load`."""

    def with_loaded(
        *args: Any,
        task: str | None,
        controlnets: Sequence[str],
        load_assignments: Sequence[str],
        **kwargs: Any,
    ) -> Any:
        return command(*args, loaded=_read(task, controlnets, load_assignments), **kwargs)

    with_loaded.__name__, with_loaded.__doc__ = command.__name__, command.__doc__
    with_loaded.__click_params__ = getattr(command, "__click_params__", [])  # type: ignore[attr-defined]
    for option in (
        click.option(
            "--load-option",
            "load_assignments",
            multiple=True,
            metavar="NAME=VALUE",
            help="Any other argument of st2i.load, in JSON where it is no text: dtype=bfloat16, "
            'scheduler={"shift": 5}; repeatable.',
        ),
        click.option(
            "--controlnet",
            "controlnets",
            multiple=True,
            metavar="FOLDER",
            help="Folder or hub id of a ControlNet to run with the pipeline; repeatable.",
        ),
        click.option(
            "--task",
            metavar="TASK",
            help="text-to-image, image-to-image or inpainting; by default what the folder's own "
            "pipeline does.",
        ),
    ):
        with_loaded = option(with_loaded)
    return with_loaded


def _read(
    task: str | None, controlnets: Sequence[str], assignments: Sequence[str]
) -> dict[str, Any]:
    loaded: dict[str, Any] = {}
    for text in assignments:
        name, equals, value = text.partition("=")
        name = name.strip()
        if not equals or not name.isidentifier() or name in ("source", "task", "controlnet"):
            raise ParameterError(
                f"--load-option {quoted(text)} is not NAME=VALUE of another argument of st2i.load; write for "
                "example dtype=bfloat16"
            )
        if name in loaded:
            raise ParameterError(f"--load-option {quoted(name)} is given twice; give it once")
        try:
            loaded[name] = json.loads(value)
        except ValueError:
            loaded[name] = value
    if task is not None:
        loaded["task"] = task
    if controlnets:
        loaded["controlnet"] = list(controlnets)
    return loaded
