# SPDX-License-Identifier: Apache-2.0
"""Routes about the cluster: health, nodes, totals, decisions, energy."""

from typing import Annotated

from fastapi import APIRouter, Query, Response

from horowatt.errors import InvalidInput
from horowatt_allocator.decisions import ledger
from horowatt_allocator.service.dependencies import TheCaller, TheServices, json_response
from horowatt_allocator.service.energy import energy_document, for_caller, narrowed
from horowatt_allocator.service.readings import cluster_document, nodes_document, readiness
from horowatt_allocator.service.views import SCHEMA_VERSION, decision_view, find_job

router = APIRouter()

_MAX_DECISIONS = 500

Instant = Annotated[float | None, Query(allow_inf_nan=False, description="Unix time, seconds.")]


@router.get("/healthz")
def health() -> Response:
    """Say that the process answers."""
    return json_response({"status": "ok"})


@router.get("/readyz")
def ready(services: TheServices) -> Response:
    """Say whether the service decides and stores."""
    return readiness(services)


@router.get("/v1/nodes")
def list_nodes(services: TheServices, caller: TheCaller) -> Response:
    """List nodes and GPUs."""
    return json_response(nodes_document(services, caller))


@router.get("/v1/cluster")
def show_cluster(services: TheServices) -> Response:
    """Show the cluster as a whole."""
    return json_response(cluster_document(services))


@router.get("/v1/decisions")
def list_decisions(
    services: TheServices, caller: TheCaller, after: Annotated[int, Query(ge=0, lt=1 << 63)] = 0
) -> Response:
    """List decisions with a number above ``after``, ascending; the latest 500 of them."""
    core = services.core
    state = core.state
    found = core.store.decisions(after, _MAX_DECISIONS)
    return json_response(
        {
            "schema_version": SCHEMA_VERSION,
            "decisions": [decision_view(decision, state, caller) for decision in found],
            "last": found[-1].number if found else after,
        }
    )


@router.get("/v1/energy")
def report_energy(
    services: TheServices,
    caller: TheCaller,
    job: str | None = None,
    tenant: str | None = None,
    start_s: Instant = None,
    end_s: Instant = None,
) -> Response:
    """Report where the joules went, from the first booked to the last unless told otherwise.

    ``job`` and ``tenant`` narrow the lines; idle, unattributed and total stay those of the cluster.
    """
    core = services.core
    state, now_s = core.state, core.clock.now_s()
    job_id = None if job is None else find_job(state, job, caller).spec.job_id
    if start_s is not None and end_s is not None and start_s > end_s:
        raise InvalidInput(
            "HW-API-013",
            "the report would end before it starts",
            because=f"start_s is {start_s}, end_s is {end_s}",
            hint="give both in Unix seconds, the earlier one first",
            fields={"start_s": str(start_s), "end_s": str(end_s)},
        )
    booked = list(core.store.intervals(start_s, end_s))
    # Nodes have clocks of their own, so that what is booked may lie outside the head's own time.
    first_s = min((item.interval.start_s for item in booked), default=core.store.created_s())
    last_s = max((item.interval.end_s for item in booked), default=now_s)
    report = ledger.summarize(
        core.inventory.name,
        booked,
        state.jobs,
        start_s=min(first_s, core.store.created_s()) if start_s is None else start_s,
        end_s=max(last_s, now_s) if end_s is None else end_s,
        made_s=now_s,
    )
    return json_response(energy_document(narrowed(for_caller(report, state, caller), job_id, tenant)))
