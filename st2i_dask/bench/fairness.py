"""Fairness: a cheap tenant against one ten times dearer, at equal request rates, on two workers.

The experiment of the ServerlessT2I paper's figure 9 (right), live: the same requests under one policy
after the other. Both tenants always have requests that nobody has started, so each could use what it
is given. Service is device seconds as the workers measure them. The difference between the two may
not grow with time: it must stay within 2 * (slack + the largest charge of one dispatch).
"""

from __future__ import annotations

import time
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import dask
from distributed import Client, SchedulerPlugin

import st2i_dask as st2i
from scheduler_plugin.plugin import SCHEDULER_PLUGIN, ServingSchedulerPlugin
from scheduler_plugin.rivals import chooser
from scheduler_plugin.settings import Settings
from st2i_dask.request import ANNOTATION

#: Policies in the order in which they run; `dask` is no policy at all: the plugin is not there.
POLICIES = {
    "fair": "st2i_dask (vTime)",
    "vtc": "VTC, counting steps",
    "fifo": "FIFO",
    "sjf": "shortest job first",
    "dask": "stock Dask order",
}
SLACK_S = 0.25
#: Steps of a request and seconds per step: 0.1 device seconds against 1.
CHEAP = ("cheap", 4, 0.025)
DEAR = ("dear", 10, 0.1)
_METER = "st2i-bench-meter"
_POINTS = 200


class Run(NamedTuple):
    """One execution that ended. `first`: it started its request."""

    tenant: str
    first: bool
    start: float
    stop: float
    seconds: float  # device seconds: load, compute, transfer
    worker: str


@dataclass
class Service:
    """Device seconds that the dear tenant was ahead, after each run, while both were backlogged."""

    begin: float
    times: list[float] = field(default_factory=lambda: [0.0])  # seconds since `begin`
    difference: list[float] = field(default_factory=lambda: [0.0])
    largest: float = 0.0  # the largest charge

    def add(self, at: float, ahead: float) -> None:
        self.times.append(at - self.begin)
        self.difference.append(self.difference[-1] + ahead)
        self.largest = max(self.largest, abs(ahead))

    @property
    def worst(self) -> float:
        """The largest difference of what the two received, over any interval."""
        return max(self.difference) - min(self.difference)


def run(
    seconds: float = 8.0, rate: float = 20.0, policies: Iterable[str] = tuple(POLICIES)
) -> dict[str, Any]:
    """Largest difference of service by policy, device seconds, and the bound for ours.

    seconds: how long each policy runs. rate: requests per second of each tenant; both tenants start
        with the requests of one second.
    """
    served: dict[str, Service] = {}
    with st2i.local_cluster(2, dashboard_address=None) as cluster, Client(cluster) as client:
        st2i.attach(client)
        client.unregister_scheduler_plugin(SCHEDULER_PLUGIN)
        for policy in policies:
            served[policy] = _serve(client, policy, seconds, rate)
    ours = served["fair"]
    return {
        "max_difference_s": round(ours.worst, 3),
        "bound_s": round(2 * (SLACK_S + ours.largest), 3),
        **{f"{p}_difference_s": round(s.worst, 3) for p, s in served.items() if p != "fair"},
        "slack_s": SLACK_S,
        "largest_charge_s": round(ours.largest, 3),
        "backlogged_s": round(min(s.times[-1] for s in served.values()), 3),
        "series": {policy: _thinned(s) for policy, s in served.items()},
    }


def plot(figures: dict[str, Any], path: str | Path) -> None:
    """Draw the difference over time, a line per policy, the bound as a band."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 4.2), dpi=110, layout="constrained")
    axes = figure.subplots()
    bound = figures["bound_s"]
    axes.axhspan(-bound, bound, color="tab:green", alpha=0.15, lw=0, label=f"bound, ±{bound:.2f} s")
    styles = {"fair": ("tab:green", "-", 2.4), "vtc": ("tab:blue", "-.", 1.6)}
    styles |= {"fifo": ("tab:red", "-", 1.6), "sjf": ("tab:purple", ":", 2.0)}
    styles |= {"dask": ("tab:gray", "--", 1.6)}
    for policy, series in figures["series"].items():
        colour, line, width = styles[policy]
        axes.step(
            series["time_s"],
            series["difference_s"],
            where="post",
            color=colour,
            linestyle=line,
            linewidth=width,
            label=POLICIES[policy],
        )
    axes.axhline(0, color="black", lw=0.6)
    axes.set_title("Service of two backlogged tenants, one 10x dearer per request, equal rates")
    axes.set_xlabel("time (s)")
    axes.set_ylabel("dear tenant ahead (device s)")
    axes.grid(alpha=0.3)
    axes.margins(x=0)
    axes.legend(loc="upper left", fontsize=9)
    figure.savefig(path, format="png")


# -- one policy ------------------------------------------------------------------------------------


class Work(st2i.ModelFn):
    """Holds its executor for `seconds` and passes its input on."""

    def setup_io(self) -> None:
        self.add_input("value")
        self.add_output("same")

    def execute(self, model_components: Any, value: Any) -> dict[str, Any]:
        time.sleep(self.options["seconds"])
        return {"same": value}


class Meter(SchedulerPlugin):
    """Notes on the scheduler what was submitted and what has run, whatever policy is there."""

    name = _METER

    def __init__(self) -> None:
        self.submitted: list[tuple[float, str]] = []
        self.runs: list[Run] = []

    async def start(self, scheduler: Any) -> None:
        self.scheduler = scheduler

    def update_graph(self, scheduler: Any, *, tasks: list[Any], **kwargs: Any) -> None:
        now = time.time()
        for key in tasks:
            note = (scheduler.tasks[key].annotations or {}).get(ANNOTATION)
            if note and note["position"] == 0:
                self.submitted.append((now, note["tenant"]))

    def transition(self, key: Any, start: str, finish: str, *args: Any, **message: Any) -> None:
        if (start, finish) != ("processing", "memory"):
            return
        note = (self.scheduler.tasks[key].annotations or {}).get(ANNOTATION)
        report = (message.get("metadata") or {}).get(ANNOTATION)
        if not note or not report:  # a step that ran as part of the one before it
            return
        spans = [s for s in message["startstops"] if s["action"] == "compute"]
        self.runs.append(
            Run(
                note["tenant"],
                note["position"] == 0,
                spans[0]["start"],
                spans[-1]["stop"],
                report["load"] + report["compute"] + report["transfer"],
                message["worker"],
            )
        )


def _serve(client: Client, policy: str, seconds: float, rate: float) -> Service:
    """Both tenants for that long under a scheduler that knows nothing but one request of each."""
    cheap, dear = _workflow(*CHEAP), _workflow(*DEAR)
    if policy != "dask":
        settings = Settings(slack_s=SLACK_S, default_cap=None)
        client.register_plugin(ServingSchedulerPlugin(settings, chooser=chooser(policy)))
    # Costs are learned, both workers warm.
    client.gather([_send(client, workflow, n) for n in range(2) for workflow in (cheap, dear)])
    client.register_plugin(Meter())
    begin = time.monotonic()
    futures: list[Any] = []
    for number in range(round(rate * (1 + seconds))):  # those of one second at once
        time.sleep(max(0.0, begin + number / rate - 1 - time.monotonic()))
        pair = (cheap, dear) if number % 2 else (dear, cheap)
        futures += [_send(client, workflow, number) for workflow in pair]
    time.sleep(max(0.0, begin + seconds - time.monotonic()))
    submitted, runs = client.run_on_scheduler(_noted)
    client.unregister_scheduler_plugin(_METER)
    for future in futures:
        future.release()
    while client.run_on_scheduler(_tasks) or any(client.run(_executing).values()):
        time.sleep(0.02)
    if policy != "dask":
        client.unregister_scheduler_plugin(SCHEDULER_PLUGIN)
    return _service(submitted, runs, (cheap.name, dear.name))


def _workflow(label: str, steps: int, seconds: float) -> st2i.Workflow:
    @st2i.workflow(name=f"bench-{label}", replace=True)
    def chain(value: float) -> Any:
        work = Work(name=label, seconds=seconds)
        for _ in range(steps):
            value = work(value)
        return value

    made: st2i.Workflow = chain
    return made


def _send(client: Client, workflow: st2i.Workflow, number: int) -> Any:
    """As `Workflow.submit` does, but also without our plugin on the scheduler."""
    request = workflow.request(workflow.name, value=float(number))
    with dask.annotate(**{ANNOTATION: request.annotations.get}):
        return client.get(request.tasks, request.key, sync=False)


def _noted(dask_scheduler: Any) -> tuple[list[tuple[float, str]], list[Run]]:
    meter = dask_scheduler.plugins[_METER]
    return meter.submitted, meter.runs


def _tasks(dask_scheduler: Any) -> int:
    return len(dask_scheduler.tasks)


def _executing(dask_worker: Any) -> int:
    return int(dask_worker.state.executing_count)


def _service(
    submitted: list[tuple[float, str]], runs: list[Run], tenants: tuple[str, str]
) -> Service:
    """The longest time in which both had requests that nobody had started, and all runs are known."""
    dear = tenants[1]
    # A worker runs one at a time: whatever began before its last known end has been told.
    known = min(
        max(r.stop for r in runs if r.worker == worker) for worker in {r.worker for r in runs}
    )
    events: list[tuple[float, str, Run | None]] = [(at, tenant, None) for at, tenant in submitted]
    events += [(r.start, r.tenant, r) for r in runs if r.start < known]
    waiting = dict.fromkeys(tenants, 0)
    longest, current = Service(0.0), None
    for at, tenant, ran in sorted(events, key=lambda event: event[0]):
        waiting[tenant] += 1 if ran is None else -ran.first
        if min(waiting.values()) < 1:
            current = None
            continue
        current = current or Service(at)
        if ran is not None:
            current.add(at, ran.seconds if tenant == dear else -ran.seconds)
        if current.times[-1] >= longest.times[-1]:
            longest = current
    return longest


def _thinned(service: Service) -> dict[str, list[float]]:
    every = max(1, len(service.times) // _POINTS)
    return {
        "time_s": [round(t, 3) for t in service.times[::every]],
        "difference_s": [round(d, 3) for d in service.difference[::every]],
    }
