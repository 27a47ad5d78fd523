"""The rule of a request's adapters: the forms it takes, and what does not fit is refused before anything runs."""

from __future__ import annotations

import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file

import st2i_dask as st2i
from st2i_dask.catalogue import lora_files, tiny, tiny_lora
from st2i_dask.catalogue.flux.parts import FluxTransformer
from st2i_dask.catalogue.folder import read_folder
from st2i_dask.catalogue.lora import MAX_LORAS, Adapters, Loras, adapted

from .adapters import reference, save_adapters


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tiny.save_flux(tmp_path_factory.mktemp("base") / "dev")


@pytest.fixture(scope="module")
def files(tmp_path_factory, folder):
    return save_adapters(tmp_path_factory.mktemp("adapters"), folder)


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


def test_adapters_print_as_their_number():
    assert f"{Adapters()}" == "0"
