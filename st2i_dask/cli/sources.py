"""What --workflow may name: a packaged model, a Diffusers folder, a hub id, or FILE.py:WORKFLOW."""

from __future__ import annotations

import os
import sys
import traceback
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from typing import Any

from ..errors import LoadError, St2iError
from ..quoting import quoted
from ..workflow import Workflow, workflows


def find_workflow(text: str, **loaded: Any) -> Workflow:
    """The workflow that the text names. LoadError says what was looked for.

    loaded: arguments of `st2i.load`, for what is no file.
    """
    file, colon, name = text.rpartition(":")
    if loaded and (file if colon else text).endswith(".py"):
        raise LoadError(
            f"{quoted(text)} is a file, which loads its workflow itself: {', '.join(loaded)} cannot be given "
            "to it; call st2i.load with them there"
        )
    if colon and file.endswith(".py"):
        return _from_file(Path(file), name)
    if text.endswith(".py"):
        return _from_file(Path(text), None)
    from ..catalogue import load
    from ..catalogue.folder import PACKAGED

    if text not in PACKAGED and os.path.isdir(text):
        # Workers have their own working directory.
        return load(Path(text).resolve(), **loaded)
    return load(text, **loaded)


def _from_file(path: Path, name: str | None) -> Workflow:
    if not os.path.isfile(path):  # also for a name that no file can have
        raise LoadError(f"workflow file {quoted(str(path))} is not there; give FILE.py:WORKFLOW")
    path = path.resolve()
    before = set(workflows)
    # Not the bare stem: a file called json.py must not hide the standard module.
    module_name = f"st2i_file_{path.stem}"
    spec = spec_from_file_location(module_name, path)
    assert spec is not None
    assert spec.loader is not None
    module = module_from_spec(spec)
    sys.modules[module_name] = module
    if str(path.parent) not in sys.path:  # as `python FILE.py` has it
        sys.path.insert(0, str(path.parent))
    try:
        spec.loader.exec_module(module)
    except St2iError:
        raise
    except Exception as error:
        lines = [
            f.lineno for f in traceback.extract_tb(error.__traceback__) if f.filename == str(path)
        ]
        at = f", line {lines[-1]}" if lines else ""
        raise LoadError(
            f"workflow file {str(path)!r}{at} cannot be run: {type(error).__name__}: {error}; "
            "correct it"
        ) from error
    import cloudpickle

    # Workers do not have the file: send its functions and classes themselves.
    cloudpickle.register_pickle_by_value(module)

    values = list(vars(module).values())
    here = {w.name: w for w in workflows if w not in before or any(w is v for v in values)}
    choices = ", ".join(sorted(here)) or "none"
    if name is None:
        if len(here) == 1:
            return next(iter(here.values()))
        raise LoadError(
            f"workflow file {str(path)!r} has these workflows: {choices}; "
            f"name one: {path.name}:WORKFLOW"
        )
    value = getattr(module, name, None)
    found = value if isinstance(value, Workflow) else here.get(name)
    if found is None:
        raise LoadError(
            f"workflow file {str(path)!r} has no workflow {quoted(name)}; it has: {choices}"
        )
    return found
