# SPDX-License-Identifier: Apache-2.0
"""Documents that both HTTP applications show: readiness, nodes, the cluster as a whole."""

from fastapi import Response

from horowatt.errors import RetryLater
from horowatt_allocator.service.dependencies import Services, json_response
from horowatt_allocator.service.identity import Caller
from horowatt_allocator.service.views import Document, cluster_view, listing, node_view

STALE_AFTER_S = 30.0
"""A core that committed nothing for so long, although it ticks every second, is not ready."""


def readiness(services: Services) -> Response:
    """Return whether the service decides and stores."""
    core = services.core
    health, now_s = core.health, core.clock.now_s()
    age_s = max(0.0, now_s - health.committed_s)
    ready = health.failing is None and age_s < STALE_AFTER_S
    document: Document = {
        "schema_version": 1,
        "ready": ready,
        "last_commit_age_s": age_s,
        "last_decision_s": core.state.last_decision_s,
        "nodes_up": sum(
            node.last_seen_s is not None and not node.silent for node in core.state.nodes.values()
        ),
        "error": None if health.failing is None else health.failing.to_problem(),
    }
    if ready:
        return json_response(document)
    error = RetryLater(
        "HW-SRV-009",
        "the service is not ready",
        because="it decides no more" if health.failing is None else health.failing.message,
        hint="see the service's log" if health.failing is None else health.failing.hint,
    )
    return json_response({**document, **error.to_problem()}, error.http_status)


def nodes_document(services: Services, caller: Caller | None) -> Document:
    """Return all nodes as a caller sees them; None is an anonymous caller."""
    core = services.core
    state, now_s = core.state, core.clock.now_s()
    return listing("nodes", [node_view(state, node, caller, now_s) for node in state.nodes.values()])


def cluster_document(services: Services) -> Document:
    """Return the cluster as a whole."""
    return cluster_view(services.core.state, services.core.inventory.name)
