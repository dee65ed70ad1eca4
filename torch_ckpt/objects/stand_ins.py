"""Members of enums and records of classes that are not imported here, for who writes them on.

A pickle says a class by name, and whoever reads it imports that. So what stands in for an object of
such a class is pickled as the object would be, with that name, and nothing is imported here.
"""

from __future__ import annotations

import copyreg
import pickle
import types
from typing import Any

import torch


class _StandIn:
    """Of a class that its own class is named after."""


class _Member(_StandIn):
    """A member of an enum."""

    def __init__(self, value: Any) -> None:
        self.value = value

    def __eq__(self, other: object) -> bool:
        return type(other) is type(self) and other.value == self.value

    def __hash__(self) -> int:
        return hash((type(self), self.value))

    def __reduce_ex__(self, protocol: Any) -> tuple[type, tuple[Any]]:
        return type(self), (self.value,)


class _Record(_StandIn):
    """An object that is its attributes, as pickle knows it."""


class _NamedTuple(tuple[Any, ...]):
    """The values of a named tuple, to look at. Pickling it raises `error`: whoever reads the pickle
    would import whatever class the file names, and run its `__new__`."""

    error: Exception

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise self.error


class StandIns:
    """Those of one conversion. Not for several threads."""

    def __init__(self) -> None:
        self._classes: dict[tuple[str, type], type] = {}

    def member(self, reference: str, value: Any) -> Any:
        """The member of that value of the enum that `reference` names."""
        return self._class_of(reference, _Member)(value)

    def record(self, reference: str, attributes: dict[str, Any]) -> Any:
        made = self._class_of(reference, _Record)()
        vars(made).update(attributes)
        return made

    def named_tuple(self, values: list[Any], error: Exception) -> Any:
        """`error` is raised where it would be written."""
        made = _NamedTuple(values)
        made.error = error
        return made

    def _class_of(self, reference: str, base: type) -> type:
        known = self._classes.get((reference, base))
        if known is None:
            module, _, name = reference.partition(":")
            known = type(name, (base,), {"__module__": module, "__qualname__": name})
            self._classes[reference, base] = known
        return known

    def save(self, value: Any, file: Any) -> None:
        """torch.save, of what may hold some of these."""
        if self._classes:  # torch takes a module
            pickles: Any = types.SimpleNamespace(__name__=__name__, Pickler=_Pickler)
            torch.save(value, file, pickle_module=pickles)
        else:
            torch.save(value, file)


_PythonPickler: Any = pickle._Pickler


class _Pickler(_PythonPickler):  # type: ignore[misc]
    """The one in Python, as torch.package takes: that in C looks whether a class is what its module
    has by that name."""

    def reducer_override(self, obj: Any) -> Any:
        if not isinstance(obj, _Record):
            return NotImplemented
        # As object.__reduce_ex__, which an attribute of that name would hide.
        return copyreg.__newobj__, (type(obj),), vars(obj)  # type: ignore[attr-defined]

    def save_global(self, obj: Any, name: str | None = None) -> None:
        if not isinstance(obj, type) or not issubclass(obj, _StandIn):
            super().save_global(obj, name)
            return
        place = f"{obj.__module__}\n{obj.__qualname__}\n"
        self.write(pickle.GLOBAL + place.encode("ascii"))
        self.memoize(obj)
