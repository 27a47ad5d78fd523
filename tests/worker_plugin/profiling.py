"""What the tests of profiles share: one model's key, and its measurements."""

from __future__ import annotations

import logging

from worker_plugin.profiles import ProfileKey

KEY = ProfileKey("sha256:ab/..\n", "bfloat16", "cpu", "64x64")
LAYERS = 4
ORDER = [0, 1, 2, 3]


def measured(profiles, key=KEY, load_s=0.02, compute_s=0.01, runs=3):
    for layer in range(LAYERS):
        profiles.observe_load(key, layer, load_s, LAYERS)
    for _ in range(runs):
        profiles.observe_run(key, [compute_s] * LAYERS, ORDER, None)


def warnings(caplog):
    return [r.getMessage() for r in caplog.records if r.levelno >= logging.WARNING]
