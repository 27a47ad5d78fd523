"""Arguments and results of component calls as they travel: their form as bytes, their tensors apart.

The form is a pickle of whatever was passed or returned (tuples, output classes, a latent distribution)
with a number in place of each tensor; the same tensor twice is one number.
"""

from __future__ import annotations

import io
import pickle
from typing import Any

import cloudpickle

from ..errors import OutputError
from ..outputs import is_tensor


class _Taker(cloudpickle.Pickler):  # type: ignore[misc]
    """Pickles all but plain tensors, which it collects."""

    def __init__(self, file: Any):
        super().__init__(file, protocol=5)
        self.tensors: list[Any] = []
        self._numbers: dict[int, int] = {}

    def persistent_id(self, value: Any) -> int | None:
        # Parameters and other subclasses keep their own pickling, except where they have no values.
        if not is_tensor(value):
            return None
        if value.is_meta:
            raise OutputError(
                "a weight is used outside of its component: the pipeline reads it where there are "
                "no weights; such a pipeline needs a workflow of its own"
            )
        if value.is_quantized or value.layout is not _strided():
            return None
        number = self._numbers.setdefault(id(value), len(self.tensors))
        if number == len(self.tensors):
            self.tensors.append(value)
        return number


class _Giver(pickle.Unpickler):
    def __init__(self, file: Any, tensors: list[Any]):
        super().__init__(file)
        self._tensors = tensors

    def persistent_load(self, number: int) -> Any:
        return self._tensors[number]


def take_apart(value: Any, what: str) -> tuple[bytes, list[Any]]:
    """The form of a value, and its tensors. OutputError where it cannot travel; `what` names it."""
    file = io.BytesIO()
    taker = _Taker(file)
    try:
        taker.dump(value)
    except OutputError as error:
        raise OutputError(f"{what}: {error}") from None
    except Exception as error:
        raise OutputError(f"{what} cannot be sent to another worker: {error}") from error
    return file.getvalue(), [_plain(tensor) for tensor in taker.tensors]


def put_together(form: bytes, tensors: list[Any]) -> Any:
    """The value again, with these tensors in it."""
    return _Giver(io.BytesIO(form), tensors).load()


def _plain(tensor: Any) -> Any:
    """The tensor itself, so that it is known again; a parameter, or one with a history, without it."""
    import torch

    return tensor if type(tensor) is torch.Tensor and not tensor.requires_grad else tensor.detach()


def _strided() -> Any:
    import torch

    return torch.strided
