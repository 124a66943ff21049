# SPDX-License-Identifier: Apache-2.0
"""Between ``hvd.elastic`` states and commits: what of a state goes into a commit, and back again.

A ``TorchState`` holds handlers (models, optimizers, samplers) and attributes (everything else), an
``ObjectState`` attributes only. A handler keeps a copy of what it last saved in one attribute whose name
begins with ``_saved_``; the next save replaces the copy, and nothing changes it in place, so it need not
be copied again. Attributes are the script's own objects: they are copied while they are encoded. What a
subclass keeps elsewhere is not part of a commit.
"""

import copy
import functools
import sys
from types import ModuleType
from typing import Any

from horowatt.elastic.commit_files import Snapshot, StoredCommit
from horowatt.errors import InvalidInput

_SAVED = "_saved_"
_SHOWN = 3
"""Differences that an error names."""


def is_supported(state: Any) -> bool:
    """Return True for a ``TorchState`` and for a plain ``ObjectState`` of a PyTorch script."""
    torch_states = sys.modules.get("horovod.torch.elastic.state")
    if torch_states is None:
        return False
    return isinstance(state, torch_states.TorchState) or type(state) is torch_states.ObjectState


def keep_saved_state_apart(module: ModuleType) -> None:
    """Repair ``horovod.torch.elastic.state``: what was restored must not change what was saved.

    Since PyTorch 2.0 ``Optimizer.load_state_dict`` takes the tensors it is given where they fit. Horovod
    gives it the saved ones, so after a restore each step changes the saved state too: a second failure
    before the next commit restores a state that never was, and a commit that is being written is torn.
    """
    handler_class = module.OptimizerStateHandler
    original = handler_class.restore

    @functools.wraps(original)
    def restore(self: Any) -> None:
        saved = self._saved_optimizer_state
        self._saved_optimizer_state = copy.deepcopy(saved)
        try:
            original(self)
        finally:
            self._saved_optimizer_state = saved

    handler_class.restore = restore


def _saved_name(handler: Any) -> str | None:
    names = [name for name in vars(handler) if name.startswith(_SAVED)]
    return names[0] if len(names) == 1 else None


def _handlers(state: Any) -> dict[str, Any]:
    return dict(getattr(state, "_handlers", {}))


def capture(state: Any, snapshot: Snapshot) -> None:
    """Put what ``state`` last saved into ``snapshot``.

    Raises:
        InvalidInput: ``HW-COMMIT-007`` when part of it cannot be stored.
    """
    for name, handler in _handlers(state).items():
        saved = _saved_name(handler)
        if saved is None:
            kind = type(handler).__name__
            raise InvalidInput(
                "HW-COMMIT-007",
                f"the state cannot be stored: it is not known how {kind} keeps {name!r}",
                because=f"a handler has one attribute whose name begins with {_SAVED!r}, as Horovod's have",
                hint="use Horovod's own handlers, or hold the object's values in plain attributes",
                fields={"name": name},
            )
        type_name = type(handler.value).__name__
        snapshot.add("handler", name, type_name, getattr(handler, saved), live=False)
    for name, value in state._saved_state.items():  # noqa: SLF001 - Horovod has no other name for it
        snapshot.add("attribute", name, type(value).__name__, value, live=True)


def restore(state: Any, commit: StoredCommit, path: str) -> list[str]:
    """Load a commit into ``state``, which is then as it was right after that commit.

    Models, optimizers and samplers must be those of the commit: same names, parameters, shapes and
    classes of optimizers. Attributes may differ, because people add and remove them: one that the commit
    lacks keeps the value that the script gave it, one that the script lacks is dropped.

    Args:
        path: Where the commit came from, for the error.

    Returns:
        Remarks for the user about attributes that differ.

    Raises:
        InvalidInput: ``HW-COMMIT-005`` when the commit does not fit; ``state`` must not be used then.
    """
    handlers = _handlers(state)
    stored = commit.names("handler")
    differences = [f"the script has no {name!r}" for name in stored if name not in handlers]
    differences += [f"the commit has no {name!r}" for name in handlers if name not in stored]
    loaded = {}
    if not differences:
        for name, handler in handlers.items():
            loaded[name] = _load(commit, "handler", name, differences)
            if name in loaded and not differences:
                differences += _compare(name, handler.value, loaded[name], stored[name])
    known = [name for name in state._saved_state if name in commit.names("attribute")]  # noqa: SLF001
    values = {name: _load(commit, "attribute", name, differences) for name in known}
    if not differences:
        for name, handler in handlers.items():
            try:
                setattr(handler, _saved_name(handler) or "", loaded[name])
                handler.restore()
            except Exception as error:  # noqa: BLE001 - load_state_dict raises what it likes
                differences.append(f"{name!r}: {type(error).__name__}: {error}")
                break
    if differences:
        more = f", and {len(differences) - _SHOWN} more" if len(differences) > _SHOWN else ""
        raise InvalidInput(
            "HW-COMMIT-005",
            f"the last commit of this job does not fit its script: {path}",
            because="; ".join(differences[:_SHOWN]) + more,
            hint="go on with the script that made the commit, or move that folder away to start "
            "from the beginning",
            fields={"path": path},
        )
    remarks = [
        f"attribute {name!r} is not in the commit and keeps the value that the script gave it"
        for name in state._saved_state  # noqa: SLF001
        if name not in values
    ]
    remarks += [
        f"attribute {name!r} of the commit is not in the script and is dropped"
        for name in commit.names("attribute")
        if name not in values
    ]
    state._saved_state = {**state._saved_state, **values}  # noqa: SLF001
    state._set_attrs()  # noqa: SLF001
    return remarks


def _load(commit: StoredCommit, kind: str, name: str, differences: list[str]) -> Any:
    try:
        return commit.load(kind, name, to_device=kind == "attribute")
    except Exception as error:  # noqa: BLE001 - classes of the script raise what they like
        differences.append(f"{kind} {name!r} cannot be loaded: {type(error).__name__}: {error}")
        return None


def _compare(name: str, value: Any, saved: Any, stored_type: str) -> list[str]:
    import torch

    if isinstance(value, torch.optim.Optimizer):
        return _compare_optimizer(name, value, saved, stored_type)
    if isinstance(value, torch.nn.Module):
        return _compare_model(name, value.state_dict(), saved)
    return []


def _compare_model(name: str, now: Any, saved: Any) -> list[str]:
    differences = [f"the script has no {name}.{key}" for key in saved if key not in now]
    differences += [f"the commit has no {name}.{key}" for key in now if key not in saved]
    for key in saved:
        before, after = _shape(saved[key]), _shape(now.get(key))
        if before is not None and after is not None and before != after:
            differences.append(
                f"{name}.{key} is {_size(after)} in the script and {_size(before)} in the commit"
            )
    return differences


def _shape(value: Any) -> tuple[int, ...] | None:
    """Return a tensor's shape; None for extra state, which may be anything, and for lazy parameters."""
    try:
        return tuple(value.shape)
    except (AttributeError, RuntimeError):
        return None


def _size(shape: tuple[int, ...]) -> str:
    return "x".join(map(str, shape)) or "a scalar"


def _compare_optimizer(name: str, optimizer: Any, saved: Any, stored_type: str) -> list[str]:
    if type(optimizer).__name__ != stored_type:
        return [f"{name} is {type(optimizer).__name__} in the script and {stored_type} in the commit"]
    now = [len(group["params"]) for group in optimizer.param_groups]
    before = [len(group["params"]) for group in saved["param_groups"]]
    return [f"{name} has {now} parameters per group in the script and {before} in the commit"] * (
        now != before
    )
