"""Labels for a bounded number of tenants: nothing is lost, nothing decreases."""

from __future__ import annotations

import math

from hypothesis import given, settings
from hypothesis import strategies as st

from scheduler_plugin.metrics_counts import OTHER
from scheduler_plugin.metrics_tenants import TenantLabels


class Counted:
    """Tenants, what they counted, and the labels that are given out."""

    def __init__(self, limit):
        self.labels = TenantLabels(limit)
        self.rows = {}

    def add(self, tenant, seconds, count=1):
        row = self.rows.setdefault(tenant, [0.0, 0])
        row[0] += seconds
        row[1] += count

    def page(self):
        served = {tenant: row[0] for tenant, row in self.rows.items()}
        total = [sum(row[at] for row in self.rows.values()) for at in (0, 1)]
        found = self.labels.counters(served, self.rows.__getitem__, total)
        self.labels._check()
        return found


def test_up_to_the_limit_every_tenant_has_a_label_and_all_it_ever_counted():
    counted = Counted(3)
    for number, tenant in enumerate("abc", 1):
        counted.add(tenant, number)
    assert counted.page() == {"c": [3, 1], "b": [2, 1], "a": [1, 1]}
    counted.add("a", 5)
    assert counted.page()["a"] == [6, 2]


def test_the_most_served_get_labels_and_the_others_are_summed():
    counted = Counted(2)
    for number in range(1, 6):
        counted.add(f"t{number}", number)
    assert counted.page() == {"t5": [5, 1], "t4": [4, 1], OTHER: [6, 3]}


def test_who_is_served_much_more_takes_the_place_of_who_has_it():
    counted = Counted(1)
    counted.add("a", 10)
    counted.page()
    counted.add("b", 20)
    assert counted.page() == {"a": [10, 1], OTHER: [20, 1]}, "twice as much is not enough"
    counted.add("b", 2)
    counted.add("a", 0.25)
    assert counted.page() == {"b": [0, 0], OTHER: [32.25, 4]}
    counted.add("b", 3)
    assert counted.page() == {"b": [3, 1], OTHER: [32.25, 4]}


def test_a_tenant_that_is_called_like_the_others_is_one_of_the_others():
    counted = Counted(5)
    counted.add(OTHER, 3)
    counted.add("a", 1)
    assert counted.page() == {"a": [1, 1], OTHER: [3, 1]}


@settings(max_examples=150, deadline=None)
@given(
    st.integers(1, 4),
    st.lists(
        st.one_of(
            st.none(),
            st.tuples(
                st.sampled_from([*"abcdefg", OTHER]),
                st.floats(0, 1e6, allow_subnormal=False) | st.floats(0, 1e-3),
            ),
        ),
        max_size=80,
    ),
)
def test_pages_lose_nothing_and_no_series_decreases_while_it_is_there(limit, script):
    counted = Counted(limit)
    before = {}
    for step in [*script, None]:
        if step is not None:
            counted.add(*step)
            continue
        page = counted.page()
        assert len(page) <= limit + 1
        for label, row in page.items():
            if label in before:
                assert all(new >= old for new, old in zip(row, before[label], strict=True))
        for at in (0, 1):
            total = math.fsum(row[at] for row in counted.rows.values())
            assert math.isclose(
                math.fsum(row[at] for row in page.values()), total, rel_tol=1e-9, abs_tol=1e-6
            )
        if OTHER in before:
            assert OTHER in page
        before = page
