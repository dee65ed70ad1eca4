"""The walk behind patches, over modules that are made here."""

from __future__ import annotations

import functools
import logging
import sys
import types
from collections.abc import Iterator
from typing import Any
from unittest import mock

import pytest

import torch_ckpt
from torch_ckpt.patching.groups import is_wanted
from torch_ckpt.patching.rebind import Patch, Rebinding


class Of:
    """Not globals of this module: a walk would find them here."""

    @staticmethod
    def theirs() -> str:
        return "theirs"

    @staticmethod
    def others() -> str:
        return "theirs, too"

    @staticmethod
    def ours() -> str:
        return "ours"


@pytest.fixture
def modules() -> Iterator[types.SimpleNamespace]:
    """A package with two modules, and a client of it."""
    made = {name: types.ModuleType(name) for name in ("lib", "lib.inner", "liberal", "client")}
    for name, module in made.items():
        vars(module).update(function=Of.theirs, name_of=name)
    with mock.patch.dict(sys.modules, made):
        yield types.SimpleNamespace(**{name.replace(".", "_"): made[name] for name in made})


def rebinding(*pairs: tuple[Any, Any], group: str = "a") -> Rebinding:
    pairs = pairs or ((Of.theirs, Of.ours),)
    table = {id(theirs): stands for theirs, stands in pairs}

    def due(module: types.ModuleType, theirs: Any) -> Any:
        return table[id(theirs)] if is_wanted(group) else theirs

    return Rebinding(pairs, due, "lib")


def functions(modules: types.SimpleNamespace) -> set[str]:
    return {module.function() for module in vars(modules).values()}


def test_names_everywhere_and_back(modules: types.SimpleNamespace) -> None:
    modules.client.again = Of.theirs
    with Patch(rebinding(), ("a",)):
        assert functions(modules) == {modules.client.again()} == {"ours"}
        assert Of.theirs() == "theirs"
    assert functions(modules) == {modules.client.again()} == {"theirs"}


def test_its_own_package_comes_first(modules: types.SimpleNamespace) -> None:
    seen: list[str] = []
    bind = Rebinding._bind

    def noted(self: Rebinding, module: types.ModuleType) -> None:
        seen.append(module.__name__)
        bind(self, module)

    with mock.patch.object(Rebinding, "_bind", noted), Patch(rebinding(), ("a",)):
        assert seen[:2] == ["lib", "lib.inner"] and seen[2] != "liberal"


def test_what_is_imported_meanwhile_is_given_back(modules: types.SimpleNamespace) -> None:
    with mock.patch.dict(sys.modules):
        with Patch(rebinding(), ("a",)):
            late = sys.modules["late"] = types.ModuleType("late")
            late.function = modules.lib.function  # type: ignore[attr-defined]
            assert late.function() == "ours"
        assert late.function() == "theirs"


def test_what_others_have_rebound_is_left(
    modules: types.SimpleNamespace, caplog: pytest.LogCaptureFixture
) -> None:
    with Patch(rebinding(), ("a",)):
        modules.client.function = Of.others
        del modules.liberal.function
    assert modules.client.function is Of.others and not hasattr(modules.liberal, "function")
    warned = [each.message for each in caplog.records if each.levelno >= logging.WARNING]
    assert warned == ["client.function has been rebound by other code meanwhile: it is left"]


@pytest.mark.parametrize("last_first", [False, True])
def test_patches_of_one_table_nest(modules: types.SimpleNamespace, last_first: bool) -> None:
    table = rebinding()
    first, second = Patch(table, ("a",)), Patch(table, ("a",))
    order = (second, first) if last_first else (first, second)
    order[0].undo()
    assert functions(modules) == {"ours"}
    order[0].undo()
    order[1].undo()
    assert functions(modules) == {"theirs"}
    with pytest.raises(torch_ckpt.InvalidArgumentError, match="over"), first:
        pass


@pytest.mark.parametrize("last_first", [False, True])
def test_patches_of_two_tables(modules: types.SimpleNamespace, last_first: bool) -> None:
    modules.client.other = Of.others
    patches = [
        Patch(rebinding(), ("a",)),
        Patch(rebinding((Of.others, lambda: "ours, too"), group="b"), ("b",)),
    ]
    assert functions(modules) == {"ours"} and modules.client.other() == "ours, too"
    for patch in reversed(patches) if last_first else patches:
        patch.undo()
    assert functions(modules) == {"theirs"} and modules.client.other is Of.others


def test_what_no_walk_finds(modules: types.SimpleNamespace) -> None:
    class Holder:
        function = staticmethod(Of.theirs)

    def default(function: Any = Of.theirs) -> str:
        return str(function())

    modules.client.holder, modules.client.table = Holder(), {"function": Of.theirs}
    modules.client.partial = functools.partial(Of.theirs)
    with Patch(rebinding(), ("a",)):
        assert modules.client.holder.function is modules.client.table["function"] is Of.theirs
        assert modules.client.partial() == default() == "theirs"


def test_odd_modules_are_passed_by(modules: types.SimpleNamespace) -> None:
    asked: list[str] = []

    class Lazy(types.ModuleType):
        def __getattr__(self, name: str) -> Any:
            asked.append(name)
            raise AttributeError(name)

    odd = {
        "lazy": Lazy("lazy"),
        "none": None,
        "no_module": types.SimpleNamespace(function=Of.theirs),
    }
    ours_too = types.ModuleType("torch_ckpt.some")
    ours_too.function = Of.theirs  # type: ignore[attr-defined]
    with mock.patch.dict(sys.modules, {**odd, "torch_ckpt.some": ours_too}):
        with Patch(rebinding(), ("a",)):
            assert functions(modules) == {"ours"}
            assert odd["no_module"].function is Of.theirs  # type: ignore[union-attr]
            assert ours_too.function is Of.theirs
    assert asked == []
