# SPDX-License-Identifier: Apache-2.0
"""What a worker still does before it gives its slot back: callbacks that the script registered.

They run once, in the order of their registration and in the main thread, when the worker's slot was
taken back, or when the worker is ended by SIGTERM because its job was cancelled or suspended. One that
fails is printed and stops none of the others. All of them together have a grace (``HOROWATT_RELEASE_GRACE_S``
seconds, 60 by default); a process that is still at it then is ended without the rest. After SIGTERM the
launcher's own patience may be shorter: ten seconds, then it kills.

Known limitations:
    * A signal's handler runs between two bytecodes of the main thread. While that sits in a call
      into C that does not return (an allreduce whose peers are gone, say), no callback runs, and the
      launcher kills the process after its grace. Without any callback the signal keeps its default
      action and ends the process at once, so only scripts that want this wait for it.
    * The first registration must be made in the main thread for SIGTERM to be caught.
    * A script that installs a handler of its own for SIGTERM has taken over: nothing runs then, except
      by that handler (which may call the one it replaced).
"""

import _thread
import contextlib
import os
import signal
import sys
import threading
import traceback
from collections.abc import Callable
from types import FrameType
from typing import TypeVar

GRACE_VARIABLE = "HOROWATT_RELEASE_GRACE_S"
GRACE_S = 60.0
"""How long all callbacks together may take, seconds."""
_FLUSH_S = 1.0
EXIT_TERMINATED = 128 + int(signal.SIGTERM)

_Callback = TypeVar("_Callback", bound=Callable[[], object])
_Handler = Callable[[int, FrameType | None], object]


class _Leaving:
    """The state of one process."""

    def __init__(self) -> None:
        # Reentrant, because the signal may come while the main thread holds it.
        self.lock = threading.RLock()
        self.callbacks: list[Callable[[], object]] = []
        self.pid = os.getpid()
        self.begun = False
        self.standing_by = False
        self.catches = False


_state = _Leaving()
_forking = threading.local()


def on_leave(callback: _Callback) -> _Callback:
    """Have ``callback`` called without arguments before this worker gives its slot back.

    For what must not be lost with the process: close a file, upload a log. The other workers train on
    meanwhile without this one, so a callback must not wait for them: no collectives. May be used as a
    decorator, and called at any time; registering the same callback twice calls it twice.

    Args:
        callback: What it returns is not used; what it raises is printed.

    Raises:
        TypeError: when it cannot be called.
    """
    if not callable(callback):
        raise TypeError(f"on_leave needs something to call, not {type(callback).__name__}")
    with _state.lock:
        if _state.pid != os.getpid():
            # A forked child registers for itself; what its parent registered is the parent's.
            _forget()
        _state.callbacks.append(callback)
    _catch_sigterm()
    return callback


def stand_by() -> None:
    """Call nothing until :func:`join`: a worker that has not joined its job has nothing to give back."""
    _state.standing_by = True


def join() -> None:
    """End :func:`stand_by`."""
    _state.standing_by = False


def run_callbacks(exit_code: int = 0) -> bool:
    """Call what was registered, once in the life of the process; return False when there is nothing to do.

    Returns in time or not at all: when the grace is over, standard output and error are flushed and the
    process ends with ``exit_code``, wherever it is.

    Args:
        exit_code: With which the process ends that takes longer than its grace.
    """
    with _state.lock:
        if _state.begun or _state.standing_by or _state.pid != os.getpid() or not _state.callbacks:
            return False
        _state.begun = True
        callbacks = list(_state.callbacks)
    grace_s = _grace_s()
    done = _thread.allocate_lock()
    done.acquire()
    # Not a threading.Thread: its start takes a lock that the interrupted main thread may hold itself.
    _thread.start_new_thread(_watch, (done, grace_s, exit_code))
    try:
        for callback in callbacks:
            try:
                callback()
            except BaseException:  # noqa: BLE001 - sys.exit() in one must not keep the others from running
                _say(f"a callback of on_leave failed:\n{traceback.format_exc()}")
    finally:
        done.release()
    return True


def _catch_sigterm() -> None:
    """Take SIGTERM over if nobody else has; only the main thread can."""
    if _state.catches or threading.current_thread() is not threading.main_thread():
        return
    if signal.getsignal(signal.SIGTERM) is signal.SIG_DFL:
        signal.signal(signal.SIGTERM, _on_sigterm)
        _state.catches = True


def _on_sigterm(number: int, frame: FrameType | None) -> None:
    del frame
    if _state.pid != os.getpid():
        _die_by(number)
        return
    if _state.begun:
        # The slot was taken back and the callbacks are under way, or this signal came twice.
        return
    run_callbacks(EXIT_TERMINATED)
    # Neither a script's "except:" nor a thread of Horovod's that waits for its peers may keep it here.
    _flush()
    os._exit(EXIT_TERMINATED)


def _die_by(number: int) -> None:
    signal.signal(number, signal.SIG_DFL)
    os.kill(os.getpid(), number)


def _forget() -> None:
    _state.callbacks.clear()
    _state.begun = False
    _state.pid = os.getpid()


def _before_fork() -> None:
    """Hold the signal back: one that reached a child before it has the default action would be lost."""
    if _state.catches:
        _forking.mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})


def _unblock() -> None:
    mask = getattr(_forking, "mask", None)
    if mask is not None:
        _forking.mask = None
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)


def _in_child() -> None:
    """Give a forked child, such as a DataLoader's worker, the signal's default action back."""
    _state.lock = threading.RLock()
    if _state.catches and signal.getsignal(signal.SIGTERM) is _on_sigterm:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
    _state.catches = False
    _unblock()


os.register_at_fork(before=_before_fork, after_in_parent=_unblock, after_in_child=_in_child)


def _watch(done: _thread.LockType, grace_s: float, exit_code: int) -> None:
    if done.acquire(timeout=grace_s):
        return
    _say(f"the callbacks of on_leave took longer than {grace_s:g} s; leaving without the rest")
    flushed = _thread.allocate_lock()
    flushed.acquire()
    # A stream that the main thread is stuck in cannot be flushed by anybody else.
    _thread.start_new_thread(_flush_and_tell, (flushed,))
    flushed.acquire(timeout=_FLUSH_S)
    os._exit(exit_code)


def _flush_and_tell(flushed: _thread.LockType) -> None:
    _flush()
    flushed.release()


def _grace_s() -> float:
    try:
        grace_s = float(os.environ.get(GRACE_VARIABLE, ""))
    except ValueError:
        return GRACE_S
    return min(grace_s, threading.TIMEOUT_MAX) if grace_s >= 0 else GRACE_S


def _say(text: str) -> None:
    # Not through sys.stderr, whose buffer the signal may have interrupted half-way.
    with contextlib.suppress(OSError):
        os.write(2, f"horowatt: {text.rstrip()}\n".encode("utf-8", "replace"))


def _flush() -> None:
    for stream in (sys.stdout, sys.stderr):
        # Interrupted by the signal while it wrote, a stream cannot be flushed; closed, it need not be.
        with contextlib.suppress(Exception):
            stream.flush()
