"""What models cost on a device: bytes, seconds to load, seconds to compute. Read from a JSON file.

{"device": "H800", "memory_bytes": 80000000000, "activation_bytes": 6000000000,
 "link_latency_s": 6e-05, "link_bandwidth": 4.1e+10, "hop_s": 0.003,
 "models": {"t5": {"nbytes": 9500000000, "load_s": 1.24, "compute_s": 0.024, "layers": 8}}}
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from ..errors import ParameterError

#: Layers that a model is split into where its profile does not say.
LAYERS = 16


@dataclass(frozen=True, slots=True)
class Model:
    """nbytes: of its weights. load_s: all of them from host memory to the device. compute_s: one
    invocation. layers: equal parts that it is loaded and evicted in."""

    nbytes: int
    load_s: float
    compute_s: float
    layers: int = LAYERS

    def __post_init__(self) -> None:
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

    memory_bytes: of the device; activation_bytes: of these what a running model needs beside weights.
    link_latency_s, link_bandwidth: of a pull from another executor, seconds and bytes per second.
    hop_s: from the end of one invocation to the start of the next that waits for it, beside pulls.
    """

    models: Mapping[str, Model]
    device: str = "device"
    memory_bytes: int = 80_000_000_000
    activation_bytes: int = 6_000_000_000
    link_latency_s: float = 6e-5
    link_bandwidth: float = 41e9
    hop_s: float = 3e-3

    def __post_init__(self) -> None:
        _whole("memory_bytes", self.memory_bytes, 1)
        _whole("activation_bytes", self.activation_bytes, 0)
        _seconds("link_latency_s", self.link_latency_s)
        _seconds("hop_s", self.hop_s)
        if not 0 < self.link_bandwidth < math.inf:
            raise ParameterError(
                f"link_bandwidth is {self.link_bandwidth!r}; give bytes per second above 0"
            )
        if self.weight_bytes <= 0:
            raise ParameterError(
                f"activation_bytes is {self.activation_bytes}, of {self.memory_bytes} bytes of "
                "memory nothing is left for weights; give a smaller number"
            )

    @property
    def weight_bytes(self) -> int:
        """Device memory for weights."""
        return self.memory_bytes - self.activation_bytes

    def model(self, name: str) -> Model:
        found = self.models.get(name)
        if found is None:
            raise ParameterError(
                f"the profile has no model {name!r}; it has: {', '.join(sorted(self.models))}"
            )
        return found

    def transfer_s(self, nbytes: int, pulls: int) -> float:
        """Seconds to pull so many bytes in so many pulls."""
        return pulls * self.link_latency_s + nbytes / self.link_bandwidth

    def with_load(self, factor: float, **changes: Any) -> Profile:
        """The same with all loads taking `factor` times as long, and other fields changed."""
        models = {
            name: Model(m.nbytes, m.load_s * factor, m.compute_s, m.layers)
            for name, m in self.models.items()
        }
        return Profile(models, **{name: getattr(self, name) for name in _PLAIN} | changes)

    def with_memory(self, memory_bytes: int) -> Profile:
        """The same models on a device of another size."""
        plain = {name: getattr(self, name) for name in _PLAIN} | {"memory_bytes": memory_bytes}
        return Profile(self.models, **plain)


_PLAIN = [f.name for f in fields(Profile) if f.name != "models"]


def read(path: Path) -> Profile:
    """The profile in a JSON file. ParameterError says what is wrong with it."""
    try:
        saved = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise ParameterError(f"profile {path} cannot be read: {error}") from None
    if not isinstance(saved, dict) or not isinstance(saved.get("models"), dict):
        raise ParameterError(f"profile {path} has no models; write {{'models': {{...}}, ...}}")
    unknown = sorted(set(saved) - {*_PLAIN, "models"})
    if unknown:
        raise ParameterError(
            f"profile {path} has {unknown[0]!r}; it may have: models, {', '.join(_PLAIN)}"
        )
    try:
        models = {name: Model(**row) for name, row in saved.pop("models").items()}
        return Profile(models, **saved)
    except (TypeError, ParameterError) as error:
        raise ParameterError(f"profile {path}: {error}") from None


def write(profile: Profile, path: Path) -> None:
    """As `read` reads it."""
    saved: dict[str, Any] = {name: getattr(profile, name) for name in _PLAIN}
    saved["models"] = {name: asdict(model) for name, model in sorted(profile.models.items())}
    path.write_text(json.dumps(saved, indent=1) + "\n")


def _whole(name: str, value: object, least: int) -> None:
    if type(value) is not int or value < least:
        raise ParameterError(f"{name} is {value!r}; give a whole number of at least {least}")


def _seconds(name: str, value: object) -> None:
    if type(value) not in (int, float) or not 0 <= value < math.inf:  # type: ignore[operator]
        raise ParameterError(f"{name} is {value!r}; give finite seconds >= 0")
