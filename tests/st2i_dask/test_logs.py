"""Logs as JSON lines: fields, configuration, and one request followed through scheduler and worker."""

from __future__ import annotations

import io
import json
import logging
import os
import subprocess
import sys
import threading
from contextlib import contextmanager

import dask.config
import pytest

import st2i_dask as st2i
from st2i_dask import logs
from st2i_dask.config import trace_options
from st2i_dask.submission import submit_requests

from ..scheduler_plugin.live import chain, hooks, idle, serving, until
from ..worker_plugin import stacks


@contextmanager
def lines(level=logging.DEBUG, names=logs.OURS):
    """JSON lines of these loggers from now on, in a list that grows."""

    class Stream(io.StringIO):
        def write(self, text):
            found.extend(json.loads(line) for line in text.splitlines())

    found = []
    handler = logging.StreamHandler(Stream())
    handler.setFormatter(logs.JsonLines())
    loggers = [logging.getLogger(name) for name in names]
    before = [logger.level for logger in loggers]
    for logger in loggers:
        logger.addHandler(handler)
        logger.setLevel(level)
    try:
        yield found
    finally:
        for logger, was in zip(loggers, before, strict=True):
            logger.removeHandler(handler)
            logger.setLevel(was)


@pytest.fixture
def as_before():
    """Loggers as they were."""
    names = [*logs.OURS, *logs.DASKS, *logging.root.manager.loggerDict]
    known = [logging.getLogger(name) for name in dict.fromkeys(names)]
    state = [(log.level, log.propagate, [(h, h.formatter) for h in log.handlers]) for log in known]
    yield
    for logger, (level, propagate, handlers) in zip(known, state, strict=True):
        logger.setLevel(level)
        logger.propagate = propagate
        logger.handlers[:] = [handler for handler, _ in handlers]
        for handler, formatter in handlers:
            handler.setFormatter(formatter)


def test_a_record_is_one_line_whatever_it_holds(monkeypatch):
    logger = logging.getLogger("st2i.test")
    # pytest's report cannot hold half a character.
    monkeypatch.setattr(logging.getLogger("st2i"), "propagate", False)
    with lines() as found:
        logger.warning(
            "two\nlines %s", '"x"', extra={"key": "k\n1", "tenant": "ann", "odd": {1, 2}, "n": 3}
        )
        try:
            raise ValueError("broken \ud800")
        except ValueError:
            logger.exception("failed")
    first, second = found
    assert first["message"] == 'two\nlines "x"'
    assert (first["level"], first["logger"]) == ("warning", "st2i.test")
    assert (first["key"], first["tenant"], first["odd"], first["n"]) == ("k\n1", "ann", "{1, 2}", 3)
    assert first["time"].endswith("Z")
    assert not {"args", "levelno", "taskName", "thread"} & first.keys()
    assert second["error"].startswith("Traceback")
    assert second["error"].endswith("ValueError: broken \ud800")


def test_fields_hold_for_what_a_thread_logs_meanwhile():
    logger = logging.getLogger("st2i.test")
    with lines() as found:
        with logs.about({"key": "outer"}):
            thread = threading.Thread(target=logger.info, args=("elsewhere",))
            thread.start()
            thread.join()
            with logs.about({"key": "inner"}):
                logger.info("inside")
            logger.info("here", extra={"key": "own"})
        logger.info("after")
    assert [line.get("key") for line in found] == [None, "inner", "own", None]


def test_configuration_switches_lines_on_once(as_before, capsys):
    for name in ("distributed", "distributed.client"):  # Dask's own configuration has both
        logging.getLogger(name).addHandler(logging.StreamHandler(sys.stderr))
        logging.getLogger(name).propagate = False
        logging.getLogger(name).setLevel(logging.WARNING)  # a cluster may have silenced them
    plain = [list(logging.getLogger(name).handlers) for name in logs.OURS]
    logs.set_up()
    assert [logging.getLogger(name).handlers for name in logs.OURS] == plain, "off by default"
    with dask.config.set({"st2i.logs": {"json": True, "level": "DEBUG"}}):
        logs.set_up()
        logs.set_up()
    logging.getLogger("scheduler_plugin.request_log").debug("hello", extra={"tenant": "ann"})
    logging.getLogger("distributed").warning("of Dask")
    logging.getLogger("distributed.client").warning("of its client")
    printed = [json.loads(line) for line in capsys.readouterr().err.splitlines()]
    assert [line["message"] for line in printed if line["logger"][:5] != "distr"] == ["hello"]
    assert printed[0]["tenant"] == "ann"
    assert {"of Dask", "of its client"} <= {line["message"] for line in printed}


@pytest.mark.parametrize(
    ("key", "value", "said"),
    [
        (
            "st2i.logs.level",
            "loud",
            r"st2i\.logs\.level: level='loud' is not known; use one of debug",
        ),
        ("st2i.logs.json", "yes", r"st2i\.logs\.json: json='yes' is not known; use true or false"),
        ("st2i.logs.jsn", True, "did you mean json"),
        ("st2i.traces.enabled", 1, "use true or false"),
    ],
)
def test_bad_configuration_is_refused(key, value, said):
    read = trace_options if "traces" in key else logs.set_up
    with dask.config.set({key: value}), pytest.raises(st2i.AttachError, match=said):
        read()


def test_one_request_is_followed_by_stimulus_from_submit_to_result():
    with serving(1, steps_per_task=1) as client, lines() as found:
        assert chain.submit(client, value=0.0, tenant="ann").result() == 3.0
        until(lambda: any(line.get("submitted_by") for line in found))
        until(lambda: sum(line["message"].endswith("memory") for line in found) == 3)
        mine = [line for line in found if line.get("tenant") == "ann"]
    by_message = {line["message"]: line for line in mine}
    (request,) = {line["request"] for line in mine}
    submitted = by_message[f"request {request} submitted"]
    assert submitted["stimulus_id"].startswith("update-graph-")
    assert (submitted["workflow"], submitted["invocations"]) == ("live-chain", 3)
    keys = dict.fromkeys(line["key"] for line in mine if "key" in line)
    assert len(keys) == 3
    cause = submitted["stimulus_id"]
    for key in keys:
        dispatched = next(line for text, line in by_message.items() if f"{key} dispatched" in text)
        begins, ends = by_message[f"{key} begins"], by_message[f"{key} ends in state memory"]
        done = by_message[f"{key} is done"]
        # The worker names the scheduler's dispatch as its cause, and the scheduler the worker's end.
        assert begins["stimulus_id"] == dispatched["stimulus_id"] == done["dispatched_by"]
        assert ends["stimulus_id"] == done["stimulus_id"]
        assert done["stimulus_id"].startswith("task-finished-")
        assert begins["logger"] == "worker_plugin.task_log"
        assert done["compute_s"] >= 0
        # The submit began the first invocation, and what ended one began the next.
        assert dispatched["stimulus_id"] == cause
        cause = done["stimulus_id"]
    over = by_message[f"request {request} is done"]
    assert over["submitted_by"] == submitted["stimulus_id"]
    assert over["stimulus_id"] == cause
    assert over["seconds"] >= sum(by_message[f"{key} is done"]["seconds"] for key in keys) - 0.01


def test_what_goes_wrong_is_logged_without_debug():
    def fail(value):
        logging.getLogger("worker_plugin.anything").warning("in the model")
        raise RuntimeError("as the test wants")

    with serving(1) as client, lines(logging.INFO) as found:
        chain.submit(client, value=0.0, tenant="ann").result()
        assert not [line for line in found if line.get("tenant") == "ann"], (
            "frequent ones are DEBUG"
        )
        hooks["bad"] = fail
        failing = chain.submit(client, value=0.0, label="bad", tenant="bob")
        with pytest.raises(RuntimeError):
            failing.result()
        st2i.settings(client, caps={"eve": 1})
        with pytest.raises(st2i.LimitError):
            submit_requests(client, [chain.request("eve", value=0.0) for _ in range(2)])
        key = f"Step-000-{failing.key.rpartition('-')[2]}"
        failing.cancel()
        until(lambda: idle(client))
    said = {(line["level"], line["message"]): line for line in found}
    for message in (f"{key} is failed", f"{key} ends in state error"):
        line = said["info", message]
        assert (line["tenant"], line["key"]) == ("bob", key)
        assert line["stimulus_id"].startswith("task-erred-")
    # The thread's fields are on whatever model code logs.
    assert said["warning", "in the model"]["tenant"] == "bob"
    assert said["warning", "in the model"]["key"] == key
    refusal = next(line for line in found if line["message"].startswith("refused"))
    assert (refusal["tenant"], refusal["requests"]) == ("eve", 2)


def test_layers_that_come_and_go_name_what_ran_then(tmp_path, monkeypatch):
    monkeypatch.setenv("ST2I_CACHE", str(tmp_path / "cache"))
    files = [
        stacks.save(tmp_path / f"{name}.safetensors", 8, seed) for seed, name in enumerate("ab")
    ]
    with serving(1) as client:
        st2i.attach(client, memory_bytes=12 * stacks.BLOCK, arena_bytes="64 KiB", weights="mcache")
        with lines() as found:
            for file in files:
                future = stacks.workflow(file).submit(client, x=0.5, tenant="ann")
                assert future.result() == stacks.expected(file, 0.5)
                del future
    loaded = [line for line in found if line["message"].endswith("loaded")]
    evicted = [line for line in found if line["message"].endswith("evicted")]
    assert len(loaded) == 16
    assert len(evicted) >= 8, "one model fits"
    for line in loaded + evicted:
        assert line["nbytes"] == stacks.BLOCK
        assert 0 <= line["layer"] < 8
        assert line["weights"] in {str(file) for file in files}
        assert line["message"].startswith(f"layer {line['layer']} of {line['weights']} ")
    # Decided as the second run began: by its thread.
    (run,) = {line["key"] for line in evicted if "key" in line}
    assert run.startswith("Stack_b")
    assert {line["tenant"] for line in evicted if "key" in line} == {"ann"}
    assert all(line["stimulus_id"] for line in evicted if "key" in line)


@pytest.mark.slow
def test_nodes_print_json_lines_as_the_environment_says():
    code = (
        "import st2i_dask as st2i; from distributed import Client\n"
        "if __name__ == '__main__':\n"
        "    with st2i.local_cluster(1, dashboard_address=':0') as cluster, Client(cluster) as client:\n"
        "        shapes = st2i.load('shapes')\n"
        "        shapes.submit(client, prompt='a red circle', tenant='ann').result()\n"
    )
    environment = {"DASK_ST2I__LOGS__JSON": "true", "DASK_ST2I__LOGS__LEVEL": "debug"}
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        check=True,
        timeout=200,
    )
    found = [json.loads(line) for line in done.stderr.splitlines() if line.startswith("{")]
    names = {line["logger"] for line in found if line.get("tenant") == "ann"}
    assert names >= {"scheduler_plugin.request_log", "worker_plugin.task_log"}
