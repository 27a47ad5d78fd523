"""The example of two tenants prints what it promises: short waits, and shares by weight."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow  # a minute

EXAMPLE = Path(__file__).parents[1] / "examples" / "two_tenants.py"


@pytest.fixture(scope="module")
def printed(tmp_path_factory):
    done = subprocess.run(
        [sys.executable, str(EXAMPLE)],
        cwd=tmp_path_factory.mktemp("two_tenants"),
        env={**os.environ, "HF_HUB_OFFLINE": "1"},
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


def test_the_small_tenant_waits_for_pictures_not_for_the_batch(printed):
    waits = re.findall(r"alice has one after ([\d.]+) s, (\d+) of batch waiting", printed)
    assert len(waits) == 3
    for seconds, waiting in waits:
        assert int(waiting) > 50
        assert float(seconds) < 5.0


def test_shares_follow_the_weights(printed):
    equal, weighted = re.findall(r"in all: alice (\d+)%, batch (\d+)%", printed)
    assert int(equal[0]) + int(equal[1]) in (99, 100, 101)
    assert int(equal[0]) == pytest.approx(50, abs=15)
    assert int(weighted[0]) == pytest.approx(75, abs=12)
    assert int(weighted[0]) > int(equal[0])


def test_it_ends_with_a_table_of_both_tenants(printed):
    table = printed.partition("tenant  weight")[2].splitlines()[1:]
    rows = {line.split()[0]: [float(cell) for cell in line.split()[1:]] for line in table}
    assert set(rows) == {"alice", "batch"}
    alice, batch = rows["alice"], rows["batch"]
    assert (alice[0], batch[0]) == (3.0, 1.0)
    assert alice[1] == pytest.approx(batch[1], abs=5.0)  # vTime: as far as each other
    assert alice[3] > 0
    assert batch[3] > 0
