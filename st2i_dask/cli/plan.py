"""`st2i plan`: how many executors of which memory a workload needs."""

from __future__ import annotations

from pathlib import Path

import click

from .tables import table


@click.command(
    help="""How many executors a workload needs, simulated with the serving code.

The trace's most active tenant gets the workload's most popular workflow, and so on. Without --trace, a
generated one with the shape of a production trace."""
)
@click.option(
    "--trace", type=click.Path(dir_okay=False, path_type=Path), help="at,tenant,workflow per line."
)
@click.option("--rate", default=1.0, show_default=True, help="Make the trace so much faster.")
@click.option(
    "--seconds", default=300.0, show_default=True, help="At most so much of the trace, scaled."
)
@click.option("--workflows", default="S2", show_default=True, help="S1 or S2 of the paper.")
@click.option(
    "--profile",
    type=click.Path(dir_okay=False, path_type=Path),
    help="Models and device, as JSON. Default: the paper's on an H800.",
)
@click.option("--slo", default=3.0, show_default=True, help="Deadline, times the solo latency.")
@click.option("--target", default=0.9, show_default=True, help="Share of requests within it.")
@click.option(
    "--memory", "memories", multiple=True, type=float, metavar="GB", help="Sizes to compare."
)
@click.option("--seed", default=1, show_default=True, help="Which workflow is how popular.")
def plan(
    trace: Path | None,
    rate: float,
    seconds: float,
    workflows: str,
    profile: Path | None,
    slo: float,
    target: float,
    memories: tuple[float, ...],
    seed: int,
) -> None:
    from ..simulate import generate, h800, profiles, traces
    from ..simulate.plan import Size
    from ..simulate.plan import plan as planned
    from ..simulate.workload import setting

    device = h800.PROFILE if profile is None else profiles.read(profile)
    workload = setting(workflows, seed, device)
    if trace is None:
        arrivals = generate.evaluation(workload, workload.rate(rate), seconds, seed)
    else:
        asked = [a for a in traces.scaled(traces.read(trace), rate) if a.at < seconds]
        arrivals = traces.arrivals(asked, list(workload.workflows))

    def note(size: Size) -> None:
        click.echo(
            f"{size.memory_bytes / 1e9:g} GB x {size.executors}: {100 * size.attainment:.1f} %",
            err=True,
        )

    found = planned(
        workload,
        arrivals,
        slo_scale=slo,
        target=target,
        memories=[int(1e9 * gigabytes) for gigabytes in memories],
        note=note,
    )
    header = ("memory (GB)", "executors", "within deadline (%)", "p99 (s)", "busy (%)", "")
    rows = [
        (
            f"{one.memory_bytes / 1e9:g}",
            str(size.executors),
            f"{100 * size.attainment:.1f}",
            f"{size.p99_s:.1f}",
            f"{100 * size.busy:.0f}",
            "<- enough" if size.executors == one.needed else "",
        )
        for one in found
        for size in one.curve
    ]
    click.echo(table(header, rows, right=range(5)))
    for one in found:
        enough = "more than 1,024" if one.needed is None else str(one.needed)
        click.echo(
            f"{enough} executors of {one.memory_bytes / 1e9:g} GB serve {100 * target:g} % of "
            f"{len(arrivals)} requests within {slo:g} times their solo latency"
        )
