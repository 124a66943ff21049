# SPDX-License-Identifier: Apache-2.0
"""Who pays for which GPU. Pure decisions, no I/O."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from horowatt.agent.meter import Holder
from horowatt.records import Lease


@dataclass(frozen=True, slots=True, kw_only=True)
class LeaseState:
    """A lease as the node sees it now.

    Attributes:
        generation: Generation of the job in which the lease was last published.
        published: True while the lease is in the job's published slots file.
        held: True while some process of its worker lives.
    """

    lease: Lease
    generation: int
    published: bool
    held: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Holders:
    """The answer of :func:`find_holders`.

    Attributes:
        by_gpu: Holder of every GPU that has one.
        contested: GPUs that more than one lease claims, with the claiming leases.
    """

    by_gpu: Mapping[str, Holder]
    contested: Mapping[str, tuple[str, ...]]


def find_holders(leases: Iterable[LeaseState]) -> Holders:
    """Return who pays for each GPU.

    A lease pays from its publication until it is out of the published slots file *and* no process
    of its worker lives. Should two claim one GPU, the one whose processes live there pays, and
    among those the one that had it first.
    """
    claims: dict[str, list[LeaseState]] = {}
    for state in leases:
        if state.published or state.held:
            claims.setdefault(state.lease.gpu_uuid, []).append(state)
    by_gpu: dict[str, Holder] = {}
    contested: dict[str, tuple[str, ...]] = {}
    for gpu_uuid, claimants in claims.items():
        payer = min(claimants, key=lambda state: (not state.held, state.published, state.lease.lease_id))
        by_gpu[gpu_uuid] = Holder(
            job_id=payer.lease.job_id, lease_id=payer.lease.lease_id, generation=payer.generation
        )
        if len(claimants) > 1:
            contested[gpu_uuid] = tuple(sorted(state.lease.lease_id for state in claimants))
    return Holders(by_gpu=by_gpu, contested=contested)
