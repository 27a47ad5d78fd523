"""The pages come with the fair scheduler and go with it, wherever its dashboard is; without one, in words."""

import asyncio
import gc
import logging
import sys
import urllib.error
import urllib.request
import weakref

from bokeh.document import Document
from distributed import Scheduler

from scheduler_plugin.dashboard import open_board
from scheduler_plugin.dashboard.tenants import TenantsPage
from scheduler_plugin.policy import FairPolicy

from .looking import got


def on_a_scheduler(use, **options):
    async def go():
        async with Scheduler(
            dashboard_address="127.0.0.1:0", port=0, validate=True, **options
        ) as scheduler:
            return await use(scheduler)

    return asyncio.run(go())


async def answers(scheduler, path):
    address = f"http://127.0.0.1:{scheduler.http_server.port}{path}"
    try:
        return await asyncio.to_thread(got, address)
    except urllib.error.HTTPError as error:
        return error.code


def test_closed_they_are_gone_and_nothing_refers_to_the_policy():
    async def use(scheduler):
        policy = FairPolicy()
        board = open_board(scheduler, policy, lambda: 1.0)
        applications = len(scheduler.http_application.applications)
        page = TenantsPage(board)
        document = Document()
        page.show({}, document)
        assert "St2i" in await answers(scheduler, "/st2i-tenants")  # a session of its own
        board.close()
        board.close()
        page.refresh()
        page.tick()
        page.say_over()
        assert "no longer live" in page.status.text
        assert await answers(scheduler, "/st2i-tenants") == 404
        assert "St2i" not in await answers(scheduler, "/status")
        assert len(scheduler.http_application.applications) == applications - 1
        gone = weakref.ref(policy)
        del board, policy
        gc.collect()
        assert gone() is None
        assert document.roots  # what was open is still there, with its words

    on_a_scheduler(use)


def test_opened_again_they_are_those_of_the_new_policy():
    async def use(scheduler):
        first = open_board(scheduler, FairPolicy(), lambda: 1.0)
        second = open_board(scheduler, FairPolicy(), lambda: 1.0)
        assert first.closed
        assert not second.closed
        text = await answers(scheduler, "/st2i")
        assert text.count('href="st2i"') == 1
        second.close()
        assert await answers(scheduler, "/st2i") == 404

    on_a_scheduler(use)


def test_under_a_prefix_they_are_where_dasks_own_are():
    async def use(scheduler):
        board = open_board(scheduler, FairPolicy(), lambda: 1.0)
        assert '"token"' in await answers(scheduler, "/behind/st2i")
        assert await answers(scheduler, "/st2i") == 404
        board.close()

    on_a_scheduler(use, http_prefix="/behind")


def test_a_scheduler_that_is_preloaded_has_them_from_its_start():
    async def use(scheduler):
        assert '"token"' in await answers(scheduler, "/st2i-executors")
        assert "st2i" in await answers(scheduler, "/status")

    on_a_scheduler(use, preload="scheduler_plugin.preload")


def test_pages_that_fail_do_not_keep_the_scheduler_from_serving(caplog, monkeypatch):
    from scheduler_plugin.dashboard import board as board_module

    def broken(scheduler):
        raise KeyError("pages")

    async def use(scheduler):
        monkeypatch.setattr(board_module, "template_variables", broken)
        assert open_board(scheduler, FairPolicy(), lambda: 1.0) is None
        assert await answers(scheduler, "/st2i") == 404

    on_a_scheduler(use)
    (record,) = [r for r in caplog.records if r.name == "scheduler_plugin.dashboard"]
    assert record.levelno == logging.WARNING
    assert "KeyError" in record.getMessage()


def test_without_a_dashboard_there_are_none_and_the_log_says_so(caplog):
    async def use(scheduler):
        with caplog.at_level(logging.INFO, logger="scheduler_plugin.dashboard"):
            assert open_board(scheduler, FairPolicy(), lambda: 1.0) is None

    on_a_scheduler(use, dashboard=False)
    (record,) = [r for r in caplog.records if r.name == "scheduler_plugin.dashboard"]
    assert "without a dashboard" in record.getMessage()


def test_without_bokeh_there_are_none_and_the_log_says_what_to_install(caplog, monkeypatch):
    for name in [n for n in sys.modules if n.startswith("scheduler_plugin.dashboard.")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "bokeh.server.tornado", None)
    with caplog.at_level(logging.INFO, logger="scheduler_plugin.dashboard"):
        assert open_board(None, FairPolicy(), lambda: 1.0) is None
    (said,) = [record.getMessage() for record in caplog.records]
    assert said.startswith("no dashboard pages: ")
    assert said.endswith("pip install 'st2i_dask[dashboard]' adds them")
