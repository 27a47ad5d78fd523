"""Adapters of a request: images equal the pipeline's with `load_lora_weights`; what does not fit is refused."""

from __future__ import annotations

import functools
import re
import shutil
import threading
import time

import numpy as np
import pytest
import torch
from distributed import Client
from safetensors.torch import load_file, save_file

import st2i_dask as st2i
from st2i_dask.catalogue import lora_files, tiny, tiny_lora
from st2i_dask.catalogue.flux.parts import FluxTransformer
from st2i_dask.catalogue.folder import read_folder
from st2i_dask.catalogue.lora import MAX_LORAS, Adapters, Loras, adapted
from st2i_dask.catalogue.lora_loading import LoadedAdapters

from .running import run_here

TIMEOUT = 120
# Workers run one torch thread each; the reference must sum in the same order.
torch.set_num_threads(1)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tiny.save_flux(tmp_path_factory.mktemp("base") / "dev")


@pytest.fixture(scope="module")
def files(tmp_path_factory, folder):
    """Adapters by format."""
    root, base = tmp_path_factory.mktemp("adapters"), reference(folder, "float32", ())
    both = ("transformer", "text_encoder")
    return {
        "peft": tiny_lora.save_lora(root / "peft.safetensors", base, parts=both),
        "half": tiny_lora.save_lora(root / "half.safetensors", base, seed=9, dtype="bfloat16"),
        "alpha": tiny_lora.save_lora(root / "alpha.safetensors", base, rank=3, alpha=9.0, seed=1),
        "old": tiny_lora.save_old_lora(root / "old.safetensors", base, seed=2),
        "kohya": tiny_lora.save_kohya_flux_lora(root / "kohya.safetensors", base, seed=3),
        "text": tiny_lora.save_lora(root / "t.safetensors", base, parts=both[1:], strength=1.0),
    }


@functools.cache
def reference(folder, dtype, adapters, pipeline_class="FluxPipeline"):
    """The unmodified pipeline with these (file, scale) loaded."""
    import diffusers

    pipeline = getattr(diffusers, pipeline_class).from_pretrained(
        folder, dtype=getattr(torch, dtype)
    )
    pipeline.set_progress_bar_config(disable=True)
    names = [f"n{number}" for number in range(len(adapters))]
    for name, (file, _) in zip(names, adapters, strict=True):
        pipeline.load_lora_weights(str(file), adapter_name=name)
    if names:
        pipeline.set_adapters(names, [scale for _, scale in adapters])
    return pipeline


COMMON = dict(prompt="a cat", height=32, width=32)


def expected(pipeline, *, seed=0, num_steps=2, num_images=1, **parameters):
    images = pipeline(
        **{**COMMON, **parameters},
        num_inference_steps=num_steps,
        num_images_per_prompt=num_images,
        output_type="pt",
        generator=torch.Generator("cpu").manual_seed(seed),
    ).images
    return images if num_images > 1 else images[0]


def check(ours, theirs, plain):
    assert torch.equal(ours.float(), theirs.float())
    assert ours.std() > 0.01  # not a constant picture, which would prove nothing
    assert not torch.equal(ours.float(), plain.float()), "the adapters did nothing"


# ---------------------------------------------------------------- equal to the pipeline

CASES = [
    # dtype, adapters, parameters
    ("float32", [("peft", 1.0)], {}),
    ("bfloat16", [("peft", 0.7)], dict(seed=4)),
    ("float32", [("half", 1.0)], dict(height=20, width=48)),
    ("bfloat16", [("half", -1.5)], {}),
    ("float32", [("alpha", 0.5)], dict(seed=-3)),
    ("float32", [("old", 2.0)], dict(num_steps=3)),
    ("bfloat16", [("old", 1.0)], {}),
    ("float32", [("kohya", 0.8)], {}),
    ("bfloat16", [("kohya", 1.0)], dict(num_images=2)),
    ("float32", [("text", 1.0)], {}),
    ("float32", [("peft", 0.3), ("kohya", 0.9), ("alpha", -0.4)], dict(true_cfg_scale=2.0)),
    ("bfloat16", [("kohya", 0.5), ("peft", 0.5)], dict(num_steps=3)),
]


@pytest.mark.parametrize(("dtype", "adapters", "parameters"), CASES)
def test_image_equals_the_pipelines(folder, files, dtype, adapters, parameters):
    loras = tuple((files[name], scale) for name, scale in adapters)
    given = {"num_steps": 2, **COMMON, **parameters}
    if "true_cfg_scale" in given:
        given["negative_prompt"] = "fog"
    ours = run_here(st2i.load(folder, dtype=dtype), loras=list(loras), **given)
    check(
        ours,
        expected(reference(folder, dtype, loras), **given),
        expected(reference(folder, dtype, ()), **given),
    )


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("other", ["peft", "half", "alpha", "old", "kohya", "text"])
@pytest.mark.parametrize("name", ["peft", "half", "alpha", "old", "kohya", "text"])
def test_every_pair_equals_the_pipelines(folder, files, name, other, dtype):
    loras = ((files[name], 0.8),) + (((files[other], -0.6),) if other != name else ())
    given = dict(seed=6, num_steps=2, height=36, width=20)
    ours = run_here(st2i.load(folder, dtype=dtype), loras=loras, **{**COMMON, **given})
    theirs = expected(reference(folder, dtype, loras), **given)
    reference.cache_clear()
    check(ours, theirs, expected(reference(folder, dtype, ()), **given))


def test_with_a_controlnet_it_equals_the_pipelines(tmp_path, files):
    folder = tiny.save_flux_controlnet(tmp_path / "controlled")
    image = np.random.default_rng(0).random((32, 32, 3), dtype=np.float32)
    loras = ((files["peft"], 0.6), (files["old"], 1.0))
    given = dict(control_image=image, num_steps=2, guidance_scale=3.5, **COMMON)
    ours = run_here(st2i.load(folder, dtype="float32"), loras=loras, **given)
    theirs = reference(folder, "float32", loras, "FluxControlNetPipeline")
    plain = reference(folder, "float32", (), "FluxControlNetPipeline")
    check(ours, expected(theirs, **given), expected(plain, **given))


def test_order_of_adapters_is_the_pipelines(folder, files):
    """Shares are added one after another: another order may round otherwise."""
    one = ((files["peft"], 1.0), (files["kohya"], 1.0))
    workflow = st2i.load(folder, dtype="bfloat16")
    given = dict(num_steps=4, seed=2)
    for loras in (one, one[::-1]):
        ours = run_here(workflow, loras=loras, **COMMON, **given)
        assert torch.equal(
            ours.float(), expected(reference(folder, "bfloat16", loras), **given).float()
        )


def test_forms_in_which_adapters_can_be_given(folder, files, tmp_path):
    rule = Loras(read_folder(str(folder)))
    shutil.copy(files["peft"], tmp_path / "only.safetensors")
    (tmp_path / "readme.txt").write_text("")
    one = rule.carry("loras", files["peft"])
    assert [a.scale for a in one] == [1.0]
    assert one[0].parts == ("text_encoder", "transformer")
    for value in (str(files["peft"]), [files["peft"]], [[str(files["peft"]), 1]], tmp_path):
        (made,) = rule.carry("loras", value)
        assert made._replace(source="") == one[0]._replace(source="")
    for nothing in ([], (), None):
        assert not st2i.load(folder).bind(prompt="a cat", loras=nothing)[2]["loras"]
    assert hash(one) == hash(rule.carry("loras", one))


def test_a_copy_elsewhere_is_the_same_model_and_a_scale_makes_no_other(folder, files, tmp_path):
    copy = shutil.copy(files["peft"], tmp_path / "copy.safetensors")
    rule = Loras(read_folder(str(folder)))

    def key(*loras, part="transformer"):
        return FluxTransformer("m", **adapted({}, rule.carry("loras", list(loras)), part)).model_key

    assert key((files["peft"], 1.0)) == key((files["peft"], -0.3)) == key((copy, 2.0))
    different = [key(), key(files["peft"]), key(files["kohya"]), key(files["peft"], files["kohya"])]
    assert len(set(different)) == 4
    assert key(files["kohya"], files["peft"]) not in different
    assert key(files["text"]) == key(), "it does not touch the transformer"
    assert key(files["kohya"], part="text_encoder_2") == key(), "reading ahead is no other model"


def test_scale_changes_neither_load_nor_bucket(folder, files):
    workflow = st2i.load(folder)
    composed = [
        workflow.bind(prompt="a cat", num_steps=2, loras=loras)[0]
        for loras in ([(files["peft"], 1.0)], [(files["peft"], 0.1)], [files["alpha"]], [])
    ]
    assert composed[0].model_keys == composed[1].model_keys
    assert composed[0].bucket == composed[1].bucket == composed[2].bucket != composed[3].bucket
    assert composed[0].packed[2].model_fn != composed[1].packed[2].model_fn
    again = workflow.bind(prompt="a dog", num_steps=2, loras=[(files["peft"], 1.0)])[0]
    assert again is composed[0], "composed once per combination"


def test_changing_the_scale_costs_far_less_than_a_load(folder, files, monkeypatch):
    loads = []
    load = FluxTransformer.load_model
    monkeypatch.setattr(
        FluxTransformer, "load_model", lambda self, path: loads.append(self) or load(self, path)
    )
    workflow = st2i.load(folder, dtype="float32")
    for scale in (0.11, 0.12, 0.11):
        loras = ((files["alpha"], scale), (files["old"], -scale))
        ours = run_here(workflow, loras=loras, num_steps=1, **COMMON)
        theirs = expected(reference(folder, "float32", loras), num_steps=1)
        assert torch.equal(ours, theirs)
    assert len(loads) == 1


# ---------------------------------------------------------------- refused at submit


@pytest.fixture
def refused(folder, monkeypatch):
    monkeypatch.setattr(FluxTransformer, "load_model", lambda *_: pytest.fail("a model was loaded"))

    def refused(loras, message, folder=folder):
        with pytest.raises(st2i.ParameterError, match=message):
            st2i.load(folder).request(prompt="a cat", loras=loras)

    return refused


def changed(file, path, change):
    """The adapter with other tensors."""
    tensors = load_file(file)
    change(tensors)
    save_file(tensors, path)
    return path


def test_what_is_no_list_of_adapters_is_refused(refused, files):
    refused(3, r"loras=3 is no list of adapters")
    refused([(files["peft"], 1.0, 2)], r"an adapter is a file, or \(file, scale\)")
    refused([7], "loras has 7")
    refused([""], "loras has ''")
    refused((str(files["peft"]), 0.5), "loras has 0.5")
    for scale in (float("nan"), float("inf"), 10.1, -11, True, "0.5", None, 10**400):
        refused([(files["peft"], scale)], r"the scale of '.*peft.safetensors' is .*-10 to 10")


def test_absent_and_ambiguous_files_are_refused(refused, files, tmp_path):
    refused("no/such.safetensors", r"adapter 'no/such.safetensors' is not there")
    refused("some/where/film.safetensors", r"neither a file here nor one on the hub")
    (tmp_path / "empty").mkdir()
    refused(tmp_path / "empty", r"a folder with 0 .safetensors files \(none\)")
    for name in "ab":
        shutil.copy(files["peft"], tmp_path / f"{name}.safetensors")
    refused(tmp_path, r"2 .safetensors files \(a.safetensors, b.safetensors\)")
    torch.save({}, tmp_path / "x.bin")
    refused(tmp_path / "x.bin", "is no .safetensors file")


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda data: data[:-3], r"ends after \d+ of \d+ bytes"),
        (lambda data: data[:20], "ends inside its header"),
        (lambda data: b"", "ends inside its header"),
        (lambda data: data + b"\0", "has 1 bytes after its end"),
        (lambda data: data[:8] + b"?" * 100 + data[108:], "does not hold a header"),
    ],
)
def test_damaged_files_are_refused(refused, files, tmp_path, damage, message):
    path = tmp_path / "damaged.safetensors"
    path.write_bytes(damage(files["peft"].read_bytes()))
    refused([path], rf"damaged.safetensors {message}")


def test_adapters_of_other_models_are_refused(refused, files, tmp_path):
    wide = tiny.flux(heads=4)
    refused(
        tiny_lora.save_lora(tmp_path / "wide.safetensors", wide),
        r"matrices \(4, 64\) and .* for .*, whose weight is \(32, 32\) in the transformer of",
    )
    deep = tiny.flux(layers=(3, 2))
    refused(
        tiny_lora.save_lora(tmp_path / "deep.safetensors", deep),
        r"'transformer_blocks.2.attn.\w+'.* and 2 more, which the transformer of .*Model, does not",
    )
    refused(
        tiny_lora.save_kohya_flux_lora(tmp_path / "deepk.safetensors", deep),
        r"'transformer_blocks.2.\S+'",
    )
    unet = {
        f"{first}down_blocks.0.attentions.0.to_q.lora_{which}.weight": torch.ones(4, 4)
        for which in "AB"
        for first in ("unet.", "lora_unet_", "")
    }
    for first in ("unet.", ""):
        some = {key: t for key, t in unet.items() if key.startswith(first + "down")}
        save_file(some, tmp_path / "unet.safetensors")
        refused(tmp_path / "unet.safetensors", r"down_blocks.*transformer of .* does not have")
    save_file({"weight": torch.ones(3, 3)}, tmp_path / "model.safetensors")
    refused(tmp_path / "model.safetensors", r"no matrix of a LoRA")


def test_adapters_for_a_part_that_is_not_taken_are_refused(refused, folder, tmp_path):
    base = reference(folder, "float32", ())
    path = tmp_path / "t5.safetensors"
    tiny_lora.save_lora(path, base, parts=["text_encoder_2"], targets=["q", "v"])
    refused(path, r"changes 'text_encoder_2' .* takes adapters for transformer, text_encoder$")


def test_files_of_which_nothing_would_be_loaded_are_refused(refused, files, tmp_path):
    def bare(tensors):
        for key in list(tensors):
            tensor = tensors.pop(key)
            if key.startswith("transformer."):
                tensors[key.removeprefix("transformer.")] = tensor

    path = changed(files["peft"], tmp_path / "bare.safetensors", bare)
    refused(path, "no key that begins with one of transformer, text_encoder")


@pytest.mark.parametrize("kind", ["dora_scale", "lokr_w1", "hada_w1_a"])
def test_other_kinds_of_adapters_are_refused(refused, files, tmp_path, kind):
    def add(tensors):
        tensors[f"transformer.transformer_blocks.0.attn.to_q.{kind}"] = torch.ones(4, 4)

    path = changed(files["peft"], tmp_path / "kind.safetensors", add)
    refused(path, r"is a (DoRA|LoKr|LoHa); only LoRA is supported")


def test_adapters_that_change_the_model_itself_are_refused(refused, files, tmp_path):
    """A control LoRA brings norms, and widens the first layer."""

    def norms(tensors):
        tensors["transformer.transformer_blocks.0.attn.norm_q.weight"] = torch.ones(16)

    path = changed(files["peft"], tmp_path / "norms.safetensors", norms)
    refused(path, r"'transformer_blocks.0.attn.norm_q.weight' for transformer: no matrix of a LoRA")

    def widen(tensors):
        tensors["transformer.x_embedder.lora_A.weight"] = torch.ones(4, 32)
        tensors["transformer.x_embedder.lora_B.weight"] = torch.ones(32, 4)

    path = changed(files["peft"], tmp_path / "wide.safetensors", widen)
    refused(path, r"\(4, 32\) and \(32, 4\) for x_embedder, whose weight is \(32, 16\)")

    def lame(tensors):
        del tensors["transformer.transformer_blocks.0.attn.to_q.lora_B.weight"]

    path = changed(files["peft"], tmp_path / "lame.safetensors", lame)
    refused(path, r"and None for transformer_blocks.0.attn.to_q")


def test_matrices_of_integers_are_refused(refused, files, tmp_path):
    def whole(tensors):
        name = "transformer.transformer_blocks.0.attn.to_q.lora_B.weight"
        tensors[name] = tensors[name].to(torch.int32)

    path = changed(files["peft"], tmp_path / "whole.safetensors", whole)
    refused(path, r"to_q.lora_B.weight' as I32, but a floating-point dtype is expected")


@pytest.mark.parametrize("value", [float("nan"), float("-inf")])
def test_numbers_that_are_not_finite_are_refused_when_they_are_loaded(
    folder, files, tmp_path, value
):
    def damage(tensors):
        tensors["transformer.transformer_blocks.0.attn.to_q.lora_B.weight"][3, 1] = value

    path = changed(files["peft"], tmp_path / "damaged.safetensors", damage)
    loras = Loras(read_folder(str(folder))).carry("loras", [path])
    model = FluxTransformer(str(folder), **adapted({"dtype": "float32"}, loras, "transformer"))
    message = (
        r"damaged.safetensors' cannot be loaded: .*to_q.lora_B.weight has numbers that are not"
    )
    with pytest.raises(st2i.LoadError, match=message):
        model.load_model(model.model_path)


def test_an_adapter_is_compared_with_the_folder_as_it_is_now(refused, files, tmp_path):
    other = tiny.save_flux(tmp_path / "dev")
    st2i.load(other).request(prompt="a cat", loras=files["peft"])
    shutil.rmtree(other)
    tiny.flux(heads=4).save_pretrained(other)
    refused(files["peft"], "whose weight is", folder=other)


def test_too_many_and_the_same_twice_are_refused(refused, files, tmp_path):
    copy = shutil.copy(files["peft"], tmp_path / "copy.safetensors")
    refused([files["peft"], (copy, 0.5)], "twice .*name it once, with the sum of the scales")
    many = [(f"{number}.safetensors", 1.0) for number in range(MAX_LORAS + 1)]
    refused(many, "9 adapters, limit 8")


def test_checked_once_per_content_and_folder(folder, files, monkeypatch, tmp_path):
    from st2i_dask.catalogue import lora_fit

    looked = []
    look = lora_fit._touched
    monkeypatch.setattr(lora_fit, "_touched", lambda *a: looked.append(a) or look(*a))
    read, reader = [], lora_files._read
    monkeypatch.setattr(lora_files, "_read", lambda *a: read.append(a) or reader(*a))
    copy = shutil.copy(files["peft"], tmp_path / "copy.safetensors")
    data = load_file(copy)
    data["transformer.x_embedder.lora_A.weight"] = torch.ones(4, 16)
    data["transformer.x_embedder.lora_B.weight"] = torch.ones(32, 4)
    save_file(data, copy)
    for _ in range(3):
        st2i.load(folder).request(prompt="a cat", loras=[copy])
    assert (len(looked), len(read)) == (1, 1)
    again = shutil.copy(copy, tmp_path / "again.safetensors")
    st2i.load(folder).request(prompt="a cat", loras=[again])
    assert (len(looked), len(read)) == (1, 2)


def test_a_workflow_inside_another_wants_checked_adapters(folder, files):
    inner = st2i.load(folder)

    def outer(prompt: str) -> None:
        return inner(prompt=prompt, num_steps=1, height=32, width=32, loras=[files["peft"]], seed=0)

    with pytest.raises(st2i.ComposeError, match="adapters were not checked"):
        st2i.workflow(outer, name="outer-lora", replace=True).request(prompt="a cat")


def test_a_file_that_changes_after_submit_is_an_error(folder, files, tmp_path):
    path = shutil.copy(files["peft"], tmp_path / "film.safetensors")
    loras = Loras(read_folder(str(folder))).carry("loras", [path])
    shutil.copy(files["old"], path)
    model = FluxTransformer(str(folder), **adapted({"dtype": "float32"}, loras, "transformer"))
    with pytest.raises(st2i.LoadError, match=r"film.safetensors' is another file here than it was"):
        model.load_model(model.model_path)


def test_a_file_from_the_hubs_cache_is_found(folder, files, tmp_path, monkeypatch):
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    commit = "0" * 40
    repository = tmp_path / "models--ada--film"
    (repository / "refs").mkdir(parents=True)
    (repository / "refs" / "main").write_text(commit)
    (repository / "snapshots" / commit / "sub").mkdir(parents=True)
    shutil.copy(files["peft"], repository / "snapshots" / commit / "sub" / "f.safetensors")
    monkeypatch.setattr("huggingface_hub.snapshot_download", lambda *_, **__: repository / "snapshots" / commit)  # fmt: skip
    for source in ("ada/film/sub/f.safetensors", "ada/film"):
        (made,) = Loras(read_folder(str(folder))).carry("loras", [(source, 0.5)])
        assert made.source == source  # workers find it in their own cache
        assert made.identity == lora_files.identity_of(files["peft"])
    shutil.copy(files["peft"], repository / "snapshots" / commit / "g.safetensors")
    with pytest.raises(st2i.ParameterError, match=r"2 .safetensors files \(g.safetensors, f.safe"):
        Loras(read_folder(str(folder))).carry("loras", "ada/film")


# ---------------------------------------------------------------- scales of a shared model


class Layer:
    def __init__(self):
        self.scales = {}

    def set_scale(self, name, scale):
        self.scales[name] = scale


def test_threads_with_equal_scales_overlap_and_others_wait():
    layer = Layer()
    loaded = LoadedAdapters([layer], ["a", "b"])
    inside, wrong = [], []
    both = threading.Barrier(2, timeout=10)

    def equal():
        with loaded.scaled([1.0, 2.0]):
            both.wait()  # would break if the other one waited

    threads = [threading.Thread(target=equal) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    assert not both.broken
    rng = np.random.default_rng(0)

    def run(scales):
        for a, b in scales:
            with loaded.scaled([a, b]):
                inside.append(1)
                time.sleep(0)  # lets others run
                if layer.scales != {"a": a, "b": b}:
                    wrong.append((layer.scales, a, b))

    threads = [
        threading.Thread(target=run, args=(rng.integers(0, 3, (100, 2)).tolist(),))
        for _ in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert len(inside) == 400
    assert not wrong


def test_who_waits_too_long_for_other_scales_is_told(monkeypatch):
    monkeypatch.setattr("st2i_dask.catalogue.lora_loading.WAIT_SECONDS", 0.01)
    loaded = LoadedAdapters([Layer()], ["a"])
    with (
        loaded.scaled([1.0]),
        pytest.raises(st2i.LoadError, match=r"other scales of its adapters for 0\.01 s"),
        loaded.scaled([2.0]),
    ):
        pytest.fail("entered")
    with loaded.scaled([2.0]):
        pass


# ---------------------------------------------------------------- on a cluster


def test_on_a_cluster_the_base_is_loaded_once_per_worker(folder, files):
    """Two tenants, two adapters and the plain model at once; images, rows and metadata."""
    with (
        st2i.local_cluster(2, dashboard_address=None) as cluster,
        Client(cluster) as client,
    ):
        st2i.attach(client)
        workflow = st2i.load(folder, dtype="float32")
        used = [(), ((files["peft"], 0.9),), ((files["kohya"], 0.4),), ((files["peft"], -0.9),)]
        given = dict(num_steps=2, output_type="pt", **COMMON)
        futures = [
            workflow.submit(client, tenant=f"t{n % 2}", loras=used[n % 4], seed=n, **given)
            for n in range(8)
        ]
        for n, future in enumerate(futures):
            theirs = expected(reference(folder, "float32", used[n % 4]), seed=n)
            assert torch.equal(future.result(timeout=TIMEOUT), theirs)
        rows = [r for r in st2i.models(client) if r["model"].startswith("FluxTransformer(")]
        assert len({row["model"] for row in rows}) > 1
        for worker in {row["worker"] for row in rows}:
            of_worker = [row for row in rows if row["worker"] == worker]
            # Layers of the base: each was copied in once, whoever ran first.
            plain = min(row["layers"] for row in rows)
            assert all(row["loads"] <= plain for row in of_worker)
            assert len({row["loads"] for row in of_worker}) == 1
        image = workflow.submit(client, loras=used[2], num_steps=1, **COMMON)
        told = image.result(timeout=TIMEOUT).metadata["parameters"]
        assert re.fullmatch(r"kohya.safetensors \([0-9a-f]{12}\) 0.4", told["loras"])


def test_adapters_print_as_their_number():
    assert f"{Adapters()}" == "0"
