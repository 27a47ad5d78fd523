"""What is known of the layers of weights, by place (dtype and kind of device), and as JSON.

Not thread-safe. Seconds throughout; layers by index.
"""

from __future__ import annotations

import math
import statistics
from dataclasses import dataclass, field
from typing import Any, NamedTuple

#: Measurements of a layer that count; their median is the estimate.
WINDOW = 7
#: A profile is contradicted when so many of the last so many runs stalled for longer than this share
#: of their compute, and than this many seconds.
STALLED_RUNS, LAST_RUNS = 3, 5
STALL_SHARE, STALL_FLOOR_S = 0.1, 0.002
#: Shape buckets kept per weights, dtype and device; those observed least recently are forgotten.
BUCKETS = 64


class ProfileKey(NamedTuple):
    """weights: their id by content. device: "cpu" or the name of the CUDA device. bucket: of shapes."""

    weights: str
    dtype: str
    device: str
    bucket: str


@dataclass(frozen=True, slots=True)
class Profile:
    """Seconds by layer. A layer that is not in `order` was not needed; its seconds may be 0.

    order: the layers in order of execution. runs: how many were observed.
    """

    load_s: tuple[float, ...]
    compute_s: tuple[float, ...]
    order: tuple[int, ...]
    runs: int


@dataclass(slots=True)
class Recent:
    """The last measurements of a layer, seconds. Stale ones count until there is a new one."""

    values: list[float] = field(default_factory=list)
    stale: bool = False

    def observe(self, seconds: float) -> None:
        if self.stale:
            self.values.clear()
            self.stale = False
        self.values.append(float(seconds))
        del self.values[:-WINDOW]

    def median(self) -> float:
        return statistics.median(self.values) if self.values else 0.0

    def make_stale(self) -> None:
        self.stale = bool(self.values)

    def is_sound(self) -> bool:
        return (
            len(self.values) <= WINDOW
            and all(0.0 <= seconds < math.inf for seconds in self.values)
            and bool(self.values or not self.stale)
        )


@dataclass(slots=True)
class Shape:
    """Runs of one shape bucket. measured: since the profile began, or was last contradicted."""

    runs: int = 0
    measured: int = 0
    order: list[int] = field(default_factory=list)
    compute: list[Recent] = field(default_factory=list)
    stalls: list[bool] = field(default_factory=list)

    def is_sound(self) -> bool:
        return (
            self.measured <= self.runs
            and len(set(self.order)) == len(self.order)
            and len(self.stalls) <= LAST_RUNS
            and sum(self.stalls) < STALLED_RUNS
            and all(recent.is_sound() for recent in self.compute)
        )


@dataclass(slots=True)
class Place:
    """Weights of one dtype on one kind of device."""

    load: list[Recent] = field(default_factory=list)
    shapes: dict[str, Shape] = field(default_factory=dict)  # least recently observed first

    def shape(self, bucket: str) -> Shape:
        """The bucket's, about to be observed."""
        shape = self.shapes[bucket] = self.shapes.pop(bucket, Shape())
        while len(self.shapes) > BUCKETS:
            del self.shapes[next(iter(self.shapes))]
        return shape

    def set_load(self, load: list[Recent]) -> None:
        """Runs of another number of layers are forgotten."""
        self.load = load
        for bucket, shape in list(self.shapes.items()):
            if len(shape.compute) not in (0, len(load)):
                del self.shapes[bucket]

    def profile(self, bucket: str) -> Profile | None:
        shape = self.shapes.get(bucket)
        if shape is None or not shape.order or len(shape.compute) != len(self.load):
            return None
        layers = range(len(self.load))
        if not all(
            layer in layers and self.load[layer].values and shape.compute[layer].values
            for layer in shape.order
        ):
            return None
        return Profile(
            tuple(recent.median() for recent in self.load),
            tuple(recent.median() for recent in shape.compute),
            tuple(shape.order),
            shape.runs,
        )

    def judge(self, shape: Shape, compute_s: float, stalled_s: float) -> None:
        """A run that the profile said would not stall."""
        shape.stalls.append(stalled_s > max(STALL_SHARE * compute_s, STALL_FLOOR_S))
        del shape.stalls[:-LAST_RUNS]
        if sum(shape.stalls) >= STALLED_RUNS:
            shape.stalls.clear()
            shape.measured = 0
            for recent in (*shape.compute, *self.load):
                recent.make_stale()

    def is_sound(self) -> bool:
        return (
            len(self.shapes) <= BUCKETS
            and all(recent.is_sound() for recent in self.load)
            and all(shape.is_sound() for shape in self.shapes.values())
        )


#: By dtype and kind of device.
Places = dict[tuple[str, str], Place]


def merge(into: Places, source: Places, key: ProfileKey) -> None:
    """Put the key's part of `source` in the place of that in `into`."""
    ours = source[key.dtype, key.device]
    theirs = into.setdefault((key.dtype, key.device), ours)
    if theirs is ours:
        return
    theirs.set_load(ours.load)
    if key.bucket in ours.shapes:
        theirs.shape(key.bucket)
        theirs.shapes[key.bucket] = ours.shapes[key.bucket]


# As JSON


def encode(places: Places) -> list[Any]:
    return [
        {
            "dtype": dtype,
            "device": device,
            "load": _encode_recent(place.load),
            "buckets": [
                {
                    "bucket": bucket,
                    "runs": shape.runs,
                    "measured": shape.measured,
                    "order": list(shape.order),
                    "compute": _encode_recent(shape.compute),
                    "stalls": list(shape.stalls),
                }
                for bucket, shape in place.shapes.items()
            ],
        }
        for (dtype, device), place in places.items()
    ]


def _encode_recent(layers: list[Recent]) -> list[Any]:
    return [[recent.stale, *recent.values] for recent in layers]


def decode(content: Any) -> Places:
    """ValueError, KeyError, TypeError or AttributeError when it is not what `encode` gives."""
    places: Places = {}
    for entry in content:
        place = places[_text(entry["dtype"]), _text(entry["device"])] = Place()
        place.load = _decode_recent(entry["load"])
        for bucket in entry["buckets"]:
            place.shapes[_text(bucket["bucket"])] = Shape(
                _count(bucket["runs"]),
                _count(bucket["measured"]),
                [_count(layer) for layer in bucket["order"]],
                _decode_recent(bucket["compute"]),
                [_flag(stalled) for stalled in bucket["stalls"]],
            )
        if not place.is_sound():
            raise ValueError(f"its figures contradict each other: {entry!r:.200}")
    return places


def _decode_recent(layers: Any) -> list[Recent]:
    return [Recent([_number(s) for s in values], _flag(stale)) for stale, *values in layers]


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise ValueError(f"{value!r} is not a text")
    return value


def _number(value: Any) -> float:
    if type(value) is not float:
        raise ValueError(f"{value!r} is not a number of seconds")
    return value


def _count(value: Any) -> int:
    if type(value) is not int or value < 0:
        raise ValueError(f"{value!r} is not a number of things")
    return value


def _flag(value: Any) -> bool:
    if type(value) is not bool:
        raise ValueError(f"{value!r} is neither true nor false")
    return value
