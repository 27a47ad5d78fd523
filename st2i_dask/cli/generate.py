"""`st2i generate`: prompts in, PNG files and a manifest out; running it again makes the rest."""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

import click

from ..errors import ParameterError
from ..tenants import DEFAULT_TENANT, check_tenant
from .clusters import cluster_options, own_cluster, quiet_logs, running_cluster
from .folder import MANIFEST, OutputFolder, checked_image
from .interrupts import Interrupts
from .jobs import Job, Plan, make_plan
from .loading import load_options
from .options import checked, parameter_values, parse_assignments
from .prompts import MAX_IMAGES, Failure, Wanted, read_prompts
from .runner import Outcome, lost_connection, run_jobs
from .sources import find_workflow
from .tables import count, failure_list

if TYPE_CHECKING:
    from distributed import Client

    from ..workflow import Workflow


@click.command()
@click.option(
    "--workflow",
    "source",
    required=True,
    metavar="NAME",
    help="A packaged model (shapes), a Diffusers folder, a hub id, or FILE.py:WORKFLOW.",
)
@load_options
@click.option("--prompt", "texts", multiple=True, metavar="TEXT", help="A prompt; repeatable.")
@click.option(
    "--prompts",
    "file",
    type=click.File("rb"),
    metavar="FILE",
    help="One prompt a line, or JSON objects with prompt, seed, steps, size, images, tenant and "
    "the workflow's other parameters; - reads standard input.",
)
@click.option("--seed", type=int, help="Seed of every prompt that names none.")
@click.option(
    "--images",
    type=click.IntRange(1, MAX_IMAGES),
    default=1,
    show_default=True,
    help="Images per prompt, with seeds SEED, SEED+1, ...",
)
@click.option("--steps", type=int, help="Denoising steps (parameter num_steps).")
@click.option("--size", metavar="WxH", help="Pixels (parameters width and height).")
@click.option(
    "--param",
    "assignments",
    multiple=True,
    metavar="NAME=VALUE",
    help="Any other parameter of the workflow; of a picture its file. Repeatable.",
)
@click.option("--tenant", default=DEFAULT_TENANT, show_default=True, help="Who is charged.")
@cluster_options
@click.option(
    "--out",
    required=True,
    type=click.Path(file_okay=False),
    help="Folder for images and manifest.jsonl.",
)
def generate(
    source: str,
    texts: Sequence[str],
    file: Any,
    seed: int | None,
    images: int,
    steps: int | None,
    size: str | None,
    assignments: Sequence[str],
    tenant: str,
    scheduler: str | None,
    workers: int,
    out: str,
    loaded: dict[str, Any],
) -> None:
    """Make images from prompts.

    Only what is missing in the folder is made, so the same command continues an interrupted run.
    Exit status: 0 everything is there; 1 some prompts failed or the run broke off; 2 refused,
    nothing was done; 130 interrupted.
    """
    if bool(texts) == (file is not None):
        raise click.UsageError("give the prompts either by --prompt or by --prompts FILE")
    check_tenant(tenant)
    quiet_logs()
    workflow = find_workflow(source, **loaded)
    written = {"seed": seed, "steps": steps, "size": size}
    common = _common_values(
        workflow, {k: v for k, v in written.items() if v is not None}, assignments
    )
    if file is not None:
        wanted, failures = read_prompts(workflow, file, common=common, images=images, tenant=tenant)
    else:
        wanted = [
            Wanted(
                "--prompt" if len(texts) == 1 else f"prompt {number}",
                {**common, **parameter_values(workflow, {"prompt": text})},
                images,
                tenant,
            )
            for number, text in enumerate(texts, 1)
        ]
        failures = []
    if not wanted and not failures:
        raise ParameterError(f"{getattr(file, 'name', file)!r} holds no prompt; write one a line")

    with OutputFolder(out) as folder:
        plan = make_plan(workflow, _shown(wanted), folder)
        plan.failures[:0] = failures
        for job in plan.kept:
            _complete_manifest(folder, workflow, job)
        status = _carry_out(workflow, plan, folder, scheduler, workers)
    sys.exit(status)


def _common_values(
    workflow: Workflow, written: dict[str, Any], assignments: Sequence[str]
) -> dict[str, Any]:
    """Checked parameter values from the command's options; ParameterError for any other."""
    named = parameter_values(workflow, written, shown={name: f"--{name}" for name in written})
    extra = parameter_values(workflow, parse_assignments(workflow, assignments))
    if "prompt" in extra:
        raise ParameterError("--param prompt is for --prompt TEXT or --prompts FILE; use these")
    for name in named.keys() & extra.keys():
        raise ParameterError(f"{name} is given twice, by an option and by --param; give it once")
    return checked(workflow, {**named, **extra})


def _carry_out(
    workflow: Workflow, plan: Plan, folder: OutputFolder, scheduler: str | None, workers: int
) -> int:
    """Make what is missing, tell what happened; returns the exit status."""
    if plan.duplicates:
        click.echo(f"{count(plan.duplicates, 'duplicate')} left out", err=True)
    _warn_of_versions(plan, folder)
    if not plan.jobs:
        if plan.kept:
            click.echo(f"nothing to do: {count(plan.images, 'image')} already in {folder.path}")
        _report(plan.failures)
        return 1 if plan.failures else 0
    started = time.monotonic()
    with Interrupts() as interrupts:
        cluster: AbstractContextManager[Client] = (
            running_cluster(scheduler, or_own=True) if scheduler else own_cluster(workers)
        )
        with cluster as client:
            outcome = _run(client, workflow, plan, folder, interrupts)
    took = time.monotonic() - started
    kept = f", {len(plan.kept)} kept" if plan.kept else ""
    click.echo(
        f"{count(outcome.made, 'image')} made{kept}, in {folder.path} ({took:.1f} s); "
        f"parameters of each: {MANIFEST}"
    )
    _report(plan.failures + outcome.failures)
    if outcome.stopped is None:
        return 1 if plan.failures or outcome.failures else 0
    missing = len(plan.jobs) - outcome.made - len(outcome.failures)
    reason = outcome.stopped
    if not interrupts.received and reason.startswith("the connection"):
        reason = str(lost_connection(outcome))
    click.echo(
        f"st2i: {reason}; {count(missing, 'image')} not made. What is done is kept: run the "
        "same command again to make the rest",
        err=True,
    )
    return interrupts.exit_status if interrupts.received else 1


def _run(
    client: Client, workflow: Workflow, plan: Plan, folder: OutputFolder, interrupts: Interrupts
) -> Outcome:
    from tqdm import tqdm

    failed, told = 0, False
    with tqdm(
        total=plan.images,
        initial=len(plan.kept),
        unit="image",
        # A log file needs no animation.
        mininterval=0.1 if sys.stderr.isatty() else 10.0,
        dynamic_ncols=True,
    ) as bar:

        def done(job: Job, failure: Failure | None) -> None:
            nonlocal failed
            if failure is not None:
                failed += 1
                bar.set_postfix(failed=failed, refresh=False)
            bar.update()

        def wait(reason: str) -> None:
            nonlocal told
            if not told:
                bar.write(f"waiting: {reason}", file=sys.stderr)
                told = True

        def save(job: Job, result: Any, seconds: float) -> None:
            folder.save(job.file, checked_image(result), seconds=round(seconds, 3))

        return run_jobs(client, workflow, plan.jobs, save, interrupts, done, wait)


def _shown(wanted: list[Wanted]) -> Any:
    """The list, with a progress bar if checking it takes long."""
    from tqdm import tqdm

    return tqdm(wanted, "checking", unit="prompt", delay=2.0, leave=False, dynamic_ncols=True)


def _complete_manifest(folder: OutputFolder, workflow: Workflow, job: Job) -> None:
    """An image that lost both its manifest line and its text chunks is what its name says."""
    parameters = job.parameters
    fields = {
        "workflow": workflow.name,
        "prompt": parameters.get("prompt"),
        "seed": parameters.get("seed"),
        "steps": parameters.get("num_steps"),
        "parameters": parameters,
    }
    folder.note(job.file, {name: value for name, value in fields.items() if value is not None})


def _warn_of_versions(plan: Plan, folder: OutputFolder) -> None:
    others = [
        job.file
        for job in plan.kept
        if (folder.entry(job.file) or {}).get("version", job.version) != job.version
    ]
    if others:
        click.echo(
            f"note: {count(len(others), 'kept image')} (such as {others[0]}) came from another "
            "version of the workflow; delete it to make it anew",
            err=True,
        )


def _report(failures: Sequence[Failure]) -> None:
    if failures:
        click.echo(failure_list(failures), err=True)
