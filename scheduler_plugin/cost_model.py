"""Seconds that a ModelFn takes, learned per (ModelFn, model, shape bucket).

Load, compute and transfer are kept apart, because load depends on where it runs and transfer on what
has to be pulled. What was never measured is guessed from what is nearest: the same model on another
bucket scaled by its size, then other models of the same ModelFn, then everything, then a constant.

Compute of a gang is learned by its size, apart from that of one executor. Until a size was seen, one
executor's seconds stand in for it: a gang is never promised what was not measured.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable
from functools import lru_cache
from statistics import median
from typing import Any

from st2i_dask.errors import PolicyError

from .events import Measured
from .outline import CostKey
from .robust import RobustSeconds

VERSION = 1
PRIOR_COMPUTE_S = 1.0
PRIOR_LOAD_S = 5.0
_NUMBER = re.compile(r"\d+")


@lru_cache(maxsize=4096)
def units(bucket: str) -> float:
    """Size of a shape bucket: the product of the whole numbers in its name, 1 if there are none.

    >>> units("1024x1024"), units("512x512 b2"), units("")
    (1048576.0, 524288.0, 1.0)
    """
    return float(math.prod(int(number) for number in _NUMBER.findall(bucket) if int(number)))


class CostModel:
    """Learned seconds. `version` changes whenever any estimate may have changed.

    Asking is a dictionary look-up, also for a guess (guesses are kept until `version` changes).
    """

    def __init__(self) -> None:
        self._compute: dict[CostKey, RobustSeconds] = {}
        self._gang: dict[tuple[CostKey, int], RobustSeconds] = {}  # compute, by size of the group
        self._transfer: dict[CostKey, RobustSeconds] = {}
        self._load: dict[tuple[str, str], RobustSeconds] = {}
        self._guessed_compute: dict[CostKey, float] = {}
        self._guessed_load: dict[tuple[str, str], float] = {}
        self.version = 0

    def observe(
        self,
        key: CostKey,
        used: Measured,
        *,
        steps: int = 1,
        group: int = 1,
        loaded_share: float,
        pulled: bool,
    ) -> bool:
        """Learn from a run that finished. True when an estimate moved.

        steps: denoising steps it did (compute is learned per step). group: executors that did them
        together, whose first one's seconds are given. loaded_share: which share of the model had to be
        loaded, 0 to 1; a small one says too little about the whole. pulled: whether any input had to
        be fetched.
        """
        compute_s = used.compute_s / steps
        if group == 1:
            moved = self._learn(self._compute, key, compute_s)
        else:
            moved = self._learn(self._gang, (key, group), compute_s)
        if pulled:
            moved |= self._learn(self._transfer, key, used.transfer_s)
        if loaded_share >= 0.05:
            moved |= self._learn(self._load, (key.fn, key.model), used.load_s / loaded_share)
        if moved:
            self._forget_guesses()
        return moved

    def compute_s(self, key: CostKey, group: int = 1) -> float:
        """Expected compute of one step by so many executors together, seconds of each."""
        learned = self._gang.get((key, group)) if group > 1 else None
        learned = learned or self._compute.get(key)
        if learned is not None:
            return learned.value
        guess = self._guessed_compute.get(key)
        if guess is None:
            guess = self._guessed_compute[key] = self._guess_compute(key)
        return guess

    def transfer_s(self, key: CostKey) -> float | None:
        """Expected pull of the inputs, seconds; None when no pull was seen yet."""
        learned = self._transfer.get(key)
        return learned.value if learned is not None else None

    def load_s(self, key: CostKey) -> float:
        """Expected load of the whole model from scratch, seconds."""
        fn, model = key.fn, key.model
        learned = self._load.get((fn, model))
        if learned is not None:
            return learned.value
        guess = self._guessed_load.get((fn, model))
        if guess is None:
            loads = self._load.items()
            guess = self._guessed_load[fn, model] = _nearest(
                PRIOR_LOAD_S,
                (seconds.value for (_, m), seconds in loads if m == model),
                (seconds.value for (f, _), seconds in loads if f == fn),
                (seconds.value for _, seconds in loads),
            )
        return guess

    def is_load_measured(self, key: CostKey) -> bool:
        """Whether the load of this model was measured for this ModelFn."""
        return (key.fn, key.model) in self._load

    def own_s(self, key: CostKey) -> float:
        """Expected compute and transfer, without load, seconds."""
        return self.compute_s(key) + (self.transfer_s(key) or 0.0)

    def is_measured(self, key: CostKey) -> bool:
        """Whether compute of one executor was measured for exactly this key."""
        return key in self._compute

    def _guess_compute(self, key: CostKey) -> float:
        size = units(key.bucket)
        known = self._compute.items()

        def rates(same: Callable[[CostKey], bool]) -> Iterable[float]:
            return (size * s.value / units(k.bucket) for k, s in known if same(k))

        def seconds(same: Callable[[CostKey], bool]) -> Iterable[float]:
            return (s.value for k, s in known if same(k))

        return _nearest(
            PRIOR_COMPUTE_S,
            (s.value * n for (k, n), s in self._gang.items() if k == key),
            rates(lambda k: k.fn == key.fn and k.model == key.model),
            seconds(lambda k: k.fn == key.fn and k.bucket == key.bucket),
            rates(lambda k: k.fn == key.fn),
            seconds(lambda k: True),
        )

    def _learn(self, into: dict[Any, RobustSeconds], key: Any, seconds: float) -> bool:
        learned = into.get(key)
        if learned is None:
            learned = into[key] = RobustSeconds()
        return learned.observe(seconds)

    def _forget_guesses(self) -> None:
        self.version += 1
        self._guessed_compute.clear()
        self._guessed_load.clear()

    # Saving and loading

    def replace_with(self, other: CostModel) -> None:
        """Take over what another model has learned, in place of what this one has."""
        self._compute, self._transfer, self._load = other._compute, other._transfer, other._load
        self._gang = other._gang
        self._forget_guesses()

    def to_dict(self) -> dict[str, Any]:
        """Everything learned, of types that JSON has."""
        return {
            "version": VERSION,
            "compute": [[*key, s.count, s.recent()] for key, s in sorted(self._compute.items())],
            "transfer": [[*key, s.count, s.recent()] for key, s in sorted(self._transfer.items())],
            "load": [[*key, s.count, s.recent()] for key, s in sorted(self._load.items())],
            "gang": [
                [*key, str(size), s.count, s.recent()]
                for (key, size), s in sorted(self._gang.items())
            ],
        }

    @classmethod
    def from_dict(cls, saved: Any) -> CostModel:
        """What `to_dict` gave. PolicyError says what is malformed and where."""
        if not isinstance(saved, dict):
            raise PolicyError(
                f"saved costs are a {type(saved).__name__}, not a mapping; "
                "load a file that this package saved"
            )
        if saved.get("version") != VERSION:
            raise PolicyError(
                f"saved costs have version {saved.get('version')!r}, this is version {VERSION}; "
                "delete the file and let the costs be learned again"
            )
        model = cls()
        model._compute = {CostKey(*k): s for k, s in _restored(saved, "compute", 3).items()}
        model._transfer = {CostKey(*k): s for k, s in _restored(saved, "transfer", 3).items()}
        model._load = {(k[0], k[1]): s for k, s in _restored(saved, "load", 2).items()}
        if "gang" in saved:  # not in files of before there were gangs
            for (fn, name, bucket, size), s in _restored(saved, "gang", 4).items():
                if not (size.isdecimal() and int(size) > 1):
                    raise PolicyError(
                        f"saved costs: {size!r} is no size of a gang; give a whole number above 1"
                    )
                model._gang[CostKey(fn, name, bucket), int(size)] = s
        return model

    def _check(self) -> None:
        for table in (self._compute, self._gang, self._transfer, self._load):
            for learned in table.values():
                learned._check()
                assert learned.count > 0
        assert not self._guessed_compute.keys() & self._compute.keys()
        assert not self._guessed_load.keys() & self._load.keys()


def _nearest(prior: float, *levels: Iterable[float]) -> float:
    """Median of the first level that has anything, else the prior."""
    for level in levels:
        found = list(level)
        if found:
            return float(median(found))
    return prior


def _restored(saved: dict[str, Any], name: str, width: int) -> dict[tuple[str, ...], RobustSeconds]:
    rows = saved.get(name)
    if not isinstance(rows, list):
        raise PolicyError(f"saved costs: {name!r} is {rows!r}; expected a list of rows")
    found: dict[tuple[str, ...], RobustSeconds] = {}
    for number, row in enumerate(rows):
        if not (
            isinstance(row, list)
            and len(row) == width + 2
            and all(isinstance(part, str) for part in row[:width])
            and type(row[width]) is int
            and isinstance(row[-1], list)
            and 1 <= len(row[-1]) <= min(row[width], RobustSeconds.WINDOW)
            and all(type(s) in (int, float) and 0 <= s < math.inf for s in row[-1])
        ):
            raise PolicyError(
                f"saved costs: row {number} of {name!r} is {row!r}; expected {width} names, a count "
                f"and 1 to {RobustSeconds.WINDOW} finite seconds >= 0"
            )
        found[tuple(row[:width])] = RobustSeconds(row[-1], row[width])
    return found
