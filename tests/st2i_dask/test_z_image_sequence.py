"""Sequence parallelism of Z-Image: a gang's forward is the unmodified one's, and leaves the model alone."""

from __future__ import annotations

import itertools
import threading

import pytest
import torch

import st2i_dask as st2i
from scheduler_plugin import events as ev
from st2i_dask.catalogue.tiny_lora import save_lora
from st2i_dask.catalogue.tiny_z_image import save_z_image, save_z_image_controlnet, z_image
from st2i_dask.catalogue.z_image.sequence import SharedAttention, bounds, shared_sequence
from st2i_dask.gang import in_gang, running_gang

from .originals import LONG, completed, expected, mask, picture, reference

TIMEOUT = 120


class Meeting:
    """A gang of threads of this process, as each of them sees it."""

    def __init__(self, rank, size, table, barrier):
        self.rank, self.size = rank, size
        self._table, self._barrier = table, barrier

    def publish(self, item):
        self._table[self.rank] = item

    def collect(self):
        self._barrier.wait()
        found = list(self._table)
        self._barrier.wait()
        return found


def gang(work, size):
    """What `work(gang)` gives on each of its executors."""
    barrier = threading.Barrier(size, timeout=60)
    table, found = [None] * size, [None] * size

    def one(rank):
        try:
            found[rank] = work(Meeting(rank, size, table, barrier))
        except BaseException as error:
            barrier.abort()
            found[rank] = error

    threads = [threading.Thread(target=one, args=(rank,)) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    for result in found:
        if isinstance(result, BaseException):
            raise result
    return found


@pytest.fixture(scope="module")
def transformer():
    return z_image().transformer


def inputs(dtype, side, texts, seed=1):
    """Latents (4, 1, *side) and a caption of so many tokens for each image."""
    generator = torch.Generator().manual_seed(seed)
    latents = [torch.randn(4, 1, *side, generator=generator).to(dtype) for _ in texts]
    captions = [torch.randn(n, 32, generator=generator).to(dtype) for n in texts]
    return latents, torch.linspace(0.2, 0.7, len(texts)), captions


@torch.no_grad()
def forward(transformer, args):
    return transformer(*args, return_dict=False)[0]


def shared(transformer, args, size):
    def work(part):
        with shared_sequence(transformer, part):
            return forward(transformer, args)

    return gang(work, size)


def check_untouched(transformer):
    for module in transformer.modules():
        assert not module._forward_hooks
        assert not module._forward_pre_hooks
        assert not isinstance(getattr(module, "processor", None), SharedAttention)


@pytest.mark.parametrize("size", [1, 2, 3, 4])
@pytest.mark.parametrize(
    ("dtype", "side", "texts"),
    [
        (torch.float32, (32, 32), (20,)),
        (torch.float32, (32, 18), (20, 70)),  # captions of other lengths: a mask
        (torch.float32, (4, 6), (5,)),  # too short to be shared
        (torch.bfloat16, (32, 18), (70, 20, 33)),
    ],
)
def test_a_shared_forward_equals_the_unmodified_one(transformer, size, dtype, side, texts):
    transformer = z_image().transformer.to(dtype) if dtype != torch.float32 else transformer
    args = inputs(dtype, side, texts)
    whole = forward(transformer, args)
    for images in shared(transformer, args, size):
        for image, other in zip(images, whole, strict=True):
            assert torch.equal(image, other)
    check_untouched(transformer)


@pytest.mark.slow
@pytest.mark.parametrize("width", [32, 256, 512])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("side", [(32, 32), (48, 32), (64, 32), (64, 64)])
def test_equal_in_every_bit_over_widths_and_sizes(width, dtype, side):
    from diffusers import ZImageTransformer2DModel

    heads = max(2, width // 64)
    torch.manual_seed(0)
    transformer = ZImageTransformer2DModel(
        in_channels=4,
        dim=width,
        n_layers=3,
        n_refiner_layers=1,
        n_heads=heads,
        n_kv_heads=heads,
        cap_feat_dim=32,
        axes_dims=[4, 6, 6] if width == 32 else [16, 24, 24],
        axes_lens=[1024, 128, 128],
    )
    transformer = transformer.eval().to(dtype)
    for texts in ((20,), (40,), (20, 70)):
        args = inputs(dtype, side, texts)
        whole = forward(transformer, args)
        for size in (2, 3, 4):
            for images in shared(transformer, args, size):
                assert all(torch.equal(a, b) for a, b in zip(images, whole, strict=True))


@pytest.mark.parametrize(("tokens", "size"), [(64, 1), (64, 2), (96, 2), (1056, 3), (4128, 8)])
def test_shares_are_whole_units_and_nearly_equal(tokens, size):
    edges = bounds(tokens, size)
    assert (edges[0], edges[-1]) == (0, tokens)
    shares = [b - a for a, b in itertools.pairwise(edges)]
    assert all(share % 32 == 0 for share in shares)
    assert 0 < min(shares) >= max(shares) - 32


def test_what_is_too_short_is_not_shared():
    assert bounds(64, 3) is None


def test_each_executor_runs_its_tokens_only_and_another_thread_all(transformer):
    args = inputs(torch.float32, (32, 32), (20,))
    seen, entered, go_on = {}, threading.Event(), threading.Event()

    def look(layer, args):
        name = threading.current_thread().name
        seen.setdefault(name, set()).add(args[0].shape[1])

    watching = transformer.layers[1].register_forward_pre_hook(look)
    plain = []

    def alone():
        assert entered.wait(30)
        plain.append(forward(transformer, args))
        go_on.set()

    thread = threading.Thread(target=alone, name="alone")
    thread.start()

    def work(part):
        with shared_sequence(transformer, part):
            result = forward(transformer, args)
            entered.set()
            assert go_on.wait(30)
            return result

    try:
        found = gang(work, 2)
    finally:
        watching.remove()
    thread.join(30)
    tokens = {name: counts for name, counts in seen.items() if name != "alone"}
    assert sorted(map(sorted, tokens.values())) == [[128], [160]]
    assert seen["alone"] == {288}
    assert torch.equal(plain[0][0], found[0][0])
    check_untouched(transformer)


def test_an_error_leaves_nothing_on_the_model(transformer):
    class Broken(Meeting):
        def collect(self):
            raise ConnectionError("a member is lost")

    args = inputs(torch.float32, (32, 32), (20,))
    with (
        pytest.raises(ConnectionError),
        shared_sequence(transformer, Broken(0, 2, [None] * 2, None)),
    ):
        forward(transformer, args)
    check_untouched(transformer)


def test_the_gang_of_a_thread():
    assert running_gang() is None
    one = Meeting(0, 1, [None], None)
    with in_gang(one):
        assert running_gang() is one
        seen = []
        thread = threading.Thread(target=lambda: seen.append(running_gang()))
        thread.start()
        thread.join()
        assert seen == [None]
        with in_gang(None):
            assert running_gang() is None
        assert running_gang() is one
    assert running_gang() is None


# -- requests ----------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return save_z_image(tmp_path_factory.mktemp("z-image") / "tiny")


def test_the_parameter_is_carried_to_the_scheduler_and_keeps_the_model_one(folder):
    workflow = st2i.load(folder)
    requests = [workflow.request(prompt="a cat", sequence_parallel=n) for n in (1, 4)]
    gangs = [
        {a["gang"] for a in request.annotations.values() if a["fn"] == "ZImageTransformer"}
        for request in requests
    ]
    assert gangs == [{1}, {4}]
    models = [{a["model"] for a in request.annotations.values()} for request in requests]
    assert models[0] == models[1]
    others = {a["gang"] for a in requests[1].annotations.values() if a["fn"] != "ZImageTransformer"}
    assert others == {1}


@pytest.mark.parametrize("task", ["image-to-image", "inpainting"])
def test_pictures_that_begin_with_another_are_shared_too(folder, task):
    given = {"image": picture(32, 32)}
    if task == "inpainting":
        given["mask_image"] = mask(32, 32)
    workflow = st2i.load(folder, task=task)
    request = workflow.request(prompt="a cat", height=32, width=32, sequence_parallel=2, **given)
    gangs = {a["gang"] for a in request.annotations.values() if a["fn"] == "ZImageTransformer"}
    assert gangs == {2}


@pytest.mark.parametrize("wrong", [0, 9, True, 1.5])
def test_a_wrong_number_is_refused(folder, wrong):
    with pytest.raises(st2i.ParameterError, match="sequence_parallel"):
        st2i.load(folder).request(prompt="a cat", sequence_parallel=wrong)


def test_with_a_controlnet_it_is_refused(tmp_path):
    workflow = st2i.load(save_z_image_controlnet(tmp_path / "controlnet"))
    with pytest.raises(st2i.ParameterError, match="no parameter 'sequence_parallel'"):
        workflow.request(prompt="a cat", control_image=None, sequence_parallel=2)


def served(client):
    """How many members served each run from now on."""
    policy, heard = client.cluster.scheduler.plugins["st2i-scheduler"].policy, []
    handle = policy.handle

    def recording(event):
        if isinstance(event, ev.Completed) and event.members is not None:
            heard.append(event.members)
        return handle(event)

    policy.handle = recording
    return heard


@pytest.mark.parametrize(
    ("dtype", "parameters"),
    [
        ("float32", dict(height=64, width=48, negative_prompt=LONG, num_steps=4)),
        ("bfloat16", dict(height=64, width=64, num_images=2, num_steps=6)),
    ],
)
def test_pictures_of_a_gang_equal_the_pipelines(client, folder, dtype, parameters):
    heard = served(client)
    parameters = completed(parameters)
    workflow = st2i.load(folder, dtype=dtype)
    future = workflow.submit(client, sequence_parallel=2, output_type="pt", **parameters)
    theirs = expected(reference("ZImagePipeline", folder, dtype), **parameters)
    assert torch.equal(torch.as_tensor(future.result(timeout=TIMEOUT)), theirs.float())
    assert 1 in heard, "nothing was shared"


@pytest.mark.slow
def test_adapters_and_weights_that_come_layer_by_layer(client, tmp_path):
    """A worker's memory holds about half of the layers."""
    from diffusers import ZImagePipeline

    folder = save_z_image(tmp_path / "deep", layers=40)
    pipeline = ZImagePipeline.from_pretrained(folder)
    file = save_lora(tmp_path / "adapter.safetensors", pipeline)
    pipeline.load_lora_weights(file, adapter_name="a")
    pipeline.set_adapters(["a"], [0.7])
    parameters = completed(dict(height=64, width=48, num_steps=4))
    theirs = expected(pipeline, **parameters)
    st2i.attach(client, memory_bytes="3 MiB", arena_bytes="1 MiB")
    try:
        heard = served(client)
        future = st2i.load(folder).submit(
            client, sequence_parallel=2, output_type="pt", loras=[(file, 0.7)], **parameters
        )
        assert torch.equal(torch.as_tensor(future.result(timeout=TIMEOUT)), theirs)
        assert 1 in heard, "nothing was shared"
        rows = [row for row in st2i.models(client) if "Transformer" in row["model"]]
        assert len(rows) == 2, "both have the model"
        assert all(row["resident_bytes"] < row["nbytes"] for row in rows)
    finally:
        st2i.attach(client, device="cpu")
