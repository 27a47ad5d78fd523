"""Operator settings: ranges, changes, and how they are shown."""

from __future__ import annotations

import math
import pickle

import pytest

from scheduler_plugin.settings import Settings
from st2i_dask.errors import PolicyError, St2iError


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"slack_s": -1.0}, "at least 0 s"),
        ({"slack_s": math.nan}, "slack_s is nan"),
        ({"slack_s": math.inf}, "finite"),
        ({"slack_s": "5"}, "slack_s is '5'"),
        ({"slack_s": True}, "slack_s is True"),
        ({"default_weight": 0.0}, "above 0"),
        ({"weights": {"studio": -2.0}}, "weight of studio is -2.0"),
        ({"weights": {"studio": math.nan}}, "weight of studio is nan"),
        ({"default_cap": 0}, "default_cap is 0.*at least 1"),
        ({"default_cap": 2.5}, "whole number"),
        ({"caps": {"studio": 0}}, "cap of studio is 0"),
        ({"steps_per_task": 0}, "steps_per_task is 0"),
        ({"bandwidth": 0.0}, "bandwidth"),
        ({"slak": 1}, "no setting is called 'slak'"),
    ],
)
def test_values_out_of_range_are_refused_with_the_range(change, message):
    with pytest.raises(PolicyError, match=message):
        Settings().with_changes(**change)


@pytest.mark.parametrize("name", ["", "a b", "-x", "x" * 65, "naïve", "a\nb", 7])
def test_tenant_names_are_checked(name):
    with pytest.raises(St2iError, match="1 to 64 characters"):
        Settings(weights={name: 1.0})
    with pytest.raises(St2iError, match="1 to 64 characters"):
        Settings(caps={name: 1})


def test_what_is_not_set_for_a_tenant_is_the_default():
    settings = Settings(default_weight=2.0, weights={"a": 3.0}, default_cap=None, caps={"a": 4})
    assert (settings.weight("a"), settings.weight("b")) == (3.0, 2.0)
    assert (settings.cap("a"), settings.cap("b")) == (4, None)


def test_a_change_is_a_new_object_and_the_mapping_cannot_be_changed():
    weights = {"a": 1.0}
    settings = Settings(weights=weights)
    weights["a"] = -1.0
    assert settings.weight("a") == 1.0
    with pytest.raises(TypeError):
        settings.weights["a"] = 2.0
    assert settings.with_changes(slack_s=0.0).slack_s == 0.0
    assert settings.slack_s == 1.0


def test_it_travels():
    settings = Settings(weights={"a": 3.0}, caps={"b": 2})
    assert pickle.loads(pickle.dumps(settings)) == settings


def test_rows_name_every_setting_with_its_unit():
    rows = Settings(weights={"b": 1.0, "a": 2.5}, caps={"a": 7}).rows()
    assert ("slack_s", "1", "s of vTime") in rows
    assert [row.name for row in rows if row.name.startswith("weight ")] == ["weight a", "weight b"]
    assert ("cap a", "7", "queued requests") in rows
    assert all(row.unit for row in rows)
