"""Logs as JSON lines, with fields that say what a record is about.

Records are the standard library's; fields are given by `extra`, or hold for all that a thread logs while
it works for a request (`about`). Switch the lines on by configuration (`st2i.logs`), or name `JsonLines`
as a formatter in a `logging` configuration of your own, Dask's included:

    logging:
      version: 1
      formatters: {json: {"()": st2i_dask.logs.JsonLines}}
      handlers: {err: {class: logging.StreamHandler, formatter: json}}
      root: {level: INFO, handlers: [err]}
"""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from datetime import UTC, datetime
from typing import Any

from .config import log_options

#: The loggers above all of this package's, and those above all of Dask's.
OURS = ("st2i_dask", "scheduler_plugin", "worker_plugin", "st2i")
DASKS = ("distributed", "bokeh", "tornado")

_STANDARD = frozenset(vars(logging.makeLogRecord({}))) | {"message", "asctime", "taskName"}
_about: ContextVar[Mapping[str, Any]] = ContextVar("st2i_about", default={})  # noqa: B039


@contextmanager
def about(fields: Mapping[str, Any]) -> Iterator[None]:
    """Whatever this thread logs in the body has these fields as well."""
    token = _about.set(fields)
    try:
        yield
    finally:
        _about.reset(token)


class JsonLines(logging.Formatter):
    """One JSON object per record: time (UTC), level, logger, message, the record's fields, and error
    with its traceback. Values that JSON does not know are written as texts."""

    def format(self, record: logging.LogRecord) -> str:
        time = datetime.fromtimestamp(record.created, UTC)
        line = {
            "time": time.isoformat(timespec="milliseconds").replace("+00:00", "Z"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
            **_about.get(),
        }
        line.update((k, v) for k, v in record.__dict__.items() if k not in _STANDARD)
        if record.exc_info:
            line["error"] = self.formatException(record.exc_info)
        return json.dumps(line, default=str)


def set_up() -> None:
    """As this node's configuration `st2i.logs` says; AttachError when it is wrong.

    Changes loggers of the process: those of this package, and with JSON lines how Dask's print. Nothing
    is changed where nothing is configured.
    """
    options = log_options()
    if options["level"] is not None:
        for name in OURS:
            logging.getLogger(name).setLevel(options["level"].upper())
    if not options["json"]:
        return
    for name in OURS:
        logger = logging.getLogger(name)
        if not any(isinstance(handler.formatter, JsonLines) for handler in logger.handlers):
            handler = logging.StreamHandler()
            handler.setFormatter(JsonLines())
            logger.addHandler(handler)
            logger.propagate = False
    known = [*DASKS, *logging.root.manager.loggerDict]
    for name in known:
        if name.partition(".")[0] not in DASKS:
            continue
        for printing in logging.getLogger(name).handlers:
            # Dask's dashboard shows the others: they keep records.
            if isinstance(printing, logging.StreamHandler):
                printing.setFormatter(JsonLines())
