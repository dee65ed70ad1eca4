"""StandIn: a class that stands under the name of a class of stock."""

from __future__ import annotations

import inspect
import types
from typing import Any

from torch.distributed.checkpoint.filesystem import FileSystemWriter


# Of stock's kind: a class that is derived from it may have abstract bases as well.
class StandIn(type(FileSystemWriter)):  # type: ignore[misc]
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
        own = {
            "stock": stock,
            "ours": ours,
            "__init__": vars(stock)["__init__"],  # for who calls it by name, not by super()
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
        return cls.ours(*arguments, **keywords)

    def __getattr__(cls, name: str) -> Any:
        return getattr(cls.stock, name)

    def __instancecheck__(cls, instance: Any) -> bool:
        return isinstance(instance, cls.stock)

    def __subclasscheck__(cls, subclass: type) -> bool:
        return issubclass(subclass, cls.stock)
