"""`st2i demo`, end to end with the packaged model, and its pieces with a quick workflow."""

from __future__ import annotations

import contextlib
import json
import os
import re
import urllib.request

import pytest
from PIL import Image

from st2i_dask import shapes
from st2i_dask.cli import demo as demo_module
from st2i_dask.cli.demo import SHEET, TENANTS, percentile, run_demo, usage_table
from st2i_dask.cli.folder import MANIFEST, OutputFolder
from st2i_dask.cli.runner import Outcome
from st2i_dask.cli.sources import find_workflow
from st2i_dask.image import read_metadata

from .conftest import PAINT

COUNT = sum(TENANTS.values())


def check_gallery(out, said):
    """All images with metadata, the sheet, and a table with a row per tenant."""
    names = sorted(os.listdir(out))
    images = [name for name in names if name.endswith(".png") and name != SHEET]
    assert names == sorted([*images, SHEET, MANIFEST])
    assert len(images) == COUNT
    tenants = [read_metadata(out / name)["tenant"] for name in images]
    assert {tenant: tenants.count(tenant) for tenant in set(tenants)} == TENANTS
    assert len((out / MANIFEST).read_text().splitlines()) == COUNT
    sheet = Image.open(out / SHEET)
    sheet.load()
    assert min(sheet.size) > 500
    assert "http://" in said
    for tenant, share in TENANTS.items():
        cells = next(line.split() for line in said.splitlines() if line.split()[:1] == [tenant])
        assert int(cells[1]) == share
        device, compute, load, transfer, mean, p95 = map(float, cells[2:])
        assert device == pytest.approx(compute + load + transfer, abs=0.02)
        assert 0 < mean <= p95


def test_the_gallery_is_large_enough_and_shared():
    assert COUNT >= 12
    assert len(TENANTS) == 2


@pytest.mark.skipif(
    not (shapes.PIPELINE / "model_index.json").exists(),
    reason="the packaged model's weights are not there",
)
def test_demo_end_to_end(st2i, tmp_path):
    from st2i_dask.shapes.judge import judge

    out = tmp_path / "demo"
    result = st2i("demo", "--out", out, "--workers", 2)
    assert result.exit_code == 0, result.output
    check_gallery(out, result.stdout)
    right = 0
    for line in (out / MANIFEST).read_text().splitlines():
        entry = json.loads(line)
        image = Image.open(out / entry["file"])
        right += judge(image, shapes.parse(entry["prompt"])).right
    assert right >= 0.8 * COUNT  # the model's business; here: images belong to their prompts


def test_demo_with_another_workflow(tmp_path, capsys):
    workflow = find_workflow(f"{PAINT}:paint")
    out = tmp_path / "demo"
    with OutputFolder(out) as folder:
        status = run_demo(workflow, shapes.gallery(COUNT), folder, 1, num_steps=2)
    said = capsys.readouterr()
    assert status == 0, said
    check_gallery(out, said.out)
    for tenant in TENANTS:
        assert tenant in said.err  # a progress bar each


def test_a_failed_prompt_is_listed(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(demo_module, "TENANTS", {"alice": 1, "bob": 1})
    workflow = find_workflow(f"{PAINT}:paint")
    with OutputFolder(tmp_path / "demo") as folder:
        status = run_demo(workflow, ["a cat", "a broken cup"], folder, 1)
    said = capsys.readouterr()
    assert status == 1
    assert "prompt 2: 'a broken cup': RuntimeError: the brush broke" in said.err
    assert (tmp_path / "demo" / SHEET).exists()


def test_percentiles_are_values_that_occurred():
    values = [float(i) for i in range(1, 21)]
    assert percentile(values, 95) == 19.0
    assert percentile(values, 100) == 20.0
    assert percentile(values[:1], 95) == 1.0


def test_the_table_without_a_tenant_in_it():
    assert usage_table(Outcome(), {}).splitlines()[1].split() == [
        *("alice", "0", "0.00", "0.00", "0.00", "0.00", "-", "-")
    ]


def test_a_taken_dashboard_port_is_said_in_words(capsys):
    import socket

    from st2i_dask.cli.clusters import dashboard, own_cluster
    from st2i_dask.cluster import attach

    with socket.socket() as taken:
        # Whoever has Dask's usual port, it is taken.
        with contextlib.suppress(OSError):
            taken.bind(("127.0.0.1", 8787))
            taken.listen()
        with own_cluster(1, announce=True) as client:
            said_where = dashboard(client)
            assert re.fullmatch(r"dashboard: http://.+:\d+/st2i", said_where)
            assert ":8787/" not in said_where
            attach(client)
            with urllib.request.urlopen(said_where.partition(" ")[2], timeout=30) as page:
                assert page.status == 200
    said = capsys.readouterr().err
    assert said.splitlines() == ["the dashboard's usual port is taken; it gets another one"]
