"""Fixtures of the tests of weights."""

from __future__ import annotations

import pytest

from worker_plugin import mapped_file
from worker_plugin.host_tier import HostTier
from worker_plugin.profiles import Profiles

from .cache_driver import Driver
from .chains import make_executor
from .host_files import mappings_of, open_files
from .leases import NO_LIMIT, Slow, loads
from .models import Model, save_plain, store_of


@pytest.fixture
def slow():
    loads.__init__()
    return lambda tag: Slow(None, kind="even", tag=tag)


@pytest.fixture
def even(tmp_path):
    """Makes models of equal layers, each in a file of its own."""

    def make(name, depth=4, seed=None, cls=Model, root=0, width=64, **options):
        path = tmp_path / f"{name}.safetensors"
        shape = {"depth": depth, "root": root, "width": width}
        save_plain(path, "even", ord(name[0]) if seed is None else seed, **shape)
        return cls(str(path), kind="even", **shape, **options)

    return make


@pytest.fixture
def executor():
    executor = make_executor(1_000_000)
    yield executor
    executor.models._check()
    executor.models.close()
    assert executor.models.models() == [], "a model is still in use"
    del executor.models, executor.store  # pytest keeps the executor for longer than the module


@pytest.fixture
def store():
    with store_of(NO_LIMIT) as store:
        yield store


@pytest.fixture
def driver():
    """Makes drivers; the caches are consistent at the end, and empty once all runs have ended."""
    made = []

    def make(*args, **kwargs):
        made.append(Driver(*args, **kwargs))
        return made[-1]

    yield make
    for one in made:
        one.hold = False
        if one.load is not None:
            one.report("loaded")
        one.cache._check()
        for row in one.cache.models():
            if row.runs == 0:
                one.cache.remove(row.weights)
        if not one.cache.models():
            assert one.cache.used("framework") == one.cache.used("arena") == 0


@pytest.fixture
def folder(tmp_path):
    """A folder of which nothing is open or mapped after the test."""
    yield tmp_path
    assert (open_files(tmp_path), mappings_of(tmp_path)) == (0, 0)
    assert not mapped_file._open


@pytest.fixture
def make_tier(folder):
    made = []

    def make(budget=1 << 30, **options):
        made.append(HostTier(budget, **options))
        return made[-1]

    yield make
    for tier in made:
        tier._check()
        tier.close()
        tier._check()


@pytest.fixture
def open_profiles():
    """Opens stores; checks and closes them all."""
    opened = []

    def open_one(folder=None, write_s=60.0):
        opened.append(Profiles(folder, write_s=write_s))
        return opened[-1]

    yield open_one
    for profiles in opened:
        profiles._check()
        profiles.close()
        profiles._check()
