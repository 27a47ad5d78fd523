"""An image as a parameter: what Diffusers pipelines take, refused or carried as a plain array.

Three forms, told apart on workers by dtype and dimensions alone:

* a PIL image travels as uint8 (height, width, 3), and is resized like the pipeline resizes it;
* an array of floats in [0, 1] travels as (height, width, 3), and is resized like the pipeline does;
* a tensor (1, 3, height, width) in [-1, 1] travels as an array of that shape; the pipeline takes it
  as it is, so it must have the size of the result. A bfloat16 one travels as its bits, since the
  pipeline computes in the dtype that it has.

A mask is a PIL image and travels as uint8 (height, width).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
from PIL import Image

from ..errors import ParameterError
from ..outputs import is_tensor
from ..rules import NOTHING

# The bits of a bfloat16 tensor travel as these.
_BFLOAT16 = np.uint16
_FLOATS = ("float16", "float32", "float64")


@dataclass(frozen=True)
class InputImage:
    """Rule: one RGB image. `height` and `width` are parameters of the same workflow.

    max_bytes: limit on what travels with a request, through the scheduler.
    """

    #: Tells the command line that a path will do.
    takes_pictures: ClassVar[bool] = True
    max_bytes: int = 64 * 2**20

    def check(self, name: str, value: Any, values: Mapping[str, Any] = NOTHING) -> None:
        if isinstance(value, Image.Image):
            _check_pil(name, value)
        elif is_tensor(value):
            _check_tensor(name, value, values)
        elif isinstance(value, np.ndarray):
            _check_array(name, value)
        else:
            raise ParameterError(
                f"{name} has type {type(value).__name__}, wanted {self.describe()}; open a file "
                "with PIL.Image.open(path)"
            )

    def carry(self, name: str, value: Any, values: Mapping[str, Any]) -> np.ndarray:
        """The array that travels. A PIL image larger than the result is resized here already."""
        array = self._array(name, value, values)
        _check_bytes(name, array.nbytes, self.max_bytes)
        return array

    def _array(self, name: str, value: Any, values: Mapping[str, Any]) -> np.ndarray:
        if is_tensor(value):
            value = value.detach().cpu()
            if str(value.dtype) == "torch.bfloat16":  # which NumPy does not know
                import torch

                return np.array(value.contiguous().view(torch.int16).numpy().view(_BFLOAT16))
            return np.array(value.numpy(), order="C")
        if isinstance(value, np.ndarray):
            return np.array(value[0] if value.ndim == 4 else value, order="C")
        size = _target(values)
        try:
            if size is not None and _pixels(size) < _pixels(value.size):
                value = value.resize(size, resample=Image.Resampling.LANCZOS)
            return np.array(value)
        except OSError as error:
            raise ParameterError(
                f"{name}={value!r} cannot be read: {error}; open the whole file again"
            ) from error

    def describe(self) -> str:
        return (
            "one RGB image: PIL image, float array (H, W, 3) in [0, 1], or tensor "
            "(1, 3, height, width) in [-1, 1]"
        )


@dataclass(frozen=True)
class InputImages:
    """Rule: a list of RGB images, `least` to `most` of them; one may come without a list."""

    takes_pictures: ClassVar[bool] = True
    least: int
    most: int
    max_bytes: int = 64 * 2**20

    def check(self, name: str, value: Any, values: Mapping[str, Any] = NOTHING) -> None:
        images = _listed(value)
        if not self.least <= len(images) <= self.most:
            raise ParameterError(f"{name} holds {len(images)} images, wanted {self.describe()}")
        for number, image in enumerate(images):
            InputImage().check(f"{name}[{number}]", image, values)

    def carry(self, name: str, value: Any, values: Mapping[str, Any]) -> list[np.ndarray]:
        """The arrays that travel, see `InputImage.carry`; together at most `max_bytes`."""
        rule = InputImage(self.max_bytes)
        arrays = [
            rule.carry(f"{name}[{number}]", image, values)
            for number, image in enumerate(_listed(value))
        ]
        _check_bytes(name, sum(array.nbytes for array in arrays), self.max_bytes)
        return arrays

    def describe(self) -> str:
        count = str(self.least) if self.least == self.most else f"{self.least} to {self.most}"
        return f"a list of {count} RGB images"


@dataclass(frozen=True)
class MaskImage:
    """Rule: a PIL image of any mode whose light parts are drawn anew; it travels as uint8 (height,
    width).

    size: gives (width, height) of the result from all parameters; None: they are parameters.
    """

    takes_pictures: ClassVar[bool] = True
    max_bytes: int = 64 * 2**20
    size: Callable[[Mapping[str, Any]], tuple[int, int]] | None = None

    def check(self, name: str, value: Any, values: Mapping[str, Any] = NOTHING) -> None:
        if not isinstance(value, Image.Image):
            raise ParameterError(
                f"{name} has type {type(value).__name__}, wanted {self.describe()}; open a file "
                "with PIL.Image.open(path)"
            )
        if not _pixels(value.size):
            raise ParameterError(f"{name} has size {value.width}x{value.height}; give it pixels")

    def carry(self, name: str, value: Any, values: Mapping[str, Any]) -> np.ndarray:
        # The pipelines resize first and make it grey then; a grey one they resize on the worker.
        size = self.size(values) if self.size is not None else _target(values)
        if size is not None and value.mode != "L":
            value = value.resize(size, resample=Image.Resampling.LANCZOS)
        array = np.array(value.convert("L"))
        _check_bytes(name, array.nbytes, self.max_bytes)
        return array

    def describe(self) -> str:
        return "one PIL image, white where the picture is drawn anew"


def restore(array: np.ndarray) -> Any:
    """On a worker: what the pipeline would have been given, a PIL image (a mask of mode L), an array or a
    tensor."""
    if array.dtype == np.uint8:
        return Image.fromarray(array)
    if array.ndim == 3:
        return array
    import torch

    array = np.array(array)  # what has travelled may be read-only
    if array.dtype == _BFLOAT16:
        return torch.from_numpy(array.view(np.int16)).view(torch.bfloat16)
    return torch.from_numpy(array)


def _listed(value: Any) -> list[Any]:
    return list(value) if isinstance(value, (list, tuple)) else [value]


def _check_bytes(name: str, nbytes: int, limit: int) -> None:
    if nbytes > limit:
        raise ParameterError(
            f"{name} is too large: {nbytes:,} bytes would travel with the request, limit "
            f"{limit:,}; resize it to the picture's size first"
        )


def _check_pil(name: str, value: Image.Image) -> None:
    if value.mode != "RGB":
        raise ParameterError(
            f"{name} has mode {value.mode!r}, wanted 'RGB'; use image.convert('RGB')"
        )
    if not _pixels(value.size):
        raise ParameterError(f"{name} has size {value.width}x{value.height}; give it pixels")


def _check_array(name: str, value: np.ndarray) -> None:
    shape = value.shape[1:] if value.ndim == 4 and value.shape[0] == 1 else value.shape
    if len(shape) != 3 or shape[2] != 3 or not value.size:
        raise ParameterError(
            f"{name} is an array of shape {value.shape}, wanted (height, width, 3); stack the "
            "channels last, a grey image three times"
        )
    if value.dtype.name not in _FLOATS:
        raise ParameterError(
            f"{name} is an array of {value.dtype}, wanted floats in [0, 1]; pass "
            "PIL.Image.fromarray(array) for 8-bit pixels"
        )
    _check_values(name, value, 0.0, "divide by the largest value, or use (x + 1) / 2")


def _check_tensor(name: str, value: Any, values: Mapping[str, Any]) -> None:
    size = _target(values)
    wanted = (1, 3, size[1], size[0]) if size is not None else (1, 3, *value.shape[2:])
    if tuple(value.shape) != wanted or not value.numel():
        raise ParameterError(
            f"{name} is a tensor of shape {tuple(value.shape)}, wanted {wanted}: tensors are taken "
            "as they are; resize it, give other height and width, or pass a PIL image"
        )
    if not value.is_floating_point():
        raise ParameterError(
            f"{name} is a tensor of {value.dtype}, wanted floats in [-1, 1]; use x / 127.5 - 1"
        )
    _check_values(
        name, value.detach().double().cpu().numpy(), -1.0, "use 2 * x - 1 or x / 127.5 - 1"
    )


def _check_values(name: str, values: np.ndarray, lowest: float, cure: str) -> None:
    if not np.isfinite(values).all():
        bad = int(values.size - np.isfinite(values).sum())
        raise ParameterError(
            f"{name} holds {bad} of {values.size} values that are NaN or infinite; repair them, "
            "for example with numpy.nan_to_num"
        )
    least, most = float(values.min()), float(values.max())
    if least < lowest or most > 1.0:
        raise ParameterError(
            f"{name} holds values from {least:g} to {most:g}; allowed: {lowest:g} to 1; {cure}"
        )


def _target(values: Mapping[str, Any]) -> tuple[int, int] | None:
    """(width, height) of the result, if they are known."""
    size = values.get("width"), values.get("height")
    return size if None not in size else None  # type: ignore[return-value]


def _pixels(size: tuple[int, int]) -> int:
    return size[0] * size[1]
