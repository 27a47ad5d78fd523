"""A pipeline of hollow components: everything of the classic pipeline but the weights."""

from __future__ import annotations

import copy
import importlib
import json
import threading
from collections import OrderedDict
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from ..catalogue.folder import read_folder, stored_dtype
from ..errors import LoadError
from .hollow import for_request, hollow


@dataclass(frozen=True)
class PipelineSource:
    """What a pipeline is made of. Plain values: it travels, and equal ones share what is made of them.

    source: folder or hub id. pipeline_class: module and name. dtype: None: as stored. scheduler: module,
    name and configuration (JSON) of another scheduler than the folder's. settings: the pipeline's own
    other configuration (JSON). models: names of the components that are models. absent: of those in the
    folder that it goes without.
    """

    source: str
    pipeline_class: tuple[str, str]
    dtype: str | None
    models: tuple[str, ...]
    absent: tuple[str, ...] = ()
    scheduler: tuple[str, str, str] | None = None
    settings: str = "{}"

    def load_class(self) -> Any:
        return named(*self.pipeline_class)


@dataclass(frozen=True)
class Shell:
    """A pipeline whose models are hollow. parts: by component, what has to be loaded for it. functions:
    its components as ModelFns, kept by whoever makes them."""

    pipeline: Any
    models: dict[str, Any]
    parts: dict[str, tuple[str, ...]]
    functions: dict[Any, Any] = field(default_factory=dict)

    def for_request(self) -> Any:
        """The pipeline with a scheduler and hollow components of its own. Cheap."""
        own = copy.copy(self.pipeline)
        for name, value in self.pipeline.components.items():
            if name in self.models:
                own.__dict__[name] = for_request(value)
            elif hasattr(value, "set_timesteps"):
                own.__dict__[name] = copy.deepcopy(value)
        return own


def named(module: str, name: str) -> Any:
    found: Any = importlib.import_module(module)
    for part in name.split("."):
        found = getattr(found, part)
    return found


def build_shell(source: PipelineSource) -> Shell:
    """Not thread-safe: torch's defaults change meanwhile."""
    import diffusers
    import torch
    from diffusers.pipelines.pipeline_loading_utils import simple_get_class_obj

    _quieten()
    others = {
        part
        for part, value in read_folder(source.source).index.items()
        if isinstance(value, list)
        and value[0] is not None
        and part not in (*source.models, *source.absent)
    }
    folder = read_folder(source.source, others or None)
    dtype = source.dtype or stored_dtype(folder)
    made: dict[str, Any] = {}
    for part in source.models:
        cls = simple_get_class_obj(*folder.index[part])
        made[part] = hollow(
            cls, folder.path / part, part, dtype, partial(_with_weights, source.source, part)
        )
    given = {**made, **dict.fromkeys(source.absent)}
    if source.scheduler is not None:
        module, name, config = source.scheduler
        given["scheduler"] = named(module, name).from_config(json.loads(config))
    owners = {id(module): name for name, model in made.items() for module in model.modules()}
    before = {name: set(model.state_dict()) for name, model in made.items()}
    logging = diffusers.utils.logging
    verbosity = logging.get_verbosity()
    # That models are passed to it, and not loaded by it, is no news for a log.
    logging.set_verbosity_error()
    try:
        pipeline = source.load_class().from_pretrained(
            str(folder.path),
            dtype=getattr(torch, dtype),
            **given,
            **json.loads(source.settings),
        )
    except (OSError, ValueError, KeyError, RuntimeError, TypeError, AttributeError) as error:
        raise LoadError(
            f"{source.source!r}: {source.pipeline_class[1]} cannot be made without weights: {error}; "
            "it needs a workflow of its own"
        ) from error
    finally:
        logging.set_verbosity(verbosity)
    pipeline.set_progress_bar_config(disable=True)
    return Shell(pipeline, made, _parts(made, owners, before))


def _with_weights(source: str, part: str) -> Path:
    """The component's folder with its files of weights, which a hub may not have sent yet."""
    return read_folder(source, {part}).path / part


def _parts(
    models: dict[str, Any], owners: dict[int, str], before: dict[str, set[str]]
) -> dict[str, tuple[str, ...]]:
    """A component that the pipeline has given modules of another one is loaded with that one.

    owners, before: which component each module belonged to, and the names of each one's weights, before
    the pipeline was made.
    """
    parts = {}
    for name, model in models.items():
        needed = {name, *(owners.get(id(module), name) for module in model.modules())}
        if set(model.state_dict()) != before[name]:
            needed |= set(models) & {"transformer", "unet"}
        parts[name] = tuple(sorted(needed))
    return parts


def _quieten() -> None:
    import diffusers
    import transformers

    # A worker's log is no place for progress bars, nor for hints about optional image processors.
    transformers.utils.logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    transformers.utils.logging.set_verbosity_error()  # type: ignore[no-untyped-call]
    diffusers.utils.logging.disable_progress_bar()


class Shells:
    """Shells of this process by source, the least recently used out first. Any thread."""

    LIMIT = 8

    def __init__(self) -> None:
        self._shells: OrderedDict[PipelineSource, Shell] = OrderedDict()
        self._lock = threading.Lock()

    def get(self, source: PipelineSource) -> Shell:
        """Not thread-safe where it has to be built, see `build_shell`."""
        with self._lock:
            found = self._shells.get(source)
            if found is not None:
                self._shells.move_to_end(source)
                return found
        made = build_shell(source)
        with self._lock:
            self._shells[source] = made
            while len(self._shells) > self.LIMIT:
                self._shells.popitem(last=False)
        return made
