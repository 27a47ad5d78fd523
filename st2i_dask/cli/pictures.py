"""Pictures as parameters of the command line: files, opened where their values are needed."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from ..errors import ParameterError
from ..quoting import quoted

if TYPE_CHECKING:
    from ..parameters import Parameter
    from ..workflow import Workflow


def with_pictures(workflow: Workflow, values: Mapping[str, Any]) -> dict[str, Any]:
    """The values, with files opened for parameters that take pictures: a path, or a list of paths.

    ParameterError with parameter and path for a file that holds none.
    """
    found = {parameter.name: parameter for parameter in workflow.parameters}
    return {
        name: _opened(name, value) if name in found and _takes_pictures(found[name]) else value
        for name, value in values.items()
    }


def _takes_pictures(parameter: Parameter) -> bool:
    return any(getattr(rule, "takes_pictures", False) for rule in parameter.rules)


def _opened(name: str, value: Any) -> Any:
    if isinstance(value, list):
        return [_opened(f"{name}[{number}]", each) for number, each in enumerate(value)]
    if not isinstance(value, str):
        return value
    from PIL import Image

    try:
        with Image.open(value) as picture:
            return picture.convert("RGB")
    except (OSError, ValueError, Image.DecompressionBombError) as error:
        reason = getattr(error, "strerror", None) or error  # without the path once more
        raise ParameterError(
            f"{name}={quoted(value)} cannot be read as a picture ({reason}); give the path of a PNG or JPEG "
            "file"
        ) from error
