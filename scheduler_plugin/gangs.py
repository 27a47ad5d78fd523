"""Who computes with the executor that was placed: the members of a gang.

Only executors that nothing else would take are spare: not those for what else is ready, of any tenant,
nor for the callback consumers that this dispatch lets in. So nobody waits because of a gang, and a gang
waits for nobody: where none is spare, its invocation runs alone.
"""

from __future__ import annotations

from .cost_model import CostModel
from .placement import Place, Placement
from .requests import Invocation, State


def members(
    invocation: Invocation, place: Place, placement: Placement, costs: CostModel, ready: int
) -> tuple[str, ...]:
    """Further executors for an invocation about to be dispatched there, those with the model first.

    ready: invocations that are ready, this one included. All of a gang wait for the slowest load of one
    of them: who would take longer than can be gained, over all its steps, is left out.
    """
    request, position = invocation.request, invocation.position
    outline = request.outline
    gang = outline.steps[position].gang
    if gang == 1 or placement.idle <= ready:
        return ()
    let_in = sum(request.states[p] is State.GATED for p in outline.consumers[position])
    count = min(gang - 1, placement.idle - ready - let_in)
    if count < 1:
        return ()
    key = invocation.candidate.cost_key
    load_s = costs.load_s(key)
    gain_s = costs.compute_s(key) * invocation.steps * count / (1 + count)
    most_s = place.missing * load_s + gain_s
    return placement.members(key.model, load_s, most_s, count, place.executor)
