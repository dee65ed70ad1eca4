"""StandIn: a class that stands under the name of a class of stock."""

from __future__ import annotations

import inspect
import types
from typing import Any

from torch.distributed.checkpoint.filesystem import FileSystemWriter

from torch_ckpt.patching.groups import is_wanted

_SET_BY_ABC_META = {"__abstractmethods__", "_abc_impl"}  # on every class that it makes


# Of stock's kind: a class that is derived from it may have abstract bases as well.
class StandIn(type(FileSystemWriter)):  # type: ignore[misc]
    """A class in the place of a class of stock. Called, it makes one of ours, or one of stock's
    when no patch wants its group any more. In all else it is the stock class: in its attributes,
    also when they are set, and in a `class` statement, so that a class which is derived while the
    patch is active overrides stock's internals as one that was derived before does. Instances and
    subclasses of either are its own. Where ours is no subclass of stock's its attributes are ours.

    It is no subclass of either: abstract base classes ask their subclasses what is an instance.
    """

    stock: type
    ours: type
    group: str

    def __new__(
        mcls, name: str, bases: tuple[type, ...], namespace: dict[str, Any], **keywords: Any
    ) -> Any:
        if not bases:
            return super().__new__(mcls, name, bases, namespace)
        bases = tuple(base.stock if isinstance(base, StandIn) else base for base in bases)
        return types.prepare_class(name, bases)[0](name, bases, namespace, **keywords)

    @classmethod
    def of(mcls, stock: type, ours: type, group: str) -> StandIn:
        own = {
            "stock": stock,
            "ours": ours,
            "group": group,
            # for callers of `FileSystemWriter.__init__(self, ...)`
            "__init__": stock.__init__,  # type: ignore[misc]
            "__module__": stock.__module__,  # by which the class pickles
            "__doc__": ours.__doc__,
            "__signature__": inspect.signature(ours),
            "_is_protocol": False,
        }
        made: StandIn = mcls(stock.__name__, (), own)
        return made

    def __repr__(cls) -> str:
        return f"<stand-in of torch_ckpt for {cls.stock.__module__}.{cls.__name__}>"

    def __call__(cls, *arguments: Any, **keywords: Any) -> Any:
        return (cls.ours if is_wanted(cls.group) else cls.stock)(*arguments, **keywords)

    @property
    def _behind(cls) -> type:
        """The class whose attributes are its own."""
        apart = not issubclass(cls.ours, cls.stock)
        return cls.ours if apart and is_wanted(cls.group) else cls.stock

    def __getattr__(cls, name: str) -> Any:
        return getattr(cls._behind, name)

    def __setattr__(cls, name: str, value: Any) -> None:
        if name in _SET_BY_ABC_META:
            super().__setattr__(name, value)
        else:
            setattr(cls._behind, name, value)

    def __delattr__(cls, name: str) -> None:
        delattr(cls._behind, name)

    @property
    def __dict__(cls) -> Any:  # type: ignore[override]
        """Of the class behind: unittest.mock looks here whether it has to put an attribute back."""
        return vars(cls._behind)

    def __instancecheck__(cls, instance: Any) -> bool:
        return isinstance(instance, (cls.stock, cls.ours))

    def __subclasscheck__(cls, subclass: type) -> bool:
        return issubclass(subclass, (cls.stock, cls.ours))
