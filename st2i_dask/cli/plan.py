"""`st2i plan`: how many executors of which memory a workload needs."""

from __future__ import annotations

import math
from pathlib import Path
from typing import TYPE_CHECKING

import click

from ..errors import ParameterError
from .tables import count, table

if TYPE_CHECKING:
    from ..simulate.plan import Plan
    from ..simulate.tasks import Arrival
    from ..simulate.workload import Workload


@click.command(
    help="""How many executors a workload needs, simulated with the serving code.

With a --profile that `st2i profile` wrote: for the workflows that it was measured on. A trace's request
names its workflow; of those that are not in the profile, the trace's most popular stands for the
profile's first, and so on. Else for the paper's: the trace's most active tenant gets the setting's most
popular workflow, and so on. Without --trace, a generated one with the shape of a production trace.

Exit status 1: no size is enough."""
)
@click.option(
    "--trace", type=click.Path(dir_okay=False, path_type=Path), help="at,tenant,workflow per line."
)
@click.option("--rate", default=1.0, show_default=True, help="Make the trace so much faster.")
@click.option(
    "--seconds", default=300.0, show_default=True, help="At most so much of the trace, scaled."
)
@click.option(
    "--workflows", help="S1 or S2 of the paper. Default: the profile's own, S2 where it has none."
)
@click.option(
    "--profile",
    type=click.Path(dir_okay=False, path_type=Path),
    help="Models and device, as JSON. Default: the paper's on an H800.",
)
@click.option("--slo", default=3.0, show_default=True, help="Deadline, times the solo latency.")
@click.option("--target", default=0.9, show_default=True, help="Share of requests within it.")
@click.option(
    "--memory",
    "memories",
    multiple=True,
    metavar="SIZE",
    help="Sizes to compare, such as '40 GiB'; without a unit, GB.",
)
@click.option("--seed", default=1, show_default=True, help="Which workflow is how popular.")
def plan(
    trace: Path | None,
    rate: float,
    seconds: float,
    workflows: str | None,
    profile: Path | None,
    slo: float,
    target: float,
    memories: tuple[str, ...],
    seed: int,
) -> None:
    from ..simulate.plan import Size
    from ..simulate.plan import plan as planned

    for option, value in (("--rate", rate), ("--seconds", seconds)):
        if not 0 < value < math.inf:
            raise ParameterError(f"{option} is {value:g}; give a finite number above 0")
    sizes = [_bytes(memory) for memory in memories]
    workload, arrivals = _requests(trace, rate, seconds, workflows, profile, seed)

    def note(size: Size) -> None:
        click.echo(
            f"{_mib(size.memory_bytes)} MiB x {size.executors}: {100 * size.attainment:.1f} %",
            err=True,
        )

    found = planned(
        workload,
        arrivals,
        slo_scale=slo,
        target=target,
        memories=sizes,
        note=note,
    )
    header = ("memory (MiB)", "executors", "within deadline (%)", "p99 (s)", "busy (%)", "")
    rows = [
        (
            _mib(one.memory_bytes),
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
    if profile is not None:
        alone = ", ".join(f"{name} {seconds:.3f} s" for name, seconds in found[0].alone_s.items())
        click.echo(f"alone: {alone}")
    for one in found:
        click.echo(
            f"{_enough(one)} of {_mib(one.memory_bytes)} MiB for {100 * target:g} % of "
            f"{count(len(arrivals), 'request')} within {slo:g} times the latency alone"
        )
        if one.needed is None:
            click.echo(_missing(one, slo))
    if all(one.needed is None for one in found):
        click.get_current_context().exit(1)


def _enough(found: Plan) -> str:
    if found.needed is not None:
        return count(found.needed, "executor")
    most = found.curve[-1].executors
    if found.best.executors == most:
        return f"more than {count(most, 'executor')}"
    return "no number of executors"


def _missing(found: Plan, slo: float) -> str:
    """Which requests miss their deadlines, and whether it is because of loads."""
    best = found.best
    missed = ", ".join(f"{number:,} of {name}" for name, number in best.missed.items())
    lines = [f"  {count(best.executors, 'executor')}: {100 * best.attainment:.1f} %; {missed} miss"]
    if best.executors < found.curve[-1].executors:
        lines[0] += ", and more executors do not help"
    lines += [
        f"  {name}: {cold_s:.3f} s where nothing is loaded, deadline {slo * found.alone_s[name]:.3f} s"
        for name, cold_s in found.cold_s.items()
        if name in best.missed and cold_s > slo * found.alone_s[name]
    ]
    return "\n".join(lines)


def _bytes(text: str) -> int:
    from dask.utils import parse_bytes

    nbytes: float
    try:
        nbytes = 1e9 * float(text)
    except ValueError:
        try:
            nbytes = parse_bytes(text)
        except ValueError:
            nbytes = math.nan
    if not 1 <= nbytes < math.inf:
        raise ParameterError(f"--memory is {text}; give a size above 0, such as '40 GiB'")
    return int(nbytes)


def _mib(nbytes: int) -> str:
    """As `st2i profile` shows sizes."""
    return f"{nbytes / 2**20:,.0f}"


def _requests(
    trace: Path | None,
    rate: float,
    seconds: float,
    name: str | None,
    profile: Path | None,
    seed: int,
) -> tuple[Workload, list[Arrival]]:
    """Who asks for what, and when."""
    from ..simulate import generate, h800, measured, traces
    from ..simulate.workload import drawn, setting

    known = measured.Measured(h800.PROFILE) if profile is None else measured.read(profile)
    if name is None and known.workflows:
        workload = drawn("the profile", list(known.workflows.values()), seed, known.profile)
    else:
        workload = setting(name or "S2", seed, known.profile)
    if trace is None:
        return workload, generate.evaluation(workload, workload.rate(rate), seconds, seed)
    asked = [a for a in traces.scaled(traces.read(trace), rate) if a.at < seconds]
    if not asked:
        raise ParameterError(f"no request of {trace} is within {seconds:g} s; give more --seconds")
    if name is None and known.workflows:
        return known.asked(asked)
    arrivals = traces.arrivals(asked, list(workload.workflows))
    if len(arrivals) < len(asked):
        click.echo(
            f"{len(asked) - len(arrivals)} of {len(asked)} requests are left out: the trace has more "
            f"tenants than {workload.name} has workflows ({len(workload.workflows)})",
            err=True,
        )
    return workload, arrivals
