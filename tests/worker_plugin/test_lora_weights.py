"""Models with adapters in a store: the base's weights are there once, unchanged, and what goes is gone."""

from __future__ import annotations

import functools
import gc
import hashlib
import os
import random
import threading
import weakref
from collections import Counter

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from st2i_dask.catalogue import tiny, tiny_lora
from st2i_dask.catalogue.flux.parts import ClipText, FluxTransformer
from st2i_dask.catalogue.folder import read_folder
from st2i_dask.catalogue.lora import Loras, adapted
from worker_plugin.adapters import adapter_parameters, base_parameters, is_adapted
from worker_plugin.content import ContentIds
from worker_plugin.held import held_bytes
from worker_plugin.layers import divide
from worker_plugin.virtual_modules import find_virtual

from .host_files import open_files
from .models import inputs, mapped_weights, settle, store_of

NO_LIMIT = 1 << 30
torch.set_num_threads(1)


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    return tmp_path_factory.mktemp("adapted")


@pytest.fixture(scope="module")
def folder(root):
    tiny.flux(layers=(2, 3)).save_pretrained(root / "dev", safe_serialization=True)
    return read_folder(str(root / "dev"))


@pytest.fixture(scope="module")
def files(root, folder):
    base = pipeline(folder, "float32")
    both = ("transformer", "text_encoder")
    return {
        "a": tiny_lora.save_lora(root / "a.safetensors", base, parts=both, strength=0.5),
        "b": tiny_lora.save_kohya_flux_lora(root / "b.safetensors", base, seed=3, strength=0.5),
        "c": tiny_lora.save_lora(root / "c.safetensors", base, targets=["linear"], rank=2, seed=5),
    }


def pipeline(folder, dtype, *loras):
    from diffusers import FluxPipeline

    made = FluxPipeline.from_pretrained(
        folder.source, dtype=getattr(torch, dtype), vae=None, text_encoder_2=None, tokenizer_2=None
    )
    for number, (file, _) in enumerate(loras):
        made.load_lora_weights(str(file), adapter_name=f"n{number}")
    if loras:
        names = [f"n{number}" for number in range(len(loras))]
        made.set_adapters(names, [scale for _, scale in loras])
    return made


def model(folder, *loras, dtype="float32", cls=FluxTransformer):
    part = "transformer" if cls is FluxTransformer else "text_encoder"
    options = adapted({"dtype": dtype}, Loras(folder).carry("loras", list(loras)), part)
    return cls(folder.source, **options)


@functools.cache  # drawn from torch's generator, which threads share
def given(dtype="float32"):
    flux = inputs("transformer", dtype)
    return dict(
        latents=flux["hidden_states"],
        timestep=flux["timestep"] * 1000,
        guidance_scale=3.5,
        pooled_prompt_embeds=flux["pooled_projections"],
        prompt_embeds=flux["encoder_hidden_states"],
        text_ids=flux["txt_ids"],
        image_ids=flux["img_ids"],
    )


@torch.no_grad()
def run(model, components, dtype="float32"):
    named = {**dict.fromkeys(model.inputs), **given(dtype)}
    return model.execute(components, **named)["noise_pred"]


def reference(folder, *loras, dtype="float32"):
    """What the transformer of a fresh pipeline gives."""
    made = pipeline(folder, dtype, *loras)
    return run(model(folder, dtype=dtype), {"pipeline": made}, dtype)


def digest(module):
    """Of the base's parameters, by their names without adapters."""
    found = hashlib.sha256()
    for name, parameter in base_parameters(module, ""):
        found.update(name.encode())
        found.update(parameter.detach().contiguous().view(torch.uint8).numpy())
    return found.hexdigest()


def base_digest(store, model):
    """With all layers in memory."""
    with store.lease(model) as lease:
        store.hold_all(lease)
        return digest(lease.components["pipeline"].transformer)


# ---------------------------------------------------------------- seeing through


def load(folder, files, names, part="transformer", dtype="float32"):
    cls = FluxTransformer if part == "transformer" else ClipText
    made = model(folder, *[files[name] for name in names], cls=cls, dtype=dtype)
    return made.load_model(made.model_path)


@pytest.mark.parametrize("part", ["transformer", "text_encoder"])
def test_base_parameters_have_the_names_that_they_have_without(folder, files, part):
    plain = getattr(load(folder, files, "", part)["pipeline"], part)
    with_adapters = getattr(load(folder, files, "ab", part)["pipeline"], part)
    assert any(map(is_adapted, with_adapters.modules()))
    names = [name for name, _ in plain.named_parameters()]
    assert [name for name, _ in base_parameters(plain, "")] == names
    assert [name for name, _ in base_parameters(with_adapters, "")] == names
    assert names != [name for name, _ in with_adapters.named_parameters()]
    layers = [[(layer.name, [n for n, _ in layer.parameters]) for layer in divide(m)]
              for m in (plain, with_adapters)]  # fmt: skip
    assert layers[0] == layers[1]
    assert digest(plain) == digest(with_adapters)


def test_modules_that_only_look_like_adapted_ones_are_not(folder):
    class Based(nn.Module):
        def __init__(self):
            super().__init__()
            self.base_layer = nn.Linear(2, 2)

    assert [name for name, _ in base_parameters(Based(), "x")] == [
        "x.base_layer.weight",
        "x.base_layer.bias",
    ]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("part", ["transformer", "text_encoder"])
def test_content_is_the_bases_and_adapters_are_held(folder, files, part, dtype):
    ids, plain_held = ContentIds(), None
    for names in ("", "a", "ab"):
        components = load(folder, files, names, part, dtype)
        (found,) = find_virtual(components, ids)
        named = getattr(components["pipeline"], part).named_parameters()
        # Kohya's fused projections give matrices that share memory.
        storages = {p.data_ptr(): p.nbytes for name, p in named if ".lora_" in name}
        matrices = sum(storages.values())
        held = held_bytes(components, [found])
        if not names:
            content, plain_held = found.id, held
            assert matrices == 0
        assert found.id == content
        assert held == plain_held + matrices
        assert (matrices > 0) == bool(names)


# ---------------------------------------------------------------- one base


def test_the_base_is_in_memory_once_whatever_adapters_are_used(folder, files):
    used = [(), [(files["a"], 1.0)], [(files["b"], 0.5)], [(files["a"], 0.2), (files["b"], 1.0)]]
    with store_of(NO_LIMIT) as store:
        for _ in range(3):
            for loras in used:
                made = model(folder, *loras)
                with store.lease(made) as lease:
                    assert torch.equal(run(made, lease.components), reference(folder, *loras))
        settle(store)
        rows = store.models()
        assert len(rows) == 4
        (plain,) = [row for row in rows if ", " not in row["model"]]
        with_adapters = [row for row in rows if row is not plain]
        assert sum(".safetensors" in row["model"] for row in rows) == 3
        # Every layer of the base was copied in once, for all of them.
        for row in rows:
            assert row["loads"] == plain["layers"] == plain["resident_layers"]
            assert row["runs"] == 12
            assert row["hits"] >= 9 or row is not plain
        held = [row["nbytes"] - plain["nbytes"] for row in with_adapters]
        assert all(0 < nbytes < plain["nbytes"] / 4 for nbytes in held)
        used_bytes = store._cache.used("framework")
        assert used_bytes == plain["nbytes"] + sum(held)
        tables = [w.table for w in store._layers._weights.values() if w.table is not None]
        assert [table.skeletons for table in tables] == [4]
        pointers = {
            tuple(
                p.data_ptr() for _, p in base_parameters(s.components["pipeline"].transformer, "")
            )
            for s in store._shelf
        }
        assert len(pointers) == 1


def test_which_came_first_makes_no_difference(folder, files):
    for order in (("", "a"), ("a", "")):
        with store_of(NO_LIMIT) as store:
            versions = set()
            for names in order:
                made = model(folder, *[files[name] for name in names])
                with store.lease(made) as lease:
                    versions.add(lease.version)
                    loras = [(files[name], 1.0) for name in names]
                    assert torch.equal(run(made, lease.components), reference(folder, *loras))
            assert len(versions) == 1


def test_a_converted_base_is_shared_too(folder, files):
    """The checkpoint's dtype is another one: parameters are found in their file by name."""
    with store_of(NO_LIMIT) as store:
        for loras in ([], [(files["a"], 0.7)], [(files["b"], 1.0)]):
            made = model(folder, *loras, dtype="bfloat16")
            with store.lease(made) as lease:
                ours = run(made, lease.components, "bfloat16")
            assert torch.equal(ours, reference(folder, *loras, dtype="bfloat16"))
        assert len([w for w in store._layers._weights.values() if w.table is not None]) == 1


def test_adapters_of_a_text_encoder_share_its_base(folder, files):
    with store_of(NO_LIMIT) as store:
        seen = []
        for loras in ([], [(files["a"], 0.7)], [(files["b"], 1.0)], []):
            made = model(folder, *loras, cls=ClipText)
            with store.lease(made) as lease, torch.no_grad():
                ours = made.execute(lease.components, prompt="a cat", num_images=1)
            theirs = pipeline(folder, "float32", *loras)
            with torch.no_grad():
                theirs = theirs._get_clip_prompt_embeds(prompt=["a cat"])
            seen.append(ours["pooled_prompt_embeds"])
            assert torch.equal(seen[-1], theirs)
        assert torch.equal(seen[0], seen[3])
        assert not torch.equal(seen[0], seen[1])
        assert len([w for w in store._layers._weights.values() if w.table is not None]) == 1


# ---------------------------------------------------------------- many requests


def choices(files, rng):
    """None, one or several adapters, in any order, of any scale."""
    names = rng.sample(sorted(files), rng.choice([0, 1, 1, 2, 3]))
    return [(files[name], rng.choice([1.0, 0.5, -0.25, 2.0, 0.0])) for name in names]


def churn(folder, files, memory, requests, seed=0, dtype="float32"):
    """a -> b -> none -> a, then at random: every result is a fresh pipeline's, the base never changes."""
    rng, results = random.Random(seed), {}
    fixed = [[(files["a"], 1.0)], [(files["b"], 1.0)], [], [(files["a"], 1.0)]]
    truth = digest(pipeline(folder, dtype).transformer)
    with store_of(memory) as store:
        for number in range(requests):
            loras = fixed[number] if number < len(fixed) else choices(files, rng)
            made = model(folder, *loras, dtype=dtype)
            with store.lease(made) as lease:
                ours = run(made, lease.components, dtype)
            key = tuple(loras)
            if key not in results:
                results[key] = reference(folder, *loras, dtype=dtype)
            assert torch.equal(ours, results[key]), (number, loras)
            assert torch.isfinite(ours).all()
            if number % 10 == 3:
                store._check()
        if memory == NO_LIMIT:
            assert base_digest(store, model(folder, dtype=dtype)) == truth
            assert base_digest(store, model(folder, files["a"], dtype=dtype)) == truth
        loads = max(row["loads"] for row in store.models())
    assert len({str(result) for result in results.values()}) > len(results) / 2
    return loads


def test_requests_with_changing_adapters_are_exact(folder, files):
    loads = churn(folder, files, NO_LIMIT, 14)
    assert loads == len(divide(pipeline(folder, "float32").transformer))


def test_requests_with_changing_adapters_are_exact_in_little_memory(folder, files):
    """Layers of the base and whole sets of adapters come and go."""
    churn(folder, files, 500_000, 12, seed=1)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("memory", [NO_LIMIT, 1_200_000, 500_000])
def test_two_hundred_requests_with_changing_adapters_are_exact(folder, files, memory, dtype):
    churn(folder, files, memory, 200, seed=2, dtype=dtype)


def test_threads_with_other_scales_share_one_model(folder, files):
    scales = [1.0, -0.5, 0.25, 1.0]
    expected = {scale: reference(folder, (files["a"], scale)) for scale in set(scales)}
    wrong, errors = [], []

    def work(store, scale):
        try:
            for _ in range(6):
                made = model(folder, (files["a"], scale))
                with store.lease(made) as lease:
                    if not torch.equal(run(made, lease.components), expected[scale]):
                        wrong.append(scale)
        except Exception as error:
            errors.append(error)

    with store_of(NO_LIMIT) as store:
        threads = [threading.Thread(target=work, args=(store, scale)) for scale in scales]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
            assert not thread.is_alive()
        assert len(store.models()) == 1
    assert not errors
    assert not wrong


# ---------------------------------------------------------------- nothing left behind


def test_idle_adapters_go_when_memory_is_short_and_the_base_stays(folder, files):
    with store_of(NO_LIMIT) as store:
        with store.lease(model(folder)) as lease:
            run(model(folder), lease.components)
        nbytes = store.models()[0]["nbytes"]
        with store.lease(model(folder, files["a"])):
            pass
        one = next(r for r in store.models() if ".safetensors" in r["model"])["nbytes"] - nbytes
    with store_of(nbytes + 2 * one) as store:  # of three sets of adapters two fit
        for name in ("a", "b", "c", "a"):
            made = model(folder, (files[name], 1.0))
            with store.lease(made) as lease:
                ours = run(made, lease.components)
            assert torch.equal(ours, reference(folder, (files[name], 1.0)))
            store._check()
        names = sorted(row["model"].rpartition(", ")[2][0] for row in store.models())
        assert names == ["a", "c"]


def test_the_smallest_adapter_counts(folder, root):
    """There may be hundreds of them beside one model."""
    base = pipeline(folder, "float32")
    path = root / "small.safetensors"
    small = tiny_lora.save_lora(path, base, targets=["x_embedder"], rank=1)
    with store_of(NO_LIMIT) as store:
        for loras in ([], [small]):
            with store.lease(model(folder, *loras)):
                pass
        plain, with_adapter = sorted(row["nbytes"] for row in store.models())
        assert 0 < with_adapter - plain < 0.01 * plain
        sizes = [tensor.nbytes for tensor in load_file(small).values()]
        # Each is as far from a multiple of 64 bytes as in its file.
        assert sum(sizes) <= with_adapter - plain < sum(sizes) + 64 * len(sizes)


def test_what_is_forgotten_leaves_nothing(folder, files, root):
    """The matrices' memory goes at once, modules and hooks with the garbage collector at the latest
    (Diffusers' own are in cycles); no file stays open."""
    for file in files.values():
        reference(folder, (file, 1.0))  # what the libraries keep for good is there before
    gc.collect()

    def census():
        kinds = Counter(type(found).__module__.partition(".")[0] + "." + type(found).__name__
                        for found in gc.get_objects() if isinstance(found, (nn.Module, nn.Parameter)))  # fmt: skip
        return kinds, open_files(root), Counter(p for p in mapped_weights() if str(root) in p)

    with store_of(300_000) as store:
        with store.lease(model(folder)) as lease:
            run(model(folder), lease.components)
        del lease
        gc.collect()
        before = census()
        gc.disable()
        left = []
        try:
            for round_ in range(3):
                for name in "abc":
                    made = model(folder, (files[name], 0.5 + round_))
                    with store.lease(made) as lease:
                        run(made, lease.components)
                    transformer = lease.components["pipeline"].transformer
                    assert lease.skeleton.handles, "it runs with hooks: it does not fit"
                    matrices = list(adapter_parameters(transformer))
                    assert sum(p.nbytes for p in matrices) > 1000
                    left += [weakref.ref(m) for m in transformer.modules()]
                    left += [weakref.ref(p) for p in transformer.parameters()]
                    skeleton = lease.skeleton
                    del transformer, lease
                    settle(store)  # what is being copied in is forgotten afterwards
                    with store._changed:
                        store._shelf.forget([skeleton])
                    del skeleton
                    assert sum(p.untyped_storage().nbytes() for p in matrices) == 0
                    del matrices
        finally:
            gc.enable()
        settle(store)
        assert len(store.models()) == 1
        assert [w.held for w in store._shelf] == [None]
        gc.collect()
        assert not [one for one in (ref() for ref in left) if one is not None]
        assert census() == before
    assert not open_files(root)


def test_no_file_of_an_adapter_stays_mapped(folder, files):
    """A file that is cut short would kill the worker when it reads there."""
    with store_of(NO_LIMIT) as store:
        made = model(folder, (files["a"], 1.0), (files["b"], 1.0))
        with store.lease(made) as lease:
            ours = run(made, lease.components)
            assert not {str(file) for file in files.values()} & set(mapped_weights())
            data = files["a"].read_bytes()
            try:
                os.truncate(files["a"], 0)
                assert torch.equal(run(made, lease.components), ours)
            finally:
                files["a"].write_bytes(data)
