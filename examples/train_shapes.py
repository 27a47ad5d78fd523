"""Train the packaged model ``shapes`` from scratch, on a CPU, in about 70 minutes.

The result is a complete FLUX pipeline in Diffusers format, small enough (3.4 million parameters,
7 MB) to live in a repository. It is trained in two phases on pictures that
:mod:`st2i_dask.shapes.render` draws:

1. An autoencoder (``AutoencoderKL``) learns to squeeze a 64x64 picture into 8x8 latents with 16
   channels, as in the large FLUX models.
2. The transformer (``FluxTransformer2DModel``) and both text encoders learn together to turn noise
   into the latents of the scene that a prompt describes (flow matching, no guidance).

Run it with

    python examples/train_shapes.py --out /tmp/shapes

or, to see in seconds that everything works, with ``--quick``. Step counts and seeds are fixed, so
two runs on one kind of machine give the same weights.

The packaged weights took 18 minutes for the autoencoder, 1 to encode the pictures and 51 for the
transformer, on two CPU cores (AVX-512) that other work shared. Of 144 pictures from 48 prompts,
drawn in 8 steps, 97 % then show size, colour, shape and background as asked for; half-way through
phase two it was about 85 %.
"""

from __future__ import annotations

import argparse
import copy
import json
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import numpy as np
import torch
import torch.nn.functional as F
from diffusers import (
    AutoencoderKL,
    FlowMatchEulerDiscreteScheduler,
    FluxPipeline,
    FluxTransformer2DModel,
)
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from transformers import (
    CLIPTextConfig,
    CLIPTextModel,
    PreTrainedTokenizerFast,
    T5Config,
    T5EncoderModel,
)

from st2i_dask.shapes import (
    COLOURS,
    DEFAULT_SIZE,
    DEFAULT_STEPS,
    MAX_PROMPT_TOKENS,
    SHAPES,
    SIZES,
    gallery,
    parse,
    scenes,
)
from st2i_dask.shapes.judge import judge
from st2i_dask.shapes.render import MAX_OFFSET, coverage

TEXT_WIDTH = 64  # of both text encoders


@dataclass(frozen=True)
class Plan:
    """How long to train; the defaults give the packaged weights."""

    vae_steps: int = 4000
    vae_batch: int = 12
    vae_rate: float = 2e-3
    offsets: int = 40  # pictures of each scene in phase two
    flow_steps: int = 10_000
    flow_batch: int = 64
    flow_rate: float = 1.5e-3
    evaluations: int = 8  # saved and judged checkpoints in phase two

    def scaled(self, fraction: float) -> Plan:
        """The same plan with ``fraction`` of the training steps, at least one."""
        return replace(
            self,
            vae_steps=max(1, round(self.vae_steps * fraction)),
            flow_steps=max(1, round(self.flow_steps * fraction)),
        )


QUICK = Plan(vae_steps=3, vae_batch=4, offsets=1, flow_steps=3, flow_batch=8, evaluations=1)


# ---------------------------------------------------------------- pictures


def silhouettes() -> torch.Tensor:
    """Coverage of every shape, size and whole-pixel offset: float32 [12, offsets, 64, 64]."""
    offsets = range(-MAX_OFFSET, MAX_OFFSET + 1)
    masks = [
        [np.asarray(coverage(shape, size, dx, dy)) for dx in offsets for dy in offsets]
        for shape in SHAPES
        for size in SIZES
    ]
    return torch.from_numpy(np.array(masks)).float() / 255


def palette() -> torch.Tensor:
    """The colours as the model sees them: float32 [8, 3] in -1..1."""
    return torch.tensor(list(COLOURS.values())) / 127.5 - 1


def paint(ground: torch.Tensor, colour: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """Lay ``colour`` [n, 3] over ``ground`` ([n, 3] or pictures) where ``mask`` [n, 64, 64] is 1."""
    if ground.ndim == 2:
        ground = ground[:, :, None, None]
    return ground + (colour[:, :, None, None] - ground) * mask[:, None]


# ---------------------------------------------------------------- phase one


def build_vae() -> AutoencoderKL:
    # Few groups: normalising two or three channels at a time would wipe out the colour of a plain
    # picture, which is nothing but the mean of its channels.
    return AutoencoderKL(
        down_block_types=("DownEncoderBlock2D",) * 4,
        up_block_types=("UpDecoderBlock2D",) * 4,
        block_out_channels=(16, 32, 64, 64),
        layers_per_block=1,
        latent_channels=16,
        norm_num_groups=4,
        sample_size=DEFAULT_SIZE,
        use_quant_conv=False,
        use_post_quant_conv=False,
        force_upcast=False,
    )


def train_vae(vae: AutoencoderKL, plan: Plan, seed: int) -> None:
    """Phase one: reconstruct pictures; three in four are scenes, the rest are free.

    Free pictures have colours from outside the palette, and half of them a second shape, so that
    the decoder stays sensible between the colours it must know.
    """
    rng = torch.Generator().manual_seed(seed)
    masks, colours = silhouettes().flatten(0, 1), palette()
    vae.to(memory_format=torch.channels_last)
    optimiser = torch.optim.AdamW(vae.parameters(), lr=plan.vae_rate, weight_decay=1e-3, fused=True)
    schedule = torch.optim.lr_scheduler.OneCycleLR(
        optimiser, plan.vae_rate, total_steps=plan.vae_steps + 1, pct_start=0.05
    )
    n = plan.vae_batch
    for step in range(plan.vae_steps):
        pair = torch.rand(n, len(colours), generator=rng).argsort(1)[:, :2]  # always different
        ground, colour = colours[pair[:, 0]], colours[pair[:, 1]]
        free = torch.rand(n, 3, 3, generator=rng) * 2 - 1
        is_free = torch.arange(n) < n // 4
        ground = torch.where(is_free[:, None], free[:, 0], ground)
        colour = torch.where(is_free[:, None], free[:, 1], colour)
        mask, second = masks[torch.randint(len(masks), (2, n), generator=rng)]
        second = second * (is_free & (torch.arange(n) % 2 == 0))[:, None, None]
        pictures = paint(paint(ground, colour, mask), free[:, 2], second)
        pictures = pictures.contiguous(memory_format=torch.channels_last)

        posterior = vae.encode(pictures).latent_dist
        output = vae.decode(posterior.sample(generator=rng)).sample
        # The pull towards unit noise keeps the latents compact, which phase two lives on; it comes
        # in slowly, because at once it would drown the first colours.
        pull = 2e-6 * min(1.0, 4 * step / plan.vae_steps)
        loss = F.l1_loss(output, pictures) + pull * posterior.kl().mean()
        optimiser.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(vae.parameters(), 1.0)
        optimiser.step()
        schedule.step()
        if step % 100 == 0:
            print(f"vae {step}/{plan.vae_steps} loss {loss.item():.4f}", flush=True)
        if step and step % 1000 == 0:
            check_colours(vae)
    vae.to(memory_format=torch.contiguous_format).eval().requires_grad_(False)


@torch.no_grad()
def check_colours(vae: AutoencoderKL) -> dict[str, float]:
    """Mean error of the reconstruction for each colour as ground, in 8-bit units, printed."""
    masks, colours = silhouettes(), palette()
    centre = masks[:, masks.shape[1] // 2]  # each shape and size once
    errors = {}
    for i, name in enumerate(COLOURS):
        ground = colours[i].expand(len(centre), 3)
        others = torch.cat([colours[:i], colours[i + 1 :]])
        colour = others[torch.arange(len(centre)) % len(others)]
        pictures = paint(ground, colour, centre)
        output = vae.decode(vae.encode(pictures).latent_dist.mode()).sample.clamp(-1, 1)
        errors[name] = round((output - pictures).abs().mean().item() * 127.5, 2)
    print("reconstruction error by ground colour (of 255):", errors, flush=True)
    return errors


# ---------------------------------------------------------------- text


def build_tokenizer(template: str, specials: list[str], **roles: str) -> PreTrainedTokenizerFast:
    """A tokenizer with one token for each word of the vocabulary."""
    words = [*specials, "a", "on", "background", *SIZES, *COLOURS, *SHAPES]
    ids = {word: i for i, word in enumerate(words)}
    tokenizer = Tokenizer(models.WordLevel(ids, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.post_processor = processors.TemplateProcessing(
        single=template, special_tokens=[(s, ids[s]) for s in specials if s in template]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        model_max_length=MAX_PROMPT_TOKENS,
        unk_token="<unk>",
        pad_token="<pad>",
        eos_token="</s>",
        **roles,
    )


def build_pipeline(vae: AutoencoderKL) -> FluxPipeline:
    """The whole pipeline around ``vae``, everything else with fresh weights."""
    clip_tokenizer = build_tokenizer(
        "<s> $A </s>", ["<pad>", "<s>", "<unk>", "</s>"], bos_token="<s>"
    )
    t5_tokenizer = build_tokenizer("$A </s>", ["<pad>", "</s>", "<unk>"])
    # FLUX reads the CLIP output at the end token. Its id must not be 2: transformers takes that
    # value for a mark of old checkpoints and would read at the highest id instead.
    clip = CLIPTextModel(
        CLIPTextConfig(
            vocab_size=len(clip_tokenizer),
            hidden_size=TEXT_WIDTH,
            intermediate_size=2 * TEXT_WIDTH,
            num_hidden_layers=2,
            num_attention_heads=4,
            max_position_embeddings=MAX_PROMPT_TOKENS,
            projection_dim=TEXT_WIDTH,
            bos_token_id=clip_tokenizer.bos_token_id,
            eos_token_id=clip_tokenizer.eos_token_id,
            pad_token_id=clip_tokenizer.pad_token_id,
            hidden_act="gelu",
        )
    )
    t5 = T5EncoderModel(
        T5Config(
            vocab_size=len(t5_tokenizer),
            d_model=TEXT_WIDTH,
            d_kv=16,
            d_ff=2 * TEXT_WIDTH,
            num_layers=2,
            num_heads=4,
            dropout_rate=0.0,
            pad_token_id=t5_tokenizer.pad_token_id,
            eos_token_id=t5_tokenizer.eos_token_id,
        )
    )
    transformer = FluxTransformer2DModel(
        patch_size=1,
        in_channels=4 * vae.config.latent_channels,
        num_layers=2,
        num_single_layers=4,
        attention_head_dim=32,
        num_attention_heads=4,
        joint_attention_dim=TEXT_WIDTH,
        pooled_projection_dim=TEXT_WIDTH,
        axes_dims_rope=[8, 12, 12],
        guidance_embeds=False,
    )
    return FluxPipeline(
        scheduler=FlowMatchEulerDiscreteScheduler(shift=1.0, use_dynamic_shifting=False),
        vae=vae,
        text_encoder=clip,
        tokenizer=clip_tokenizer,
        text_encoder_2=t5,
        tokenizer_2=t5_tokenizer,
        transformer=transformer,
    )


def token_ids(tokenizer: PreTrainedTokenizerFast, prompts: list[str]) -> torch.Tensor:
    """Token ids padded to the one prompt length: int64 [n, MAX_PROMPT_TOKENS]."""
    return tokenizer(
        prompts, padding="max_length", max_length=MAX_PROMPT_TOKENS, return_tensors="pt"
    ).input_ids


# ---------------------------------------------------------------- phase two


@torch.no_grad()
def encode_scenes(vae: AutoencoderKL, plan: Plan, seed: int) -> torch.Tensor:
    """Latents of every scene at random offsets, packed: float32 [scenes, plan.offsets, 16, 64].

    Also writes into the configuration of ``vae`` the shift and the scale that bring the latents to
    mean 0 and deviation 1, which the noise has.
    """
    rng = torch.Generator().manual_seed(seed)
    masks, colours = silhouettes(), palette()
    shapes, sizes, names = list(SHAPES), list(SIZES), list(COLOURS)
    latents = []
    for scene in scenes():
        n = plan.offsets
        row = masks[shapes.index(scene.shape) * len(sizes) + sizes.index(scene.size)]
        mask = row[torch.randperm(len(row), generator=rng)[:n]]
        ground = colours[names.index(scene.background)].expand(n, 3)
        colour = colours[names.index(scene.colour)].expand(n, 3)
        latents.append(vae.encode(paint(ground, colour, mask)).latent_dist.mode())
    stacked = torch.stack(latents)
    shift, scale = stacked.mean().item(), 1 / stacked.std().item()
    vae.register_to_config(shift_factor=shift, scaling_factor=scale)
    print(f"latents {tuple(stacked.shape)}, shift {shift:.4f}, scale {scale:.4f}", flush=True)
    n, k, channels, height, width = stacked.shape
    packed = FluxPipeline._pack_latents(
        (stacked.flatten(0, 1) - shift) * scale, n * k, channels, height, width
    )
    return packed.unflatten(0, (n, k))


def train_flow(pipe: FluxPipeline, latents: torch.Tensor, plan: Plan, out: Path, seed: int) -> None:
    """Phase two: learn the velocity from picture to noise, transformer and text encoders together.

    ``pipe`` ends up with a running average of the weights, which draws better than the last ones.
    """
    rng = torch.Generator().manual_seed(seed)
    parts = torch.nn.ModuleDict(
        {"transformer": pipe.transformer, "clip": pipe.text_encoder, "t5": pipe.text_encoder_2}
    ).train()
    average = AveragedModel(parts, multi_avg_fn=get_ema_multi_avg_fn(0.99))
    optimiser = torch.optim.AdamW(
        parts.parameters(), lr=plan.flow_rate, betas=(0.9, 0.99), weight_decay=0.01, fused=True
    )
    schedule = torch.optim.lr_scheduler.OneCycleLR(
        optimiser, plan.flow_rate, total_steps=plan.flow_steps + 1, pct_start=0.03
    )
    prompts = [scene.prompt for scene in scenes()]
    clip_ids = token_ids(pipe.tokenizer, prompts)
    t5_ids = token_ids(pipe.tokenizer_2, prompts)
    side = DEFAULT_SIZE // 16
    image_ids = FluxPipeline._prepare_latent_image_ids(1, side, side, "cpu", torch.float32)
    text_ids = torch.zeros(MAX_PROMPT_TOKENS, 3)
    n = plan.flow_batch
    running = 0.0
    for step in range(1, plan.flow_steps + 1):
        which = torch.randint(len(prompts), (n,), generator=rng)
        offset = torch.randint(latents.shape[1], (n,), generator=rng)
        clean = latents[which, offset]
        noise = torch.randn(clean.shape, generator=rng)
        # Mostly the middle of the way, where most is to be learnt, and some of everywhere: the
        # sampler starts at the very end.
        t = torch.sigmoid(torch.randn(n, generator=rng))
        anywhere = torch.rand(n, generator=rng)
        t = torch.where(torch.arange(n) < n // 5, anywhere, t)
        noisy = torch.lerp(clean, noise, t[:, None, None])
        velocity = parts["transformer"](
            hidden_states=noisy,
            timestep=t,
            encoder_hidden_states=parts["t5"](t5_ids[which]).last_hidden_state,
            pooled_projections=parts["clip"](clip_ids[which]).pooler_output,
            txt_ids=text_ids,
            img_ids=image_ids,
            return_dict=False,
        )[0]
        loss = F.mse_loss(velocity, noise - clean)
        optimiser.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(parts.parameters(), 1.0)
        optimiser.step()
        schedule.step()
        if step % 10 == 0:
            average.update_parameters(parts)
        running += (loss.item() - running) / min(step, 100)
        if step % 100 == 0:
            print(f"flow {step}/{plan.flow_steps} loss {running:.4f}", flush=True)
        if step % max(1, plan.flow_steps // plan.evaluations) == 0 or step == plan.flow_steps:
            averaged = average.module.eval()
            pipe.register_modules(
                transformer=averaged["transformer"],
                text_encoder=averaged["clip"],
                text_encoder_2=averaged["t5"],
            )
            save(pipe, out)
            evaluate(FluxPipeline.from_pretrained(out, dtype=torch.float32))


# ---------------------------------------------------------------- result


def save(pipe: FluxPipeline, out: Path) -> None:
    """Write ``pipe`` to the folder ``out`` with its weights rounded to float16."""
    for name in ("vae", "transformer", "text_encoder", "text_encoder_2"):
        copy.deepcopy(getattr(pipe, name)).half().save_pretrained(out / name)
    pipe.save_config(out)
    for name in ("tokenizer", "tokenizer_2", "scheduler"):
        getattr(pipe, name).save_pretrained(out / name)


def evaluate(pipe: FluxPipeline, prompts: int = 48) -> dict[str, float]:
    """Share of pictures that show what was asked for, by attribute and in all, printed."""
    pipe.set_progress_bar_config(disable=True)
    asked = gallery(prompts, seed=1)
    pictures = pipe(
        prompt=asked,
        num_inference_steps=DEFAULT_STEPS,
        guidance_scale=0.0,
        height=DEFAULT_SIZE,
        width=DEFAULT_SIZE,
        max_sequence_length=MAX_PROMPT_TOKENS,
        generator=[torch.Generator().manual_seed(i) for i in range(prompts)],
    ).images
    verdicts = [
        judge(picture, parse(prompt)) for picture, prompt in zip(pictures, asked, strict=True)
    ]
    names = ("right", "background", "colour", "size", "shape")
    shares = {name: round(sum(getattr(v, name) for v in verdicts) / prompts, 3) for name in names}
    print("judged:", shares, flush=True)
    return shares


@contextmanager
def timed(minutes: dict[str, float], phase: str) -> Iterator[None]:
    """Record and print how long a phase takes."""
    start = time.perf_counter()
    yield
    minutes[phase] = round((time.perf_counter() - start) / 60, 2)
    print(f"{phase} took {minutes[phase]} minutes", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, required=True, help="folder for the pipeline")
    parser.add_argument(
        "--steps", type=float, default=1.0, help="fraction of the training steps to run"
    )
    parser.add_argument("--quick", action="store_true", help="a few steps only, to try the script")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--threads", type=int, default=2, help="CPU threads (2 for the packaged weights)"
    )
    args = parser.parse_args()
    if args.steps <= 0:
        parser.error(f"--steps {args.steps} would train nothing; give a fraction above 0")
    plan = QUICK if args.quick else Plan().scaled(args.steps)

    torch.set_num_threads(args.threads)
    torch.use_deterministic_algorithms(True)
    torch.manual_seed(args.seed)
    minutes: dict[str, float] = {}
    vae = build_vae()
    pipe = build_pipeline(vae)
    print({name: f"{part.num_parameters():,}" for name, part in trained_parts(pipe).items()})
    with timed(minutes, "autoencoder"):
        train_vae(vae, plan, args.seed + 1)
    save(pipe, args.out)
    errors = check_colours(vae)
    with timed(minutes, "encoding"):
        latents = encode_scenes(vae, plan, args.seed + 2)
    with timed(minutes, "transformer"):
        train_flow(pipe, latents, plan, args.out, args.seed + 3)
    with timed(minutes, "evaluation"):
        shares = evaluate(FluxPipeline.from_pretrained(args.out, dtype=torch.float32))
    report = {"minutes": minutes, "reconstruction_error": errors, "judged": shares}
    print(json.dumps(report, indent=2))


def trained_parts(pipe: FluxPipeline) -> dict[str, torch.nn.Module]:
    names = ("vae", "transformer", "text_encoder", "text_encoder_2")
    return {name: getattr(pipe, name) for name in names}


if __name__ == "__main__":
    main()
