"""`st2i profile`: what workflows cost on a running cluster, for `st2i plan` and `st2i replay`."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import click

from ..errors import ParameterError
from ..request import Request
from .calls import Call, call_of, call_options
from .clusters import running_cluster, scheduler_option
from .tables import table

if TYPE_CHECKING:
    from ..simulate.measured import Measured


@click.command(
    help="""Measure workflows on a running cluster that has nothing else to do.

Runs a few requests of each, one after the other, and writes seconds of compute per model and size,
bytes and seconds of loads, transfers and what lies between tasks, as JSON for `st2i plan --profile` and
`st2i replay --profile`. A file that is there keeps what it has of other workflows and sizes."""
)
@scheduler_option
@call_options("What to measure; NAME: what a trace calls it. Repeatable.")
@click.option(
    "--runs",
    default=5,
    show_default=True,
    type=click.IntRange(1, 1000),
    help="Requests of each that count, after one that loads.",
)
@click.option(
    "--out",
    required=True,
    type=click.Path(dir_okay=False, path_type=Path),
    metavar="FILE",
    help="Where the profile goes.",
)
def profile(
    scheduler: str,
    sources: Sequence[str],
    assignments: Sequence[str],
    prompt: str,
    runs: int,
    out: Path,
) -> None:
    from ..simulate import measured
    from ..simulate.profiling import TENANT
    from ..simulate.profiling import profile as profiled

    known = measured.read(out) if out.exists() else None
    if not out.resolve().parent.is_dir():
        raise ParameterError(f"--out {out}: there is no folder {out.resolve().parent}; make it")
    calls = _by_name(sources, assignments, prompt)
    for call in calls.values():
        if not isinstance(call.request(TENANT, 0), Request):
            raise ParameterError(
                f"workflow {call.workflow.name!r} is a pipeline that calls its models itself: what it "
                "will call is not known before; profile composed workflows"
            )
    with running_cluster(scheduler) as client:
        found = profiled(
            client,
            {name: partial(call.request, TENANT) for name, call in calls.items()},
            runs=runs,
            note=lambda text: click.echo(text, err=True),
        )
    measured.write(found if known is None else known.with_more(found), out)
    click.echo(_shown(found))
    click.echo(f"{out}: {', '.join(found.workflows)}")


def _by_name(sources: Sequence[str], assignments: Sequence[str], prompt: str) -> dict[str, Call]:
    found: dict[str, Call] = {}
    for source in sources:
        name, equals, rest = source.partition("=")
        call = call_of(rest if equals else source, assignments, prompt)
        name = name if equals else call.workflow.name
        if not name or name in found:
            raise ParameterError(
                f"--workflow {source!r}: {'two are' if name else 'one is'} called {name!r}; give each "
                "a name of its own: --workflow NAME=SOURCE"
            )
        found[name] = call
    return found


def _shown(found: Measured) -> str:
    known = found.profile
    rows = [
        (name, f"{m.compute_s:.4f}", f"{m.nbytes / 2**20:.1f}", f"{m.load_s:.4f}", str(m.layers))
        for name, m in known.models.items()
    ]
    header = ("model", "compute (s)", "weights (MiB)", "load (s)", "layers")
    device = f"{known.device}, {known.memory_bytes / 2**20:,.0f} MiB a worker"
    between = (
        f"between tasks {1e3 * known.hop_s:.1f} ms, round a request {1e3 * known.request_s:.1f} ms"
    )
    pulled = f"{known.link_bandwidth / 2**30:.2f} GiB/s after {1e3 * known.link_latency_s:.2f} ms"
    return f"{table(header, rows, right=range(1, 5))}\n{device}; {between}; pulls at {pulled}"
