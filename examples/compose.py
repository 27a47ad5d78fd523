"""Compose: a workflow written from scratch out of model functions.

    python examples/compose.py [OUT.png]

The models of the packaged `shapes` pipeline, each as a ModelFn of our own, with something the ready
made workflow does not do: the picture begins with one prompt and ends with another, and the noise
is the same for both halves.
"""

import sys

import torch
from dask.distributed import Client
from diffusers import AutoencoderKL, FluxPipeline, FluxTransformer2DModel

import st2i_dask as st2i
from st2i_dask.shapes import DEFAULT_STEPS, MAX_PROMPT_TOKENS, PIPELINE

SIDE = 4  # a 64x64 picture is 4x4 tokens


class TextEncoders(st2i.ModelFn):
    """Both text encoders as one function: load them together, run them together."""

    def setup_io(self):
        self.add_input("prompt")
        self.add_output("embeds")
        self.add_output("pooled")

    def load_model(self, model_path):
        parts = FluxPipeline.from_pretrained(
            model_path, transformer=None, vae=None, dtype=torch.float32
        )
        return {"encoders": parts}

    def execute(self, model_components, prompt):
        embeds, pooled, _ = model_components["encoders"].encode_prompt(
            prompt, device="cpu", max_sequence_length=MAX_PROMPT_TOKENS
        )
        return {"embeds": embeds, "pooled": pooled}


class Denoiser(st2i.ModelFn):
    def setup_io(self):
        self.add_input("latents")
        self.add_input("sigma")
        self.add_input("embeds")
        self.add_input("pooled")
        self.add_output("velocity")

    def load_model(self, model_path):
        return {
            "transformer": FluxTransformer2DModel.from_pretrained(
                model_path, subfolder="transformer", dtype=torch.float32
            )
        }

    def execute(self, model_components, latents, sigma, embeds, pooled):
        velocity = model_components["transformer"](
            hidden_states=latents,
            timestep=torch.tensor([sigma]),
            encoder_hidden_states=embeds,
            pooled_projections=pooled,
            txt_ids=torch.zeros(embeds.shape[1], 3),
            img_ids=FluxPipeline._prepare_latent_image_ids(1, SIDE, SIDE, "cpu", torch.float32),
            return_dict=False,
        )[0]
        return {"velocity": velocity}


class Decoder(st2i.ModelFn):
    def setup_io(self):
        self.add_input("latents")
        self.add_output("pixels")

    def load_model(self, model_path):
        return {
            "vae": AutoencoderKL.from_pretrained(model_path, subfolder="vae", dtype=torch.float32)
        }

    def execute(self, model_components, latents):
        vae = model_components["vae"]
        latents = FluxPipeline._unpack_latents(latents, 64, 64, 8)
        latents = latents / vae.config.scaling_factor + vae.config.shift_factor
        return {"pixels": vae.decode(latents, return_dict=False)[0] / 2 + 0.5}


@st2i.glue
def random_latents(seed):
    noise = torch.randn(1, 16, 2 * SIDE, 2 * SIDE, generator=torch.Generator().manual_seed(seed))
    return FluxPipeline._pack_latents(noise, 1, 16, 2 * SIDE, 2 * SIDE)


@st2i.glue
def euler_step(latents, velocity, sigma, next_sigma):
    return latents + (next_sigma - sigma) * velocity


@st2i.workflow
def turncoat(first: str, last: str, seed: int = 0, num_steps: int = DEFAULT_STEPS):
    """Begin the picture with one prompt, end it with another."""
    text = TextEncoders(PIPELINE)
    denoiser = Denoiser(PIPELINE)
    sigmas = [1 - i / num_steps for i in range(num_steps + 1)]  # num_steps is known here
    latents = random_latents(seed)  # seed is not: it stays symbolic, as the prompts do
    early, late = text(first), text(last)  # independent: they may run at the same time
    for step in range(num_steps):
        prompt = early if step < num_steps // 4 else late
        velocity = denoiser(latents, sigmas[step], prompt.embeds, prompt.pooled)
        latents = euler_step(latents, velocity, sigmas[step], sigmas[step + 1])
    return st2i.to_image(Decoder(PIPELINE)(latents))


if __name__ == "__main__":
    out = sys.argv[1] if len(sys.argv) > 1 else "turncoat.png"
    with st2i.local_cluster(n_workers=2) as cluster, Client(cluster) as client:
        future = turncoat.submit(
            client,
            first="a large red circle on a blue background",
            last="a large red ring on a green background",
            seed=3,
            tenant="alice",
        )
        image = future.result()
        image.save(out)
        print(f"{out}: {image.size[0]}x{image.size[1]}, {image.metadata['steps']} steps")
