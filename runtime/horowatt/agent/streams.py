# SPDX-License-Identifier: Apache-2.0
"""Pieces of a job's append-only files, on their way to the head."""

import codecs
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

from horowatt.errors import NotAllowed
from horowatt.files import read_owned
from horowatt.records import StreamChunk

CHUNK_LIMIT_BYTES = 64 * 1024
"""Most bytes of one stream in one report."""
REPORT_LIMIT_BYTES = 512 * 1024
"""Most bytes of all streams together in one report."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """One append-only file that a tenant owns.

    Attributes:
        offset: Bytes that the head holds already.
        complete: True when nothing will be appended any more.
        whole_lines: True when readers want lines and not parts of them.
    """

    stream: str
    path: Path
    uid: int
    offset: int
    complete: bool
    whole_lines: bool = False


class Budget:
    """Bytes that one report has left for streams."""

    def __init__(self, limit_bytes: int = REPORT_LIMIT_BYTES) -> None:
        self.left_bytes = limit_bytes


def read_chunks(
    sources: Iterable[Source], budget: Budget, refused: Callable[[NotAllowed], None]
) -> tuple[StreamChunk, ...]:
    """Return the next piece of every source that has one, as far as the budget goes.

    Args:
        refused: Told about files that are not what Horowatt put there; they are not read.
    """
    chunks: list[StreamChunk] = []
    for source in sources:
        if budget.left_bytes <= 0:
            break
        limit_bytes = min(CHUNK_LIMIT_BYTES, budget.left_bytes)
        try:
            data = read_owned(source.path, source.uid, limit_bytes=limit_bytes, offset=source.offset)
        except NotAllowed as error:
            refused(error)
            continue
        except OSError:
            # Not there yet, or gone with a worker's folder: there is nothing to send.
            continue
        chunk = cut(source, data, limit_bytes)
        if chunk is not None:
            budget.left_bytes -= chunk.next_offset - chunk.offset
            chunks.append(chunk)
    return tuple(chunks)


def cut(source: Source, data: bytes, limit_bytes: int) -> StreamChunk | None:
    """Return what of ``data`` can be sent: whole characters, and whole lines where wanted.

    A character that is only half there waits for its rest, unless no rest can come: the file is
    complete, or the bytes are no beginning of a character and so will never be one.
    """
    if source.whole_lines and b"\n" in data:
        data = data[: data.rindex(b"\n") + 1]
    elif source.whole_lines and not source.complete and len(data) < limit_bytes:
        return None
    at_end = source.complete and len(data) < limit_bytes
    text, num_bytes = codecs.utf_8_decode(data, "replace", at_end)
    if num_bytes == 0:
        return None
    return StreamChunk(
        stream=source.stream, offset=source.offset, next_offset=source.offset + num_bytes, text=text
    )
