# SPDX-License-Identifier: Apache-2.0
"""The worker's side of a standby: the user's script, run up to ``hvd.elastic.run`` in a world of its own.

There Horovod has one rank and no rendezvous, so nothing of the job that trains can be disturbed.
``hvd.rank()`` and ``hvd.size()`` answer what the standby will be once it joins, so what a script does on
rank 0 only is not done twice; what Horovod itself does before that (collectives) runs in the private
world. At ``hvd.elastic.run`` the standby rehearses what comes after a join, says that it is ready, and waits
for its place in the real world, which it then enters like a worker that was there before.
"""

import functools
import gc
import os
import queue
import signal
import sys
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from types import ModuleType
from typing import Any

from horowatt.elastic import leaving, priority
from horowatt.elastic.control import Channel, Message
from horowatt.errors import InvalidInput

RENDEZVOUS_VARIABLE = "HOROWATT_RENDEZVOUS"
"""``address:port`` of the launcher, for a standby: Horovod's own variables would make it join at once."""
PROMISED_RANK_VARIABLE = "HOROWATT_PROMISED_RANK"
PROMISED_SIZE_VARIABLE = "HOROWATT_PROMISED_SIZE"
STEPS_BEFORE_RUN = 20
"""Optimizer steps that a script may make before ``hvd.elastic.run``, for a warm-up of its own."""
_PRIVATE = {
    "HOROVOD_RANK": "0",
    "HOROVOD_SIZE": "1",
    "HOROVOD_LOCAL_RANK": "0",
    "HOROVOD_LOCAL_SIZE": "1",
    "HOROVOD_CROSS_RANK": "0",
    "HOROVOD_CROSS_SIZE": "1",
}


class Standby:
    """What this worker is until it joins. ``waiting`` is True so long."""

    def __init__(
        self,
        channel: Channel,
        uncounted: Callable[[], AbstractContextManager[None]],
        on_join: Callable[[], None] = lambda: None,
    ) -> None:
        """Take the promised place from the environment.

        Args:
            uncounted: Returns a context manager within which optimizer steps are not training.
            on_join: Called when the launcher has told this standby to join.
        """
        self._on_join = on_join
        self.waiting = True
        self._channel = channel
        self._uncounted = uncounted
        self._joins: queue.Queue[Message | None] = queue.Queue()
        rank, size = os.environ[PROMISED_RANK_VARIABLE], os.environ[PROMISED_SIZE_VARIABLE]
        self._promised = {
            "rank": int(rank),
            "size": int(size),
            "local_rank": 0,
            "local_size": 1,
            "cross_rank": int(rank),
            "cross_size": int(size),
        }
        self._rehearsing = False
        self._steps = 0
        self._inits = 0

    def join(self, message: Message | None) -> None:
        """Take the message of the launcher that this standby's time has come; None when it is gone."""
        self._joins.put(message)

    def hooks(self) -> Mapping[str, Callable[[ModuleType], None]]:
        """Return what to do to modules of Horovod and PyTorch, by module name."""
        return {
            "horovod.torch.mpi_ops": self._promise,
            "horovod.torch.functions": self._stay_private,
            "horovod.torch.elastic": self._patch_run,
            "torch.optim.optimizer": self._watch_steps,
        }

    def private_init(self, init: Callable[..., None], *args: Any, **kwargs: Any) -> None:
        """Call Horovod's ``init`` so that it makes a world of this process alone."""
        promised = {name: os.environ.get(name) for name in _PRIVATE}
        os.environ.update(_PRIVATE)
        # The native side asks the rendezvous for its place when an elastic job starts a second time.
        os.environ["HOROVOD_ELASTIC"] = "1" if self._inits == 0 else "0"
        self._inits += 1
        try:
            init(*args, **kwargs)
        finally:
            os.environ["HOROVOD_ELASTIC"] = "1"
            for name, value in promised.items():
                if value is None:
                    del os.environ[name]
                else:
                    os.environ[name] = value

    def _promise(self, module: ModuleType) -> None:
        for name in self._promised:
            setattr(module, name, self._promised_or(name, getattr(module, name)))

    def _promised_or(self, name: str, native: Callable[[], int]) -> Callable[[], int]:
        @functools.wraps(native)
        def place() -> int:
            return self._promised[name] if self.waiting and not self._rehearsing else native()

        place.native = native  # type: ignore[attr-defined]
        return place

    @staticmethod
    def _stay_private(module: ModuleType) -> None:
        # It decides by the rank who sends and who receives, and in a world of one nobody sends to rank 1.
        for name in ("rank", "size"):
            found = getattr(module, name, None)
            setattr(module, name, getattr(found, "native", found))

    def _watch_steps(self, module: ModuleType) -> None:
        def before_step(*_: Any) -> None:
            if not self.waiting or self._rehearsing:
                return
            self._steps += 1
            if self._steps > STEPS_BEFORE_RUN:
                error = InvalidInput(
                    "HW-JOB-015",
                    "this script trains outside of hvd.elastic.run, so it cannot be given another worker",
                    because=f"it made {STEPS_BEFORE_RUN} optimizer steps without entering it",
                    hint="train in a function decorated with @hvd.elastic.run, or submit it with a fixed "
                    "width: --min N --max N",
                )
                sys.stderr.write(f"{error}\n")
                sys.stderr.flush()
                os.kill(os.getpid(), signal.SIGKILL)

        module.register_optimizer_step_pre_hook(before_step)

    def _patch_run(self, module: ModuleType) -> None:
        original = module.run
        shutdown, init = module.shutdown, module.init

        @functools.wraps(original)
        def run(func: Callable[..., Any]) -> Callable[..., Any]:
            entered = original(func)

            @functools.wraps(func)
            def wrapper(state: Any, *args: Any, **kwargs: Any) -> Any:
                if self.waiting:
                    self._wait(state, shutdown, init)
                return entered(state, *args, **kwargs)

            return wrapper

        module.run = run  # type: ignore[attr-defined]

    def _wait(self, state: Any, shutdown: Callable[[], None], init: Callable[[], None]) -> None:
        self._rehearse(state)
        gc.collect()
        self._channel.say({"ready": True})
        message = self._joins.get()
        if message is None:
            raise SystemExit(0)
        self._on_join()
        priority.step_forward()
        leaving.join()
        shutdown()
        os.environ.update(message["environment"])
        self.waiting = False
        init()
        state.on_reset()

    def _rehearse(self, state: Any) -> None:
        """Do now what would take its time while all others wait; nothing of it outlives the join."""
        self._rehearsing = True
        try:
            with self._uncounted():
                state.sync()
            self._connect()
            _warm_up()
        except Exception as error:  # noqa: BLE001 - what matters will be tried again, for real
            sys.stderr.write(f"horowatt: the rehearsal failed: {type(error).__name__}: {error}\n")
        finally:
            self._rehearsing = False

    @staticmethod
    def _connect() -> None:
        """Tell Horovod's driver where this worker can be notified."""
        from horovod.common.elastic import notification_manager

        address, _, port = os.environ[RENDEZVOUS_VARIABLE].rpartition(":")
        notification_manager.init(rendezvous_addr=address, rendezvous_port=int(port))


def _warm_up() -> None:
    """Have PyTorch start its threads and load its kernels."""
    import torch

    device = torch.device("cuda" if torch.cuda.is_available() and torch.cuda.is_initialized() else "cpu")
    weights = torch.zeros(8, 8, device=device, requires_grad=True)
    torch.nn.functional.cross_entropy(
        weights @ weights, torch.zeros(8, dtype=torch.long, device=device)
    ).backward()
