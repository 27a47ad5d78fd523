"""`st2i replay`: the requests of a trace on a running cluster, and how they were served."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from ..errors import ParameterError
from ..simulate.live import alone_s, attainment, play
from .calls import Call, call_of, call_options
from .clusters import running_cluster, scheduler_option
from .tables import table

if TYPE_CHECKING:
    from distributed import Client

    from ..simulate.measured import Measured
    from ..simulate.traces import Asked

LONGEST_TRACE_S = 30 * 86400.0


@click.command(
    help="""Submit the requests of a trace to a running cluster, when and for whom the trace says.

Reports, by tenant, requests that were done within their deadline, latencies and device time, and what
the workers' caches did. A deadline is a multiple of the latency of the same request alone, which is
measured first. With a --profile that `st2i profile` wrote, also what the simulator says of the same
requests on as many workers. Exit status 1: some requests failed."""
)
@click.option(
    "--trace",
    "path",
    required=True,
    type=click.Path(dir_okay=False, path_type=Path),
    help="at,tenant,workflow per line, or another format that is known.",
)
@scheduler_option
@call_options("What to run: for requests of workflow NAME of the trace, or for all others.")
@click.option("--rate", default=1.0, show_default=True, help="Make the trace so much faster.")
@click.option("--seconds", type=float, help="Only so much of the trace, after --rate.")
@click.option("--slo", default=3.0, show_default=True, help="Deadline, times the latency alone.")
@click.option(
    "--profile",
    type=click.Path(dir_okay=False, path_type=Path),
    help="Of these workflows, to simulate the same requests.",
)
@click.option(
    "--json", "file", type=click.Path(dir_okay=False, path_type=Path), help="Figures go here."
)
def replay(
    path: Path,
    scheduler: str,
    sources: Sequence[str],
    assignments: Sequence[str],
    prompt: str,
    rate: float,
    seconds: float | None,
    slo: float,
    profile: Path | None,
    file: Path | None,
) -> None:
    from ..simulate import measured, traces

    asked = traces.scaled(traces.read(path), rate)
    asked = [a for a in asked if seconds is None or a.at < seconds]
    if not asked:
        raise ParameterError(f"no request of {path} is within {seconds:g} s; give more --seconds")
    if asked[-1].at > LONGEST_TRACE_S:
        raise ParameterError(
            f"{path} lasts {asked[-1].at:.3g} s, more than {LONGEST_TRACE_S:,.0f}; give --seconds, or a "
            "larger --rate"
        )
    if not slo > 1:
        raise ParameterError(f"--slo is {slo}; give a multiple of the latency alone above 1")
    if file is not None and not file.resolve().parent.is_dir():
        raise ParameterError(f"--json {file}: there is no folder {file.resolve().parent}; make it")
    calls = _by_name(sources, assignments, prompt, asked)
    known = measured.read(profile) if profile is not None else None
    named = _as_measured(known, calls, asked) if known is not None else []
    with running_cluster(scheduler) as client:
        figures = run(client, asked, calls, slo, note=lambda text: click.echo(text, err=True))
        executors = len(client.nthreads())
    if known is not None and executors:
        figures["simulated"] = _simulated(known, named, executors, slo)
    click.echo(_shown(figures))
    if file is not None:
        file.write_text(json.dumps(figures, indent=2) + "\n")
    if figures["failed"]:
        click.get_current_context().exit(1)


def _by_name(
    sources: Sequence[str], assignments: Sequence[str], prompt: str, asked: Sequence[Asked]
) -> dict[str, Call]:
    """By the trace's names of workflows; '' is for all that have none of their own."""
    wanted = {a.workflow for a in asked}
    found: dict[str, Call] = {}
    for source in sources:
        name, equals, rest = source.partition("=")
        if equals and name not in wanted and not Path(source).exists():
            shown = ", ".join(map(repr, sorted(wanted)[:10]))
            raise ParameterError(
                f"--workflow {source!r}: the trace asks for no workflow {name!r}, but for {shown}"
            )
        name, text = (name, rest) if equals and name in wanted else ("", source)
        if name in found:
            raise ParameterError(
                f"--workflow {source!r}: there is one for {f'workflow {name!r}' if name else 'all others'} "
                "already; give each workflow of the trace one at most, by NAME=SOURCE"
            )
        found[name] = call_of(text, assignments, prompt)
    missing = sorted(wanted - set(found))
    if missing and "" not in found:
        raise ParameterError(
            f"the trace asks for workflow {missing[0]!r}, and no --workflow is for it; give "
            f"--workflow {missing[0]}=SOURCE, or --workflow SOURCE for all that have none"
        )
    return found


def _as_measured(known: Measured, calls: Mapping[str, Call], asked: Sequence[Asked]) -> list[Asked]:
    """The requests, their workflows called as the profile calls them. ParameterError: it lacks one."""
    found = []
    for request in asked:
        name = request.workflow
        if name not in known.workflows:
            name = (calls.get(name) or calls[""]).workflow.name
        if name not in known.workflows:
            raise ParameterError(
                f"the profile has no workflow {name!r}, it has: {', '.join(known.workflows) or 'none'}; "
                "measure it with st2i profile"
            )
        found.append(request._replace(workflow=name))
    return found


def _simulated(
    known: Measured, asked: Sequence[Asked], executors: int, slo: float
) -> dict[str, float]:
    """attainment and p99_s of the same requests in virtual time."""
    from ..simulate.plan import measured

    workload, arrivals = known.asked(asked)
    size = measured(workload, arrivals, executors, slo)
    return {"executors": executors, "attainment": size.attainment, "p99_s": size.p99_s}


def run(
    client: Client,
    asked: Sequence[Asked],
    calls: Mapping[str, Call],
    slo: float,
    note: Callable[[str], None] = lambda text: None,
) -> dict[str, Any]:
    """Submit and wait. Figures: attainment (0 to 1), p50_s, p95_s, p99_s, failed, late_s (how much
    later than the trace says the last request was submitted), alone_s by workflow, tenants, caches."""
    from .. import operate

    seconds = {}
    for name, call in calls.items():
        for number in range(2):  # the first loads
            submit = partial(call.submit, client, "st2i-replay", number)
            seconds[name] = alone_s(submit, call.workflow.name)
        one = seconds[name]
        note(f"{call.workflow.name}: {one:.3f} s alone, deadline {slo * one:.3f} s")
    service = {row["tenant"]: row["service_s"] for row in operate.tenants(client)}
    models = operate.models(client)
    names = [a.workflow if a.workflow in calls else "" for a in asked]
    played = play(
        [a.at for a in asked],
        lambda number: calls[names[number]].submit(client, asked[number].tenant, number),
    )
    after = {row["tenant"]: row["service_s"] for row in operate.tenants(client)}
    caches = _caches(models, operate.models(client))
    deadline = [slo * seconds[name] for name in names]
    latency = played.latency_s
    rows = []
    for tenant in dict.fromkeys(a.tenant for a in asked):
        own = [n for n, a in enumerate(asked) if a.tenant == tenant]
        rows.append(
            {
                "tenant": tenant,
                **_served([latency[n] for n in own], [deadline[n] for n in own]),
                "service_s": after.get(tenant, 0.0) - service.get(tenant, 0.0),
            }
        )
    return {
        "requests": len(asked),
        **_served(latency, deadline),
        "failed": sum(one is None for one in latency),
        "seconds": played.seconds,
        "late_s": played.late_s,
        "slo": slo,
        "alone_s": {call.workflow.name: seconds[name] for name, call in calls.items()},
        "tenants": rows,
        "fairness": _jain([row["service_s"] for row in rows]),
        "caches": caches,
    }


def _served(latency: Sequence[float | None], deadline: Sequence[float]) -> dict[str, float]:
    ordered = sorted(one for one in latency if one is not None)

    def share(part: float) -> float:
        return ordered[min(len(ordered) - 1, int(part * len(ordered)))] if ordered else 0.0

    shares = {f"p{round(100 * part)}_s": share(part) for part in (0.5, 0.95, 0.99)}
    return {"attainment": attainment(latency, deadline), **shares}


_CACHED = ("runs", "hits", "loads", "load_s", "stalled_s")


def _caches(
    before: Sequence[Mapping[str, Any]], after: Sequence[Mapping[str, Any]]
) -> dict[str, float]:
    """What the workers' models did in between; those that are gone by then are left out."""
    known = {(row["worker"], row["model_key"]): row for row in before}
    found = dict.fromkeys(_CACHED, 0.0)
    for row in after:
        old = known.get((row["worker"], row["model_key"]))
        # A model that was read anew counts from 0 again.
        old = old if old is not None and old["runs"] <= row["runs"] else dict.fromkeys(_CACHED, 0)
        for name in _CACHED:
            found[name] += row[name] - old[name]
    return found


def _jain(service: Sequence[float]) -> float:
    """Jain's index of the tenants' device seconds: 1 where all got the same, 1/n where one got all."""
    total = sum(service)
    return total * total / (len(service) * sum(s * s for s in service)) if total else 1.0


def _shown(figures: Mapping[str, Any]) -> str:
    header = ("tenant", "within deadline (%)", "p50 (s)", "p95 (s)", "p99 (s)", "device time (s)")
    rows = [
        (
            row["tenant"],
            f"{100 * row['attainment']:.1f}",
            *(f"{row[name]:.2f}" for name in ("p50_s", "p95_s", "p99_s", "service_s")),
        )
        for row in figures["tenants"]
    ]
    caches = figures["caches"]
    served = (
        f"{figures['requests']} requests in {figures['seconds']:.1f} s, {figures['failed']} failed; "
        f"{100 * figures['attainment']:.1f} % within their deadline; p50 {figures['p50_s']:.2f} s, "
        f"p99 {figures['p99_s']:.2f} s; fairness of device time {figures['fairness']:.2f}"
    )
    cached = (
        f"caches: {caches['hits']:.0f} of {caches['runs']:.0f} runs found their model, "
        f"{caches['loads']:.0f} layers loaded, {caches['stalled_s']:.2f} s waited for loads"
    )
    lines = [table(header, rows, right=range(1, 6)), served, cached]
    if "simulated" in figures:
        virtual = figures["simulated"]
        lines.append(
            f"simulated on {virtual['executors']} workers: {100 * virtual['attainment']:.1f} % within "
            f"their deadline; p99 {virtual['p99_s']:.2f} s"
        )
    return "\n".join(lines)
