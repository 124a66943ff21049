# SPDX-License-Identifier: Apache-2.0
"""Doing something to a module right after somebody else imported it, without importing it oneself."""

import importlib.abc
import importlib.machinery
import sys
from collections.abc import Callable, Mapping, Sequence
from types import CodeType, ModuleType

from horowatt.errors import HorowattError

Hook = Callable[[ModuleType], None]


def install(hooks: Mapping[str, Hook]) -> None:
    """Call each hook once, with its module, when that module has been imported.

    A hook that fails says so and leaves the module as it is: measuring must not stop a training.
    Errors of Horowatt's own are on purpose and end the import.
    """
    waiting = dict(hooks)
    for name in [name for name in waiting if name in sys.modules]:
        _call(waiting.pop(name), sys.modules[name])
    sys.meta_path.insert(0, _Finder(waiting))


def merged(*features: Mapping[str, Hook]) -> dict[str, Hook]:
    """Return the hooks of several features: those of one module are called in the order given."""
    by_name: dict[str, list[Hook]] = {}
    for hooks in features:
        for name, hook in hooks.items():
            by_name.setdefault(name, []).append(hook)
    return {name: _in_turn(hooks) for name, hooks in by_name.items()}


def _in_turn(hooks: Sequence[Hook]) -> Hook:
    def call_all(module: ModuleType) -> None:
        for hook in hooks:
            _call(hook, module)

    return call_all


def _call(hook: Hook, module: ModuleType) -> None:
    try:
        hook(module)
    except HorowattError:
        raise
    except Exception as error:  # noqa: BLE001 - whatever another version of the module makes of it
        sys.stderr.write(f"horowatt: {module.__name__} is left as it is: {type(error).__name__}: {error}\n")


class _Finder(importlib.abc.MetaPathFinder):
    def __init__(self, hooks: dict[str, Hook]) -> None:
        self._hooks = hooks

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        hook = self._hooks.pop(fullname, None)
        if hook is None:
            return None
        for finder in sys.meta_path:
            if finder is self or not hasattr(finder, "find_spec"):
                continue
            spec = finder.find_spec(fullname, path, target)
            if spec is not None:
                if spec.loader is not None:
                    spec.loader = _Loader(spec.loader, hook)
                return spec
        self._hooks[fullname] = hook
        return None


class _Loader(importlib.abc.Loader):
    """Stands in for a module's own loader until the module has been executed."""

    def __init__(self, loader: importlib.abc.Loader, hook: Hook) -> None:
        self._loader = loader
        self._hook = hook

    def __getattr__(self, name: str) -> object:
        return getattr(self._loader, name)

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType | None:
        return self._loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        module.__loader__ = self._loader
        if module.__spec__ is not None:
            module.__spec__.loader = self._loader
        self._loader.exec_module(module)
        _call(self._hook, module)

    def get_code(self, fullname: str) -> CodeType | None:
        code: CodeType | None = self._loader.get_code(fullname)  # type: ignore[attr-defined]
        return code
