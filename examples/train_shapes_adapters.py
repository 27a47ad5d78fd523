"""Train what goes with the packaged model ``shapes``: a ControlNet and two LoRAs, on a CPU.

* ``controlnet/``: the shape takes the outline of a silhouette, white on black, whatever its place,
  size and turn, and whatever shape the prompt names. The prompt gives the colours.
* ``framed.safetensors``: pictures with a frame in the colour of the shape.
* ``night.safetensors``: pictures with a black background, whatever the prompt says.

All learn from pictures that :mod:`st2i_dask.shapes.render` draws, as the model itself did; the
weights of the model stay as they are. Run it with

    python examples/train_shapes_adapters.py --out /tmp/shapes

or with ``--quick``, to see in seconds that everything works. ``--only`` trains one of the three.

The packaged weights took 45 minutes for the ControlNet and 12 to 13 for each LoRA, on two CPU cores
that much other work shared. Of 48 pictures each: the drawn shape overlaps the silhouette by 0.92
(intersection over union; 0.27 without the ControlNet) with all colours right; 47 have the frame and
48 the black background.
"""

from __future__ import annotations

import argparse
import copy
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from diffusers import (
    AutoencoderKL,
    FluxControlNetModel,
    FluxControlNetPipeline,
    FluxPipeline,
)
from peft import LoraConfig, get_peft_model_state_dict
from PIL import Image, ImageChops
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from st2i_dask.shapes import (
    COLOURS,
    DEFAULT_SIZE,
    DEFAULT_STEPS,
    MAX_PROMPT_TOKENS,
    PIPELINE,
    SHAPES,
    SIZES,
    STYLES,
    Scene,
    gallery,
    parse,
    scenes,
)
from st2i_dask.shapes.judge import framed, judge, look, overlap, unframe
from st2i_dask.shapes.render import at_night, render, silhouette

SIDE = DEFAULT_SIZE // 16  # tokens in a row of the picture
CHECKPOINT_SECONDS = 60

# Projections of the attention: what the LoRAs change.
ATTENTION = ["to_q", "to_k", "to_v", "to_out.0"]
ATTENTION += ["add_q_proj", "add_k_proj", "add_v_proj", "to_add_out"]

# What a ControlNet must have in common with its transformer.
SHARED = ["in_channels", "attention_head_dim", "num_attention_heads", "axes_dims_rope"]
SHARED += ["joint_attention_dim", "pooled_projection_dim"]


@dataclass(frozen=True)
class Plan:
    """How long to train; the defaults give the packaged weights."""

    outlines: int = 4000
    paintings: int = 3  # pictures of each outline, in different colours
    scenes: int = 672
    offsets: int = 4  # pictures of each scene for a style
    controlnet_steps: int = 1600
    lora_steps: int = 600
    batch: int = 64
    rate: float = 1.5e-3
    rank: int = 16
    judged: int = 48  # pictures drawn at the end


QUICK = Plan(
    outlines=8,
    paintings=1,
    scenes=8,
    offsets=1,
    controlnet_steps=2,
    lora_steps=2,
    batch=4,
    judged=2,
)


@dataclass(frozen=True)
class Lesson:
    """Pictures to learn from. latents, controls: float32 [n, 16, 64]; scene: int64 [n].

    scene is the place in ``scenes()`` of what the prompt says.
    """

    latents: torch.Tensor
    scene: torch.Tensor
    controls: torch.Tensor | None = None


# ---------------------------------------------------------------- pictures


@torch.no_grad()
def encode(
    vae: AutoencoderKL, pictures: Sequence[Image.Image], sample: bool = False
) -> torch.Tensor:
    """Packed latents of 64x64 pictures as the transformer sees them: float32 [n, 16, 64]."""
    packed = []
    for i in range(0, len(pictures), 64):
        pixels = np.stack([np.asarray(picture.convert("RGB")) for picture in pictures[i : i + 64]])
        posterior = vae.encode(torch.from_numpy(pixels).movedim(3, 1) / 127.5 - 1).latent_dist
        latents = posterior.sample() if sample else posterior.mode()
        latents = (latents - vae.config.shift_factor) * vae.config.scaling_factor
        packed.append(FluxPipeline._pack_latents(latents, *latents.shape))
    return torch.cat(packed)


def random_outline(rng: random.Random) -> tuple[str, float, Image.Image]:
    """A shape, its radius in pixels, and the silhouette of it somewhere in the picture."""
    shape, radius = rng.choice(SHAPES), rng.uniform(13, 27)
    room = DEFAULT_SIZE / 2 + 2 - radius
    dx, dy = (rng.uniform(-room, room) for _ in range(2))
    return shape, radius, silhouette(shape, radius, dx, dy, rng.choice((0, rng.uniform(0, 360))))


def outline_lesson(vae: AutoencoderKL, plan: Plan, seed: int) -> Lesson:
    """Pictures that follow an outline. In one of three the words for size and shape are random.

    One outline in five is of two shapes at once, for which there is no word.
    """
    rng, known = random.Random(seed), {scene: i for i, scene in enumerate(scenes())}
    outlines, pictures, told = [], [], []
    for _ in range(plan.outlines):
        shape, radius, outline = random_outline(rng)
        if rng.random() < 0.2:
            outline = ImageChops.lighter(outline, random_outline(rng)[2])
        outlines.append(outline)
        for _ in range(plan.paintings):
            colour, ground = rng.sample(sorted(COLOURS), 2)
            picture = Image.new("RGB", outline.size, COLOURS[ground])
            picture.paste(COLOURS[colour], (0, 0), outline)
            pictures.append(picture)
            size = min(SIZES, key=lambda name: abs(SIZES[name] - radius))
            if rng.random() < 1 / 3:
                size, shape = rng.choice(sorted(SIZES)), rng.choice(SHAPES)
            told.append(known[Scene(size, colour, shape, ground)])
    # The pipeline draws the latents of the control image too.
    controls = encode(vae, outlines, sample=True).repeat_interleave(plan.paintings, 0)
    return Lesson(encode(vae, pictures), torch.tensor(told), controls)


def style_lesson(vae: AutoencoderKL, style: str, plan: Plan, seed: int) -> Lesson:
    """Every scene in the style ``style``, at several places."""
    rng = random.Random(seed)
    pictures, told = [], []
    for i, scene in enumerate(scenes()[: plan.scenes]):
        for _ in range(plan.offsets):
            dx, dy = (rng.uniform(-1, 1) for _ in range(2))
            pictures.append(render(scene, dx, dy, style))
            told.append(i)
    return Lesson(encode(vae, pictures), torch.tensor(told))


# ---------------------------------------------------------------- training


@torch.no_grad()
def read_prompts(pipe: FluxPipeline) -> tuple[torch.Tensor, torch.Tensor]:
    """What the text encoders say of every scene: float32 [672, 12, 64] and [672, 64]."""
    embeds, pooled, _ = pipe.encode_prompt(
        [scene.prompt for scene in scenes()], device="cpu", max_sequence_length=MAX_PROMPT_TOKENS
    )
    return embeds, pooled


def train(
    pipe: FluxPipeline,
    lesson: Lesson,
    learner: torch.nn.Module,
    steps: int,
    plan: Plan,
    seed: int,
    save: Callable[[torch.nn.Module], None],
) -> None:
    """Flow matching: those weights of ``learner`` learn that require a gradient.

    ``learner`` is the transformer itself, or a ControlNet that gives it residuals. ``save`` gets a
    running average of it, every minute and at the end.
    """
    rng = torch.Generator().manual_seed(seed)
    embeds, pooled = read_prompts(pipe)
    ids = {
        "txt_ids": torch.zeros(MAX_PROMPT_TOKENS, 3),
        "img_ids": FluxPipeline._prepare_latent_image_ids(1, SIDE, SIDE, "cpu", torch.float32),
    }
    weights = [weight for weight in learner.parameters() if weight.requires_grad]
    print(f"{sum(weight.numel() for weight in weights):,} weights learn", flush=True)
    average = AveragedModel(learner, multi_avg_fn=get_ema_multi_avg_fn(0.9))
    optimiser = torch.optim.AdamW(weights, lr=plan.rate, betas=(0.9, 0.99), fused=True)
    schedule = torch.optim.lr_scheduler.OneCycleLR(
        optimiser, plan.rate, total_steps=steps + 1, pct_start=0.05
    )
    saved, running = time.monotonic(), 0.0
    for step in range(1, steps + 1):
        which = torch.randint(len(lesson.latents), (plan.batch,), generator=rng)
        clean, scene = lesson.latents[which], lesson.scene[which]
        noise = torch.randn(clean.shape, generator=rng)
        # As the model itself was trained: mostly the middle of the way.
        t = torch.sigmoid(torch.randn(plan.batch, generator=rng))
        anywhere = torch.rand(plan.batch, generator=rng)
        t = torch.where(torch.arange(plan.batch) < plan.batch // 5, anywhere, t)
        inputs = {
            "hidden_states": torch.lerp(clean, noise, t[:, None, None]),
            "timestep": t,
            "encoder_hidden_states": embeds[scene],
            "pooled_projections": pooled[scene],
            "return_dict": False,
            **ids,
        }
        residuals = {}
        if lesson.controls is not None:
            doubles, singles = learner(controlnet_cond=lesson.controls[which], **inputs)
            residuals["controlnet_block_samples"] = doubles
            residuals["controlnet_single_block_samples"] = singles
        velocity = pipe.transformer(**inputs, **residuals)[0]
        loss = F.mse_loss(velocity, noise - clean)
        optimiser.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(weights, 1.0)
        optimiser.step()
        schedule.step()
        if step % 10 == 0:
            average.update_parameters(learner)
        running += (loss.item() - running) / min(step, 100)
        if step % 100 == 0:
            print(f"step {step}/{steps} loss {running:.4f}", flush=True)
        if step == steps or time.monotonic() > saved + CHECKPOINT_SECONDS:
            save(average.module)
            saved = time.monotonic()


def train_controlnet(plan: Plan, out: Path, seed: int) -> None:
    pipe = FluxPipeline.from_pretrained(PIPELINE, dtype=torch.float32)
    pipe.transformer.requires_grad_(False)
    lesson = outline_lesson(pipe.vae, plan, seed)
    controlnet = FluxControlNetModel(
        num_layers=2,
        num_single_layers=2,
        **{name: pipe.transformer.config[name] for name in SHARED},
    )
    # Begin as the first blocks of the transformer; what goes to the transformer begins at zero.
    controlnet.load_state_dict(pipe.transformer.state_dict(), strict=False)

    def save(averaged: torch.nn.Module) -> None:
        copy.deepcopy(averaged).half().save_pretrained(out / "controlnet")

    train(pipe, lesson, controlnet, plan.controlnet_steps, plan, seed, save)
    judge_controlnet(out / "controlnet", plan.judged)


def train_style(style: str, plan: Plan, out: Path, seed: int) -> None:
    pipe = FluxPipeline.from_pretrained(PIPELINE, dtype=torch.float32)
    pipe.transformer.requires_grad_(False)
    lesson = style_lesson(pipe.vae, style, plan, seed)
    pipe.transformer.add_adapter(
        LoraConfig(r=plan.rank, lora_alpha=plan.rank, target_modules=ATTENTION)
    )

    def save(averaged: torch.nn.Module) -> None:
        layers = get_peft_model_state_dict(averaged, adapter_name="default")
        FluxPipeline.save_lora_weights(
            out,
            transformer_lora_layers={name: layer.half() for name, layer in layers.items()},
            weight_name=f"{style}.safetensors",
        )

    train(pipe, lesson, pipe.transformer, plan.lora_steps, plan, seed, save)
    judge_style(style, out / f"{style}.safetensors", plan.judged)


# ---------------------------------------------------------------- result


def draw(pipe: Any, prompts: list[str], **options: Any) -> list[Image.Image]:
    pipe.set_progress_bar_config(disable=True)
    drawn: list[Image.Image] = pipe(
        prompts,
        num_inference_steps=DEFAULT_STEPS,
        height=DEFAULT_SIZE,
        width=DEFAULT_SIZE,
        max_sequence_length=MAX_PROMPT_TOKENS,
        generator=[torch.Generator().manual_seed(i) for i in range(len(prompts))],
        **options,
    ).images
    return drawn


def judge_controlnet(path: Path, number: int) -> None:
    """Print how well drawn shapes follow outlines, with the ControlNet and without."""
    asked, rng = gallery(number, seed=1), random.Random(1)
    outlines = [random_outline(rng)[2] for _ in asked]
    pipe = FluxPipeline.from_pretrained(PIPELINE, dtype=torch.float32)
    controlnet = FluxControlNetModel.from_pretrained(path, dtype=torch.float32)
    controlled = FluxControlNetPipeline(**pipe.components, controlnet=controlnet)
    images = [outline.convert("RGB") for outline in outlines]
    for name, pictures in (
        ("without", draw(pipe, asked)),
        ("with the ControlNet", draw(controlled, asked, control_image=images)),
    ):
        seen = [
            (look(picture), parse(prompt)) for picture, prompt in zip(pictures, asked, strict=True)
        ]
        colours = sum((a.colour, a.background) == (b.colour, b.background) for a, b in seen)
        mean = sum(map(overlap, pictures, outlines)) / number
        print(f"{name}: overlap {mean:.3f}, both colours right {colours}/{number}", flush=True)


def judge_style(style: str, path: Path, number: int) -> None:
    """Print how many pictures show the style, with the LoRA and without."""
    asked = gallery(number, seed=1)
    pipe = FluxPipeline.from_pretrained(PIPELINE, dtype=torch.float32)
    plain = draw(pipe, asked)
    pipe.load_lora_weights(path)
    for name, pictures in (("without", plain), (f"with {style}", draw(pipe, asked))):
        pairs = [(picture, parse(prompt)) for picture, prompt in zip(pictures, asked, strict=True)]
        if style == "framed":
            shown = sum(framed(picture, scene) >= 0.6 for picture, scene in pairs)
            right = sum(judge(unframe(picture), scene).right for picture, scene in pairs)
        else:
            shown = sum(look(picture).background == "black" for picture, _ in pairs)
            right = sum(judge(picture, at_night(scene)).right for picture, scene in pairs)
        print(f"{name}: style in {shown}/{number}, all else right in {right}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, required=True, help="folder for the weights")
    parser.add_argument("--only", choices=["controlnet", *STYLES], help="train only this")
    parser.add_argument("--quick", action="store_true", help="a few steps only, to try the script")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--threads", type=int, default=2, help="CPU threads")
    args = parser.parse_args()
    plan = QUICK if args.quick else Plan()
    torch.set_num_threads(args.threads)
    for name in [args.only] if args.only else ["controlnet", *STYLES]:
        print(f"training {name}", flush=True)
        start = time.monotonic()
        torch.manual_seed(args.seed)
        if name == "controlnet":
            train_controlnet(plan, args.out, args.seed)
        else:
            train_style(name, plan, args.out, args.seed)
        print(f"{name} took {(time.monotonic() - start) / 60:.1f} minutes", flush=True)


if __name__ == "__main__":
    main()
