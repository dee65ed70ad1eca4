"""The walk behind patches: names in all modules get the objects that are due.

A name is known by the object that it has: a global of a module that is bound to one of a table's
objects, or to what stands for it, whoever bound it (`from ... import ...` does). Nothing else is
looked at: attributes of objects, default arguments, `functools.partial`, containers and local
variables keep what they have. Modules of torch_ckpt are left as they are. Undoing is the same walk,
so it reaches modules that were imported meanwhile.
"""

from __future__ import annotations

import logging
import sys
import threading
from collections.abc import Callable, Iterable
from types import ModuleType, TracebackType
from typing import Any, TypeVar

from torch_ckpt.errors import InvalidArgumentError
from torch_ckpt.patching.groups import wanted

logger = logging.getLogger(__name__)

# Signal handlers run in the middle of what this thread does, and may save.
_lock = threading.RLock()
_MISSING = object()
P = TypeVar("P", bound="Patch")


class Rebinding:
    """A table of objects and what stands for them.

    pairs: (an object of others, what stands for it).
    due: which of the two a module is to have now, of such an object.
    first: the package of these objects. Its modules are the first to be rebound: what other threads
        import meanwhile is in `sys.modules` by then, or takes its names from these.
    """

    def __init__(
        self,
        pairs: Iterable[tuple[Any, Any]],
        due: Callable[[ModuleType, Any], Any],
        first: str,
    ) -> None:
        self._pairs = list(pairs)  # alive, so that nothing else gets their ids
        self._original = {id(each): pair[0] for pair in self._pairs for each in pair}
        self._due = due
        self._first = first
        self._bound: set[tuple[ModuleType, str]] = set()  # the names that stand for ours

    def walk(self) -> None:
        """Give every name the object that is due. Can be interrupted, and called again."""
        for module in _modules(lambda name: f"{name}.".startswith(f"{self._first}.")):
            self._bind(module)
        others = _modules(lambda name: name.partition(".")[0] != "torch_ckpt")
        for module in {*others, *(module for module, _ in self._bound)}:
            self._bind(module)
        for module, name in list(self._bound):
            value = vars(module).get(name, _MISSING)
            if id(value) in self._original:
                continue
            self._bound.discard((module, name))
            if value is not _MISSING:
                said = f"{module.__name__}.{name}"
                logger.warning("%s has been rebound by other code meanwhile: it is left", said)
        logger.info("names that stand for torch_ckpt in other modules: %d", len(self._bound))

    def _bind(self, module: ModuleType) -> None:
        names = vars(module)  # asks no `__getattr__` of the module for anything
        for name, value in list(names.items()):
            original = self._original.get(id(value), _MISSING)
            if original is _MISSING:
                continue
            due = self._due(module, original)
            if due is original:
                names[name] = original
                self._bound.discard((module, name))
            else:
                self._bound.add((module, name))
                names[name] = due


def _modules(which: Callable[[str], bool]) -> list[ModuleType]:
    return [
        module
        for name, module in list(sys.modules.items())
        if isinstance(module, ModuleType) and which(name)
    ]


class Patch:
    """An active patch of names. As a context manager it is undone at the end of the block."""

    def __init__(self, rebinding: Rebinding, groups: tuple[str, ...]) -> None:
        self._rebinding = rebinding
        self._is_over = False
        with _lock:
            wanted[self] = groups
            try:
                rebinding.walk()
            except BaseException:  # Ctrl-C: nobody has this patch, who could undo it
                self.undo()
                raise

    def undo(self) -> None:
        """Give every name its own object back, but those that another patch still wants. Once
        more does nothing, but for what an exception such as Ctrl-C has left undone. A name that
        other code has rebound while the patch was active is left as it is, with a warning in the
        log. What a program has kept of ours elsewhere makes stock's from now on."""
        with _lock:
            if not self._is_over:
                wanted.pop(self, None)
                self._rebinding.walk()
                self._is_over = True

    def __enter__(self: P) -> P:
        if self not in wanted:
            raise InvalidArgumentError("this patch is over: make another one")
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.undo()
