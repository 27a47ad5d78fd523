"""Commands and the cluster they are given: nobody answers there."""

from __future__ import annotations

import pytest
from click.testing import CliRunner

from st2i_dask.cli import main

NOBODY = ["--scheduler", "tcp://127.0.0.1:9"]


@pytest.mark.parametrize(
    "command",
    [
        ["tenants"],
        ["models"],
        ["settings"],
        ["costs", "save", "costs.json"],
    ],
)
def test_where_an_address_is_required_it_cannot_be_left_out(command):
    result = CliRunner().invoke(main, [*command, *NOBODY])
    assert result.exit_code == 2
    assert "give the address that dask-scheduler prints" in result.output
    assert "leave --scheduler out" not in result.output


@pytest.mark.parametrize(
    "command",
    [
        ["doctor"],
        ["generate", "--workflow", "shapes", "--prompt", "a red ring"],
        ["serve", "--model", "shapes", "--port", "0"],
    ],
)
def test_where_there_is_a_cluster_of_its_own_it_can(command, tmp_path):
    out = ["--out", str(tmp_path)] if command[0] == "generate" else []
    result = CliRunner().invoke(main, [*command, *out, *NOBODY])
    assert result.exit_code == 2
    assert "or leave --scheduler out to use this machine" in result.output
