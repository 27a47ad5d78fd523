"""The two-layer choice: hand-computed scores, and the arrays against the formula in plain Python."""

from __future__ import annotations

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from scheduler_plugin.candidates import Candidate
from scheduler_plugin.fair_queue import FEW, FairQueue
from scheduler_plugin.outline import Outline, Step
from st2i_dask.errors import PolicyError


class Outlook:
    """Estimates that a test sets by hand; by model. share: of a model that is missing; else all of it."""

    def __init__(self, path=None, own=None, load=None):
        self.path, self.own, self.load, self.share = path or {}, own or {}, load or {}, {}

    def path_s(self, outline, position):
        return self.path.get(outline.steps[position].model, 0.0)

    def own_s(self, cost_key):
        return self.own.get(cost_key.model, 0.0)

    def load_s(self, cost_key):
        return self.load.get(cost_key.model, 0.0)

    def missing(self, model):
        return self.share.get(model, 1.0)

    def whole_s(self, outline):
        return sum(self.own_s(key) for key in outline.cost_keys)


OUTLINES = {m: Outline(f"w-{m}", (Step("Fn", m, "1"), Step("Fn", m, "1", (0,)))) for m in "xyz"}


def candidate(key, tenant, model="x", since=0.0, position=0):
    return Candidate(key, tenant, f"r-{key}", OUTLINES[model], position, since)


def queue_of(outlook, slack, *candidates):
    """Each candidate with its tenant's vTime."""
    queue = FairQueue(outlook, slack)
    for one, vtime in candidates:
        queue.add(one, vtime)
    queue._check()
    return queue


def chosen(queue, now=10.0):
    found = queue.choose(now)
    return found.key if found is not None else None


def test_nothing_ready_nothing_chosen():
    assert FairQueue(Outlook(), 0.0).choose(0.0) is None


def test_layer_1_keeps_the_tenants_within_the_slack():
    ahead, behind = candidate("a", "ahead", since=0.0), candidate("b", "behind", since=9.0)
    assert chosen(queue_of(Outlook(), 0.0, (ahead, 5.0), (behind, 4.0))) == "b"
    assert chosen(queue_of(Outlook(), 0.999, (ahead, 5.0), (behind, 4.0))) == "b"
    assert chosen(queue_of(Outlook(), 1.0, (ahead, 5.0), (behind, 4.0))) == "a"


def test_who_is_left_out_still_counts_for_layer_1():
    ahead, behind = candidate("a", "ahead", "x"), candidate("b", "behind", "y")
    queue = queue_of(Outlook(), 1.0, (ahead, 5.0), (behind, 3.5))
    assert queue.choose(10.0, ["y"]) is None
    queue.set_slack(2.0)
    assert queue.choose(10.0, ["y"]) is ahead


def test_layer_2_prefers_the_longer_wait_all_else_equal():
    queue = queue_of(
        Outlook(), 9.0, (candidate("a", "t", since=3.0), 0.0), (candidate("b", "u", since=2.0), 0.0)
    )
    assert chosen(queue) == "b"


def test_layer_2_scores_by_hand():
    # waits 10, 8, 5; paths 10, 4, 1; runs 4, 4, 1 (load included).
    # scores: 1.0-1.0-1.0=-1.0;  0.8-0.4-1.0=-0.6;  0.5-0.1-0.25=0.15
    outlook = Outlook(
        path={"x": 10.0, "y": 4.0, "z": 1.0},
        own={"x": 1.0, "y": 4.0, "z": 1.0},
        load={"x": 3.0},
    )
    one, two, three = (
        candidate("1", "a", "x", since=0.0),
        candidate("2", "b", "y", since=2.0),
        candidate("3", "c", "z", since=5.0),
    )
    queue = queue_of(outlook, 9.0, (one, 0.0), (two, 0.0), (three, 0.0))
    assert chosen(queue) == "3"
    queue.discard("3")
    assert chosen(queue) == "2"


def test_load_of_the_model_counts_as_execution():
    outlook = Outlook(own={"x": 1.0, "y": 1.0}, load={"x": 5.0})
    queue = queue_of(outlook, 9.0, (candidate("a", "t", "x"), 0.0), (candidate("b", "u", "y"), 0.0))
    assert chosen(queue) == "b"
    outlook.load = {"x": 6.0, "y": 5.0}
    queue.refresh_models(None)
    queue._check()
    assert chosen(queue) == "b"
    outlook.share = {"x": 0.5, "nowhere": 0.0}
    queue.refresh_models(["x", "nowhere"])
    queue._check()
    assert chosen(queue) == "a"


def test_a_moved_path_is_seen_after_a_refresh():
    outlook = Outlook(path={"x": 2.0, "y": 1.0})
    queue = queue_of(outlook, 9.0, (candidate("a", "t", "x"), 0.0), (candidate("b", "u", "y"), 0.0))
    assert chosen(queue) == "b"
    outlook.path["y"] = 5.0
    queue.refresh_outline(OUTLINES["y"])
    assert chosen(queue) == "a"


def test_all_terms_zero_is_a_tie_and_ties_go_to_the_smallest_key():
    queue = queue_of(
        Outlook(), 9.0, *((candidate(k, f"t{k}", since=4.0), 0.0) for k in ("b", "a", "c"))
    )
    assert chosen(queue, now=4.0) == "a"


def test_equal_scores_go_to_the_longest_waiting():
    # a: wait 10/10 - path 5/5 = 0;  b: wait 8/10 - path 4/5 = 0
    outlook = Outlook(path={"x": 5.0, "y": 4.0})
    queue = queue_of(
        outlook,
        9.0,
        (candidate("b", "u", "y", since=2.0), 0.0),
        (candidate("z", "t", "x", since=0.0), 0.0),
    )
    assert chosen(queue) == "z"


def test_within_a_lane_the_longest_waiting_then_the_smallest_key():
    queue = queue_of(
        Outlook(),
        0.0,
        (candidate("b", "t", since=1.0), 0.0),
        (candidate("a", "t", since=1.0), 0.0),
        (candidate("c", "t", since=0.5), 0.0),
    )
    order = []
    while queue:
        order.append(chosen(queue))
        queue.discard(order[-1])
    assert order == ["c", "a", "b"]


def test_a_decision_costs_lanes_not_invocations():
    queue = FairQueue(Outlook(), 0.0)
    for number in range(1000):
        queue.add(candidate(f"k{number}", f"t{number % 4}", "xyz"[number % 3]), 0.0)
    assert (len(queue), queue.lanes) == (1000, 12)


def test_an_emptied_queue_is_empty():
    queue = FairQueue(Outlook(), 0.0)
    for number in range(300):
        queue.add(candidate(f"k{number}", f"t{number}", "xyz"[number % 3]), float(number))
    queue._check()
    for number in range(300):
        queue.discard(f"k{number}")
    queue._check()
    assert (len(queue), queue.lanes) == (0, 0)
    for outline in OUTLINES.values():
        queue.outline_left(outline)
    queue._check()
    assert not queue._lanes._kinds
    assert not queue._lanes._costs


def test_misuse_is_refused():
    queue = queue_of(Outlook(), 0.0, (candidate("a", "t"), 0.0))
    with pytest.raises(PolicyError, match="already queued"):
        queue.add(candidate("a", "t"), 0.0)
    with pytest.raises(PolicyError, match="not queued"):
        queue.discard("b")
    for slack in (-1.0, math.nan, math.inf):
        with pytest.raises(PolicyError, match="slack"):
            queue.set_slack(slack)
    assert chosen(queue) == "a"


def expected(candidates, vtimes, outlook, slack, now):
    """DESIGN's formula, one candidate at a time, over all candidates and not only lane heads."""
    least = min(vtimes[c.tenant] for c in candidates)
    within = [c for c in candidates if vtimes[c.tenant] <= least + slack]
    terms = [
        (
            now - c.since,
            outlook.path_s(c.outline, c.position),
            outlook.own_s(c.cost_key) + outlook.load_s(c.cost_key) * outlook.missing(c.model),
        )
        for c in within
    ]
    most = [max(column) for column in zip(*terms, strict=True)]
    w, r, e = ([t[i] / most[i] if most[i] else 0.0 for t in terms] for i in range(3))
    scores = [w[i] - r[i] - e[i] for i in range(len(within))]
    best = max(scores)
    tied = [c for c, score in zip(within, scores, strict=True) if score == best]
    return min(tied, key=lambda c: (c.since, c.key)).key


SECONDS = st.sampled_from([0.0, 0.5, 1.0, 2.0, 3.0, 7.0])
#: Values that meet often, and values that hardly ever do and round when divided.
ANY_SECONDS = st.one_of(SECONDS, st.floats(0.0, 1e4, allow_subnormal=False))


@settings(max_examples=500, deadline=None)
@given(
    rows=st.lists(
        st.tuples(
            st.sampled_from("abcdefgh"), st.sampled_from("xyz"), st.integers(0, 1), ANY_SECONDS
        ),
        min_size=1,
        max_size=3 * FEW,
    ),
    vtimes=st.lists(ANY_SECONDS, min_size=8, max_size=8),
    costs=st.lists(ANY_SECONDS, min_size=9, max_size=9),
    slack=ANY_SECONDS,
    now=ANY_SECONDS,
)
def test_few_lanes_are_chosen_from_as_many_are(rows, vtimes, costs, slack, now):
    """Also across the border between the two, and with requests submitted after `now`."""
    path, own, load = (dict(zip("xyz", costs[at:], strict=False)) for at in (0, 3, 6))
    queue = FairQueue(Outlook(path, own, load), slack)
    vtime = dict(zip("abcdefgh", vtimes, strict=True))
    for number, (tenant, model, position, since) in enumerate(rows):
        queue.add(
            candidate(f"k{number * 7 % 10}-{number}", tenant, model, since, position), vtime[tenant]
        )
    assert queue._choose_of_few(now) is queue._choose_of_many(now) is queue.choose(now)
    for without in (["x"], ["y", "z"], ["x", "y", "z"]):
        found = queue.choose(now, without)
        assert queue._choose_of_few(now, without) is queue._choose_of_many(now, without) is found
        assert found is None or found.model not in without


class QueueMachine(RuleBasedStateMachine):
    def __init__(self):
        super().__init__()
        self.outlook = Outlook()
        self.queue = FairQueue(self.outlook, 1.0)
        self.slack, self.now, self.serial = 1.0, 0.0, 0
        self.waiting: dict[str, Candidate] = {}
        self.vtimes = dict.fromkeys("abcd", 0.0)

    @rule(tenant=st.sampled_from("abcd"), model=st.sampled_from("xyz"), position=st.integers(0, 1))
    def add(self, tenant, model, position):
        self.serial += 1
        key = f"k{self.serial * 7919 % 1000}-{self.serial}"
        one = candidate(key, tenant, model, self.now, position)
        self.queue.add(one, self.vtimes[tenant])
        self.waiting[key] = one

    @precondition(lambda self: self.waiting)
    @rule(data=st.data())
    def discard(self, data):
        key = data.draw(st.sampled_from(sorted(self.waiting)))
        self.queue.discard(key)
        del self.waiting[key]

    @rule(tenant=st.sampled_from("abcd"), vtime=SECONDS)
    def charge(self, tenant, vtime):
        self.vtimes[tenant] = vtime
        self.queue.set_vtime(tenant, vtime)

    @rule(model=st.sampled_from("xyz"), path=SECONDS, own=SECONDS)
    def costs(self, model, path, own):
        self.outlook.path[model], self.outlook.own[model] = path, own
        self.queue.refresh_outline(OUTLINES[model])

    @rule(loads=st.dictionaries(st.sampled_from("xyz"), SECONDS))
    def load(self, loads):
        self.outlook.load |= loads
        self.queue.refresh_models(None)

    @rule(shares=st.dictionaries(st.sampled_from("xyz"), st.sampled_from([0.0, 0.5, 1.0])))
    def resident(self, shares):
        self.outlook.share |= shares
        self.queue.refresh_models(shares)

    @rule(model=st.sampled_from("xyz"))
    def leave_outline(self, model):
        if all(one.outline is not OUTLINES[model] for one in self.waiting.values()):
            self.queue.outline_left(OUTLINES[model])

    @rule(slack=SECONDS)
    def set_slack(self, slack):
        self.slack = slack
        self.queue.set_slack(slack)

    @rule(seconds=SECONDS)
    def wait(self, seconds):
        self.now += seconds

    @invariant()
    def agrees_with_the_formula(self):
        self.queue._check()
        found = self.queue.choose(self.now)
        if not self.waiting:
            assert found is None
        else:
            assert found.key == expected(
                list(self.waiting.values()), self.vtimes, self.outlook, self.slack, self.now
            )
            assert self.queue._choose_of_few(self.now) is found
            assert self.queue._choose_of_many(self.now) is found


TestQueueMachine = QueueMachine.TestCase
TestQueueMachine.settings = settings(max_examples=80, stateful_step_count=40, deadline=None)
