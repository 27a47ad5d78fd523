"""Six workflows of real models with random weights, in the bytes and seconds of `simulate.h800`, scaled.

Each is an encoder (T5), a transformer (FLUX) and a VAE, as in the paper's setting 1: those with FLUX.1
share encoder and VAE, the Z-Images their encoder, and FLUX.1's VAE. Bytes are some three-thousandths of the
paper's, in as many blocks as give the proportion. Seconds are half: a block computes, and then waits
until its share of the model's scaled seconds is over, as a processor waits for its device. So executors
hardly slow each other or the scheduler where they share two cores. Steps are a fifth of the paper's, four
at least. A workflow runs as three kinds of ModelFn, or whole as one.
"""

from __future__ import annotations

import copy
import functools
import threading
import time
from collections.abc import Callable, Mapping
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import st2i_dask as st2i
from st2i_dask.simulate import h800

#: Of the seconds on an H800.
TIME = 0.5
#: Width of every model; its blocks have bytes in proportion.
WIDTH = 128
_HEAD = 16
_SIDE = 4  # image tokens along an edge
_TEXT_TOKENS = 8
_CHANNELS = 64
_VOCABULARY = 512
_reading = threading.Lock()
_late = threading.local()


class Kind(NamedTuple):
    """One workflow; models by their names in `h800`."""

    name: str
    encoder: str
    denoiser: str
    steps: int
    decoder: str


KINDS = (
    Kind("sd35", "t5-sd3", "sd35-large", 6, "sd35-vae"),
    Kind("z-image", "qwen3-4b", "z-image", 10, "flux1-vae"),
    Kind("turbo", "qwen3-4b", "z-image-turbo", 4, "flux1-vae"),
    Kind("flux-dev", "t5-flux", "flux1-dev", 6, "flux1-vae"),
    Kind("schnell", "t5-flux", "flux1-schnell", 4, "flux1-vae"),
    Kind("klein", "qwen3-8b", "flux2-klein", 4, "flux2-vae"),
)
#: Its load takes 3.2 of its invocations, and a device of 80 GB holds it 3.4 times.
EXAMPLE = "flux1-dev"
#: Blocks of the example's transformer. A block of T5 has two thirds of the bytes of one of FLUX.
_BLOCKS = 8
_T5_BLOCKS = 12


def _blocks(model: str) -> int:
    share = h800.MODELS[model].nbytes / h800.MODELS[EXAMPLE].nbytes
    return max(1, round(share * (_T5_BLOCKS if model.startswith(("t5", "qwen")) else _BLOCKS)))


def save(folder: Path) -> None:
    """All models, each a folder of its own name."""
    import torch

    with torch.random.fork_rng():
        torch.manual_seed(0)
        for kind in KINDS:
            for name in (kind.encoder, kind.denoiser, kind.decoder):
                if not (folder / name).exists():
                    _made(name).save_pretrained(folder / name)


def _made(name: str) -> Any:
    cls = _class(name)
    if name.endswith("vae"):
        return cls(
            down_block_types=("DownEncoderBlock2D",) * 2,
            up_block_types=("UpDecoderBlock2D",) * 2,
            block_out_channels=(8, 16),
            layers_per_block=1,
            latent_channels=_CHANNELS // 4,
            norm_num_groups=8,
            use_quant_conv=False,
            use_post_quant_conv=False,
            mid_block_add_attention=False,
        )
    if name.startswith(("t5", "qwen")):
        from transformers import T5Config

        return cls(
            T5Config(
                vocab_size=_VOCABULARY,
                d_model=WIDTH,
                d_kv=_HEAD,
                d_ff=2 * WIDTH,
                num_layers=_blocks(name),
                num_heads=WIDTH // _HEAD,
            )
        )
    return cls(
        patch_size=1,
        in_channels=_CHANNELS,
        num_layers=1,
        num_single_layers=_blocks(name) - 2,  # a double block has twice the bytes
        attention_head_dim=_HEAD,
        num_attention_heads=WIDTH // _HEAD,
        joint_attention_dim=WIDTH,
        pooled_projection_dim=WIDTH,
        axes_dims_rope=(4, 4, 8),
    )


def _class(name: str) -> Any:
    import diffusers
    import transformers

    if name.endswith("vae"):
        return diffusers.AutoencoderKL
    t5 = name.startswith(("t5", "qwen"))
    return transformers.T5EncoderModel if t5 else diffusers.FluxTransformer2DModel


def read(path: Path) -> Any:
    """A model whose parameters lie in the mapped file, and whose blocks take their time. Its
    configuration is read once per process: a rival that keeps nothing on the device pays for loading
    weights, not for building modules."""
    from torch.nn import Parameter

    with _reading:
        known = _first(path)
        shared: dict[int, Any] = {
            id(p): Parameter(p.data, requires_grad=False) for p in known.parameters()
        }
        model = copy.deepcopy(known, shared)
    blocks = _timed(model)
    for block in blocks:
        seconds = TIME * h800.PROFILE.model(path.name).compute_s / len(blocks)
        block.forward = _lasting(block.forward, seconds)
    return model


@cache
def _first(path: Path) -> Any:
    import torch

    model = _class(path.name).from_pretrained(str(path), torch_dtype=torch.float32).eval()
    if path.name.endswith("vae"):
        model.encoder = None  # nothing is encoded
    return model


def _timed(model: Any) -> list[Any]:
    if hasattr(model, "single_transformer_blocks"):
        return [*model.transformer_blocks, *model.single_transformer_blocks]
    return [model.decoder] if hasattr(model, "decoder") else list(model.encoder.block)


def _lasting(forward: Callable[..., Any], seconds: float) -> Callable[..., Any]:
    """Within the hooks that wait for the block's weights: that wait is not its compute. What a busy
    machine wakes it too late for, the thread's next block takes less."""

    @functools.wraps(forward)
    def timed(*args: Any, **kwargs: Any) -> Any:
        ends = time.perf_counter() + seconds - getattr(_late, "seconds", 0.0)
        result = forward(*args, **kwargs)
        time.sleep(max(0.0, ends - time.perf_counter()))
        _late.seconds = min(seconds, time.perf_counter() - ends)
        return result

    return timed


class _Part(st2i.ModelFn):
    def load_model(self, model_path: str | None) -> dict[str, Any]:
        return {"model": read(Path(str(model_path)))}


class Encode(_Part):
    """A seed to embeddings of its prompt."""

    def setup_io(self) -> None:
        self.add_input("seed")
        self.add_output("embeddings")

    def execute(self, model_components: Any, seed: Any) -> dict[str, Any]:
        return {"embeddings": encode(model_components["model"], seed)}


class Denoise(_Part):
    """One step."""

    def setup_io(self) -> None:
        self.add_input("embeddings")
        self.add_input("latents")
        self.add_input("step")
        self.add_input("steps")
        self.add_output("next")

    def execute(self, model_components: Any, **inputs: Any) -> dict[str, Any]:
        return {"next": denoise(model_components["model"], **inputs)}


class Decode(_Part):
    """Latents to pixels."""

    def setup_io(self) -> None:
        self.add_input("latents")
        self.add_output("pixels")

    def execute(self, model_components: Any, latents: Any) -> dict[str, Any]:
        return {"pixels": decode(model_components["model"], latents)}


class Whole(st2i.ModelFn):
    """All of it as one function, as a monolithic serverless workflow is: the same calls in turn."""

    def setup_io(self) -> None:
        self.add_input("seed")
        self.add_output("pixels")

    def load_model(self, model_path: str | None) -> dict[str, Any]:
        names = {role: self.options[role] for role in ("encoder", "denoiser", "decoder")}
        return {role: read(Path(str(model_path)) / name) for role, name in names.items()}

    def execute(self, model_components: Mapping[str, Any], seed: Any) -> dict[str, Any]:
        steps, latents = self.options["steps"], noise(seed)
        embeddings = encode(model_components["encoder"], seed)
        for step in range(steps):
            latents = denoise(model_components["denoiser"], embeddings, latents, step, steps)
        return {"pixels": decode(model_components["decoder"], latents)}


@st2i.glue
def noise(seed: int) -> Any:
    """Latents to begin with, (1, tokens, channels)."""
    import torch

    generator = torch.Generator().manual_seed(seed)
    return torch.randn(1, _SIDE * _SIDE, _CHANNELS, generator=generator)


def encode(model: Any, seed: int) -> Any:
    """Embeddings (1, tokens, width)."""
    import torch

    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(0, _VOCABULARY, (1, _TEXT_TOKENS), generator=generator)
    return model(ids).last_hidden_state


def denoise(model: Any, embeddings: Any, latents: Any, step: int, steps: int) -> Any:
    """Latents after this step of Euler's."""
    import torch

    edge = torch.arange(_SIDE, dtype=torch.float32)
    velocity = model(
        hidden_states=latents,
        encoder_hidden_states=embeddings,
        pooled_projections=embeddings[:, 0],
        timestep=torch.full((1,), 1 - step / steps),
        img_ids=torch.cat([torch.zeros(_SIDE * _SIDE, 1), torch.cartesian_prod(edge, edge)], 1),
        txt_ids=torch.zeros(_TEXT_TOKENS, 3),
        return_dict=False,
    )[0]
    return latents - velocity / steps


def decode(model: Any, latents: Any) -> Any:
    """Pixels (1, 3, height, width)."""
    grid = latents.reshape(1, _SIDE, _SIDE, _CHANNELS // 4, 2, 2).permute(0, 3, 1, 4, 2, 5)
    grid = grid.reshape(1, _CHANNELS // 4, 2 * _SIDE, 2 * _SIDE)
    return model.decode(grid, return_dict=False)[0].clamp(-1, 1)


def model_functions(kind: Kind, folder: Path) -> st2i.Workflow:
    """A DAG of invocations."""

    @st2i.workflow(name=f"slo-{kind.name}", replace=True)
    def workflow(seed: int) -> Any:
        embeddings, latents = Encode(str(folder / kind.encoder))(seed), noise(seed)
        denoiser = Denoise(str(folder / kind.denoiser))
        for step in range(kind.steps):
            latents = denoiser(embeddings, latents, step, kind.steps)
        return Decode(str(folder / kind.decoder))(latents)

    made: st2i.Workflow = workflow
    return made


def whole(kind: Kind, folder: Path) -> st2i.Workflow:
    """The same as one function."""

    @st2i.workflow(name=f"slo-whole-{kind.name}", replace=True)
    def workflow(seed: int) -> Any:
        function = Whole(
            str(folder),
            encoder=kind.encoder,
            denoiser=kind.denoiser,
            decoder=kind.decoder,
            steps=kind.steps,
        )
        return function(seed)

    made: st2i.Workflow = workflow
    return made
