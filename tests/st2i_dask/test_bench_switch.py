"""The switch benchmark compares like with like, and its figures follow from what it measured."""

from __future__ import annotations

import pytest
import torch
from torch.overrides import TorchFunctionMode

from st2i_dask.bench import _offloading, _transformers, switch
from st2i_dask.bench._transformers import Shape

pytestmark = pytest.mark.slow

TINY = Shape(layers=(2, 3), heads=2)


def test_figures_follow_from_the_times():
    times = {"ours": 0.1, "nocache": 0.5, "wcache": 0.4, "mcache": 0.3}
    assert switch.figures(times) == {
        "ours_s": 0.1,
        "nocache_s": 0.5,
        "wcache_s": 0.4,
        "mcache_s": 0.3,
    }
    times |= {"group_offload": 0.2, "cpu_offload": 0.6, "group_offload_in_place": 0.05}
    figures = switch.figures(times)
    assert figures["best_other_s"] == 0.2, "one that copies nothing is no rival"
    assert figures["ratio"] == 0.5


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    path = tmp_path_factory.mktemp("bench") / "model"
    _transformers.save(path, 3, TINY)
    return path


def test_models_lie_in_the_mapped_file(path):
    with open("/proc/self/maps") as table:
        before = table.read()
    model = _transformers.read(path)
    with open("/proc/self/maps") as table:
        mapped = [line for line in table if str(path) in line and line not in before]
    spans = [[int(end, 16) for end in line.split()[0].split("-")] for line in mapped]
    for parameter in model.parameters():
        assert any(start <= parameter.data_ptr() < end for start, end in spans)
    assert _transformers.nbytes(model) == sum(4 * p.numel() for p in model.parameters())


class Watching(TorchFunctionMode):
    """Records where the weights lie that matrices are multiplied with, and how many copies there are."""

    def __init__(self, model):
        self.model = model
        self.host = {name: p.data_ptr() for name, p in model.named_parameters()}
        self.used, self.copied = [], []

    def __torch_function__(self, func, types, args=(), kwargs=None):
        if func is torch.nn.functional.linear:
            self.used.append(args[1].data_ptr() in self.host.values())
            self.copied.append(len(self.away()))
        return func(*args, **(kwargs or {}))

    def away(self):
        return [
            name
            for name, p in self.model.named_parameters()
            if p.device.type == "cpu" and p.data_ptr() != self.host[name]
        ]


@pytest.mark.parametrize("offload", [_offloading.group_offload, _offloading.cpu_offload])
@pytest.mark.parametrize("copies", [True, False])
def test_offloading_copies_what_runs_and_nothing_else(path, offload, copies):
    given = TINY.inputs(0)
    wanted = _transformers.step(_transformers.read(path), given)
    model = _transformers.read(path)
    watching = Watching(model)
    offload(model, copies=copies)
    for _ in range(2):
        with watching:
            output = _transformers.step(model, given)
        assert torch.equal(output, wanted)
        assert not watching.away()
    assert len(watching.used) > 50
    assert set(watching.used) == {not copies}
    # A block of the larger kind and what is around the blocks.
    around = sum("blocks" not in name for name in watching.host)
    block = sum(name.startswith("transformer_blocks.0.") for name in watching.host)
    assert max(watching.copied) <= around + block
    assert (max(watching.copied) > 0) == copies


def test_it_measures_the_ways_it_is_asked_for():
    figures = switch.run(rounds=1, warm=1, shape=TINY, ways=("group_offload", "cpu_offload"))
    assert set(figures) == {"group_offload_s", "cpu_offload_s"}
    assert all(seconds > 0 for seconds in figures.values())


def test_it_measures_all_ways():
    figures = switch.run(rounds=1, warm=0, shape=TINY)
    names = {f"{name}_s" for name in (*switch.MODES, *switch.OFFLOADING)}
    assert set(figures) == names | {"best_other_s", "ratio"}
    assert all(value > 0 for value in figures.values())


def test_a_wrong_output_is_no_figure(monkeypatch):
    monkeypatch.setattr(switch, "_store", lambda *_: lambda *_: torch.zeros(1, 1, 16))
    with pytest.raises(AssertionError, match="ours gave something else"):
        switch.run(rounds=1, warm=0, shape=TINY, ways=("ours",))
