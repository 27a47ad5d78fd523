"""The worked example: the paper's models on an H800.

Seconds and bytes are derived from the per-operator measurements of the DiFlow artifact (mental2008/
DiFlow-AE, rounded; batch 1, 1024x1024; SD3.x at batch 2, as guidance doubles its batch). There models
load at about 8 GB/s, from memory that is not pinned: `UNPINNED`. The paper loads from pinned memory, a
transformer of FLUX.1 in 3.2 of its invocations, T5 in 13.5: about 30 GB/s. That is `PROFILE`.

Not measured there, so estimated: Z-Image, Z-Image-Turbo and Flux2-Klein (9B) with their Qwen3 encoders.
Bytes are parameters times 2; they load at the rate of FLUX.1's transformer and compute in FLUX.1's
seconds in proportion to parameters, which is what compute-bound models of like tokens do.
"""

from __future__ import annotations

from dataclasses import replace

from .profiles import Model, Profile

_GB = 1_000_000_000
_LOAD_S_PER_GB = 2.94 / 23.8
_STEP_S_PER_BILLION = 0.243 / 12.0
#: Of a batch of two in seconds of a batch of one, measured for FLUX.1.
_GUIDED = 0.466 / 0.243
_ENCODER_S_PER_BILLION = 0.024 / 4.8

#: Adapters: an example of a LoRA of rank 64 or so, 0.3 GB.
_LORA = 0.3


def _measured(gigabytes: float, load_s: float, compute_s: float, layers: int) -> Model:
    return Model(int(gigabytes * _GB), load_s, compute_s, layers)


def _estimated(billions: float, compute_s: float, layers: int) -> Model:
    return _measured(2 * billions, 2 * billions * _LOAD_S_PER_GB, compute_s, layers)


MODELS: dict[str, Model] = {
    "clip-l": _measured(0.49, 0.060, 0.0041, 1),
    "clip-g": _measured(2.85, 0.293, 0.0163, 4),
    "t5-sd3": _measured(11.5, 1.66, 0.038, 12),
    "sd35-large": _measured(16.7, 1.92, 0.231, 19),
    "sd35-canny": _measured(4.6, 0.480, 0.083, 6),
    "sd35-depth": _measured(4.6, 0.456, 0.083, 6),
    "sd3-medium": _measured(4.22, 0.439, 0.0692, 24),
    "sd35-vae": _measured(0.17, 0.023, 0.109, 1),
    "clip-flux": _measured(0.25, 0.030, 0.003, 1),
    "t5-flux": _measured(9.5, 1.24, 0.024, 12),
    "flux1-dev": _measured(23.8, 2.94, 0.243, 19),
    "flux1-schnell": _measured(23.8, 2.74, 0.224, 19),
    "flux1-canny": _measured(1.49, 0.175, 0.0109, 2),
    "flux1-depth": _measured(1.49, 0.168, 0.0109, 2),
    "flux1-vae": _measured(0.17, 0.027, 0.253, 1),
    "qwen3-4b": _estimated(4.0, 4.0 * _ENCODER_S_PER_BILLION, 12),
    "qwen3-8b": _estimated(8.2, 8.2 * _ENCODER_S_PER_BILLION, 12),
    "z-image": _estimated(6.15, 6.15 * _STEP_S_PER_BILLION * _GUIDED, 15),
    "z-image-turbo": _estimated(6.15, 6.15 * _STEP_S_PER_BILLION, 15),
    "z-image-control": _estimated(1.5, 1.5 * _STEP_S_PER_BILLION * _GUIDED, 3),
    "turbo-control": _estimated(1.5, 1.5 * _STEP_S_PER_BILLION, 3),
    "flux2-klein": _estimated(9.1, 9.1 * _STEP_S_PER_BILLION, 16),
    "flux2-vae": _measured(0.17, 0.027, 0.253, 1),
    **{f"lora-{n}": _measured(_LORA, _LORA * _LOAD_S_PER_GB, 0.0, 1) for n in range(8)},
}

UNPINNED = Profile(MODELS, device="H800, unpinned")
PROFILE = UNPINNED.with_load(3.2 * 0.243 / 2.94, device="H800")
#: The same with the link between executors of one node (NVLink, from pulls of the same artifact) in place
#: of the one between nodes.
NODE = replace(PROFILE, link_latency_s=5.7e-5, link_bandwidth=178e9)
