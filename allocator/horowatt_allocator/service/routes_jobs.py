# SPDX-License-Identifier: Apache-2.0
"""Routes about jobs: submit, list, look at, explain, cancel, read the log."""

import hashlib
import json
from typing import Annotated

from anyio import to_thread
from fastapi import APIRouter, Header, Query, Response

from horowatt.errors import InvalidInput
from horowatt_allocator.ports.store import LogFilter, LogPage
from horowatt_allocator.records.jobs import ENDED
from horowatt_allocator.service.dependencies import (
    Services,
    SubmitBytes,
    TheCaller,
    TheServices,
    json_response,
)
from horowatt_allocator.service.schemas import SubmitBody, parse_submit
from horowatt_allocator.service.views import (
    SCHEMA_VERSION,
    Document,
    find_job,
    job_details,
    job_explanation,
    job_view,
    listing,
    log_ended,
    may_see,
)

router = APIRouter()

MAX_WAIT_S = 30.0
"""Longest time a request for the log is held."""
EVENTS = "events"
ALL_STREAMS = "all"
_MAX_KEY_LENGTH = 255
_STORY_LINES = 50
_EXPLAINED_DECISIONS = 200


@router.post(
    "/v1/jobs",
    openapi_extra={
        "requestBody": {
            "required": True,
            "content": {"application/json": {"schema": SubmitBody.model_json_schema()}},
        }
    },
)
def submit(
    services: TheServices,
    caller: TheCaller,
    body: SubmitBytes,
    idempotency_key: Annotated[str | None, Header(max_length=_MAX_KEY_LENGTH, min_length=1)] = None,
) -> Response:
    """Accept a job; the answer comes once it is stored."""
    wish = parse_submit(body)
    key = None
    if idempotency_key is not None:
        key = (idempotency_key, hashlib.sha256(_canonical(body)).hexdigest())
    job = services.core.submit(wish.to_request(caller.username or ""), caller, key)
    return json_response(_one(services, job.spec.job_id), 201)


def _canonical(body: bytes) -> bytes:
    return json.dumps(json.loads(body), sort_keys=True).encode()


@router.get("/v1/jobs")
def list_jobs(
    services: TheServices,
    caller: TheCaller,
    everything: Annotated[bool, Query(alias="all", description="Ended jobs as well.")] = False,
    tenant: str | None = None,
) -> Response:
    """List the jobs that the caller may see, in order of submission."""
    state = services.core.state
    jobs = [
        job
        for job in state.jobs.values()
        if may_see(caller, job)
        and (everything or job.phase not in ENDED)
        and (tenant is None or job.spec.tenant == tenant)
    ]
    jobs.sort(key=lambda job: (job.spec.submitted_at_s, job.spec.job_id))
    energy_j = services.core.store.job_energy_j
    return json_response(listing("jobs", [job_view(state, job, energy_j(job.spec.job_id)) for job in jobs]))


@router.get("/v1/jobs/{ref}")
def show_job(services: TheServices, caller: TheCaller, ref: str) -> Response:
    """Show one job."""
    return json_response(_one(services, find_job(services.core.state, ref, caller).spec.job_id))


@router.get("/v1/jobs/{ref}/explain")
def explain_job(services: TheServices, caller: TheCaller, ref: str) -> Response:
    """Say what a job has, and why."""
    core = services.core
    state = core.state
    job = find_job(state, ref, caller)
    document = job_explanation(
        state,
        job,
        core.store.job_energy_j(job.spec.job_id),
        core.store.story(job.spec.job_id, _STORY_LINES),
        core.store.decisions(0, _EXPLAINED_DECISIONS),
        caller,
        core.clock.now_s(),
    )
    return json_response(document)


@router.post("/v1/jobs/{ref}/cancel")
def cancel_job(services: TheServices, caller: TheCaller, ref: str) -> Response:
    """Have a job end; repeating it changes nothing."""
    job = find_job(services.core.state, ref, caller)
    services.core.cancel(job.spec.job_id, caller)
    return json_response(_one(services, job.spec.job_id))


@router.get("/v1/jobs/{ref}/logs")
async def read_log(
    services: TheServices,
    caller: TheCaller,
    ref: str,
    cursor: Annotated[str, Query(max_length=20)] = "",
    wait_s: Annotated[float, Query(ge=0.0, allow_inf_nan=False)] = 0.0,
    stream: Annotated[str | None, Query(max_length=255)] = None,
) -> Response:
    """Return the lines of a job's log after a cursor; wait for some when there are none yet.

    Without ``stream`` these are the launcher's and all workers' lines; ``all`` adds the events;
    any other value names one stream.
    """
    core, loop_time = services.core, services.bell.time
    job_id = find_job(core.state, ref, caller).spec.job_id
    after, wanted = _position(cursor), _filter(stream)
    until = loop_time() + min(wait_s, MAX_WAIT_S)
    while True:
        rung = services.bell.ticket()
        job = core.state.jobs.get(job_id)
        # Read before the lines are: a line that comes in between must not be missed at the end.
        ended = job is None or log_ended(core.state, job)
        page = await to_thread.run_sync(core.store.log_page, job_id, after, wanted)
        left_s = until - loop_time()
        if page.pieces or ended or left_s <= 0 or services.bell.closing:
            return json_response(_log_document(page, ended=ended and not page.more))
        after = page.cursor
        await services.bell.wait(rung, left_s)


def _position(cursor: str) -> int:
    if cursor and not (cursor.isascii() and cursor.isdigit()):
        raise InvalidInput(
            "HW-API-012",
            f"{cursor!r} is no cursor",
            hint="leave it out, or give the cursor of an earlier answer",
            fields={"cursor": cursor},
        )
    return min(int(cursor or "0"), (1 << 63) - 1)


def _filter(stream: str | None) -> LogFilter:
    if stream is None:
        return LogFilter(without=frozenset({EVENTS}))
    return LogFilter() if stream == ALL_STREAMS else LogFilter(stream=stream)


def _log_document(page: LogPage, *, ended: bool) -> Document:
    lines = [
        {"stream": stream, "node": node, "text": line}
        for node, stream, text in page.pieces
        for line in text.removesuffix("\n").split("\n")
    ]
    return {
        "schema_version": SCHEMA_VERSION,
        "lines": lines,
        "cursor": str(page.cursor),
        "ended": ended,
        "more": page.more,
    }


def _one(services: Services, job_id: str) -> Document:
    state = services.core.state
    view = job_details(state, state.jobs[job_id], services.core.store.job_energy_j(job_id))
    return {"schema_version": SCHEMA_VERSION, **view}
