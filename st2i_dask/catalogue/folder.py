"""Reading Diffusers folders: configuration on the client, parts of a pipeline on workers."""

from __future__ import annotations

import inspect
import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from .. import shapes
from ..errors import LoadError
from ..quoting import quoted
from . import hub
from .checkpoint import check_checkpoint
from .component_check import check_component, check_components
from .config_kinds import check_kinds
from .files_state import FilesState, files_state
from .scheduler_check import find_class

#: Packaged models by name, with the defaults they were trained for.
PACKAGED: dict[str, dict[str, Any]] = {
    "shapes": {
        "num_steps": shapes.DEFAULT_STEPS,
        "height": shapes.DEFAULT_SIZE,
        "width": shapes.DEFAULT_SIZE,
        "sizes": (shapes.DEFAULT_SIZE,),
        "max_sequence_length": shapes.MAX_PROMPT_TOKENS,
    }
}

#: Packaged models that a pipeline takes beside its own, and packaged LoRAs, by name.
COMPONENTS: dict[str, Path] = {"shapes-silhouette": shapes.CONTROLNET}
LORAS: dict[str, Path] = {f"shapes-{style}": path for style, path in shapes.STYLES.items()}

DTYPES = ("float32", "bfloat16", "float16")

# Pipelines that cannot be made without their ControlNet, and what loads their other parts.
_UNCONTROLLED = {
    "ZImageControlNetPipeline": "ZImagePipeline",
    "ZImageControlNetInpaintPipeline": "ZImagePipeline",
}


class _Config(dict[str, Any]):
    """A component's configuration that says which file lacks a value."""

    def __init__(self, values: Mapping[str, Any], path: Path, source: str):
        super().__init__(values)
        self._about = path, source

    def __reduce__(self) -> Any:
        return _Config, (dict(self), *self._about)

    def __missing__(self, key: str) -> Any:
        path, source = self._about
        raise LoadError(f"{source!r}: {path} does not say {key!r}; copy the file again")


@dataclass(frozen=True)
class DiffusersFolder:
    """A pipeline's configuration. `source` is what workers get; `path` is where it is here; `state` that of
    its files when it was read."""

    source: str
    path: Path
    index: Mapping[str, Any]
    state: FilesState = ()

    @property
    def pipeline_class(self) -> str:
        return str(self.index.get("_class_name"))

    def config(self, part: str, file: str = "config.json") -> dict[str, Any]:
        """The configuration of one component. LoadError naming the file when it, or later a value that
        is asked for, is missing, and when a value is of another kind."""
        path = self.path / part / file
        values = _read_json(path, self.source)
        check_kinds(part, values, path, self.source)
        return _Config(values, path, self.source)

    @property
    def scheduler(self) -> tuple[str, dict[str, Any]]:
        """Class name and configuration of its scheduler. LoadError if it has none."""
        named = self.index.get("scheduler")
        if not named or not named[1]:
            raise LoadError(
                f"{self.source!r}: model_index.json names no scheduler; copy the whole folder again"
            )
        return str(named[1]), self.scheduler_config

    @cached_property
    def scheduler_config(self) -> dict[str, Any]:
        return dict(self.config("scheduler", "scheduler_config.json"))

    def with_scheduler(self, changes: Mapping[str, Any]) -> DiffusersFolder:
        """With these values in its scheduler's configuration; `_class_name` makes it another class.

        LoadError for a class that Diffusers does not have, or that does not take a value.
        """
        class_name = str(changes.get("_class_name", self.scheduler[0]))
        taken = inspect.signature(find_class(class_name)).parameters
        unknown = set(map(str, changes)) - set(taken) - {"_class_name"}
        if unknown:
            raise LoadError(f"{class_name} takes no {', '.join(sorted(unknown))}")
        made = replace(self, index={**self.index, "scheduler": ["diffusers", class_name]})
        config = {**self.scheduler_config, **changes, "_class_name": class_name}
        made.__dict__["scheduler_config"] = config
        return made

    def tokenizer(self, part: str) -> Any:
        """A tokenizer, loaded here (used to measure prompts before anything is submitted)."""
        import transformers

        class_name = self.index[part][1]
        cls = getattr(transformers, class_name, transformers.AutoTokenizer)
        try:
            return cls.from_pretrained(str(self.path / part))
        except Exception as error:  # of a damaged file, whatever its parser meets first
            raise LoadError(
                f"{self.source!r}: {part} cannot be read ({type(error).__name__}: {error}); copy the "
                "whole folder again"
            ) from error


@dataclass(frozen=True)
class ComponentFolder:
    """A model that lies in a folder of its own. `source` is what workers get."""

    source: str
    path: Path
    config: Mapping[str, Any]


def read_component(source: str, weights: bool = False) -> ComponentFolder:
    """Find a packaged model, a local folder or a hub id with the config.json of one model.

    From the hub, weights are fetched only with `weights`.
    """
    path = COMPONENTS.get(source, Path(source))
    if source in COMPONENTS:
        pass  # the name, not the path: workers may have the package elsewhere
    elif os.path.isdir(path):
        source = str(path.absolute())
    else:
        patterns = ["config.json"] + ["*.safetensors", "*.index.json"] * weights
        path = _from_hub(source, patterns, "config.json", weights)
    file = path / "config.json"
    config = _read_json(file, source)
    check_kinds("controlnet", config, file, source)
    return ComponentFolder(source, path, _Config(config, file, source))


def load_component(source: str, class_name: str, dtype: str | None) -> Any:
    """On a worker: the model of a folder or hub id; by default in the dtype it is stored in."""
    import diffusers
    import torch

    diffusers.utils.logging.disable_progress_bar()
    folder = read_component(source, weights=True)
    check_checkpoint(folder.path, source, class_name)
    check_component(getattr(diffusers, class_name), folder.config, folder.path, source)
    dtype = dtype or _stored_in(folder.path)
    try:
        return getattr(diffusers, class_name).from_pretrained(
            str(folder.path), torch_dtype=getattr(torch, dtype)
        )
    except (OSError, ValueError, TypeError, KeyError, RuntimeError) as error:
        raise LoadError(
            f"{source!r}: {class_name} cannot be loaded: {error}; "
            "check that the folder is whole and visible on every worker"
        ) from error


def read_folder(source: str, parts: set[str] | None = None) -> DiffusersFolder:
    """Find a packaged model, a local folder or a hub id, and read its model_index.json.

    From the hub, `parts` are fetched whole (weights too); None: configuration and tokenizers only.
    """
    path = _packaged_path(source) or Path(source)
    if not os.path.isdir(path):  # False also for what cannot be a path at all
        patterns = ["model_index.json", "*/*config.json", "tokenizer*/*", "scheduler/*"]
        patterns += [f"{part}/*" for part in sorted(parts or ())]
        path = _from_hub(source, patterns, "model_index.json", bool(parts))
    elif source not in PACKAGED:
        # Workers have other working directories.
        source = str(path.absolute())
    state = files_state(path)
    index = _read_json(path / "model_index.json", source)
    check_kinds("model_index.json", index, path / "model_index.json", source)
    for part, value in index.items():
        names = value if isinstance(value, list) else ()
        present = len(names) == 2 and all(isinstance(name, str) for name in names)
        if (path / part).is_dir() and not present and names != [None, None]:
            raise LoadError(
                f"{source!r}: {path / 'model_index.json'} has {part}={value!r}, wanted the library "
                "and the class of what is in that folder; copy the file again"
            )
        if present and not part.startswith("_") and not (path / part).is_dir():
            raise LoadError(
                f"{source!r}: model_index.json names {part!r} but the folder {path / part} is "
                "missing; copy the whole folder again"
            )
        if present and part.startswith("tokenizer"):
            _check_tokenizer(path / part, source, str(value[1]))
    return DiffusersFolder(source, path, index, state)


def _check_tokenizer(folder: Path, source: str, class_name: str) -> None:
    # Without one, transformers makes an empty tokenizer and says nothing: any prompt, one picture.
    about = {
        "tokenizer_config.json",
        "special_tokens_map.json",
        "added_tokens.json",
        "config.json",
        "chat_template.jinja",
    }
    if not {file.name for file in folder.iterdir()} - about:
        raise LoadError(
            f"{source!r}: {folder} has no vocabulary (tokenizer.json, vocab.json, spiece.model); "
            "copy the whole folder again"
        )
    # Pipelines take CLIP's limit from it, and fail on a worker without one.
    if class_name.startswith("CLIP") and not (folder / "tokenizer_config.json").is_file():
        raise LoadError(
            f"{source!r}: {folder} has no tokenizer_config.json, which says how many tokens a prompt "
            "may have; copy the whole folder again"
        )


def load_parts(source: str, parts: set[str], dtype: str | None) -> Any:
    """On a worker: the pipeline with only `parts` loaded, the other components None.

    Diffusers' own loader reads them, so weights and dtypes are those of the whole pipeline.
    """
    import torch
    import transformers

    # A worker's log is no place for progress bars, nor for hints about optional image processors.
    transformers.utils.logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    transformers.utils.logging.set_verbosity_error()  # type: ignore[no-untyped-call]
    import diffusers

    diffusers.utils.logging.disable_progress_bar()
    folder = read_folder(source, parts)
    absent = {
        part: None
        for part, value in folder.index.items()
        if isinstance(value, list) and part not in parts
    }
    for part in sorted(parts):
        if _is_model(folder, part):
            check_checkpoint(folder.path / part, source)
    check_components(folder, parts)
    if dtype is None:
        dtype = stored_dtype(folder)
    class_name = folder.pipeline_class
    if class_name in _UNCONTROLLED and "controlnet" not in parts:
        class_name = _UNCONTROLLED[class_name]
        absent.pop("controlnet", None)
    try:
        pipeline = getattr(diffusers, class_name).from_pretrained(
            str(folder.path), dtype=getattr(torch, dtype), **absent
        )
    except (OSError, ValueError, TypeError, KeyError, RuntimeError) as error:
        raise LoadError(
            f"{source!r}: {', '.join(sorted(parts))} cannot be loaded: {error}; "
            "check that the folder is whole and visible on every worker"
        ) from error
    pipeline.set_progress_bar_config(disable=True)
    return pipeline


def _is_model(folder: DiffusersFolder, part: str) -> bool:
    return (folder.path / part / "config.json").is_file() and not part.startswith("tokenizer")


def stored_dtype(folder: DiffusersFolder) -> str:
    """The dtype that the denoiser's weights are stored in; of a hub's, also if only other parts are
    here."""
    part = "transformer" if (folder.path / "transformer").is_dir() else "unet"
    of_hub = folder.source not in PACKAGED and not os.path.isdir(folder.source)
    has_weights = any((folder.path / part).glob("*.safetensors"))
    if has_weights:
        check_checkpoint(folder.path / part, folder.source)
    if has_weights or not of_hub:
        return _stored_in(folder.path / part)
    try:
        return _computed_in(hub.stored_dtype(folder.source, part))
    except hub.client_errors() as error:
        raise LoadError(
            f"{folder.source!r}: the dtype of its {part} is not known here and the hub does not say "
            f"({type(error).__name__}); give the dtype, one of {', '.join(DTYPES)}"
        ) from error


def check_one_dtype(folder: DiffusersFolder, controlnets: Sequence[str]) -> None:
    """LoadError where ControlNets are stored in another dtype than the denoiser; of weights that are not
    here workers find out."""
    part = "transformer" if (folder.path / "transformer").is_dir() else "unet"
    wanted = _stored_here(folder.path / part)
    for source in controlnets:
        try:
            its = _stored_here(read_component(source).path)
        except LoadError:
            continue  # who composes with it says what is wrong, or that it takes none
        if None not in (its, wanted) and its != wanted:
            raise LoadError(
                f"the ControlNet {source!r} is stored in {its}, the {part} of {folder.source!r} in "
                f"{wanted}; give both one: st2i.load(..., dtype='bfloat16')"
            )


def _stored_here(path: Path) -> str | None:
    try:
        return _stored_in(path) if any(path.glob("*.safetensors")) else None
    except Exception:  # of a damaged file; who loads it says what is wrong
        return None


def _stored_in(path: Path) -> str:
    from safetensors import safe_open

    files = sorted(path.glob("*.safetensors"))
    if not files:
        return "float32"
    with safe_open(str(files[0]), "np") as file:
        name = next(iter(file.keys()))
        return _computed_in(str(file.get_slice(name).get_dtype()))


def _computed_in(stored: str | None) -> str:
    return {"BF16": "bfloat16", "F16": "float16"}.get(str(stored), "float32")


def check_dtype(dtype: str | None) -> None:
    """LoadError unless it is one of the supported names or None."""
    if dtype is not None and dtype not in DTYPES:
        raise LoadError(
            f"dtype={quoted(dtype)} is not supported; choose one of {', '.join(DTYPES)}"
        )


def _packaged_path(source: str) -> Path | None:
    return shapes.PIPELINE if source == "shapes" else None


def _from_hub(source: str, patterns: list[str], index: str, weights: bool) -> Path:
    """The hub's snapshot folder of this machine, with what is needed fetched into it."""
    try:
        return hub.fetch(source, patterns, weights)
    except LoadError:
        raise
    except hub.client_errors() as error:
        raise LoadError(
            f"{quoted(source)} is neither a packaged model ({', '.join(PACKAGED)}), nor a folder here, "
            f"nor a hub repository that can be reached ({type(error).__name__}); give a path to "
            f"a folder with {index}"
        ) from error


def _read_json(path: Path, source: str) -> dict[str, Any]:
    try:
        value = json.loads(path.read_text())
    except OSError as error:
        raise LoadError(
            f"{source!r}: {path} cannot be read ({error.strerror}); a Diffusers folder has "
            "model_index.json and one folder per component"
        ) from error
    except ValueError as error:
        raise LoadError(f"{source!r}: {path} is not JSON ({error}); copy it again") from error
    if not isinstance(value, dict):
        raise LoadError(f"{source!r}: {path} does not hold a JSON object; copy it again")
    return value
