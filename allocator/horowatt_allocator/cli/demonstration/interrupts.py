# SPDX-License-Identifier: Apache-2.0
"""What Ctrl-C does during the demo: unwind once, then wait until every process has ended."""

import contextlib
import signal
from collections.abc import Callable, Iterator
from types import FrameType


@contextlib.contextmanager
def interrupts_unwind() -> Iterator[None]:
    """Let a polite request to end, and a closed terminal, unwind like Ctrl-C."""

    def unwind(_number: int, _frame: FrameType | None) -> None:
        raise KeyboardInterrupt

    with _handling((signal.SIGTERM, signal.SIGHUP), unwind):
        yield


@contextlib.contextmanager
def interrupts_wait(say: Callable[[str], None]) -> Iterator[None]:
    """Do not let impatience leave processes behind."""

    def wait(_number: int, _frame: FrameType | None) -> None:
        say("still ending processes; this takes a moment")

    with _handling((signal.SIGINT, signal.SIGTERM, signal.SIGHUP), wait):
        yield


@contextlib.contextmanager
def _handling(numbers: tuple[signal.Signals, ...], handler: "signal._HANDLER") -> Iterator[None]:
    before = {number: signal.signal(number, handler) for number in numbers}
    try:
        yield
    finally:
        for number, old in before.items():
            signal.signal(number, old)
