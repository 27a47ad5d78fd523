"""Tenant names: they travel in keys, metrics and file names."""

from __future__ import annotations

import pytest

from st2i_dask.errors import ParameterError
from st2i_dask.tenants import DEFAULT_TENANT, check_tenant


@pytest.mark.parametrize(
    "name", [DEFAULT_TENANT, "a", "7", "alice@example.org", "team-1_b.c", "x" * 64]
)
def test_names_that_are_allowed(name):
    assert check_tenant(name) == name


@pytest.mark.parametrize(
    "name",
    [
        *("", " ", "-a", ".a", "@a", "a b", "a/b", "a\n", "\na", "a\x00", "é", "x" * 65, ".."),
        *(None, 5, b"alice", ["a"], True),
    ],
)
def test_names_that_are_refused(name):
    with pytest.raises(ParameterError, match="is not a tenant name; allowed: 1 to 64") as caught:
        check_tenant(name)
    assert repr(name) in str(caught.value)
