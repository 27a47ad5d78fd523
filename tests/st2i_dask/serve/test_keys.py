"""API keys: what is kept of them, and what a client without a right one sees."""

from __future__ import annotations

import json

import pytest

from st2i_dask.errors import LoadError
from st2i_dask.serve.keys import Holder, digest_of, new_key, read_key_file, read_keys

from .conftest import ADMIN, ALICE
from .test_generations import error


def ring(*entries):
    return read_keys(json.dumps(entries), "keys.json")


def test_a_new_key_is_known_and_only_its_digest_is_kept(tmp_path):
    key, entry = new_key("studio", weight=2, cap=5)
    assert len(key) > 40
    file = tmp_path / "keys.json"
    file.write_text(json.dumps([entry]))
    assert key not in file.read_text()
    found = read_key_file(file)
    assert found.holder(key) == Holder("studio")
    assert found.holder(key[:-1]) is None
    assert found.holder("") is None
    assert (found.weights, found.caps) == ({"studio": 2.0}, {"studio": 5})


def test_two_keys_of_a_tenant():
    one, other = (
        {"sha256": digest_of("a"), "tenant": "t"},
        {"sha256": digest_of("b"), "tenant": "t"},
    )
    found = ring({**one, "cap": 3}, {**other, "admin": True})
    assert found.holder("a") == Holder("t")
    assert found.holder("b") == Holder("t", admin=True)
    assert found.caps == {"t": 3}


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("{", "no JSON"),
        ("[]", "has no key"),
        ("", "has no key"),
        ('{"a": 1}', "key 1 has 'a'"),
        ('{"a": 1}\n{"b":', "line 2 is no JSON"),
        ("[1]", "key 1 is a int"),
        ('[{"key": "secret"}]', "'key'; known are"),
        ('[{"sha256": "secret", "tenant": "t"}]', "no digest"),
    ],
)
def test_what_is_no_key_file(text, says):
    with pytest.raises(LoadError, match=says):
        read_keys(text, "keys.json")


def test_the_printed_line_is_a_key_file_alone_and_below_others():
    made = [new_key(tenant) for tenant in ("alice", "bob")]
    lines = [json.dumps(entry) for _, entry in made]
    assert read_keys(lines[0], "x").holder(made[0][0]).tenant == "alice"
    both = read_keys("\n".join([*lines, ""]), "x")
    assert [both.holder(key).tenant for key, _ in made] == ["alice", "bob"]


@pytest.mark.parametrize(
    ("more", "says"),
    [
        ({"tenant": "no blanks"}, "not a tenant name"),
        ({"weight": 0}, "weight is 0"),
        ({"weight": float("inf")}, "weight is inf"),
        ({"cap": 0}, "cap is 0"),
        ({"admin": 1}, "admin is 1"),
    ],
)
def test_what_is_wrong_in_an_entry(more, says):
    with pytest.raises(LoadError, match=says):
        ring({"sha256": digest_of("a"), "tenant": "t", **more})


def test_a_key_twice_or_two_caps_of_a_tenant():
    entry = {"sha256": digest_of("a"), "tenant": "t", "cap": 1}
    with pytest.raises(LoadError, match="twice"):
        ring(entry, entry)
    with pytest.raises(LoadError, match="two values of cap"):
        ring(entry, {"sha256": digest_of("b"), "tenant": "t", "cap": 2})


@pytest.mark.parametrize(
    "header",
    [None, "", "Bearer", "Bearer wrong", f"Basic {ALICE}", ALICE, f"Bearer {ALICE}x",
     "Bearer \xff\xfe", "Bearer " + "x" * 10_000],
)  # fmt: skip
def test_without_a_right_key_nothing_is_read(served, header):
    headers = {} if header is None else {"authorization": header.encode("latin-1")}
    seen = []
    for method, path in (
        ("POST", "/v1/images/generations"),
        ("POST", "/v1/images/edits"),
        ("GET", "/v1/models"),
        ("GET", "/v1/requests/imgreq_x"),
        ("POST", "/v1/workflows"),
        ("GET", "/v1/nothing"),
    ):
        answer = served.send(method, path, key=None, headers=headers)
        found = error(answer, 401)
        assert found["code"] == "invalid_api_key"
        assert answer.headers["www-authenticate"] == "Bearer"
        seen.append(found)
    assert all(each == seen[0] for each in seen)


def test_health_and_description_need_no_key(served):
    assert served.get("/healthz", key=None).json()["status"] == "ok"
    assert served.get("/openapi.json", key=None).json()["openapi"].startswith("3.")


def test_only_admins_register_workflows(served, fresh_registry):
    body = {"id": "mine", "source": "shapes"}
    assert error(served.post("/v1/workflows", json=body), 403)["code"] == "not_allowed"
    answer = served.post("/v1/workflows", key=ADMIN, json=body)
    assert answer.status_code == 201
    assert served.get("/v1/models/mine").json() == answer.json()
    again = served.post("/v1/workflows", key=ADMIN, json=body)
    assert again.status_code == 201
