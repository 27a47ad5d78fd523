"""Seconds of imports are told apart from what else a thread does, and modules load as ever."""

from __future__ import annotations

import importlib
import importlib.util
import sys
import threading
import time

import pytest

from worker_plugin import import_clock

SLEEP = 0.1


@pytest.fixture
def module(tmp_path, monkeypatch):
    """Writes modules that nobody has imported; they are forgotten after the test."""
    monkeypatch.syspath_prepend(str(tmp_path))
    made = []

    def make(name, text=f"import time\ntime.sleep({SLEEP})\n"):
        name = f"st2i_clocked_{tmp_path.name}_{name}".replace("-", "_")
        (tmp_path / f"{name}.py").write_text(text)
        importlib.invalidate_caches()
        made.append(name)
        return name

    yield make
    for name in made:
        sys.modules.pop(name, None)


def test_an_import_counts_once_with_all_that_it_imports(module):
    inner = module("inner")
    outer = module("outer", f"import time\nimport {inner}\ntime.sleep({SLEEP})\n")
    with import_clock.running() as clock:
        start = time.perf_counter()
        importlib.import_module(outer)
        took = time.perf_counter() - start
        assert 2 * SLEEP <= clock.seconds <= took
        before = clock.seconds
        importlib.import_module(outer)
        time.sleep(SLEEP)
    assert clock.seconds == before


def test_a_module_that_fails_counts_too_and_raises_what_it_raised(module):
    name = module("failing", f"import time\ntime.sleep({SLEEP})\nraise ZeroDivisionError('mine')\n")
    with (
        import_clock.running() as clock,
        pytest.raises(ZeroDivisionError, match="mine"),
    ):
        importlib.import_module(name)
    assert clock.seconds >= SLEEP
    assert name not in sys.modules
    with import_clock.running(), pytest.raises(ModuleNotFoundError, match="st2i_not_there"):
        importlib.import_module("st2i_not_there")


def test_other_threads_and_later_imports_do_not_count(module):
    mine, other, later = (module(name) for name in ("mine", "other", "later"))
    with import_clock.running() as clock:
        thread = threading.Thread(target=importlib.import_module, args=(other,))
        thread.start()
        thread.join(10)
        assert other in sys.modules
        assert clock.seconds == 0.0
        importlib.import_module(mine)
    found = clock.seconds
    importlib.import_module(later)
    assert clock.seconds == found < 2 * SLEEP


def test_what_an_inner_clock_counts_the_outer_one_counts(module):
    with import_clock.running() as outer:
        with import_clock.running() as inner:
            importlib.import_module(module("a"))
        importlib.import_module(module("b"))
    assert inner.seconds >= SLEEP
    assert inner.seconds + SLEEP <= outer.seconds


def test_modules_know_only_their_own_loader(module):
    name = module("plain", "answer = 42\n")
    with import_clock.running():
        spec = importlib.util.find_spec(name)
        assert spec.loader.get_source(name) == "answer = 42\n"
        loose = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(loose)
        assert loose.answer == 42
        found = importlib.import_module(name)
        assert importlib.reload(found) is found
    for each in (found, loose):
        assert type(each.__loader__) is importlib.machinery.SourceFileLoader
        assert each.__spec__.loader is each.__loader__


def test_extension_modules_and_packages_load(monkeypatch):
    for name in ("_zoneinfo", "xml.dom.minidom", "xml.dom", "xml"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    with import_clock.running() as clock:
        importlib.import_module("_zoneinfo")
        importlib.import_module("xml.dom.minidom")
    assert clock.seconds > 0


def test_it_is_there_once():
    for _ in range(3):
        with import_clock.running():
            pass
    assert sum(finder is import_clock._finder for finder in sys.meta_path) == 1
