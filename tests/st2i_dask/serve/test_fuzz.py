"""Every operation of the API's own description, with data that fits it and data that does not."""

from __future__ import annotations

import pytest
import schemathesis
from hypothesis import HealthCheck, Phase, given, settings
from schemathesis import GenerationMode
from schemathesis.checks import not_a_server_error
from schemathesis.specs.openapi import checks

from st2i_dask.serve.app import make_app
from st2i_dask.serve.models import Models

from .conftest import ADMIN, keys
from .fake_cluster import FakeCluster

_CHECKS = [
    not_a_server_error,
    checks.status_code_conformance,
    checks.content_type_conformance,
    checks.response_headers_conformance,
    checks.response_schema_conformance,
    checks.negative_data_rejection,
]


def _operations():
    app = make_app(FakeCluster(), Models(), keys())
    schema = schemathesis.openapi.from_dict(app.openapi())
    found = [result.ok() for result in schema.get_all_operations()]
    return {f"{each.method.upper()} {each.path}": each for each in found}


OPERATIONS = _operations()
MODES = {"right": GenerationMode.POSITIVE, "wrong": GenerationMode.NEGATIVE}
# Without a body there is nothing to get wrong.
CASES = [(name, mode) for name, each in OPERATIONS.items() for mode in MODES
         if mode == "right" or each.body]  # fmt: skip


def fuzz(served, operation, mode, examples):
    made = OPERATIONS[operation]

    @settings(
        max_examples=examples,
        deadline=None,
        database=None,
        derandomize=examples < 100,
        phases=[Phase.generate],  # what fails is short enough, and making it shorter takes minutes
        suppress_health_check=list(HealthCheck),
    )
    @given(made.as_strategy(MODES[mode]))
    def run(case):
        answer = case.call(
            base_url=served.url, headers={"authorization": f"Bearer {ADMIN}"}, timeout=30
        )
        assert answer.headers["x-request-id"][0].startswith("req_")
        case.validate_response(answer, checks=_CHECKS)

    run()


def test_the_description_has_every_route():
    assert {
        "POST /v1/images/generations",
        "POST /v1/images/edits",
        "GET /v1/models",
        "POST /v1/workflows",
        "GET /v1/requests/{request_id}",
        "DELETE /v1/requests/{request_id}",
    } <= set(OPERATIONS)


@pytest.mark.parametrize(("operation", "mode"), CASES)
def test_no_answer_is_other_than_described(served, operation, mode):
    fuzz(served, operation, mode, 10)


@pytest.mark.slow
@pytest.mark.parametrize(("operation", "mode"), CASES)
def test_no_answer_is_other_than_described_at_length(served, operation, mode):
    fuzz(served, operation, mode, 300)
