# SPDX-License-Identifier: Apache-2.0
"""Streams of jobs on their way into the database: whole lines, bounded per job.

A stream arrives in pieces that may end within a line. Only whole lines become visible; the rest
waits as the stream's *tail* for the next piece, or for the end of the job.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace

from horowatt.records import StreamChunk

MAX_LOG_BYTES_PER_JOB = 64 << 20
"""What is kept of one job's streams together, bytes."""
MAX_TAIL_LENGTH = 64 << 10
"""A line longer than this, in characters, is broken."""

StreamKey = tuple[str, str, str]
"""Job id, node and name of a stream."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamState:
    """One stream as the database has it.

    Attributes:
        offset_bytes: Up to where the node's file was taken over.
        kept_bytes: How much of it counts against the job's bound.
        tail: Text after the last whole line.
    """

    offset_bytes: int = 0
    kept_bytes: int = 0
    tail: str = ""


@dataclass(slots=True)
class Taken:
    """What a set of pieces changes: new states of streams, and lines that become visible."""

    states: dict[StreamKey, StreamState] = field(default_factory=dict)
    pieces: list[tuple[StreamKey, str]] = field(default_factory=list)


def is_next(chunk: StreamChunk, held_bytes: int) -> bool:
    """Tell whether a chunk begins where the held part of its stream ends.

    Any other is a repeat, or comes too early: the node is told the right offset in its orders.
    """
    return chunk.offset == held_bytes and chunk.next_offset > chunk.offset


def take(
    chunks: Iterable[tuple[StreamKey, StreamChunk]],
    known: Mapping[StreamKey, StreamState],
    kept_by_job: Mapping[str, int],
) -> Taken:
    """Return what fresh chunks change.

    Args:
        known: States of the streams so far; absent means nothing held.
        kept_by_job: Bytes kept of each job so far.
    """
    taken = Taken()
    kept = dict(kept_by_job)
    for key, chunk in chunks:
        before = taken.states.get(key) or known.get(key) or StreamState()
        text, size = chunk.text.replace("\x00", "\ufffd"), chunk.next_offset - chunk.offset
        room = MAX_LOG_BYTES_PER_JOB - kept.get(key[0], 0)
        if room <= 0:
            taken.states[key] = replace(before, offset_bytes=chunk.next_offset)
            continue
        kept[key[0]] = kept.get(key[0], 0) + size
        whole, tail = _cut(before.tail + (text if size <= room else text[:room]))
        if size > room:
            whole, tail = whole + tail + ("\n" if tail else "") + _marker(key), ""
        if whole:
            taken.pieces.append((key, whole))
        taken.states[key] = StreamState(
            offset_bytes=chunk.next_offset, kept_bytes=before.kept_bytes + size, tail=tail
        )
    return taken


def flush(taken: Taken, job_id: str, known: Mapping[StreamKey, StreamState]) -> None:
    """Make the last line of each stream of an ended job visible, whether it is whole or not."""
    keys = {key for key in (*known, *taken.states) if key[0] == job_id}
    for key in sorted(keys):
        state = taken.states.get(key) or known[key]
        if state.tail:
            taken.pieces.append((key, state.tail + "\n"))
            taken.states[key] = replace(state, tail="")


def _cut(text: str) -> tuple[str, str]:
    end = text.rfind("\n") + 1
    whole, tail = text[:end], text[end:]
    if len(tail) > MAX_TAIL_LENGTH:
        return whole + tail + "\n", ""
    return whole, tail


def _marker(key: StreamKey) -> str:
    return (
        f"[horowatt] more than {MAX_LOG_BYTES_PER_JOB >> 20} MiB of output: the rest of this job's log "
        f"is only in its folder on node {key[1]}\n"
    )
