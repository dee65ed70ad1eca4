"""What people give as `tensor_mapping`: pairs of views, a table's name, a path or a dict."""

from __future__ import annotations

import importlib.resources
import json
import os
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

from torch_ckpt.checkpoint.quantization import CONFIGS_OF_PARTS
from torch_ckpt.errors import InvalidArgumentError
from torch_ckpt.native import core
from torch_ckpt.native.opened import PartlyUsed

_TABLES = "torch_ckpt.tensor_mapping.tables"
_MOST_SHOWN = 20  # names in a message
_MEMBERS = {"pairs", "numbers", "models", "about"}


class Named(NamedTuple):
    """A name that a pair means, the position of the pair, and the name on its other side: "" where
    the first does not say it, and for padding."""

    name: str
    pair: int
    other: str


@dataclass(frozen=True, slots=True)
class Pairs:
    """Pairs of views of the same elements, stored first. The language is that of
    csrc/plan/view.h, and what pairs must be to each other what engine/open/derived.h says.

    numbers: what their names of numbers are, or what these are called in the configuration.
    is_table: some of them may mean no tensor; of a list each means one.
    """

    pairs: tuple[tuple[str, str], ...]
    numbers: Mapping[str, int | str] = field(default_factory=dict)
    is_table: bool = False

    @staticmethod
    def of(given: TensorMapping) -> Pairs:
        """Raises InvalidArgumentError for what holds no pairs of texts, OSError for a file that
        cannot be read."""
        if isinstance(given, Pairs):
            return given
        if isinstance(given, str) and given in table_names():
            return Pairs.of(json.loads(_table(given).read_text(encoding="utf-8")))
        if isinstance(given, str | os.PathLike):
            return Pairs.of(_of_file(os.fspath(given)))
        pairs = given.get("pairs") if isinstance(given, Mapping) else given
        if isinstance(given, Mapping) and given.keys() - _MEMBERS:
            unknown = sorted(map(str, given.keys() - _MEMBERS))
            raise InvalidArgumentError(
                f"tensor_mapping has {unknown}: it has 'pairs', 'numbers', 'models' and 'about'"
            )
        if not isinstance(pairs, list | tuple) or not all(map(_is_pair, pairs)):
            raise InvalidArgumentError(
                f"tensor_mapping is a list of pairs of texts, a table's name or a path; it was "
                f"{given!r}"
            )
        numbers = given.get("numbers", {}) if isinstance(given, Mapping) else {}
        if not isinstance(numbers, Mapping) or not all(map(_is_number, numbers.items())):
            raise InvalidArgumentError(
                "tensor_mapping: 'numbers' has an integer for each name, or what that is called in "
                f"the configuration; it was {numbers!r}"
            )
        return Pairs(
            tuple((stored, native) for stored, native in pairs),
            dict(numbers),
            isinstance(given, Mapping),
        )

    def numbers_in(self, *configs: Any) -> dict[str, int]:
        """The numbers that views may name: those of configurations, of which the first that has one
        counts, and its own. Raises InvalidArgumentError for one that no configuration has."""
        found: dict[str, int] = {}
        for config in reversed(configs):
            found |= numbers_of(config)
        for name, number in self.numbers.items():
            if isinstance(number, str):
                if number not in found:
                    raise InvalidArgumentError(
                        f"tensor_mapping: {name!r} is {number!r} of the configuration, which has "
                        "no such integer"
                    )
                number = found[number]
            found[name] = number
        return found

    def check_matched(self, unmatched: Collection[int]) -> None:
        """Raises InvalidArgumentError where pairs mean no tensor that should.

        unmatched: the positions of those that mean none, on any rank.
        """
        if self.is_table and len(unmatched) < len(self.pairs):
            return
        for at in sorted(unmatched):
            raise InvalidArgumentError(
                f"pair {self.pairs[at]} of tensor_mapping: no tensor has such a name"
            )

    def is_padding(self, pair: int) -> bool:
        """Whether a pair, by its position, says what is in no native tensor."""
        return self.pairs[pair][1].strip() == "0"

    def stored_in(self, names: list[str]) -> list[Named]:
        """Those of `names` that stored views mean, for each pair that does."""
        request = {"pairs": list(self.pairs), "names": core.names_text(names)}
        answer = core.call({"op": "named_by_pairs", **request})
        return [Named(names[at], pair, other) for at, pair, other in answer["named"]]

    def natives_in(self, names: list[str]) -> list[Named]:
        """The same of native views."""
        turned = replace(self, pairs=tuple((native, stored) for stored, native in self.pairs))
        return turned.stored_in(names)

    def resolved(self, *configs: Any) -> Pairs:
        """The same, with what `numbers_in` finds as its numbers."""
        return replace(self, numbers=self.numbers_in(*configs))


# Pairs (stored view, native view); a table's name; a path of a JSON file; or what one holds.
TensorMapping = Sequence[tuple[str, str]] | str | os.PathLike[str] | Mapping[str, Any] | Pairs


def checked_pairs(tensor_mapping: TensorMapping, key_mapping: Any, flattens: bool = True) -> Pairs:
    """What a call is given as `tensor_mapping`. Raises InvalidArgumentError beside a `key_mapping`,
    and where state dicts are not flattened, so that tensors have no names."""
    if key_mapping is not None:
        raise InvalidArgumentError(
            "key_mapping and tensor_mapping exclude each other: pairs give other names too"
        )
    if not flattens:
        raise InvalidArgumentError("tensor_mapping needs flatten_state_dict=True")
    return Pairs.of(tensor_mapping)


Shapes = Mapping[str, Sequence[int]]


class Sharing(NamedTuple):
    """What a rank says of a mapping.

    stored: the names of stored tensors of which its native ones have a part, and all together not
        all; natives: those that have a part of such a one, with their shapes.
    unmatched: the positions of pairs that mean no tensor of its.
    """

    stored: frozenset[str]
    natives: dict[str, Sequence[int]]
    unmatched: frozenset[int]

    @staticmethod
    def of(partly: Iterable[PartlyUsed], natives: Shapes, unmatched: Iterable[int]) -> Sharing:
        used = list(partly)
        return Sharing(
            frozenset(each.stored for each in used),
            {each.native: natives[each.native] for each in used if each.native},
            frozenset(unmatched),
        )


def check_shared(
    pairs: Pairs,
    said: Sequence[Sharing],
    map_again: Callable[[Shapes], Iterable[PartlyUsed]],
    path: str | None,
) -> None:
    """Raises InvalidArgumentError where a mapping leaves elements of a stored tensor at `path` out,
    native tensors of several ranks have the same, or a pair means no tensor of any.

    said: by rank. map_again: maps native tensors as those of one rank, and raises what that raises.
    """
    pairs.check_matched(frozenset.intersection(*(each.unmatched for each in said)))
    stored = frozenset[str]().union(*(each.stored for each in said))
    if not stored:
        return
    natives = {name: shape for each in said for name, shape in each.natives.items()}
    left = [each for each in map_again(natives) if each.stored in stored]
    if not left:
        return
    parts = [each for each in left if each.stored == left[0].stored]
    names = sorted(each.native for each in parts if each.native)
    shown = ", ".join(names[:_MOST_SHOWN]) + ("" if len(names) <= _MOST_SHOWN else " and more")
    raise InvalidArgumentError(
        f"{sum(each.elements for each in parts)} of {parts[0].of} elements are in "
        f"{shown or 'nothing'}, by tensor_mapping, and the rest is in no tensor that is loaded: a "
        "pair with '0' leaves it out",
        file=path,
        tensor=parts[0].stored,
    )


def table_names() -> list[str]:
    """Of the tables that come with torch_ckpt."""
    found = (each.name for each in importlib.resources.files(_TABLES).iterdir())
    return sorted(name.removesuffix(".json") for name in found if name.endswith(".json"))


def table_of(model_type: Any) -> str | None:
    """The table that says how the Hub has models of transformers of this `model_type`, where that
    is another way than they have their tensors."""
    for name in table_names():
        if model_type in json.loads(_table(name).read_text(encoding="utf-8")).get("models", ()):
            return name
    return None


def numbers_of(config: Any) -> dict[str, int]:
    """The integers of a model's configuration, by their names: its own, then those of its language
    model, and of other parts, where it has some."""
    if hasattr(config, "to_dict"):
        config = config.to_dict()
    numbers: dict[str, int] = {}
    if not isinstance(config, Mapping):
        return numbers
    for part in (config, *(config.get(key) for key in CONFIGS_OF_PARTS)):
        for name, value in part.items() if isinstance(part, Mapping) else ():
            if type(value) is int and str(name).isidentifier():
                numbers.setdefault(str(name), value)
    return numbers


def _table(name: str) -> Any:
    return importlib.resources.files(_TABLES).joinpath(f"{name}.json")


def _of_file(path: str) -> Any:
    try:
        with open(path, encoding="utf-8") as file:
            return json.load(file)
    except FileNotFoundError:
        raise InvalidArgumentError(
            f"tensor_mapping: there is neither a file {path!r} nor a table of that name; there are "
            f"{', '.join(table_names())}"
        ) from None
    except (ValueError, RecursionError) as error:
        raise InvalidArgumentError(f"tensor_mapping is no JSON: {error}", file=path) from error


def _is_number(item: tuple[Any, Any]) -> bool:
    name, number = item
    return isinstance(name, str) and name.isidentifier() and type(number) in (int, str)


def _is_pair(pair: Any) -> bool:
    return (
        isinstance(pair, list | tuple)
        and len(pair) == 2
        and all(isinstance(view, str) for view in pair)
    )
