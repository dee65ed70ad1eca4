"""when_imported: a call as soon as a program imports a module, which may be never."""

from __future__ import annotations

import importlib.machinery
import importlib.util
import sys
from collections.abc import Callable, Sequence
from importlib.abc import Loader, MetaPathFinder
from types import ModuleType
from typing import Any


def when_imported(module: str, call: Callable[[], object]) -> None:
    """Call `call` when `module` has been executed; at once if it has been already. What it raises
    is raised by the import."""
    if module in sys.modules:
        call()
        return
    sys.meta_path.insert(0, _Finder(module, call))


class _Finder(MetaPathFinder):
    """Finds one module as the others do, once, and has its loader call."""

    def __init__(self, module: str, call: Callable[[], object]) -> None:
        self._module = module
        self._call = call

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if name != self._module:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        if spec is not None and spec.loader is not None:
            spec.loader = _Calling(spec.loader, self._call)
        return spec


class _Calling(Loader):
    """A loader that calls when it has executed its module."""

    def __init__(self, loader: Loader, call: Callable[[], object]) -> None:
        self._loader = loader
        self._call = call

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType | None:
        return self._loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        if module.__spec__ is not None:
            module.__spec__.loader = self._loader  # which tells of sources, and reads resources
        module.__loader__ = self._loader
        self._loader.exec_module(module)
        self._call()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._loader, name)
