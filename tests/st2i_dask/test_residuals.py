"""Residuals of a ControlNet: published block by block, and bit for bit what forward returns."""

from __future__ import annotations

import functools
import threading
import time

import pytest
import torch

import st2i_dask as st2i
from st2i_dask.catalogue.flux.controlnet_parts import DOUBLES, SINGLES, FluxControlNet
from st2i_dask.catalogue.flux.parts import FluxTransformer
from st2i_dask.dag import build
from st2i_dask.fusion import fuse
from st2i_dask.invocation import BoundTask
from st2i_dask.outputs import TaskOutputs
from st2i_dask.plan import pack
from st2i_dask.trace import Trace, tracing

from .controlnets import reference, save_all

TIMEOUT = 120


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    return save_all(tmp_path_factory.mktemp("controlled"))


@functools.cache
def loaded(folder, dtype):
    """ControlNet ModelFn with its components, and the untouched pipeline's ControlNet."""
    model_fn = FluxControlNet(str(folder), part="controlnet", dtype=dtype)
    return model_fn, model_fn.load_model(model_fn.model_path)


def step_inputs(folder, dtype, seed=0):
    """One step's inputs, for transformer and ControlNet."""
    config = reference(folder, dtype).transformer.config
    kind = getattr(torch, dtype)
    generator = torch.Generator().manual_seed(seed)

    def noise(*shape):
        return torch.randn(*shape, generator=generator).to(kind)

    return dict(
        latents=noise(1, 64, config.in_channels),
        timestep=torch.tensor([437.5], dtype=kind),
        guidance_scale=3.5,
        pooled_prompt_embeds=noise(1, config.pooled_projection_dim),
        prompt_embeds=noise(1, 8, config.joint_attention_dim),
        text_ids=torch.zeros(8, 3, dtype=kind),
        image_ids=torch.zeros(64, 3, dtype=kind),
    ), noise(1, 64, config.in_channels)


def plain_forward(folder, dtype, inputs, control, scale, mode=None):
    controlnet = reference(folder, dtype).controlnet
    guidance = torch.tensor([inputs["guidance_scale"]])
    return controlnet(
        hidden_states=inputs["latents"],
        controlnet_cond=control,
        controlnet_mode=mode,
        conditioning_scale=scale,
        timestep=inputs["timestep"] / 1000,
        guidance=guidance if controlnet.config.guidance_embeds else None,
        pooled_projections=inputs["pooled_prompt_embeds"],
        encoder_hidden_states=inputs["prompt_embeds"],
        txt_ids=inputs["text_ids"],
        img_ids=inputs["image_ids"],
        joint_attention_kwargs={},
        return_dict=False,
    )


def same(ours, theirs):
    if ours is None or theirs is None:
        return ours is theirs
    return len(ours) == len(theirs) and all(map(torch.equal, ours, theirs))


def run_controlnet(folder, dtype, inputs, control, scale, mode=None):
    model_fn, components = loaded(folder, dtype)
    return model_fn.execute(
        components, **inputs, control=control, control_mode=mode, conditioning_scale=scale
    )


@torch.no_grad()
@pytest.mark.parametrize("scale", [1.0, 0.7, 0.0])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("form", ["dev", "doubles", "schnell", "union"])
def test_what_is_streamed_is_what_forward_returns(folders, form, dtype, scale):
    inputs, control = step_inputs(folders[form], dtype)
    mode = 1 if form == "union" else None
    outputs = run_controlnet(folders[form], dtype, inputs, control, scale, mode)
    tensor = None if mode is None else torch.tensor([[mode]])
    theirs = plain_forward(folders[form], dtype, inputs, control, scale, tensor)
    assert same(outputs[DOUBLES], theirs[0])
    assert same(outputs[SINGLES], theirs[1])
    assert scale == 0 or all(residual.abs().max() > 0 for residual in outputs[DOUBLES])


@torch.no_grad()
def test_residuals_are_made_once_each_as_soon_as_their_block_has_run(folders):
    _, components = loaded(folders["dev"], "float32")
    controlnet = components["controlnet"]
    events, handles = [], []
    blocks = [*controlnet.transformer_blocks, *controlnet.single_transformer_blocks]
    projections = [*controlnet.controlnet_blocks, *controlnet.controlnet_single_blocks]
    for i, (block, projection) in enumerate(zip(blocks, projections, strict=True)):
        handles += [
            block.register_forward_pre_hook(lambda *_, i=i: events.append(("block", i))),
            projection.register_forward_hook(
                lambda m, args, out, i=i: events.append(("residual", i)) if out.numel() else None
            ),
        ]
    inputs, control = step_inputs(folders["dev"], "float32")
    run_controlnet(folders["dev"], "float32", inputs, control, 0.7)
    for handle in handles:
        handle.remove()
    assert events == [(what, i) for i in range(5) for what in ("block", "residual")]


@torch.no_grad()
def test_a_loaded_controlnet_is_otherwise_what_it_was(folders):
    """Called directly, also after an execution that failed midway."""
    _, components = loaded(folders["dev"], "float32")
    controlnet = components["controlnet"]
    inputs, control = step_inputs(folders["dev"], "float32")

    def fail(*_):
        raise ZeroDivisionError

    handle = controlnet.transformer_blocks[1].register_forward_pre_hook(fail)
    with pytest.raises(ZeroDivisionError):
        run_controlnet(folders["dev"], "float32", inputs, control, 0.7)
    handle.remove()
    theirs = plain_forward(folders["dev"], "float32", inputs, control, 0.7)
    original = reference(folders["dev"], "float32").controlnet
    try:
        reference(folders["dev"], "float32").controlnet = controlnet
        ours = plain_forward(folders["dev"], "float32", inputs, control, 0.7)
    finally:
        reference(folders["dev"], "float32").controlnet = original
    assert same(ours[0], theirs[0])
    assert same(ours[1], theirs[1])
    outputs = run_controlnet(folders["dev"], "float32", inputs, control, 0.7)
    assert same(outputs[DOUBLES], theirs[0])


def test_threads_share_one_controlnet(folders):
    """A worker may run two invocations of one model at once."""
    inputs = [step_inputs(folders["dev"], "float32", seed) for seed in range(3)]
    scales = (1.0, 0.7, 0.3)
    found = [[] for _ in inputs]
    together = threading.Barrier(len(inputs))
    controlnet = loaded(folders["dev"], "float32")[1]["controlnet"]

    def meet():
        together.wait(timeout=20)

    handles = [
        block.register_forward_pre_hook(lambda *_: meet())
        for block in controlnet.single_transformer_blocks
    ]

    @torch.no_grad()
    def run(number):
        for _ in range(4):
            found[number].append(
                run_controlnet(folders["dev"], "float32", *inputs[number], scales[number])
            )

    threads = [threading.Thread(target=run, args=(n,)) for n in range(len(inputs))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=TIMEOUT)
    for handle in handles:
        handle.remove()
    for number, (step, control) in enumerate(inputs):
        with torch.no_grad():
            theirs = plain_forward(folders["dev"], "float32", step, control, scales[number])
        assert len(found[number]) == 4
        assert all(same(outputs[DOUBLES], theirs[0]) for outputs in found[number])
        assert all(same(outputs[SINGLES], theirs[1]) for outputs in found[number])


class Channel:
    """A producer's exports, item by item, between two threads; notes when each item came."""

    def __init__(self, exports):
        self.values = [[] for _ in range(exports)]
        self.times = [[] for _ in range(exports)]
        self._lengths = {}
        self._changed = threading.Condition()

    def open(self, export, length):  # BoundTask's open_stream
        with self._changed:
            self._lengths[export] = length
            self._changed.notify_all()
        return _End(self, export)

    def items(self, export):
        return _End(self, export)

    def outputs(self):
        raise AssertionError("the whole output was wanted")


class _End:
    def __init__(self, channel, export):
        self.channel, self.export = channel, export

    def put(self, index, item):
        with self.channel._changed:
            assert index == len(self.channel.values[self.export])
            self.channel.values[self.export].append(item)
            self.channel.times[self.export].append(time.perf_counter())
            self.channel._changed.notify_all()
        return item

    def _wait(self, there):
        with self.channel._changed:
            assert self.channel._changed.wait_for(there, timeout=TIMEOUT)

    def length(self):
        self._wait(lambda: self.export in self.channel._lengths)
        return self.channel._lengths[self.export]

    def item(self, index):
        self._wait(lambda: len(self.channel.values[self.export]) > index)
        return self.channel.values[self.export][index]


@st2i.glue
def pass_on(value):
    return value


class Last(st2i.ModelFn):
    """Keeps the producer of the transformer's callback inputs."""

    def setup_io(self):
        self.add_input("value")
        self.add_output("same")

    def execute(self, model_components, value):
        return {"same": value}


def one_step(folder, inputs, control):
    """Packed tasks of ControlNet and transformer in one step."""
    controlnet, _ = loaded(folder, "float32")
    transformer = FluxTransformer(str(folder), dtype="float32")
    with tracing(Trace("step")) as trace:
        made = controlnet(**inputs, control=control, conditioning_scale=0.7)
        noise = transformer(
            **inputs,
            controlnet_block_samples=made.controlnet_block_samples,
            controlnet_single_block_samples=made.controlnet_single_block_samples,
        )
        result = Last()(pass_on(noise))
    dag = build(trace, result)
    return transformer, pack(dag, fuse(dag))[:2]


def test_the_transformer_runs_while_the_controlnet_does(folders):
    """The ControlNet's last block waits for the transformer's first: neither can come after."""
    folder = folders["dev"]
    inputs, control = step_inputs(folder, "float32")
    transformer, (first, second) = one_step(folder, inputs, control)
    _, components = loaded(folder, "float32")
    pipeline = transformer.load_model(transformer.model_path)
    channel = Channel(2)
    producer = BoundTask(first, {}, None, (), open_stream=channel.open)
    consumer = BoundTask(second, {}, None, (), producers=[channel])
    begun, marks = threading.Event(), {}

    def mark(name):
        marks[name] = time.perf_counter()

    def starts():
        mark("transformer")
        begun.set()

    def hold(*_):
        marks["began in time"] = begun.wait(timeout=20)

    # Once the transformer's second block starts, the first residual has been added.
    blocks = pipeline["pipeline"].transformer.transformer_blocks
    handles = [
        blocks[1].register_forward_pre_hook(lambda *_: starts()),
        components["controlnet"].single_transformer_blocks[-1].register_forward_pre_hook(hold),
    ]
    outputs = []

    @torch.no_grad()
    def produce():
        outputs.append(producer.evaluate(components))
        mark("controlnet")

    thread = threading.Thread(target=produce)
    thread.start()
    with torch.no_grad():
        (noise,) = consumer.evaluate(pipeline)
    thread.join(timeout=TIMEOUT)
    for handle in handles:
        handle.remove()

    assert marks["began in time"]
    doubles, singles = channel.times
    assert [len(doubles), len(singles)] == [2, 3]
    assert sorted(doubles + singles) == doubles + singles
    assert doubles[0] < marks["transformer"] < singles[-1] < marks["controlnet"]
    with torch.no_grad():
        theirs = plain_forward(folder, "float32", inputs, control, 0.7)
        whole = transformer.execute(
            pipeline,
            **inputs,
            controlnet_block_samples=theirs[0],
            controlnet_single_block_samples=theirs[1],
            controlnet_blocks_repeat=None,
            residuals_lengths=None,
        )["noise_pred"]
    assert torch.equal(noise, whole)
    assert same(TaskOutputs(outputs[0]).values[0], theirs[0])
    assert same(TaskOutputs(outputs[0]).values[1], theirs[1])
