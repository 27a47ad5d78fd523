"""The log of requests and runs: what the journal tells, as records with fields.

Frequent ones are of level DEBUG, and cost a look at the level while that is off; what went wrong is INFO.
Fields: stimulus_id (the cause, as Dask and the workers' logs name it), request, tenant, key, and more.
"""

from __future__ import annotations

import logging
from typing import Any

from .journal import RequestRecord, RunRecord, Watcher

logger = logging.getLogger(__name__)

_DEBUG, _INFO = logging.DEBUG, logging.INFO


class RequestLog(Watcher):
    """Watches a journal."""

    def submitted(self, request: RequestRecord) -> None:
        if logger.isEnabledFor(_DEBUG):
            fields = _request(request, request.stimulus_id, invocations=len(request.outline))
            logger.debug("request %s submitted", request.name, extra=fields)

    def refused(self, tenant: str, requests: int, why: str, now: float, stimulus_id: str) -> None:
        fields = {"tenant": tenant, "requests": requests, "stimulus_id": stimulus_id}
        logger.info("refused: %s", why, extra=fields)

    def dispatched(self, run: RunRecord) -> None:
        if logger.isEnabledFor(_DEBUG):
            fields = _run(
                run,
                run.stimulus_id,
                waited_s=round(run.started - run.ready, 6),
                decided_s=round(run.decided_s, 6),
                estimate_s=round(run.estimate.total_s, 6),
                steps=run.steps,
            )
            logger.debug("%s dispatched to %s", run.key, run.executor, extra=fields)

    def yielding(self, run: RunRecord) -> None:
        if logger.isEnabledFor(_DEBUG):
            logger.debug("%s is to hand back", run.key, extra=_run(run, run.stimulus_id))

    def run_over(self, run: RunRecord) -> None:
        level = _DEBUG if run.outcome == "done" else _INFO
        if not logger.isEnabledFor(level):
            return
        assert run.over is not None
        fields = _run(
            run,
            run.over_stimulus_id,
            outcome=run.outcome,
            dispatched_by=run.stimulus_id,
            seconds=round(run.over - run.started, 6),
            steps=run.steps,
        )
        if run.used is not None:
            fields["load_s"] = round(run.used.load_s, 6)
            fields["compute_s"] = round(run.used.compute_s, 6)
            fields["transfer_s"] = round(run.used.transfer_s, 6)
        logger.log(level, "%s is %s", run.key, run.outcome, extra=fields)

    def result_lost(self, request: RequestRecord, key: str, now: float, stimulus_id: str) -> None:
        if logger.isEnabledFor(_INFO):
            logger.info(
                "the result of %s is lost", key, extra=_request(request, stimulus_id, key=key)
            )

    def request_over(self, request: RequestRecord) -> None:
        level = _DEBUG if request.outcome == "done" else _INFO
        if not logger.isEnabledFor(level):
            return
        assert request.over is not None
        fields = _request(
            request,
            request.over_stimulus_id,
            outcome=request.outcome,
            submitted_by=request.stimulus_id,
            seconds=round(request.over - request.submitted, 6),
        )
        logger.log(level, "request %s is %s", request.name, request.outcome, extra=fields)


def _request(request: RequestRecord, stimulus_id: str, **more: Any) -> dict[str, Any]:
    return {
        "stimulus_id": stimulus_id,
        "request": request.name,
        "tenant": request.tenant,
        "workflow": request.outline.workflow,
        **more,
    }


def _run(run: RunRecord, stimulus_id: str, **more: Any) -> dict[str, Any]:
    return _request(
        run.request,
        stimulus_id,
        key=run.key,
        position=run.position,
        fn=run.step.fn,
        worker=run.executor,
        **more,
    )
