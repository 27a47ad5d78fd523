"""A model that is streamed takes its prefix and two layers of memory: by the books, by the arena, and
by what the system says of the process."""

from __future__ import annotations

import json
import subprocess
import sys
import textwrap

import pytest

from st2i_dask._core import GRANULE
from worker_plugin.host_tier import PIECE

from .models import Model, inputs, make_plain, outputs, resident, same, save_plain, settle, store_of

LAYER = 64 * 64 * 4
DEPTH = 8


@pytest.mark.parametrize("arena_layers", [0, 2])
@pytest.mark.parametrize("mode", ["elastic", "pipelined"])
@pytest.mark.parametrize("prefix", [0, 3])
def test_no_more_than_the_prefix_and_two_layers_are_there(tmp_path, mode, prefix, arena_layers):
    width = 128 if arena_layers else 64  # in an arena a layer takes a granule at least
    layer = GRANULE if arena_layers else LAYER
    path = save_plain(tmp_path / "m.safetensors", "even", depth=DEPTH, width=width)
    model = Model(str(path), kind="even", depth=DEPTH, width=width)
    x = {"x": inputs("even")["x"].repeat(1, width // 64)}
    expected = outputs(make_plain("even", depth=DEPTH, width=width), "even", x)
    budget = (prefix + 2) * layer
    # Tensors' share of the arena is no room for weights.
    arena_bytes = (arena_layers + 1) * layer if arena_layers else 0
    framework = budget - arena_layers * layer
    seen = []
    with store_of(framework or 1, arena_bytes, mode=mode) as store:
        arena = store._arena

        def look(*_):
            with store._changed:
                books = store._cache.used("framework") + store._cache.used("arena")
                buffers = sum(buffer.tensor.numel() for buffer in store._layers._buffers.values())
                lying = arena.statistics().weights if arena else 0
            seen.append((books, buffers, lying))

        for _ in range(6):
            with store.lease(model) as lease:
                module = lease.components["model"]
                handles = [
                    register(look)
                    for block in module.blocks
                    for register in (block.register_forward_pre_hook, block.register_forward_hook)
                ]
                for _ in range(2):
                    assert same(outputs(module, "even", x), expected)
                for handle in handles:
                    handle.remove()
        settle(store)
        assert sum(resident(store, model)) == (0 if mode == "pipelined" else prefix + 2)
    assert len(seen) == 6 * 2 * 2 * DEPTH
    assert max(books for books, _, _ in seen) == budget, "it was used"
    assert max(buffers for _, buffers, _ in seen) <= budget
    assert max(lying for _, _, lying in seen) <= arena_layers * layer


SCRIPT = """
import json, re, sys, threading, time
import torch
from worker_plugin.arena import Arena
from worker_plugin.host_heap import HostHeap
from worker_plugin import host_tier
from worker_plugin.weights import WeightStore
from tests.worker_plugin.models import Model, save_plain, outputs, read_plain, same, settle

torch.set_num_threads(1)
folder, arena_layers = sys.argv[1], int(sys.argv[2])
DEPTH, WIDTH, LAYERS = 24, 1280, 6
LAYER = WIDTH * WIDTH * 4
WARM = 16 << 20


def memory():
    found = dict(re.findall(r"(Rss\\w+):\\s+(\\d+) kB", open("/proc/self/status").read()))
    found = {name: int(kb) * 1024 for name, kb in found.items()}
    return found["RssAnon"] + found["RssShmem"], found["RssFile"]


small = Model(str(save_plain(folder + "/s.safetensors", "even")), kind="even")
big = Model(
    str(save_plain(folder + "/b.safetensors", "even", depth=DEPTH, width=WIDTH)),
    kind="even", depth=DEPTH, width=WIDTH,
)
x = {"x": torch.linspace(-1, 1, WIDTH).expand(2, WIDTH)}
arena = Arena(HostHeap(2 * arena_layers * LAYER)) if arena_layers else None
nbytes = arena.heap.address.nbytes if arena else 0
store = WeightStore(memory=nbytes + (LAYERS - arena_layers) * LAYER, arena=arena)
store._host._warm = host_tier._Warm(WARM)
if arena:  # the rest of it is tensors'
    taken = arena.allocate(nbytes - arena_layers * LAYER)
with store.lease(small) as lease:
    outputs(lease.components["model"], "even", {"x": torch.ones(2, 64)})
store.trim(small, 0)
private, shared = memory()
peak = [0, 0]
over = threading.Event()


def watch():
    while not over.wait(0.0005):
        now = memory()
        peak[:] = max(peak[0], now[0] - private), max(peak[1], now[1] - shared)


thread = threading.Thread(target=watch)
thread.start()
for _ in range(5):
    with store.lease(big) as lease:
        for _ in range(2):
            got = outputs(lease.components["model"], "even", x)
over.set()
thread.join()
settle(store)
resident = sum(row["resident_bytes"] for row in store.models())
store.trim(big, 0)
left = memory()[0] - private
expected = outputs(read_plain(big.model_path, "even", depth=DEPTH, width=WIDTH), "even", x)
taken = None
store.close()
print(json.dumps(dict(
    layer=LAYER, layers=LAYERS, depth=DEPTH, warm=WARM, private=peak[0], file=peak[1], left=left,
    same=same(got, expected), resident=resident,
)))
"""


@pytest.mark.parametrize("arena_layers", [0, 3])
def test_the_process_grows_by_no_more(tmp_path, arena_layers):
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(SCRIPT), str(tmp_path), str(arena_layers)],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["same"]
    layer = found["layer"]
    # An arena's memory may have been taken when it was made.
    least = found["layers"] - arena_layers - 1
    assert least * layer < found["private"] <= (found["layers"] + 1) * layer
    assert found["resident"] == found["layers"] * layer
    assert found["left"] <= 1.5 * layer  # the C library keeps some to give it out again
    # What is being copied is mapped besides, and a little of what libraries read meanwhile.
    assert found["file"] <= found["warm"] + PIECE + layer, "it counts against Dask's limit"
    assert found["file"] < found["depth"] * layer / 4
