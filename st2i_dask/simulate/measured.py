"""A profile with the workflows that it was measured on, in one JSON file; and traces of these workflows.

Beside what `profiles` describes, the file may have

{"workflows": {"shapes": [{"fn": "T5Text", "models": ["T5Text@shapes"], "out_bytes": 4096}, ...]}}

a list of positions for each: fn, models (whose weights it needs, the one that it runs last), deps and
callback_deps (earlier positions, counted from 0), out_bytes.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ..errors import ParameterError
from . import profiles
from .profiles import Profile
from .tasks import Arrival
from .traces import Asked
from .workflows import Position, Workflow
from .workload import Workload

#: Of a position, in a file.
_KEYS = ("fn", "models", "deps", "callback_deps", "out_bytes")


@dataclass(frozen=True)
class Measured:
    """A profile, and workflows by name, whose models are in it."""

    profile: Profile
    workflows: Mapping[str, Workflow] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for workflow in self.workflows.values():
            for model in workflow.models:
                self.profile.model(model)

    def with_more(self, other: Measured) -> Measured:
        """Also what the other has; where both have a name, and of the device, the other's."""
        models = {**self.profile.models, **other.profile.models}
        plain = {**profiles.encode(other.profile), "models": models}
        return Measured(Profile(**plain), {**self.workflows, **other.workflows})

    def asked(self, trace: Sequence[Asked]) -> tuple[Workload, list[Arrival]]:
        """A trace's requests of these workflows, a tenant for each of its tenants and workflows.

        A workflow that the trace names is that one; of the others the trace's most popular stands for
        the first here, and so on, round and round. Nothing is left out.
        """
        if not self.workflows:
            raise ParameterError(
                "the profile has no workflows; measure some: st2i profile --workflow SOURCE"
            )
        own = list(self.workflows)
        others = Counter(a.workflow for a in trace if a.workflow not in self.workflows)
        stands = {name: own[n % len(own)] for n, (name, _) in enumerate(others.most_common())}
        pairs = [(a.tenant, stands.get(a.workflow, a.workflow)) for a in trace]
        shares = Counter(pairs)
        names = {pair: f"t{number}" for number, pair in enumerate(shares)}
        workload = Workload(
            "trace",
            self.profile,
            {names[pair]: self.workflows[pair[1]] for pair in shares},
            {names[pair]: float(count) for pair, count in shares.items()},
        )
        return workload, [Arrival(a.at, names[p]) for a, p in zip(trace, pairs, strict=True)]


def read(path: Path) -> Measured:
    """ParameterError says what is wrong with the file."""
    try:
        saved = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise ParameterError(f"profile {path} cannot be read: {error}") from None
    try:
        rows = saved.pop("workflows", {}) if isinstance(saved, dict) else {}
        profile = profiles.decode(saved)
        if not isinstance(rows, dict):
            raise ParameterError(f"workflows is {rows!r:.60}; give positions by name")
        return Measured(profile, {name: _workflow(name, row) for name, row in rows.items()})
    except ParameterError as error:
        raise ParameterError(f"profile {path}: {error}") from None


def write(measured: Measured, path: Path) -> None:
    """As `read` reads it."""
    saved = profiles.encode(measured.profile)
    if measured.workflows:
        saved["workflows"] = {
            name: [{key: getattr(p, key) for key in _KEYS} for p in workflow.positions]
            for name, workflow in measured.workflows.items()
        }
    path.write_text(json.dumps(saved, indent=1) + "\n")


def _workflow(name: str, rows: Any) -> Workflow:
    if not isinstance(rows, list) or not rows:
        raise ParameterError(f"workflow {name!r} is {rows!r:.60}; give a list of positions")
    return Workflow(name, tuple(_position(name, at, row) for at, row in enumerate(rows)))


def _position(name: str, at: int, row: Any) -> Position:
    where = f"workflow {name!r}, position {at}"
    if not isinstance(row, dict) or not set(row) <= set(_KEYS):
        raise ParameterError(f"{where} is {row!r:.80}; it may have: {', '.join(_KEYS)}")
    values: dict[str, Any] = {k: tuple(v) if isinstance(v, list) else v for k, v in row.items()}
    try:
        position = Position(**values)
    except TypeError as error:
        raise ParameterError(f"{where}: {error}") from None
    lists = (position.models, position.deps, position.callback_deps)
    if not all(isinstance(one, tuple) for one in lists):
        raise ParameterError(f"{where} has models {position.models!r}; give lists")
    earlier: Iterable[Any] = (*position.deps, *position.callback_deps)
    if any(type(dep) is not int or not 0 <= dep < at for dep in earlier):
        raise ParameterError(f"{where} needs {list(earlier)!r}; give earlier positions, from 0 on")
    if type(position.out_bytes) is not int or position.out_bytes < 0:
        raise ParameterError(f"{where}: out_bytes is {position.out_bytes!r}; give bytes, 0 or more")
    if not position.models or not all(type(m) is str for m in (position.fn, *position.models)):
        raise ParameterError(f"{where} has fn {position.fn!r} and models {position.models!r}")
    return position
