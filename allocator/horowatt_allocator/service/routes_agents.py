# SPDX-License-Identifier: Apache-2.0
"""The route that agents call."""

from fastapi import APIRouter, Response

from horowatt import wire
from horowatt.errors import NotAllowed
from horowatt.records import AgentReport
from horowatt_allocator.service.dependencies import ReportBytes, TheCaller, TheServices

router = APIRouter()


@router.post("/v1/agents/{node}/report")
def take_report(services: TheServices, caller: TheCaller, node: str, body: ReportBytes) -> Response:
    """Take over what an agent says and answer with its orders."""
    if not caller.agent:
        raise NotAllowed(
            "HW-NODE-005",
            f"{caller.shown_name} may not report as an agent",
            because="only root, the service's own user and the configured agent_users may",
            hint="run the agent as one of them, or add the user to agent_users in the configuration",
        )
    orders = services.core.report(node, wire.decode(body, AgentReport))
    return Response(wire.encode(orders), media_type="application/json")
