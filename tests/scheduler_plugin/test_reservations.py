"""Promised places: counted until they arrive or expire."""

from __future__ import annotations

import pytest

from scheduler_plugin.reservations import EXPIRES_S, Reservations


@pytest.fixture
def reservations():
    made = Reservations()
    yield made
    made._check()


def test_counts_until_arrival(reservations):
    reservations.promise("ann", 2, 0.0)
    reservations.promise("bob", 1, 0.0)
    assert reservations.count("ann", 1.0) == 2
    reservations.arrived("ann")
    assert reservations.count("ann", 1.0) == 1
    reservations.arrived("ann")
    reservations.arrived("ann")  # one that nobody asked for
    assert reservations.count("ann", 1.0) == 0
    assert reservations.count("bob", 1.0) == 1


def test_a_client_that_died_holds_its_places_for_a_while_only(reservations):
    reservations.promise("ann", 3, 0.0)
    reservations.promise("ann", 1, 10.0)
    assert reservations.count("ann", EXPIRES_S - 0.1) == 4
    assert reservations.count("ann", EXPIRES_S) == 1
    assert reservations.count("ann", EXPIRES_S + 10) == 0
