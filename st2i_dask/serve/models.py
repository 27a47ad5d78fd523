"""Models by the names that clients use, and the workflows behind them."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ..cli.sources import find_workflow
from ..errors import LoadError, St2iError
from ..workflow import Workflow
from .problems import ApiError

#: Most models that clients can have registered.
MOST = 1_000


@dataclass
class Model:
    """name: what clients say. source: what `find_workflow` takes. tasks: workflows by task, as they
    were loaded; "" is what the source itself does. loaded: arguments of `st2i.load`."""

    name: str
    source: str
    workflow: Workflow
    created: int = field(default_factory=lambda: int(time.time()))
    tasks: dict[str, Workflow] = field(default_factory=dict)
    loaded: dict[str, Any] = field(default_factory=dict)


class Models:
    """All models. The first is the default. Loading may take long: call from a thread.

    root: below which clients may register workflows. loras: adapters' sources by name.
    """

    def __init__(self, root: Path | None = None, loras: Mapping[str, str] | None = None) -> None:
        self.loras = dict(loras or {})
        self._root = root.resolve() if root is not None else None
        self._models: dict[str, Model] = {}
        self._lock = threading.Lock()

    def __iter__(self) -> Iterator[Model]:
        return iter(tuple(self._models.values()))

    def add(self, name: str, source: str, **loaded: Any) -> Model:
        """Load and add one; the operator's own words. LoadError if it cannot be loaded.

        loaded: arguments of `st2i.load`.
        """
        with self._lock:
            model = Model(name, source, find_workflow(source, **loaded), loaded=loaded)
            self._models[name] = model
            return model

    def get(self, name: str | None) -> Model:
        """By name; None is the default. ApiError 404."""
        if not self._models:
            raise ApiError(404, "there is no model here yet", code="model_not_found", param="model")
        if name is None:
            return next(iter(self._models.values()))
        found = self._models.get(name)
        if found is None:
            raise ApiError(
                404,
                f"The model {name!r} does not exist; there are: {', '.join(self._models)[:500]}",
                code="model_not_found",
                param="model",
            )
        return found

    def register(self, name: str, source: str, dtype: str | None) -> Model:
        """From a client: only packaged models, and what lies below the root. ApiError otherwise."""
        if name in self._models:
            known = self._models[name]
            if known.source == str(self._allowed(source)):
                return known
            raise ApiError(
                409,
                f"there is a model {name!r} already; choose another id",
                code="exists",
                param="id",
            )
        if len(self._models) >= MOST:
            raise ApiError(409, f"there are {MOST} models already, the limit", code="too_many")
        allowed = self._allowed(source)
        try:
            with self._lock:
                workflow = _load(str(allowed), dtype)
                model = self._models.setdefault(name, Model(name, str(allowed), workflow))
        except St2iError as error:
            text = " ".join(str(error).split())
            raise ApiError(400, text, code="invalid_value", param="source") from None
        return model

    def for_task(self, model: Model, task: str) -> Workflow:
        """The model's workflow for a task of the catalogue. ApiError 400 if it has none."""
        with self._lock:
            if task not in model.tasks:
                from ..catalogue import load

                try:
                    if ".py" in model.source:
                        raise LoadError("its file has another workflow")
                    model.tasks[task] = load(model.source, **{**model.loaded, "task": task})
                except (LoadError, TypeError) as error:
                    raise ApiError(
                        400,
                        f"model {model.name!r} cannot do {task}: {error}",
                        code="unsupported_task",
                        param="model",
                    ) from None
            return model.tasks[task]

    def _allowed(self, source: str) -> str | Path:
        from ..catalogue.folder import PACKAGED

        if source in PACKAGED:
            return source
        file, colon, name = source.rpartition(":")
        path, suffix = (file, f":{name}") if colon and file.endswith(".py") else (source, "")
        if self._root is not None and "\0" not in path:
            found = (self._root / path).resolve()
            if found.is_relative_to(self._root) and found.exists():
                return f"{found}{suffix}"
        where = "; the server has no workflow root" if self._root is None else ""
        raise ApiError(
            400,
            f"source {source[:100]!r} is neither a packaged model ({', '.join(PACKAGED)}) nor a path "
            f"below the server's workflow root{where}",
            code="invalid_value",
            param="source",
        )


def _load(source: str, dtype: str | None) -> Workflow:
    if dtype is None:
        return find_workflow(source)
    from ..catalogue import load

    return load(source, dtype=dtype)
