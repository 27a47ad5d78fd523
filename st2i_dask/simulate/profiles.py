"""What models cost on a device: bytes, seconds to load, seconds to compute. As JSON:

{"device": "H800", "memory_bytes": 80000000000, "activation_bytes": 6000000000,
 "link_latency_s": 6e-05, "link_bandwidth": 4.1e+10, "hop_s": 0.003,
 "models": {"t5": {"nbytes": 9500000000, "load_s": 1.24, "compute_s": 0.024, "layers": 8}}}

A file of them, with workflows or without, is read by `measured`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields, replace
from functools import cached_property
from typing import Any

from ..errors import ParameterError

#: Layers that a model is split into where its profile does not say.
LAYERS = 16


@dataclass(frozen=True, slots=True)
class Model:
    """nbytes: of its weights. load_s: all of them from host memory to the device. compute_s: one
    invocation. layers: equal parts that it is loaded and evicted in. weights: names them where several
    models have the same: one at two sizes, a VAE that encodes and decodes. Empty: they are its own."""

    nbytes: int
    load_s: float
    compute_s: float
    layers: int = LAYERS
    weights: str = ""

    def __post_init__(self) -> None:
        if not isinstance(self.weights, str):
            raise ParameterError(f"weights is {self.weights!r}; give a name")
        _whole("nbytes", self.nbytes, 1)
        _whole("layers", self.layers, 1)
        if self.layers > self.nbytes:
            raise ParameterError(
                f"layers is {self.layers} for {self.nbytes} bytes; give at most one layer a byte"
            )
        for name in ("load_s", "compute_s"):
            _seconds(name, getattr(self, name))

    @property
    def sizes(self) -> list[int]:
        """Bytes of each layer."""
        each, rest = divmod(self.nbytes, self.layers)
        return [each + (number < rest) for number in range(self.layers)]


@dataclass(frozen=True)
class Profile:
    """A device and the models on it.

    memory_bytes: of the device; of these, activation_bytes: what a running model needs beside weights,
    tensor_bytes: tensors in flight between tasks.
    link_latency_s, link_bandwidth: of a pull from another executor, seconds and bytes per second.
    hop_s: from the end of one invocation to the start of the next that waits for it, beside pulls.
    request_s: what a request takes beside its tasks, from the client and back to it.
    """

    models: Mapping[str, Model]
    device: str = "device"
    memory_bytes: int = 80_000_000_000
    activation_bytes: int = 6_000_000_000
    link_latency_s: float = 6e-5
    link_bandwidth: float = 41e9
    hop_s: float = 3e-3
    tensor_bytes: int = 2_000_000_000
    request_s: float = 0.0

    def __post_init__(self) -> None:
        _whole("memory_bytes", self.memory_bytes, 1)
        _whole("activation_bytes", self.activation_bytes, 0)
        _whole("tensor_bytes", self.tensor_bytes, 0)
        for name in ("link_latency_s", "hop_s", "request_s"):
            _seconds(name, getattr(self, name))
        if not isinstance(self.device, str):
            raise ParameterError(f"device is {self.device!r}; give its name")
        if type(self.link_bandwidth) not in (int, float) or not 0 < self.link_bandwidth < math.inf:
            raise ParameterError(
                f"link_bandwidth is {self.link_bandwidth!r}; give bytes per second above 0"
            )
        if self.weight_bytes <= self.tensor_bytes:
            raise ParameterError(
                f"of memory_bytes {self.memory_bytes:,}, activation_bytes {self.activation_bytes:,} and "
                f"tensor_bytes {self.tensor_bytes:,} leave nothing for weights; give more memory"
            )
        for name, model in self.models.items():
            shared = self.model_with(self.weights_of(name))
            if (shared.nbytes, shared.layers) != (model.nbytes, model.layers):
                raise ParameterError(
                    f"model {name!r} has {model.nbytes:,} bytes in {model.layers} layers, another with "
                    f"weights {model.weights!r} has {shared.nbytes:,} in {shared.layers}; give the same"
                )

    @property
    def weight_bytes(self) -> int:
        """Device memory for weights and tensors in flight."""
        return self.memory_bytes - self.activation_bytes

    def model(self, name: str) -> Model:
        found = self.models.get(name)
        if found is None:
            raise ParameterError(
                f"the profile has no model {name!r}; it has: {', '.join(sorted(self.models))}"
            )
        return found

    def weights_of(self, name: str) -> str:
        """What the model's weights are called."""
        return self.model(name).weights or name

    @cached_property
    def _first_with(self) -> dict[str, Model]:
        found: dict[str, Model] = {}
        for name, model in self.models.items():
            found.setdefault(model.weights or name, model)
        return found

    def model_with(self, weights: str) -> Model:
        """The first model with these weights."""
        return self._first_with[weights]

    def transfer_s(self, nbytes: int, pulls: int) -> float:
        """Seconds to pull so many bytes in so many pulls."""
        return pulls * self.link_latency_s + nbytes / self.link_bandwidth

    def with_load(self, factor: float, **changes: Any) -> Profile:
        """The same with all loads taking `factor` times as long, and other fields changed."""
        models = {name: replace(m, load_s=m.load_s * factor) for name, m in self.models.items()}
        return replace(self, models=models, **changes)

    def with_memory(self, memory_bytes: int) -> Profile:
        """The same models on a device of another size."""
        return replace(self, memory_bytes=memory_bytes)


_PLAIN = [f.name for f in fields(Profile) if f.name != "models"]


def decode(saved: Any) -> Profile:
    """What `encode` gave. ParameterError says what is wrong with it."""
    if not isinstance(saved, dict) or not isinstance(saved.get("models"), dict):
        raise ParameterError("it has no models; write {'models': {...}, ...}")
    unknown = sorted(set(saved) - {*_PLAIN, "models"})
    if unknown:
        raise ParameterError(f"it has {unknown[0]!r}; it may have: models, {', '.join(_PLAIN)}")
    models = {}
    for name, row in saved["models"].items():
        try:
            models[name] = Model(**row)
        except (TypeError, ParameterError) as error:
            raise ParameterError(f"model {name!r}: {error}") from None
    return Profile(models, **{name: value for name, value in saved.items() if name != "models"})


def encode(profile: Profile) -> dict[str, Any]:
    """Of types that JSON has."""
    saved: dict[str, Any] = {name: getattr(profile, name) for name in _PLAIN}
    saved["models"] = {name: asdict(model) for name, model in sorted(profile.models.items())}
    return saved


def _whole(name: str, value: object, least: int) -> None:
    if type(value) is not int or value < least:
        raise ParameterError(f"{name} is {value!r}; give a whole number of at least {least}")


def _seconds(name: str, value: object) -> None:
    if type(value) not in (int, float) or not 0 <= value < math.inf:  # type: ignore[operator]
        raise ParameterError(f"{name} is {value!r}; give finite seconds >= 0")
