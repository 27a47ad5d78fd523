"""What the front end logs of a request, as fields."""

from __future__ import annotations

import io
import json
import logging

from st2i_dask.logs import JsonLines


def test_every_answer_is_a_record_with_fields(served):
    stream = io.StringIO()
    handler = logging.StreamHandler(stream)
    handler.setFormatter(JsonLines())
    logger = logging.getLogger("st2i.serve")
    level = logger.level
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    try:
        good, refused = served.get("/v1/models"), served.get("/v1/models", key="wrong")
    finally:
        logger.removeHandler(handler)
        logger.setLevel(level)
    lines = {line["http_request"]: line for line in map(json.loads, stream.getvalue().splitlines())}
    one = lines[good.headers["x-request-id"]]
    assert (one["tenant"], one["status"], one["level"]) == ("alice", 200, "info")
    assert 0 <= one["seconds"] < 60
    other = lines[refused.headers["x-request-id"]]
    assert (other["tenant"], other["status"]) == (None, 401)
