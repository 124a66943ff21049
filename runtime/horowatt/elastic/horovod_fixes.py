# SPDX-License-Identifier: Apache-2.0
"""Everything that Horowatt changes in Horovod: each fix with its reason, in this one place.

``FIXES`` lists them. The driver's side is used by the launcher, the worker's side by the start of
workers, after the script itself has imported the part of Horovod in question. Horovod is patched from
outside, so a version that these fixes were not tested with is refused.

Nothing here imports Horovod before a function is called: scripts without it never load it.
"""

import functools
import importlib.metadata
import logging
import os
import sys
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from types import ModuleType
from typing import Any

from horowatt.elastic import rendezvous
from horowatt.elastic.standby import Standby
from horowatt.errors import NeedsOperator

TESTED_VERSION = "0.28.1"
"""The only version of Horovod these fixes are applied to."""

DISCOVERY_INTERVAL_S = 0.1
RENOTIFY_INTERVAL_S = 2.0
GLOO_TIMEOUT_S = 120
"""How long survivors wait for a newcomer's imports, seconds. Longer also means slower to notice a peer
that hangs during training; a peer that dies is noticed at once."""

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Fix:
    """One change to Horovod's behaviour.

    Attributes:
        where: What is subclassed or patched.
        reason: What goes wrong without it.
    """

    name: str
    where: str
    reason: str


FIXES = (
    Fix(
        "discovery-interval",
        "runner.elastic.driver.DISCOVER_HOSTS_FREQUENCY_SECS",
        "a new hostfile is seen up to a second late, and there is no option for it",
    ),
    Fix(
        "float-timestamps",
        "runner.elastic.driver._epoch_time_s",
        "two updates within one second, or a clock set back, and workers drop the second update",
    ),
    Fix(
        "lost-notifications",
        "runner.elastic.driver.ElasticDriver",
        "an update that comes while workers start or reset is never sent again, so a published slot "
        "stays unused or a withdrawn one stays held for good",
    ),
    Fix(
        "closed-rendezvous",
        "runner.http.http_server, runner.http.http_client, common/gloo/http_store.cc",
        "anybody who reaches the port reads keys, records READY and has pickles run (CVE-2024-10190, "
        "CVE-2026-31234); see horowatt.elastic.rendezvous",
    ),
    Fix(
        "closed-notifications",
        "runner.common.util.network.BasicService",
        "it listens on every interface, takes any length, and a silent stranger keeps a worker from ending",
    ),
    Fix(
        "port-range",
        "runner.util.network.find_port, gloo/transport/tcp/pair.cc",
        "ports are chosen at random, so no firewall can let just them through",
    ),
    Fix(
        "process-sets-let-go",
        "common/gloo/gloo_context.cc",
        "after a death a survivor that waits for another survivor learns of it only by Gloo's time-out",
    ),
    Fix(
        "one-mesh-for-all",
        "common/gloo/gloo_context.cc",
        "every connection among the workers is built twice at each resize",
    ),
    Fix(
        "gloo-timeout",
        "HOROVOD_GLOO_TIMEOUT_SECONDS",
        "a newcomer that imports for more than 30 s aborts every survivor",
    ),
    Fix(
        "orderly-leave",
        "torch.mpi_ops.init",
        "a worker whose slot was withdrawn is aborted: no atexit, no flushed output, a core dump",
    ),
    Fix(
        "no-rewind",
        "torch.elastic.TorchState.check_host_updates",
        "attributes fall back to the last commit while the model does not; and survivors that skip "
        "the synchronisation wait for a newcomer that does not, for ever",
    ),
    Fix(
        "replica-drift",
        "torch.functions.broadcast_optimizer_state, torch.elastic.TorchState.sync",
        "a newcomer's optimizer makes a real step to create its state, so weight decay shrinks its "
        "parameters, and those of nobody else, after the model was synchronised",
    ),
    Fix(
        "exactly-once",
        "torch.elastic.ElasticSampler, torch.optimizer",
        "shares are padded with samples that are trained twice, and a short last batch weighs as much as a "
        "full one; see horowatt.elastic.sampling",
    ),
    Fix(
        "warm-join",
        "torch.mpi_ops, torch.elastic.run",
        "all workers stop while a new one imports and sets itself up, and die with it when it fails; see "
        "horowatt.elastic.standby",
    ),
    Fix(
        "saved-state-apart",
        "torch.elastic.state.OptimizerStateHandler.restore",
        "load_state_dict keeps the saved tensors themselves, so training after a restore changes the saved "
        "state; see horowatt.elastic.commit_state",
    ),
    Fix(
        "durable-commits",
        "common.elastic.run_fn",
        "commits are in the memory of workers only; see horowatt.elastic.commits",
    ),
)


def require_tested_version() -> None:
    """Refuse a Horovod that is absent or that the fixes were not tested with.

    Raises:
        NeedsOperator: ``HW-JOB-007``.
    """
    try:
        found = importlib.metadata.version("horovod")
    except importlib.metadata.PackageNotFoundError as error:
        raise NeedsOperator(
            "HW-JOB-007",
            "Horovod is not installed in the Python environment of this job",
            because=f"{sys.executable} does not find it",
            hint="activate that environment and run 'horowatt build-horovod'",
        ) from error
    if found != TESTED_VERSION:
        raise NeedsOperator(
            "HW-JOB-007",
            f"Horovod {found} is not supported",
            because=f"Horowatt repairs Horovod's elastic mode and was tested with {TESTED_VERSION} only",
            hint=f"install {TESTED_VERSION}: 'horowatt build-horovod'",
            fields={"found": found, "tested": TESTED_VERSION},
        )


# ---------------------------------------------------------------------------------------- driver


@functools.cache
def _monotonic_epoch() -> Callable[[], float]:
    last_s = 0.0

    def epoch_s() -> float:
        nonlocal last_s
        last_s = max(time.time(), last_s + 1e-3)
        return last_s

    return epoch_s


def prepare_driver_module() -> None:
    """Apply the fixes that are constants and functions of Horovod's driver module; may be repeated."""
    require_tested_version()
    from horovod.runner.elastic import driver

    driver.DISCOVER_HOSTS_FREQUENCY_SECS = DISCOVERY_INTERVAL_S
    driver._epoch_time_s = _monotonic_epoch()  # noqa: SLF001


def make_driver(
    server: Any,
    discovery: Any,
    *,
    min_width: int,
    max_width: int,
    on_assignment: Callable[[tuple[str, ...]], None],
) -> Any:
    """Return an ``ElasticDriver`` that repeats lost notifications and says what it assigns.

    Args:
        on_assignment: Called with the host names in the order of their ranks, before workers start.
    """
    from horovod.runner.elastic.driver import ElasticDriver
    from horovod.runner.elastic.worker import HostUpdateResult

    class RenotifyingDriver(ElasticDriver):  # type: ignore[misc]
        def start(self, num_proc: int, create_worker_fn: Any) -> None:
            super().start(num_proc, create_worker_fn)
            threading.Thread(target=self._renotify, name="renotify", daemon=True).start()

        def _renotify(self) -> None:
            while not self._shutdown.wait(RENOTIFY_INTERVAL_S):
                try:
                    current = self._host_manager.current_hosts
                    # It compares first, and sends only if an assignment of these hosts would differ.
                    self._notify_workers_host_changes(current, HostUpdateResult.mixed)
                except Exception:  # noqa: BLE001 - the thread must outlive whatever a send raises
                    _log.exception("repeating a notification failed; trying again")

        def _update_host_assignments(self, current_hosts: Any) -> Any:
            pending = super()._update_host_assignments(current_hosts)
            ranks = sorted(self._rank_assignments)
            on_assignment(tuple(self._rank_assignments[rank].hostname for rank in ranks))
            return pending

    return RenotifyingDriver(server, discovery, min_width, max_width, reset_limit=None, cooldown_range=None)


def release_waiting(driver: Any) -> None:
    """Let go of the threads that answer workers of a world whose workers have all ended."""
    barrier = driver._worker_registry._barrier  # noqa: SLF001 - there is no other way to it
    if barrier is not None:
        barrier.abort()


# ---------------------------------------------------------------------------------------- workers


def worker_hooks(
    *,
    on_world: Callable[[int, int], None],
    on_leave: Callable[[], None],
    uncounted: Callable[[], Any],
    on_phase: Callable[[str], None] = lambda _: None,
    standby: Standby | None = None,
) -> Mapping[str, Callable[[ModuleType], None]]:
    """Return what to do to modules of Horovod once a script has imported them, by module name.

    Args:
        on_world: Called with rank and size after each ``hvd.init`` of a world with others.
        on_leave: Called before a worker whose slot was withdrawn exits.
        uncounted: Returns a context manager within which optimizer steps are not training.
        on_phase: Called with ``"interrupted"`` and ``"synced"`` when a resize has come so far.
        standby: What this worker is until it joins, if it was started as one.
    """
    return {
        "horovod.common": lambda _: require_tested_version(),
        "horovod.torch.mpi_ops": lambda module: _patch_init(module, on_world, on_leave, standby),
        "horovod.torch.functions": lambda module: _patch_broadcast_optimizer_state(module, uncounted),
        "horovod.torch.elastic.state": lambda module: _patch_state(module, on_phase, standby),
    }


_ASSIGNED = (
    "HOROVOD_RANK",
    "HOROVOD_SIZE",
    "HOROVOD_LOCAL_RANK",
    "HOROVOD_LOCAL_SIZE",
    "HOROVOD_CROSS_RANK",
    "HOROVOD_CROSS_SIZE",
)


def _patch_init(
    module: ModuleType,
    on_world: Callable[[int, int], None],
    on_leave: Callable[[], None],
    standby: Standby | None,
) -> None:
    original = module.init
    entered = False

    @functools.wraps(original)
    def init(*args: Any, **kwargs: Any) -> None:
        nonlocal entered
        if module.is_initialized():
            original(*args, **kwargs)
            return
        if standby is not None and standby.waiting:
            standby.private_init(original, *args, **kwargs)
            return
        elastic = os.environ.get("HOROVOD_ELASTIC") == "1" and "HOROVOD_GLOO_RENDEZVOUS_ADDR" in os.environ
        if elastic and (entered or standby is not None):
            # A standby that joins was told its place.
            assignment = _ask_for_assignment() if entered else {}
            if assignment is None:
                on_leave()
                raise SystemExit(0)
            os.environ.update(assignment)
            # The question may be asked once per reset: this keeps the native side from asking again.
            # It remembers from its first start that the job is elastic.
            os.environ["HOROVOD_ELASTIC"] = "0"
            try:
                original(*args, **kwargs)
            finally:
                os.environ["HOROVOD_ELASTIC"] = "1"
        else:
            original(*args, **kwargs)
        entered = True
        on_world(module.rank(), module.size())

    module.init = init  # type: ignore[attr-defined]


def _ask_for_assignment() -> dict[str, str] | None:
    """Say that this worker is ready, wait for the others, and return its place; None for no place."""
    key = f"{os.environ['HOROVOD_HOSTNAME']}:{os.environ['HOROVOD_LOCAL_RANK']}"
    values = rendezvous.fetch(f"rank_and_size/{key}").decode("ascii").split(",")
    return None if values[0] == "-1" else dict(zip(_ASSIGNED, values, strict=True))


def _patch_broadcast_optimizer_state(module: ModuleType, uncounted: Callable[[], Any]) -> None:
    original = module.broadcast_optimizer_state

    @functools.wraps(original)
    def broadcast_optimizer_state(optimizer: Any, *args: Any, **kwargs: Any) -> Any:
        with uncounted():
            if optimizer.state_dict()["state"]:
                return original(optimizer, *args, **kwargs)
            decay = [group.get("weight_decay") for group in optimizer.param_groups]
            grads = [[parameter.grad for parameter in group["params"]] for group in optimizer.param_groups]
            with _without_decay(optimizer, decay, grads):
                _create_state(module, optimizer)
            if optimizer.state_dict()["state"]:
                return original(optimizer, *args, **kwargs)
            # An optimizer without state steps once more in there and broadcasts nothing.
            with _without_decay(optimizer, decay, grads):
                return original(optimizer, *args, **kwargs)

    module.broadcast_optimizer_state = broadcast_optimizer_state  # type: ignore[attr-defined]


class _without_decay:  # noqa: N801 - reads as the statement it is used in
    """Keeps weight decay and gradients out of steps that only create an optimizer's state."""

    def __init__(self, optimizer: Any, decay: list[Any], grads: list[list[Any]]) -> None:
        self._groups = optimizer.param_groups
        self._decay = decay
        self._grads = grads

    def __enter__(self) -> None:
        for group in self._groups:
            if "weight_decay" in group:
                group["weight_decay"] = 0.0

    def __exit__(self, *_: object) -> None:
        for group, decay, grads in zip(self._groups, self._decay, self._grads, strict=True):
            if "weight_decay" in group:
                group["weight_decay"] = decay
            for parameter, grad in zip(group["params"], grads, strict=True):
                parameter.grad = grad


def _create_state(module: ModuleType, optimizer: Any) -> None:
    from horovod.torch.optimizer import DistributedOptimizer

    torch = module.torch
    if isinstance(optimizer, torch.optim.SparseAdam | torch.optim.LBFGS):
        return
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if parameter.requires_grad:
                parameter.grad = torch.zeros_like(parameter)
    if optimizer.__module__ == DistributedOptimizer.__module__:
        # The step of the wrapped class: the distributed one would wait for all other workers.
        super(optimizer.__class__, optimizer).step()
    else:
        optimizer.step()


def _patch_state(module: ModuleType, on_phase: Callable[[str], None], standby: Standby | None) -> None:
    from horovod.common.elastic import ObjectState
    from horovod.common.exceptions import HostsUpdatedInterrupt

    state_class = module.TorchState
    check = state_class.check_host_updates
    original_commit = state_class.commit

    def check_host_updates(self: Any) -> None:
        try:
            check(self)
        except HostsUpdatedInterrupt as interrupt:
            on_phase("interrupted")
            if not getattr(self, "_horowatt_committing", False):
                self.save()
            raise HostsUpdatedInterrupt(False) from interrupt

    def commit(self: Any) -> None:
        # It has just saved, and a second copy of a large state would be made while all wait.
        self._horowatt_committing = True
        try:
            original_commit(self)
        finally:
            self._horowatt_committing = False

    def sync(self: Any) -> None:
        # Models last: what an optimizer does to them while it creates its state is overwritten.
        for handler in sorted(self._handlers.values(), key=_is_model(module)):
            handler.sync()
        ObjectState.sync(self)
        if standby is None or not standby.waiting:
            on_phase("synced")

    state_class.commit = commit
    state_class.check_host_updates = check_host_updates
    state_class.sync = sync


def _is_model(module: ModuleType) -> Callable[[Any], bool]:
    return lambda handler: isinstance(handler, module.ModelStateHandler)


def names(fixes: Iterable[Fix] = FIXES) -> tuple[str, ...]:
    """Return the names of all fixes."""
    return tuple(fix.name for fix in fixes)
