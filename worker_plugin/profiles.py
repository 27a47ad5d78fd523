"""Measured seconds per layer: to load it and to compute it, kept from run to run and across restarts.

From these two follows how many layers have to be resident for the loads of the others to hide. Seconds
to load do not depend on the shapes that are computed, so all shape buckets share them: a bucket that
is new while part of the model is resident needs no load of that part to be known.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Iterable, Sequence
from pathlib import Path

from st2i_dask.errors import PolicyError

from .prefix import resident_prefix
from .profile_files import ProfileFiles
from .profile_records import Place, Places, Recent, Shape, decode, encode, merge
from .profile_records import Profile as Profile
from .profile_records import ProfileKey as ProfileKey

#: Runs whose layers are measured: computing is slower while it is timed layer by layer.
MEASURED_RUNS = 3
#: Files are written at most once in so many seconds.
WRITE_SECONDS = 5.0


class Profiles:
    """One per worker. Thread-safe; nobody waits for a file but who asks first about some weights.

    folder: where the files are; None: in memory only.
    """

    def __init__(self, folder: Path | None = None, *, write_s: float = WRITE_SECONDS):
        self._files = ProfileFiles(folder) if folder is not None else None
        self._write_s = write_s
        self._weights: dict[str, Places] = {}
        # What was observed here and is not in the files yet. Only that is written: the rest of a
        # file may be newer than what was read.
        self._unwritten: dict[str, set[ProfileKey]] = {}
        self._timer: threading.Timer | None = None
        self._closed = False
        self._lock = threading.Lock()
        self._write_lock = threading.Lock()

    # Observations

    def observe_load(self, key: ProfileKey, layer: int, seconds: float, layers: int) -> None:
        """A layer of so many was loaded. Another number of layers than before: all starts anew."""
        if not 0 <= layer < layers:
            raise PolicyError(f"layer {layer} of {layers} does not exist; count them from 0")
        _check_seconds([seconds])
        place = self._place(key)
        with self._lock:
            if len(place.load) != layers:
                place.set_load([Recent() for _ in range(layers)])
            place.load[layer].observe(seconds)
            self._changed(key)

    def observe_run(
        self,
        key: ProfileKey,
        compute_s: Sequence[float] | None,
        order: Sequence[int],
        stalled_s: float | None,
    ) -> None:
        """A run ended.

        compute_s: seconds of one pass by layer, 0 for one that was not needed; None: not measured.
        order: layers in order of execution, those needed all the time first; repetitions count once.
        stalled_s: seconds it waited for loads; None: it began without its whole prefix, so that its
            stalls say nothing about the profile.
        """
        layers = len(compute_s) if compute_s is not None else math.inf
        wrong = [layer for layer in order if not 0 <= layer < layers]
        if wrong:
            raise PolicyError(
                f"order names layer {wrong[0]}, but there are {layers}; count them from 0"
            )
        _check_seconds([*(compute_s or ()), stalled_s or 0.0])
        place = self._place(key)
        with self._lock:
            shape = place.shape(key.bucket)
            if compute_s is not None and len(shape.compute) != len(compute_s):
                shape = place.shapes[key.bucket] = Shape()
                shape.compute = [Recent() for _ in compute_s]
            # While a profile is being measured nothing contradicts it.
            judged = stalled_s is not None and shape.measured >= MEASURED_RUNS
            profile = place.profile(key.bucket) if judged else None
            shape.runs += 1
            if order:
                shape.order = list(dict.fromkeys(order))
            if compute_s is not None:
                shape.measured += 1
                for recent, seconds in zip(shape.compute, compute_s, strict=True):
                    recent.observe(seconds)
            if profile is not None and stalled_s is not None:
                place.judge(shape, sum(compute_s or profile.compute_s), stalled_s)
            self._changed(key)

    # Questions

    def get(self, key: ProfileKey) -> Profile | None:
        """None until every layer that a run needs has been loaded and measured."""
        place = self._place(key)
        with self._lock:
            return place.profile(key.bucket)

    def wants_compute(self, key: ProfileKey) -> bool:
        """Whether the next run is to be measured layer by layer."""
        place = self._place(key)
        with self._lock:
            shape = place.shapes.get(key.bucket)
            return shape is None or shape.measured < MEASURED_RUNS

    def prefix(self, key: ProfileKey) -> int | None:
        """How many layers, in order of execution, hide the loads of the rest; None: not known yet."""
        profile = self.get(key)
        if profile is None:
            return None
        return resident_prefix(
            [profile.load_s[layer] for layer in profile.order],
            [profile.compute_s[layer] for layer in profile.order],
        )

    # Files

    def close(self) -> None:
        """Write what is not written. What is observed afterwards stays in memory."""
        with self._lock:
            self._closed = True
            timer, self._timer = self._timer, None
        if timer is not None:
            timer.cancel()
            if timer.is_alive():
                timer.join()
        self._write()

    def _place(self, key: ProfileKey) -> Place:
        with self._lock:
            known = self._weights.get(key.weights)
        if known is None:
            read = self._files.read(key.weights, decode) if self._files is not None else None
            with self._lock:
                known = self._weights.setdefault(key.weights, read if read is not None else {})
        with self._lock:
            return known.setdefault((key.dtype, key.device), Place())

    def _changed(self, key: ProfileKey) -> None:
        if self._files is None or self._closed:
            return
        self._unwritten.setdefault(key.weights, set()).add(key)
        if self._timer is None:
            self._timer = threading.Timer(self._write_s, self._write)
            self._timer.name = "st2i-profiles"
            self._timer.daemon = True
            self._timer.start()

    def _write(self) -> None:
        if self._files is None:
            return
        with self._write_lock:
            with self._lock:
                self._timer = None
                unwritten, self._unwritten = self._unwritten, {}
            for weights, keys in unwritten.items():
                merged = self._files.read(weights, decode)
                with self._lock:
                    places = self._weights[weights]
                    if merged is None:
                        merged = places
                    for key in keys:
                        merge(merged, places, key)
                    content = encode(merged)
                if not self._files.write(weights, content):
                    with self._lock:
                        self._unwritten.setdefault(weights, set()).update(keys)

    def _check(self) -> None:
        with self._lock:
            for weights, places in self._weights.items():
                for place in places.values():
                    assert place.is_sound()
                assert encode(decode(encode(places))) == encode(places)
                assert {key.weights for key in self._unwritten.get(weights, ())} <= {weights}
            assert set(self._unwritten) <= set(self._weights)
            assert not (self._closed and self._timer is not None)
            assert self._files is not None or not self._unwritten


def _check_seconds(values: Iterable[float]) -> None:
    for seconds in values:
        if not 0.0 <= seconds < math.inf:
            raise PolicyError(
                f"{seconds!r} seconds were observed; give the difference of two readings of a "
                "monotonic clock, 0 or more"
            )
