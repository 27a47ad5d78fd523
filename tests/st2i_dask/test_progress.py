"""The progress bar in terminals, logs and notebooks, and callbacks."""

from __future__ import annotations

import importlib
import io
import logging
import re
import threading
import time

import pytest
from distributed import Client

import st2i_dask as st2i

from ..scheduler_plugin.live import hooks, learn, serving, until
from .watched import TIMEOUT, gate, open_gates, submit


class Terminal(io.StringIO):
    def isatty(self):
        return True

    def states(self):
        """What the bar has shown, one after the other."""
        return [state.strip() for state in self.getvalue().split("\r")]


@pytest.fixture(scope="module")
def client():
    with serving(1) as client:
        learn(client, seconds=0.01)
        yield client


@pytest.fixture(autouse=True)
def nothing_left(request):
    yield
    open_gates(request)


def waiting(futures, **options):
    """progress in a thread, as the screen would show it; (file, thread)."""
    file = options.setdefault("file", Terminal())
    thread = threading.Thread(target=st2i.progress, args=(futures,), kwargs=options)
    thread.start()
    return file, thread


def test_a_single_request_is_counted_in_steps(client):
    go = gate("ann", 5.0)
    (mine,) = submit(client, "ann", 1, steps=8, seconds=0.0)
    screen, thread = waiting(mine)
    until(lambda: "5/8" in screen.getvalue())
    assert "step" in screen.states()[-1]
    go.set()
    thread.join(TIMEOUT)
    assert "8/8" in screen.states()[-1]
    assert "100%" in screen.states()[-1]
    del mine


def test_several_are_counted_in_images_with_the_steps_of_those_that_run(client):
    go, later = gate("bob", 0.0), gate("ann", 2.0)
    before = submit(client, "bob", 1, steps=1)
    mine = submit(client, "ann", 3, steps=4, seconds=0.0)
    screen, thread = waiting(mine)
    until(lambda: re.search(r"place 1 in the queue, about \d+ s to go", screen.getvalue()))
    go.set()
    until(lambda: "1 running: 2/4 steps" in screen.getvalue())
    later.set()
    thread.join(TIMEOUT)
    assert "3/3" in screen.states()[-1]
    assert "image/s" in screen.states()[-1]
    del before, mine


def test_failed_ones_are_counted(client):
    def fail(value):
        raise ZeroDivisionError

    hooks["ann"] = fail
    mine = [*submit(client, "ann", 1), *submit(client, "bob", 1)]
    screen = Terminal()
    assert st2i.progress(mine, file=screen) == mine
    assert "failed=1" in screen.states()[-1]
    mine[0].release()
    del mine


def test_in_a_log_it_is_a_few_lines(client, monkeypatch):
    monkeypatch.setattr(importlib.import_module("st2i_dask.progress"), "_LINES_S", 0.5)
    log = io.StringIO()
    mine = submit(client, "ann", 60, steps=2, seconds=0.01)
    begin = time.monotonic()
    st2i.progress(mine, file=log)
    took = time.monotonic() - begin
    lines = log.getvalue().splitlines()
    assert "\r" not in log.getvalue()
    assert 2 <= len(lines) <= 3 + took / 0.5
    assert "0/60" in lines[0]
    assert "60/60" in lines[-1]
    assert log.getvalue().endswith("\n")
    del mine


def test_nothing_to_wait_for_and_no_bar(client, capsys):
    assert st2i.progress([]) == []
    mine = submit(client, "ann", 2)
    assert st2i.progress(iter(mine), disable=True) == mine
    assert capsys.readouterr().err == ""
    del mine


@pytest.mark.parametrize(
    ("option", "said"),
    [("ncol", "did you mean 'ncols'?"), ("foo", "tqdm: desc, total"), ("gui", "no option 'gui'")],
)
def test_an_unknown_option_of_the_bar_is_refused_before_it_waits(client, option, said):
    go = gate("ann", 0.0)
    mine = submit(client, "ann", 1)
    for futures in (mine, []):
        with pytest.raises(st2i.ParameterError, match=re.escape(said)):
            st2i.progress(futures, **{option: 1})
    assert mine[0].status == "pending"
    go.set()
    del mine, futures


def test_callbacks_are_told_in_order_in_the_waiting_thread(client):
    told, threads = [], set()

    def tell(update):
        told.append(update)
        threads.add(threading.current_thread())

    mine = submit(client, "ann", 2, steps=4)
    st2i.progress(mine, on_progress=tell, disable=True)
    assert threads == {threading.current_thread()}
    assert [u.number for u in told if u.over] == [0, 1]
    assert all(isinstance(u, st2i.Update) for u in told)
    with pytest.raises(AttributeError):
        told[0].done = 7
    del mine


def test_a_callback_that_fails_is_logged_once_and_breaks_nothing(client, caplog):
    def tell(update):
        raise ZeroDivisionError("my own fault")

    mine = submit(client, "ann", 3)
    with caplog.at_level(logging.ERROR, "st2i_dask.progress"):
        assert st2i.progress(mine, on_progress=tell, disable=True) == mine
    assert {future.status for future in mine} == {"finished"}
    (record,) = [r for r in caplog.records if r.name == "st2i_dask.progress"]
    assert "on_progress failed" in record.getMessage()
    assert "my own fault" in str(record.exc_info[1])
    record.exc_info = None  # its frames hold the futures
    del mine


def test_it_shows_the_queue_of_another_client_too(client):
    """Who watches need not be who has submitted."""
    go = gate("ann", 1.0)
    (mine,) = submit(client, "ann", 1, steps=2)
    # What one client sends may be there after what another one asks: of a key that nobody knows.
    key = mine.key
    until(lambda: client.run_on_scheduler(lambda dask_scheduler: key in dask_scheduler.tasks))
    with Client(client.cluster, set_as_default=False) as other:
        (found,) = other.get({}, [mine.key], sync=False)
        screen, thread = waiting(found)
        until(lambda: "1/2" in screen.getvalue())
        go.set()
        thread.join(TIMEOUT)
        assert found.result() == 2.0
        del found
    del mine


# In a kernel


CELLS = """
import st2i_dask as st2i
from tests.scheduler_plugin.live import chain, serving
context = serving(1, at_rest=False)
client = context.__enter__()
---
st2i.progress([chain.submit(client, value=1.0, steps=3, seconds=0.02) for _ in range(4)]);
---
async for update in st2i.updates(chain.submit(client, value=0.0, steps=2)):
    last = update.state
print(last)
---
context.__exit__(None, None, None)
"""


@pytest.mark.slow
@pytest.mark.parametrize("widgets", [True, False])
def test_in_a_notebook(widgets, monkeypatch):
    pytest.importorskip("ipykernel")
    nbclient, nbformat = pytest.importorskip("nbclient"), pytest.importorskip("nbformat")
    monkeypatch.setenv("PYTHONPATH", ".")
    hide = "import sys; sys.modules['ipywidgets'] = None"
    cells = [*([] if widgets else [hide]), *CELLS.split("---\n")]
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(c) for c in cells])
    nbclient.NotebookClient(notebook, timeout=TIMEOUT, kernel_name="python3").execute()
    first = 1 if widgets else 2
    bar, told = notebook.cells[first].outputs, notebook.cells[first + 1].outputs
    if widgets:
        (shown,) = [o for o in bar if o.output_type == "display_data"]
        assert "application/vnd.jupyter.widget-view+json" in shown.data
        assert "4/4" in shown.data["text/plain"] or "0/4" in shown.data["text/plain"]
    else:
        text = "".join(o.text for o in bar)
        assert "4/4" in text
        assert "Warning" not in text
    assert told[-1].text == "finished\n"
