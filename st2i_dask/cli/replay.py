"""`st2i replay`: the requests of a trace on a running cluster, and how they were served."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from ..errors import ParameterError
from ..tenants import check_tenant
from .clusters import running_cluster
from .options import checked, parse_assignments
from .sources import find_workflow
from .tables import table

if TYPE_CHECKING:
    from distributed import Client

    from ..simulate.traces import Asked
    from ..workflow import Workflow

_PROMPT = "a red circle on a white background"


@click.command(
    help="""Submit the requests of a trace to a running cluster, when and for whom the trace says.

Reports, by tenant, requests that were done within their deadline, latencies and device time, and what
the workers' caches did. A deadline is a multiple of the latency of the same request alone, which is
measured first. Exit status 1: some requests failed."""
)
@click.option(
    "--trace",
    "path",
    required=True,
    type=click.Path(dir_okay=False, path_type=Path),
    help="at,tenant,workflow per line, or another format that is known.",
)
@click.option("--scheduler", required=True, metavar="ADDR", help="Address of the Dask scheduler.")
@click.option(
    "--workflow",
    "sources",
    multiple=True,
    required=True,
    metavar="[NAME=]SOURCE",
    help="What to run: for requests of workflow NAME of the trace, or for all others.",
)
@click.option("--param", "assignments", multiple=True, metavar="NAME=VALUE", help="Repeatable.")
@click.option("--prompt", default=_PROMPT, show_default=True, help="Of workflows that take one.")
@click.option("--rate", default=1.0, show_default=True, help="Make the trace so much faster.")
@click.option("--seconds", type=float, help="Only so much of the trace, after --rate.")
@click.option("--slo", default=3.0, show_default=True, help="Deadline, times the latency alone.")
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
    file: Path | None,
) -> None:
    from ..simulate import traces

    asked = traces.scaled(traces.read(path), rate)
    asked = [a for a in asked if seconds is None or a.at < seconds]
    if not asked:
        raise ParameterError(f"no request of {path} is within {seconds} s; give more --seconds")
    for tenant in {a.tenant for a in asked}:
        check_tenant(tenant)
    if not slo > 1:
        raise ParameterError(f"--slo is {slo}; give a multiple of the latency alone above 1")
    played = _by_name(sources, assignments, prompt, asked)
    with running_cluster(scheduler) as client:
        figures = run(client, asked, played, slo, note=lambda text: click.echo(text, err=True))
    click.echo(_shown(figures))
    if file is not None:
        file.write_text(json.dumps(figures, indent=2) + "\n")
    if figures["failed"]:
        click.get_current_context().exit(1)


@dataclass
class Played:
    """A workflow and the values it is called with; `seeded`: it takes a seed."""

    workflow: Workflow
    values: dict[str, Any]
    seeded: bool = False
    alone_s: float = 0.0

    def submit(self, client: Client, tenant: str, number: int) -> Any:
        values = {**self.values, "seed": number} if self.seeded else self.values
        return self.workflow.submit(client, tenant=tenant, **values)


def _by_name(
    sources: Sequence[str], assignments: Sequence[str], prompt: str, asked: Sequence[Asked]
) -> dict[str, Played]:
    """By the trace's names of workflows; '' is for all that have none of their own."""
    wanted = {a.workflow for a in asked}
    found: dict[str, Played] = {}
    for source in sources:
        name, equals, rest = source.partition("=")
        name, text = (name, rest) if equals and name in wanted else ("", source)
        workflow = find_workflow(text)
        names = {parameter.name for parameter in workflow.parameters}
        values = checked(workflow, parse_assignments(workflow, assignments))
        if "prompt" in names:
            values.setdefault("prompt", prompt)
        found[name] = Played(workflow, values, "seed" in names and "seed" not in values)
    missing = sorted(wanted - set(found))
    if missing and "" not in found:
        raise ParameterError(
            f"the trace asks for workflow {missing[0]!r}, and no --workflow is for it; give "
            f"--workflow {missing[0]}=SOURCE, or --workflow SOURCE for all that have none"
        )
    return found


@dataclass
class _Done:
    """How each request went: latency in seconds, or None when it failed."""

    latency_s: dict[int, float | None] = field(default_factory=dict)
    all: threading.Event = field(default_factory=threading.Event)


def run(
    client: Client,
    asked: Sequence[Asked],
    played: Mapping[str, Played],
    slo: float,
    note: Callable[[str], None] = lambda text: None,
) -> dict[str, Any]:
    """Submit and wait. Figures: attainment (0 to 1), p50_s, p95_s, p99_s, failed, late_s (how much
    later than the trace says the last request was submitted), tenants, caches."""
    from .. import operate

    for one in played.values():
        for number in range(2):  # the first loads
            began = time.monotonic()
            one.submit(client, "st2i-replay", number).result()
            one.alone_s = time.monotonic() - began
        note(f"{one.workflow.name}: {one.alone_s:.3f} s alone, deadline {slo * one.alone_s:.3f} s")
    service = {row["tenant"]: row["service_s"] for row in operate.tenants(client)}
    caches = _caches(operate.models(client))
    done = _Done()
    begin = time.monotonic()
    futures = []
    late_s = 0.0
    for number, request in enumerate(asked):
        time.sleep(max(0.0, begin + request.at - time.monotonic()))
        one = played.get(request.workflow) or played[""]
        submitted = time.monotonic()
        late_s = max(late_s, submitted - begin - request.at)
        future = one.submit(client, request.tenant, number)

        def ended(future: Any, number: int = number, submitted: float = submitted) -> None:
            seconds = time.monotonic() - submitted
            done.latency_s[number] = seconds if future.status == "finished" else None
            if len(done.latency_s) == len(asked):
                done.all.set()

        future.add_done_callback(ended)
        futures.append(future)
    done.all.wait()
    seconds = time.monotonic() - begin
    after = {row["tenant"]: row["service_s"] for row in operate.tenants(client)}
    used = _caches(operate.models(client))
    deadline = [slo * (played.get(a.workflow) or played[""]).alone_s for a in asked]
    latency = [done.latency_s[number] for number in range(len(asked))]
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
        "seconds": seconds,
        "late_s": late_s,
        "slo": slo,
        "tenants": rows,
        "fairness": _jain([row["service_s"] for row in rows]),
        "caches": {name: used[name] - caches[name] for name in used},
    }


def _served(latency: Sequence[float | None], deadline: Sequence[float]) -> dict[str, float]:
    good = sum(
        one is not None and one <= limit for one, limit in zip(latency, deadline, strict=True)
    )
    ordered = sorted(one for one in latency if one is not None)

    def share(part: float) -> float:
        return ordered[min(len(ordered) - 1, int(part * len(ordered)))] if ordered else 0.0

    shares = {f"p{round(100 * part)}_s": share(part) for part in (0.5, 0.95, 0.99)}
    return {"attainment": good / len(latency), **shares}


def _caches(rows: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    return {
        name: sum(row[name] for row in rows)
        for name in ("runs", "hits", "loads", "load_s", "stalled_s")
    }


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
    return "\n".join([table(header, rows, right=range(1, 6)), served, cached])
