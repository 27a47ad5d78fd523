"""What is kept of tenants is what was sampled, and bounded."""

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from scheduler_plugin.glance import TenantGlance
from scheduler_plugin.tenant_history import TenantHistory


def busy(vtime_s, service_s=0.0, queued=1, running=1, ready=True):
    return TenantGlance(vtime_s, service_s, queued, running, True, ready)


AWAY = TenantGlance(5.0, 5.0, 0, 0, False, False)


def sampled(history, now, glances):
    history.sample(now, list(glances), list(glances.values()))
    history._check()


def test_lines_have_gaps_where_a_tenant_was_away():
    history = TenantHistory(samples=4)
    sampled(history, 1.0, {"ann": busy(1.0), "bob": busy(2.0, queued=3)})
    sampled(history, 2.0, {"ann": busy(1.5), "bob": AWAY})
    sampled(history, 3.0, {"ann": busy(3.0), "bob": busy(5.5)})
    assert history.times().tolist() == [1.0, 2.0, 3.0]
    vtimes = history.vtimes(["bob", "ann"])
    assert vtimes[:, 1].tolist() == [1.0, 1.5, 3.0]
    assert vtimes[0, 0] == 2.0
    assert math.isnan(vtimes[1, 0])
    assert history.queued(["bob"])[:, 0].tolist() == [3, 0, 1]
    assert history.least().tolist() == [1.0, 1.5, 3.0]
    assert history.everybody().tolist() == [[4, 2, 2, 3.0], [1, 1, 1, 1.5], [2, 2, 2, 8.5]]


def test_device_seconds_of_the_window_and_of_newcomers():
    history = TenantHistory()
    for second in range(100):
        glances = {"ann": busy(0.0, service_s=2.0 * second)}
        if second >= 90:  # came back with 50 device seconds of an earlier time
            glances["bob"] = busy(0.0, service_s=50.0 + 3.0 * (second - 90))
        sampled(history, float(second), glances)
    names, used = history.used(60.0)
    assert dict(zip(names, used.tolist(), strict=True)) == {"ann": 120.0, "bob": 27.0}


def test_who_is_gone_for_the_whole_ring_is_forgotten():
    history = TenantHistory(samples=3)
    sampled(history, 0.0, {"ann": busy(1.0), "bob": busy(1.0)})
    for now in (1.0, 2.0):
        sampled(history, now, {"ann": busy(1.0), "bob": AWAY})
        assert history.tenants == ["ann", "bob"]
    sampled(history, 3.0, {"ann": busy(1.0), "bob": AWAY})
    assert history.tenants == ["ann"]
    assert history.watched(["eve"]) == ["eve", "ann"]


def test_with_too_many_tenants_the_longest_away_gives_way_and_the_rest_are_sums():
    history = TenantHistory(samples=10, tenants=2)
    sampled(history, 0.0, {"ann": busy(1.0), "bob": busy(2.0)})
    sampled(history, 1.0, {"ann": AWAY, "bob": busy(2.0), "eve": busy(3.0, queued=7)})
    assert set(history.tenants) == {"ann", "bob"}
    assert (history.totals.omitted, history.totals.queued) == (1, 8)
    sampled(history, 2.0, {"ann": AWAY, "bob": busy(2.0), "eve": busy(3.0, queued=7)})
    assert set(history.tenants) == {"bob", "eve"}
    assert np.isnan(history.vtimes(["eve"])[:2]).all()
    assert history.totals.omitted == 0


def test_time_does_not_go_back():
    history = TenantHistory()
    sampled(history, 2.0, {})
    with pytest.raises(AssertionError, match="go back"):
        history.sample(1.0, [], [])


@settings(max_examples=60, deadline=None)
@given(
    st.lists(
        st.dictionaries(
            st.sampled_from("abcdefg"),
            st.tuples(st.floats(0, 1e6), st.integers(0, 9), st.booleans()),
        ),
        max_size=25,
    )
)
def test_it_is_what_a_plain_list_of_samples_would_be(samples):
    """Against a model that keeps everything."""
    history = TenantHistory(samples=5, tenants=7)
    kept, service = [], dict.fromkeys("abcdefg", 0.0)
    for now, present in enumerate(samples):
        asked = history.watched(present)
        glances = []
        for tenant in asked:
            if tenant in present:
                vtime_s, queued, ready = present[tenant]
                service[tenant] += 1.0
                glances.append(busy(vtime_s, service[tenant], queued, ready=ready))
            else:
                glances.append(TenantGlance(0.0, service[tenant], 0, 0, False, False))
        history.sample(float(now), asked, glances)
        history._check()
        kept = [*kept, present][-5:]
    known = {tenant for present in kept for tenant in present}
    assert set(history.tenants) == known
    for tenant in known:
        expected = [p[tenant][0] if tenant in p else math.nan for p in kept]
        np.testing.assert_array_equal(history.vtimes([tenant])[:, 0], expected)
        expected = [p[tenant][1] if tenant in p else 0 for p in kept]
        assert history.queued([tenant])[:, 0].tolist() == expected
    least = [min((v for v, _, _ in p.values()), default=math.nan) for p in kept]
    np.testing.assert_array_equal(history.least(), least)
    np.testing.assert_allclose(
        history.everybody()[:, 3], [sum(v for v, _, _ in p.values()) for p in kept]
    )


def test_who_came_and_went_between_two_samples_is_kept_with_what_it_used():
    history = TenantHistory()
    sampled(history, 0.0, {"ann": busy(1.0, service_s=9.0)})
    gone = {"ann": busy(1.0, service_s=9.0), "bob": TenantGlance(3.0, 11.0, 0, 0, False, False)}
    history.sample(1.0, list(gone), list(gone.values()), {"bob": 4.0})
    history._check()
    assert history.tenants == ["ann", "bob"]
    assert dict(zip(*history.used(60.0), strict=True)) == {"ann": 0.0, "bob": 4.0}
    assert history.totals.active == 1


def test_nobody_is_below_the_least_of_the_same_sample_also_who_has_just_left():
    history = TenantHistory()
    long, new = busy(100.0, service_s=100.0), TenantGlance(57.0, 7.0, 0, 0, False, False)
    for now, worked in ((0.0, {}), (1.0, {"new": 7.0}), (2.0, {})):
        history.sample(now, ["long", "new"], [long, new], worked)
    assert history.least().tolist() == [100.0, 57.0, 100.0]
    history.sample(3.0, ["long", "new"], [AWAY, new], {"new": 1.0})
    assert history.least()[-1] == 57.0
    sampled(history, 4.0, {"long": AWAY, "new": AWAY})
    assert math.isnan(history.least()[-1])
    vtimes = history.vtimes(["long", "new"])
    assert not (vtimes < history.least()[:, None]).any()
