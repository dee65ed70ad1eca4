"""Objects of ours under the names of somebody else's functions and classes, until that is undone.

A `Table` says what takes the place of what, and a `Patch` is active for a time. It walks the
modules that are imported and rebinds every global name of an object in the table, and nothing else:
those of the package itself, where later imports find them, and those that `from ... import ...` has
bound elsewhere. Undoing walks again and gives every name of an object of ours the other one back,
also in modules that were imported meanwhile. Modules of torch_ckpt are left as they are.

Names that are no globals of a module are left too: attributes of classes and of other objects, base
classes, default arguments, functools.partial, entries of dicts, local variables; and what stands in
sys.modules and is no module. What such a place holds of stock stays stock's; what it has taken of
ours meanwhile it keeps, so that ours asks `is_wanted` when it is called, and else does what stock
does.
"""

from __future__ import annotations

import logging
import sys
import threading
import weakref
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any, NamedTuple, TypeVar

from torch_ckpt.errors import InvalidArgumentError
from torch_ckpt.patching.groups import is_wanted, wanted

logger = logging.getLogger(__name__)
_P = TypeVar("_P", bound="Patch")
# Signal handlers run in the middle of what this thread does, and may save.
_lock = threading.RLock()
_table_of: weakref.WeakValueDictionary[int, Table] = weakref.WeakValueDictionary()
_MISSING = object()


class Replacement(NamedTuple):
    """`ours` in the place of `stock` while a patch wants `group`, a word that no other table uses;
    with `module`, in that one instead of what holds elsewhere. `ours` needs to be an object that
    has no other name, since undoing gives all its names to `stock`."""

    stock: Callable[..., Any]
    ours: Callable[..., Any]
    group: str
    module: ModuleType | None = None


class Table:
    """All that one function replaces: `call` is its name, for messages, and `package` the one whose
    modules are walked first. Patches of a table nest, and are undone in any order. No object may be
    in two tables: the patch that is undone last would bind what the other one has put there."""

    def __init__(self, call: str, package: str, rows: Sequence[Replacement]) -> None:
        self.call = call
        self._package = package
        self._rows = {(id(row.stock), id(row.module)): row for row in rows}
        both = [(each, row.stock) for row in rows for each in (row.stock, row.ours)]
        self._stock_of = {id(each): stock for each, stock in both}
        self._bound: dict[tuple[int, str], ModuleType] = {}  # the names that stand for ours
        for each, stock in both:
            if id(each) in _table_of or self._stock_of[id(each)] is not stock:
                raise InvalidArgumentError(f"{call}: {each!r} is in a table already")
        _table_of.update(dict.fromkeys(self._stock_of, self))

    def rebind(self) -> None:
        """Give every name the object that is due. Can be interrupted, and called again."""
        # The package's own modules first: what other threads import meanwhile is in `sys.modules`
        # by then, or takes its names from these.
        for prefix in (f"{self._package}.", ""):
            for module in [*_modules(prefix), *self._bound.values()]:
                self._rebind_in(module)
        for (key, name), module in list(self._bound.items()):
            names = _names_of(module)
            value = names.get(name, _MISSING)
            if id(value) in self._stock_of:
                continue
            self._bound.pop((key, name), None)
            if value is not _MISSING:
                said = f"{names.get('__name__')}.{name}"
                logger.warning("%s has been rebound by other code meanwhile: it is left", said)
        logger.info("names that stand for torch_ckpt in other modules: %d", len(self._bound))

    def _rebind_in(self, module: ModuleType) -> None:
        names = _names_of(module)
        for name, value in names.copy().items():  # other threads may bind names meanwhile
            stock = self._stock_of.get(id(value))
            if stock is None:
                continue
            row = self._rows.get((id(stock), id(module))) or self._rows.get((id(stock), id(None)))
            if row is not None and is_wanted(row.group):
                self._bound[id(module), name] = module
                names[name] = row.ours
            else:
                names[name] = stock
                self._bound.pop((id(module), name), None)


class Patch:
    """An active patch by a table, of some of its groups. Threads and signal handlers may make one,
    and undo it."""

    def __init__(self, table: Table, groups: Sequence[str]) -> None:
        self._table = table
        self._is_over = False
        with _lock:
            wanted[self] = tuple(groups)
            try:
                table.rebind()
            except BaseException:  # Ctrl-C: nobody has this patch, who could undo it
                self.undo()
                raise

    def undo(self) -> None:
        """Give every name its stock object back, but those that another patch still wants. Once
        more does nothing, but for what an exception such as Ctrl-C has left undone. A name that
        other code has rebound while the patch was active is left as it is, with a warning in the
        log. What a program has kept of ours elsewhere makes stock's from now on."""
        with _lock:
            if not self._is_over:
                wanted.pop(self, None)
                self._table.rebind()
                self._is_over = True

    def __enter__(self: _P) -> _P:
        if self not in wanted:
            raise InvalidArgumentError(f"this patch is over: call {self._table.call} again")
        return self

    def __exit__(self, *_: object) -> None:
        self.undo()


def _modules(prefix: str) -> list[ModuleType]:
    return [
        module
        for name, module in sys.modules.copy().items()
        # By type(): isinstance also asks the object for its __class__, which may load something.
        if issubclass(type(module), ModuleType)
        and f"{name}.".startswith(prefix)
        and not f"{name}.".startswith("torch_ckpt.")
    ]


def _names_of(module: ModuleType) -> dict[str, Any]:
    """Not by vars(), which loads a module of importlib's LazyLoader."""
    names: dict[str, Any] | None = vars(ModuleType)["__dict__"].__get__(module)
    return names or {}  # None on Python 3.10, where a module has been made without __init__
