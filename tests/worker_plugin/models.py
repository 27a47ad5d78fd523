"""Models in files for tests of the store of weights: tiny ones of every kind, and what they give."""

from __future__ import annotations

import re
import time
from contextlib import contextmanager
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import nn

import st2i_dask as st2i
from st2i_dask.catalogue import tiny
from worker_plugin.arena import Arena
from worker_plugin.host_heap import HostHeap
from worker_plugin.weights import WeightStore

from .aligned import align

#: Component of the tiny pipeline, by kind of model.
PIPELINE = {
    "transformer": ("transformer", "diffusers", "FluxTransformer2DModel"),
    "t5": ("text_encoder_2", "transformers", "T5EncoderModel"),
    "clip": ("text_encoder", "transformers", "CLIPTextModel"),
    "vae": ("vae", "diffusers", "AutoencoderKL"),
    "controlnet": ("controlnet", "diffusers", "FluxControlNetModel"),
}


class Stack(nn.Module):
    """Layers of the given widths one after the other, and what is around them."""

    def __init__(self, widths=(16, 48, 8, 32), inside=8):
        super().__init__()
        self.head = nn.Linear(inside, inside)
        self.scale = nn.Parameter(torch.rand(inside))  # a root layer
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(inside, width), nn.GELU(), nn.Linear(width, inside))
            for width in widths
        )

    def forward(self, x):
        x = self.head(x) * self.scale
        for block in self.blocks:
            x = x + block(x)
        return x


class Tied(Stack):
    """The first block and the last are one in memory; the head is used twice."""

    def __init__(self):
        super().__init__((16, 24, 16))
        self.tail = nn.Linear(8, 8)
        self.tie()

    def tie(self):
        self.tail.weight = self.head.weight
        for place in (0, 2):
            self.blocks[2][place].weight = self.blocks[0][place].weight

    def forward(self, x):
        return self.tail(super().forward(x))


class Single(nn.Module):
    """One layer: nothing but parameters of its own."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(8, 8))

    def forward(self, x):
        return x @ self.weight


class Even(nn.Module):
    """Layers of the same size. depth: how many; width: of each, which has width * width * 4 bytes;
    root: elements of a root layer, 0: there is none."""

    def __init__(self, depth=6, width=64, root=0):
        super().__init__()
        self.root = nn.Parameter(torch.rand(root)) if root else None
        self.blocks = nn.ModuleList(nn.Linear(width, width, bias=False) for _ in range(depth))

    def forward(self, x):
        if self.root is not None:
            x = x + self.root.mean()
        for block in self.blocks:
            x = torch.tanh(block(x))
        return x


PLAIN = {"uneven": Stack, "tied": Tied, "single": Single, "even": Even}
KINDS = (*PIPELINE, *PLAIN)


def save_pipeline(folder):
    """The components of a Flux pipeline with a ControlNet, in fp32 and bf16, by dtype and kind."""
    pipeline = tiny.flux_controlnet()
    for dtype in ("float32", "bfloat16"):
        for kind, (name, _, _) in PIPELINE.items():
            module = getattr(pipeline, name).to(getattr(torch, dtype))
            module.save_pretrained(Path(folder) / dtype / kind, safe_serialization=True)
    align(folder)


def save_plain(path, kind, seed=0, dtype="float32", **options):
    """A plain module in a file of its own; its path."""
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    module = make_plain(kind, seed, dtype, **options)
    tensors = {name: p.detach().clone() for name, p in module.named_parameters()}
    save_file(tensors, path)
    align(path)
    return path


def make_plain(kind, seed=0, dtype="float32", **options):
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return PLAIN[kind](**options).to(getattr(torch, dtype)).eval()


def read_plain(path, kind, **options):
    """The module, its parameters in the mapped file."""
    with torch.device("meta"):
        module = PLAIN[kind](**options)
    module.load_state_dict(load_file(path), strict=False, assign=True)
    if hasattr(module, "tie"):
        module.tie()
    return module.eval()


def read(path, kind, dtype="float32"):
    """A module as its library loads it."""
    if kind in PLAIN:
        return read_plain(path, kind)
    import diffusers
    import transformers

    _, library, name = PIPELINE[kind]
    cls = getattr({"diffusers": diffusers, "transformers": transformers}[library], name)
    return cls.from_pretrained(path, torch_dtype=getattr(torch, dtype)).eval()


class Model(st2i.ModelFn):
    """Any of these models. options: kind, dtype, those of a plain module's class; other: makes it
    another ModelFn of the same weights."""

    def setup_io(self):
        self.add_input("x")
        self.add_output("y")

    def load_model(self, model_path):
        options = {k: v for k, v in self.options.items() if k not in ("kind", "dtype", "other")}
        if options:
            return {"model": read_plain(model_path, self.options["kind"], **options)}
        kind, dtype = self.options["kind"], self.options.get("dtype", "float32")
        return {"model": read(model_path, kind, dtype)}

    def execute(self, model_components, x):
        return {"y": x}


def inputs(kind, dtype="float32", seed=0):
    """What `outputs` calls the model with."""
    dtype = getattr(torch, dtype)
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        x = torch.randn(1, 8, 8).to(dtype)
        latents, prompt = torch.randn(1, 4, 16).to(dtype), torch.randn(1, 3, 32).to(dtype)
        pooled, image = torch.randn(1, 32).to(dtype), torch.randn(1, 3, 16, 16).to(dtype)
        ids, control = torch.randint(0, 100, (1, 7)), torch.randn(1, 4, 16).to(dtype)
    flux = dict(
        hidden_states=latents,
        encoder_hidden_states=prompt,
        pooled_projections=pooled,
        timestep=torch.tensor([0.5]).to(dtype),
        guidance=torch.tensor([3.5]).to(dtype),
        img_ids=torch.arange(12.0).reshape(4, 3).to(dtype),
        txt_ids=torch.zeros(3, 3).to(dtype),
        return_dict=False,
    )
    if kind == "transformer":
        return flux
    if kind == "controlnet":
        return {**flux, "controlnet_cond": control, "guidance": None}
    if kind in ("t5", "clip"):
        return {"input_ids": ids}
    if kind == "vae":
        return {"sample": image}
    if kind == "even":
        return {"x": torch.linspace(-1, 1, 64).expand(2, 64).to(dtype)}
    return {"x": x}


@torch.no_grad()
def outputs(module, kind, given):
    """All tensors that the model gives."""
    if kind == "vae":
        encoded = module.encode(given["sample"]).latent_dist.parameters
        return [encoded, module.decode(encoded[:, :4].contiguous()).sample]
    got = module(**given)
    if kind in ("t5", "clip"):
        got = list(got.values())
    return flat(got)


def flat(value):
    if isinstance(value, torch.Tensor):
        return [value]
    return [tensor for item in value or () for tensor in flat(item)]


def same(got, expected):
    """Whether all are equal, bit by bit."""
    assert len(got) == len(expected) > 0
    return all(a.dtype == b.dtype and torch.equal(a, b) for a, b in zip(got, expected, strict=True))


# ---------------------------------------------------------------- stores


@contextmanager
def store_of(memory, arena_bytes=0, wait_s=10.0, **options):
    """A store with so many bytes in torch's own memory and so many in an arena. When it is closed
    nothing is left of it."""
    arena = Arena(HostHeap(arena_bytes)) if arena_bytes else None
    nbytes = arena.heap.address.nbytes if arena else 0
    store = WeightStore(memory=memory + nbytes, arena=arena, wait_s=wait_s, **options)
    try:
        yield store
        store._check()
        assert not store._leases
    finally:
        loader = store._layers._loader._thread
        store.close()
    store._check()
    assert not store._layers._weights
    assert not store._layers._buffers
    assert not store._shelf._skeletons
    assert not store._shelf._retired
    assert store._cache.used("framework") == store._cache.used("arena") == 0
    if arena is not None:
        assert arena.statistics().weights == 0
    assert loader is None or not loader.is_alive()


def layer_bytes(store, model):
    """Sizes of the layers of a model that has been leased, and which of them are roots."""
    skeletons = [s for s in store._shelf._skeletons.values() if s.model_key == model.model_key]
    sizes = [size for w in skeletons[0].weights for size in w.sizes]
    roots, base = [], 0
    for w in skeletons[0].weights:
        roots += [base + layer for layer in w.roots]
        base += len(w.sizes)
    return sizes, roots


def least_budget(sizes, roots):
    """Bytes in which a run can just do."""
    return sum(sizes[i] for i in roots) + max(
        (size for i, size in enumerate(sizes) if i not in roots), default=0
    )


def resident(store, model):
    """By layer, in order of definition."""
    skeleton = next(s for s in store._shelf._skeletons.values() if s.model_key == model.model_key)
    return [there for w in skeleton.weights for there in store._cache.resident(w.id)]


def settle(store):
    """Until the load ahead of need that a run has left behind is over."""
    deadline = time.monotonic() + 10
    while store._cache.outstanding() is not None:
        assert time.monotonic() < deadline
        time.sleep(0.001)


def mapped_weights():
    """Paths of safetensors files that this process has mapped."""
    with open("/proc/self/maps") as maps:
        return re.findall(r"\S+\.safetensors\S*", maps.read())
