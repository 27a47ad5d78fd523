"""`st2i demo`: a gallery for two tenants on a cluster of its own, in under a minute."""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from ..cluster import attach
from ..operate import data_plane
from ..tenants import check_tenant
from .clusters import dashboard, own_cluster, quiet_logs
from .contact_sheet import Tile, contact_sheet
from .folder import OutputFolder, checked_image, replace_with
from .interrupts import Interrupts
from .jobs import Job
from .naming import image_name
from .prompts import Failure
from .runner import Outcome, run_jobs
from .sources import find_workflow
from .tables import count, failure_list, table

if TYPE_CHECKING:
    from distributed import Client
    from PIL import Image

    from ..workflow import Workflow

#: Who asks for how many images. The first asks for all of them at once, just before the second.
TENANTS = {"alice": 12, "bob": 6}

SHEET = "contact-sheet.png"


@click.command()
@click.option(
    "--out",
    default="st2i-demo",
    show_default=True,
    type=click.Path(file_okay=False),
    help="Folder for the images and the contact sheet.",
)
@click.option("--workers", type=click.IntRange(1), default=2, show_default=True)
def demo(out: str, workers: int) -> None:
    """Draw a gallery on a local cluster for two tenants.

    Starts a Dask cluster here, sends the prompts of two tenants, and shows what each of them got:
    images, device seconds, latency. No download: the model comes with the package.
    """
    from ..shapes import gallery

    quiet_logs()
    workflow = find_workflow("shapes")
    prompts = gallery(sum(TENANTS.values()), seed=0)
    with OutputFolder(out) as folder:
        status = run_demo(workflow, prompts, folder, workers)
    sys.exit(status)


def run_demo(
    workflow: Workflow,
    prompts: Sequence[str],
    folder: OutputFolder,
    workers: int,
    **parameters: Any,
) -> int:
    """Run the gallery and show the results; returns the exit status."""
    jobs = demo_jobs(workflow, prompts, parameters)
    images: dict[str, Image.Image] = {}

    def save(job: Job, result: Any, seconds: float) -> None:
        image = images[job.file] = checked_image(result)
        folder.save(job.file, image, seconds=round(seconds, 3))

    started = time.monotonic()
    click.echo(f"starting a cluster with {count(workers, 'worker')} ...")
    with Interrupts() as interrupts:
        with own_cluster(workers, announce=True) as client:
            attach(client)
            click.echo(dashboard(client))
            drawing = time.monotonic()
            outcome = _run(client, workflow, jobs, save, interrupts)
            took = time.monotonic() - drawing
            usage = client.sync(client.scheduler.st2i_usage) if outcome.made else {}
            moved = data_plane(client) if outcome.made else {}
        if outcome.made:
            click.echo()
            click.echo(usage_table(outcome, usage))
            click.echo(moved_line(moved))
            click.echo()
            _save_sheet(outcome, images, folder.path, workflow, took)
    if outcome.failures:
        click.echo(failure_list(outcome.failures), err=True)
    click.echo(f"{time.monotonic() - started:.0f} s in all")
    if outcome.stopped is not None:
        click.echo(f"st2i: {outcome.stopped}", err=True)
        return interrupts.exit_status if interrupts.received else 1
    return 1 if outcome.failures else 0


def demo_jobs(workflow: Workflow, prompts: Sequence[str], parameters: dict[str, Any]) -> list[Job]:
    """One job per prompt, dealt to the tenants in order."""
    owners = [tenant for tenant, share in TENANTS.items() for _ in range(share)]
    jobs = []
    for seed, (tenant, prompt) in enumerate(zip(owners, prompts, strict=True)):
        values = {"prompt": prompt, "seed": seed, **parameters}
        composed, _, everything = workflow.bind(**values)
        name = image_name(workflow.name, everything)
        jobs.append(
            Job(
                name,
                f"prompt {seed + 1}",
                check_tenant(tenant),
                values,
                everything,
                composed.version,
            )
        )
    return jobs


def _run(
    client: Client,
    workflow: Workflow,
    jobs: Sequence[Job],
    save: Callable[[Job, Any, float], None],
    interrupts: Interrupts,
) -> Outcome:
    from contextlib import ExitStack

    from tqdm import tqdm

    width = max(map(len, TENANTS))
    with ExitStack() as stack:
        bars = {
            tenant: stack.enter_context(
                tqdm(
                    total=total,
                    desc=tenant.ljust(width),
                    unit="image",
                    position=position,
                    mininterval=0.1 if sys.stderr.isatty() else 5.0,
                )
            )
            for position, (tenant, total) in enumerate(TENANTS.items())
        }

        def done(job: Job, failure: Failure | None) -> None:
            bars[job.tenant].update()

        return run_jobs(client, workflow, jobs, save, interrupts, done)


def usage_table(outcome: Outcome, usage: dict[str, dict[str, float]]) -> str:
    """What every tenant got and used.

    usage: the scheduler's totals by tenant, in device seconds.
    """
    rows = []
    for tenant in TENANTS:
        seconds = sorted(s for job, s in outcome.seconds if job.tenant == tenant)
        used = usage.get(tenant, {})
        rows.append(
            [
                tenant,
                str(len(seconds)),
                f"{used.get('device_seconds', 0.0):.2f}",
                f"{used.get('compute', 0.0):.2f}",
                f"{used.get('load', 0.0):.2f}",
                f"{used.get('transfer', 0.0):.2f}",
                f"{sum(seconds) / len(seconds):.2f}" if seconds else "-",
                f"{percentile(seconds, 95):.2f}" if seconds else "-",
            ]
        )
    header = [
        "tenant",
        "images",
        "device s",
        "compute s",
        "load s",
        "transfer s",
        "mean latency s",
        "p95 latency s",
    ]
    return table(header, rows, right=range(1, len(header)))


#: How a demo's reader knows the transports.
_WAYS = {
    "process": "within a process",
    "host": "through shared memory",
    "nvshmem": "from device to device",
    "comm": "in messages",
}


def moved_line(workers: dict[str, dict[str, Any]]) -> str:
    """Bytes of tensors pulled by workers, by transport."""
    parts = []
    for name, way in _WAYS.items():
        found = [worker["transports"][name] for worker in workers.values()]
        pulls, nbytes = (sum(each[what] for each in found) for what in ("pulls", "bytes"))
        if pulls:
            parts.append(f"{nbytes / 1e6:.1f} MB {way} ({count(pulls, 'tensor')})")
    return f"tensors between workers: {', '.join(parts) or 'none'}"


def percentile(ordered: Sequence[float], percent: float) -> float:
    """Nearest rank: the smallest value that `percent` % of the sorted values do not exceed.

    >>> percentile([1.0, 2.0, 3.0, 4.0], 50), percentile([1.0, 2.0, 3.0, 4.0], 95)
    (2.0, 4.0)
    """
    return ordered[max(0, math.ceil(len(ordered) * percent / 100) - 1)]


def _save_sheet(
    outcome: Outcome, images: dict[str, Image.Image], folder: Path, workflow: Workflow, took: float
) -> None:
    import io

    latency = {job.file: seconds for job, seconds in outcome.seconds}
    jobs = sorted((job for job, _ in outcome.seconds), key=lambda job: int(job.parameters["seed"]))
    sheet = contact_sheet(
        [
            Tile(
                images[job.file],
                job.prompt,
                job.tenant,
                f"seed {job.parameters['seed']}, after {latency[job.file]:.1f} s",
            )
            for job in jobs
        ],
        f"{workflow.name}: {len(jobs)} images",
        f"{jobs[0].parameters.get('num_steps')} steps each, {took:.0f} s for all of them",
    )
    buffer = io.BytesIO()
    sheet.save(buffer, "PNG", optimize=True)
    replace_with(folder / SHEET, buffer.getbuffer())
    click.echo(f"contact sheet: {folder / SHEET}")
    click.echo(f"single images, with their parameters: {folder}/*.png")
