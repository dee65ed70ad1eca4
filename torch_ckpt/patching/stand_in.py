"""StandIn: a class that stands under the name of a class of stock."""

from __future__ import annotations

import inspect
import types
from typing import Any


class StandIn(type):
    """A class in the place of a class of stock. Called, it makes one of ours. In all else it is the
    stock class: to isinstance and issubclass, in its attributes, and in a `class` statement, so
    that a class which is derived while the patch is active overrides stock's internals as one that
    was derived before does.

    It is no subclass of either: abstract base classes ask their subclasses what is an instance.
    """

    stock: type
    ours: type

    def __new__(
        mcls, name: str, bases: tuple[type, ...], namespace: dict[str, Any], **keywords: Any
    ) -> Any:
        if not bases:
            return super().__new__(mcls, name, bases, namespace)
        bases = tuple(base.stock if isinstance(base, StandIn) else base for base in bases)
        return types.prepare_class(name, bases)[0](name, bases, namespace, **keywords)

    @classmethod
    def of(mcls, stock: type, ours: type) -> StandIn:
        made: StandIn = mcls(stock.__name__, (), {})
        made.stock, made.ours = stock, ours
        made.__module__, made.__doc__ = __name__, ours.__doc__
        made.__init__ = stock.__init__  # type: ignore[misc]  # for who calls it by name
        made.__signature__ = inspect.signature(ours)  # type: ignore[attr-defined]
        return made

    def __call__(cls, *arguments: Any, **keywords: Any) -> Any:
        return cls.ours(*arguments, **keywords)

    def __getattr__(cls, name: str) -> Any:
        return getattr(cls.stock, name)

    def __instancecheck__(cls, instance: Any) -> bool:
        return isinstance(instance, cls.stock)

    def __subclasscheck__(cls, subclass: type) -> bool:
        return issubclass(subclass, cls.stock)
