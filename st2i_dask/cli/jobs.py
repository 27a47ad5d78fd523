"""From what was asked for to the images to make: checked, named, each once."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from ..errors import ParameterError
from ..tenants import check_tenant
from .naming import described, image_name
from .pictures import with_pictures
from .prompts import Failure, Wanted

if TYPE_CHECKING:
    from ..workflow import Workflow
    from .folder import OutputFolder


@dataclass(frozen=True)
class Job:
    """One image to make."""

    file: str
    where: str  # for messages
    tenant: str
    values: dict[str, Any]  # as submitted
    parameters: dict[str, Any]  # all of them, checked, defaults included; of pictures a digest
    version: str  # of the workflow with these parameters

    @property
    def prompt(self) -> str:
        return str(self.parameters.get("prompt", ""))


@dataclass
class Plan:
    """What to do for a list of prompts. `jobs` are to make, `kept` are there already."""

    jobs: list[Job] = field(default_factory=list)
    kept: list[Job] = field(default_factory=list)
    failures: list[Failure] = field(default_factory=list)
    duplicates: int = 0

    @property
    def images(self) -> int:
        return len(self.jobs) + len(self.kept)


def make_plan(workflow: Workflow, wanted: Iterable[Wanted], folder: OutputFolder) -> Plan:
    """Check everything, name every image, and find out which are there. Nothing is sent."""
    plan = Plan()
    seen: dict[str, dict[str, Any]] = {}
    for want in wanted:
        for job in _expand(workflow, want, plan):
            if job.file in seen:
                if seen[job.file] == job.parameters:
                    plan.duplicates += 1
                else:  # 32 bits of hash, the same first words and the same seed
                    plan.failures.append(
                        _failure(job, f"has the same file name, {job.file}, as another image here")
                    )
                continue
            seen[job.file] = job.parameters
            if job.file not in folder:
                plan.jobs.append(job)
            elif _agrees(folder.entry(job.file), workflow.name, job):
                plan.kept.append(job)
            else:
                plan.failures.append(
                    _failure(
                        job,
                        f"{job.file} is there with other parameters; move it away, or choose "
                        "another --out",
                    )
                )
    return plan


def _expand(workflow: Workflow, want: Wanted, plan: Plan) -> list[Job]:
    """The jobs of one prompt, one per seed; refusals go to the plan."""
    jobs: list[Job] = []
    values = want.values
    try:
        check_tenant(want.tenant)
        for offset in range(want.images):
            if offset:
                values = {**want.values, "seed": jobs[0].parameters["seed"] + offset}
            composed, _, bound = workflow.bind(**with_pictures(workflow, values))
            parameters = described(bound)
            if want.images > 1 and type(parameters.get("seed")) is not int:
                raise ParameterError(
                    f"{want.images} images of one prompt differ in their seed, but workflow "
                    f"{workflow.name!r} has no seed here; ask for 1 image"
                )
            if parameters.get("num_images", 1) != 1:
                raise ParameterError(
                    f"num_images={parameters['num_images']!r} gives several images at once, and a file "
                    'holds one; ask for --images (in JSON "images"), whose seeds count up'
                )
            name = image_name(workflow.name, parameters)
            jobs.append(Job(name, want.where, want.tenant, values, parameters, composed.version))
    except ParameterError as error:
        prompt = str(want.values.get("prompt", ""))
        # The line's message need not repeat which workflow it is: there is one.
        reason = str(error).removeprefix(f"workflow {workflow.name!r}: ")
        plan.failures.append(Failure(want.where, prompt, reason))
    return jobs


def _failure(job: Job, reason: str) -> Failure:
    return Failure(job.where, job.prompt, reason)


def _agrees(entry: dict[str, Any] | None, workflow: str, job: Job) -> bool:
    """Whether the image in the folder is the one the job would make."""
    if entry is None:
        return True  # no record of it: its name is the only evidence, and that fits
    if entry.get("workflow", workflow) != workflow:
        return False
    recorded = entry.get("parameters")
    if not isinstance(recorded, dict):
        return True
    return all(job.parameters.get(name, value) == value for name, value in recorded.items())
