# SPDX-License-Identifier: Apache-2.0
"""Records as rows: JSON that is proven to come back, and writing what differs."""

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, TypeVar

import msgspec
import sqlalchemy as sa

from horowatt import wire
from horowatt.errors import InvalidInput, NeedsOperator
from horowatt_allocator.records.cluster import Node
from horowatt_allocator.records.jobs import Job, JobEstimate, LeaseState

T = TypeVar("T")


def decode_document(path: Path, text: str, kind: Any) -> Any:
    """Return the record that a document of the database at ``path`` describes.

    Raises:
        NeedsOperator: ``HW-DB-001`` when it cannot be read.
    """
    try:
        return msgspec.json.decode(text, type=kind)
    except msgspec.DecodeError as error:
        raise NeedsOperator(
            "HW-DB-001",
            f"{path} holds a record that cannot be read",
            because=str(error),
            hint="restore it from a backup; running jobs go on meanwhile",
            fields={"path": str(path)},
        ) from error


def changed_records(before: Mapping[str, T], after: Mapping[str, T]) -> Iterator[tuple[str, T]]:
    """Yield the records of ``after`` that ``before`` lacks or has otherwise."""
    if before is after:
        return
    for name, record in after.items():
        old = before.get(name)
        if old is not record and old != record:
            yield name, record


def write_rows(
    connection: sa.Connection,
    table: sa.Table,
    key: str,
    before: Mapping[str, Any],
    after: Mapping[str, Any],
    to_row: Callable[[Any], dict[str, object]],
) -> int:
    """Write the records that differ, insert new ones, delete those that are gone; return how many."""
    if before is after:
        return 0
    new, changed = [], []
    for name, record in changed_records(before, after):
        row = {key: name, **to_row(record)}
        if name in before:
            changed.append({f"b_{column}": value for column, value in row.items()})
        else:
            new.append(row)
    gone = [name for name in before if name not in after]
    if new:
        connection.execute(sa.insert(table), new)
    if changed:
        columns = [name.removeprefix("b_") for name in changed[0] if name != f"b_{key}"]
        connection.execute(
            sa.update(table)
            .where(table.c[key] == sa.bindparam(f"b_{key}"))
            .values({name: sa.bindparam(f"b_{name}") for name in columns}),
            changed,
        )
    if gone:
        connection.execute(
            sa.delete(table).where(table.c[key] == sa.bindparam("b_gone")), [{"b_gone": n} for n in gone]
        )
    return len(new) + len(changed) + len(gone)


def encode_document(record: object, kind: Any) -> str:
    """Return the JSON of a record of type ``kind``.

    Raises:
        NeedsOperator: ``HW-DB-005`` when it would not come back as it is.
    """
    # JSON has no infinities and no NaN. A record that would not come back as it is must not be
    # written: the service could never start again.
    try:
        text = wire.encode(record).decode()
        same = msgspec.json.decode(text, type=kind) == record
    except (TypeError, ValueError, InvalidInput) as error:
        raise _unstorable(record, str(error)) from error
    if not same:
        raise _unstorable(record, "it would not come back as it is")
    return text


def _unstorable(record: object, because: str) -> NeedsOperator:
    return NeedsOperator(
        "HW-DB-005",
        f"a {type(record).__name__} cannot be stored",
        because=because,
        hint="this is a defect of Horowatt; please report it with the service's log",
    )


def job_row(job: Job) -> dict[str, object]:
    """Return the columns of a job, its key left out."""
    return {
        "name": job.spec.name,
        "tenant": job.spec.tenant,
        "uid": job.spec.uid,
        "phase": job.phase.value,
        "submitted_at_s": job.spec.submitted_at_s,
        "document": encode_document(job, Job),
    }


def lease_row(lease: LeaseState) -> dict[str, object]:
    """Return the columns of a lease, its key left out."""
    return {"job_id": lease.job_id, "node": lease.node, "document": encode_document(lease, LeaseState)}


def estimate_row(estimate: JobEstimate) -> dict[str, object]:
    """Return the columns of the estimate of a job, its key left out."""
    return {"document": encode_document(estimate, JobEstimate)}


def node_row(node: Node) -> dict[str, object]:
    """Return the columns of a node, its key left out."""
    return {"document": encode_document(node, Node)}
