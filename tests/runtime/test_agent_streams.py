# SPDX-License-Identifier: Apache-2.0
"""Logs on their way to the head: whole characters, whole lines, nobody else's files."""

import os
from pathlib import Path

import pytest

from horowatt.agent.streams import CHUNK_LIMIT_BYTES, Budget, Source, cut, read_chunks
from horowatt.errors import NotAllowed
from horowatt.records import StreamChunk


def source(path: Path, **more: object) -> Source:
    fields: dict[str, object] = {
        "stream": "launcher",
        "path": path,
        "uid": os.geteuid(),
        "offset": 0,
        "complete": False,
    }
    return Source(**{**fields, **more})  # type: ignore[arg-type]


def read(*sources: Source, budget: Budget | None = None) -> tuple[StreamChunk, ...]:
    refused: list[NotAllowed] = []
    chunks = read_chunks(sources, budget or Budget(), refused.append)
    assert not refused
    return chunks


def test_pieces_put_together_are_the_file(tmp_path: Path) -> None:
    """However a file is cut, its pieces follow each other and make up the whole text."""
    path = tmp_path / "log"
    text = "Grüße 🙂 naïve\n" * 20_000
    path.write_text(text, encoding="utf-8")
    offset, got = 0, ""
    while chunks := read(source(path, offset=offset)):
        (chunk,) = chunks
        assert chunk.offset == offset
        assert chunk.next_offset - chunk.offset <= CHUNK_LIMIT_BYTES
        got, offset = got + chunk.text, chunk.next_offset
    assert got == text
    assert offset == path.stat().st_size


def test_half_a_character_waits_for_its_rest() -> None:
    """A character of which only a part is written is sent once, whole."""
    half = "aé".encode()[:-1]
    first = cut(source(Path()), half, 100)
    assert first is not None
    assert (first.text, first.next_offset) == ("a", 1)
    assert cut(source(Path(), offset=1), half[1:], 100) is None


def test_half_a_character_at_the_end_is_shown_as_such() -> None:
    """A file that will not grow any more is sent to its last byte, whatever that is."""
    chunk = cut(source(Path(), complete=True), "aé".encode()[:-1], 100)
    assert chunk is not None
    assert (chunk.text, chunk.next_offset) == ("a\ufffd", 2)


def test_bytes_that_are_no_text_do_not_stop_a_stream() -> None:
    """Binary output is sent with replacement characters and moves the offset by its true length."""
    chunk = cut(source(Path()), b"\xff\xfe\x00ok", 100)
    assert chunk is not None
    assert (chunk.text, chunk.next_offset) == ("\ufffd\ufffd\x00ok", 5)


def test_events_are_sent_in_whole_lines() -> None:
    """A reader of events never sees a part of one."""
    chunk = cut(source(Path(), whole_lines=True), b'{"a":1}\n{"b"', 100)
    assert chunk is not None
    assert (chunk.text, chunk.next_offset) == ('{"a":1}\n', 8)
    assert cut(source(Path(), whole_lines=True), b'{"b"', 100) is None


def test_the_budget_of_a_report_is_kept(tmp_path: Path) -> None:
    """All streams together stay within the limit of one report."""
    for number in range(20):
        (tmp_path / str(number)).write_bytes(b"x" * CHUNK_LIMIT_BYTES)
    chunks = read(*(source(tmp_path / str(number)) for number in range(20)))
    assert sum(chunk.next_offset for chunk in chunks) == 8 * CHUNK_LIMIT_BYTES


@pytest.mark.parametrize("kind", ["link", "fifo", "folder"])
def test_a_tenants_trick_is_refused(tmp_path: Path, kind: str) -> None:
    """A link or special file in place of a log is not read, and the other streams are."""
    secret, good, path = tmp_path / "secret", tmp_path / "good", tmp_path / "log"
    secret.write_text("secret")
    good.write_text("fine")
    if kind == "link":
        path.symlink_to(secret)
    elif kind == "fifo":
        os.mkfifo(path)
    else:
        path.mkdir()
    refused: list[NotAllowed] = []
    chunks = read_chunks([source(path), source(good, stream="events")], Budget(), refused.append)
    assert [chunk.text for chunk in chunks] == ["fine"]
    assert [error.code for error in refused] == ["HW-FILE-001"]


@pytest.mark.root
def test_another_users_file_is_refused(tmp_path: Path) -> None:
    """A hard link to a file of somebody else is not read for this tenant."""
    if os.geteuid() != 0:
        pytest.skip("files of other users need root")
    path = tmp_path / "log"
    path.write_text("secret of root")
    refused: list[NotAllowed] = []
    assert read_chunks([source(path, uid=65534)], Budget(), refused.append) == ()
    assert [error.code for error in refused] == ["HW-FILE-001"]
