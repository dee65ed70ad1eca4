"""The walk that rebinds names, on a package that each test makes: what test_patch_torch.py shows of
stock's names is not repeated here."""

from __future__ import annotations

import importlib.util
import itertools
import logging
import sys
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from torch_ckpt import InvalidArgumentError
from torch_ckpt.patching.groups import is_wanted
from torch_ckpt.patching.rebind import Patch, Replacement, Table

GROUP, OTHER = "test_rebind", "test_rebind_other"


def function(answer: str) -> Callable[[], str]:
    return lambda: answer


def imported(name: str, text: str = "", **names: Any) -> types.ModuleType:
    """A module `name`, as the import of `text` leaves it, with `names` beside."""
    sys.modules[name] = module = types.ModuleType(name)
    exec(text, vars(module))
    vars(module).update(names)
    return module


@pytest.fixture(autouse=True)
def package() -> Iterator[types.ModuleType]:
    """Somebody's package a_package, with a module `deep`, a function and a class. Modules that a
    test imports are gone after it, and names rebound by then."""
    with mock.patch.dict(sys.modules):
        made = imported("a_package", save=function("stock"), Writer=type("Writer", (), {}))
        imported("a_package.deep", save=made.save)
        yield made
    assert not is_wanted(GROUP) and not is_wanted(OTHER)


def table_of(*rows: Replacement) -> Table:
    return Table("patch_it", "a_package", rows)


@pytest.fixture
def table(package: types.ModuleType) -> Table:
    return table_of(
        Replacement(package.save, function("ours"), GROUP),
        Replacement(package.Writer, type("OurWriter", (), {}), OTHER),
    )


def test_every_global_name_is_rebound_and_given_back(
    package: types.ModuleType, table: Table
) -> None:
    before = imported("before", "from a_package import save as kept, Writer\nimport a_package")
    stock = package.save
    with Patch(table, [GROUP]) as active:
        late = imported("late", "from a_package.deep import save")
        for save in (package.save, sys.modules["a_package.deep"].save, before.kept, late.save):
            assert save is not stock and save() == "ours"
        assert before.Writer is package.Writer and package.Writer.__name__ == "Writer"
        assert isinstance(active, Patch)
    for save in (package.save, sys.modules["a_package.deep"].save, before.kept, late.save):
        assert save is stock


def test_what_is_no_global_name_is_left(package: types.ModuleType, table: Table) -> None:
    text = (
        "import functools\n"
        "from a_package import Writer, save\n"
        "class Derived(Writer):\n"
        "    kept = staticmethod(save)\n"
        "def default(save=save):\n"
        "    return save()\n"
        "partial = functools.partial(save)\n"
        "registry, listed = {'save': save}, [save]\n"
        "def caller():\n"
        "    return save()\n"
    )
    client = imported("client", text)
    with Patch(table, [GROUP, OTHER]):
        kept = client.default, client.partial, client.registry["save"], client.listed[0]
        assert [each() for each in (*kept, client.Derived.kept)] == ["stock"] * 5
        assert client.Derived.__bases__ != (client.Writer,)
        assert client.caller() == "ours"
    assert client.caller() == "stock" and client.Derived.__bases__ == (client.Writer,)


def test_our_own_modules_are_left(package: types.ModuleType, table: Table) -> None:
    ours = imported("torch_ckpt.of_a_test", save=package.save)
    others = imported("torch_ckpt_of_somebody", save=package.save)
    with Patch(table, [GROUP]):
        assert ours.save() == "stock" and others.save() == "ours"
    assert others.save is ours.save


def test_a_row_of_one_module(package: types.ModuleType) -> None:
    deep = sys.modules["a_package.deep"]
    everywhere = Replacement(package.save, function("ours"), GROUP)
    there = Replacement(package.save, function("ours there"), OTHER, deep)
    table = table_of(everywhere, there)
    with Patch(table, [GROUP]):
        assert (package.save(), deep.save()) == ("ours", "stock")
        with Patch(table, [OTHER]):
            assert (package.save(), deep.save()) == ("ours", "ours there")
    assert package.save is deep.save
    del table  # whose objects another one may replace then
    with Patch(table_of(there), [OTHER]):
        client = imported("client", "from a_package.deep import save")
        assert (package.save(), deep.save()) == ("stock", "ours there")
    assert package.save is deep.save is client.save


def test_what_others_have_rebound_is_left(
    package: types.ModuleType, table: Table, caplog: pytest.LogCaptureFixture
) -> None:
    client = imported("client", "from a_package import save, save as gone, save as stocks")
    theirs, stock = function("theirs"), package.save
    active = Patch(table, [GROUP])
    package.save = client.save = theirs
    client.stocks = stock
    del client.gone
    active.undo()
    assert package.save is client.save is theirs and client.stocks is stock
    assert not hasattr(client, "gone")
    assert sys.modules["a_package.deep"].save is stock
    warned = [record.message for record in caplog.records if record.levelno >= logging.WARNING]
    said = "has been rebound by other code meanwhile: it is left"
    assert sorted(warned) == [f"a_package.save {said}", f"client.save {said}"]


def test_what_others_put_back_after_the_end_is_found_by_the_next_walk(
    package: types.ModuleType, table: Table
) -> None:
    stock = package.save
    with Patch(table, [GROUP]) as active:
        with mock.patch.object(package, "save", function("theirs")):
            active.undo()
        assert package.save is not stock  # put back by mock
    Patch(table, [OTHER]).undo()
    assert package.save is stock


@pytest.mark.parametrize("order", list(itertools.permutations(range(3))))
def test_patches_of_a_table_are_undone_in_any_order(
    order: tuple[int, ...], package: types.ModuleType, table: Table
) -> None:
    stock = package.save, package.Writer
    groups: list[list[str]] = [[GROUP], [GROUP, OTHER], [OTHER]]
    active = {number: Patch(table, wanted) for number, wanted in enumerate(groups)}
    for number in order:
        active.pop(number).undo()
        wanted = {group for left in active for group in groups[left]}
        assert (package.save is not stock[0]) == (GROUP in wanted)
        assert (package.Writer is not stock[1]) == (OTHER in wanted)


def test_an_object_is_in_one_table(package: types.ModuleType, table: Table) -> None:
    stock, ours = package.save, function("ours too")
    with Patch(table, [GROUP]):
        for taken in (stock, package.save):  # the latter is ours
            with pytest.raises(InvalidArgumentError, match="^patch_it: <function .* already"):
                table_of(Replacement(taken, ours, OTHER))
            with pytest.raises(InvalidArgumentError, match="already"):
                table_of(Replacement(function("another"), taken, OTHER))
    first, second = function("a"), function("b")
    for rows in ([(first, ours), (second, ours)], [(first, ours), (ours, second)]):
        with pytest.raises(InvalidArgumentError, match="already"):
            table_of(*(Replacement(*row, OTHER) for row in rows))


def test_tables_of_different_objects_are_independent(package: types.ModuleType) -> None:
    save, writer = package.save, package.Writer
    first = Patch(table_of(Replacement(save, function("ours"), GROUP)), [GROUP])
    second = Patch(table_of(Replacement(writer, type("Ours", (), {}), OTHER)), [OTHER])
    first.undo()
    assert package.save is save and package.Writer is not writer
    second.undo()
    assert package.Writer is writer


def test_a_patch_that_is_over_is_not_entered_again(table: Table) -> None:
    active = Patch(table, [GROUP])
    active.undo()
    with pytest.raises(InvalidArgumentError, match="is over: call patch_it again"), active:
        pass


def test_lazy_modules_are_not_loaded(
    package: types.ModuleType, table: Table, tmp_path: Path
) -> None:
    def fails(*_: object) -> Any:
        raise AssertionError("a walk is no use of a module")

    # A module's __getattr__, and those of the classes of modules that programs put in its place.
    imported("lazy", "from a_package import save", __getattr__=fails)
    kinds = {"__getattr__": fails}, {"__getattribute__": fails}, {"__dict__": property(fails)}
    for number, kind in enumerate(kinds):
        made: Any = type("Lazy", (types.ModuleType,), kind)(f"lazy_{number}")
        sys.modules[f"lazy_{number}"] = made
    # Python's own way, which loads at the first attribute of any name.
    (tmp_path / "loads_late.py").write_text("from a_package import save\n")
    spec = importlib.util.spec_from_file_location("loads_late", tmp_path / "loads_late.py")
    assert spec is not None and spec.loader is not None
    spec.loader = importlib.util.LazyLoader(spec.loader)
    late = sys.modules["loads_late"] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(late)
    lazy = type(late)
    with Patch(table, [GROUP]):
        assert type(late) is lazy
        assert sys.modules["lazy"].save() == "ours"
        assert late.save() == "ours" and type(late) is types.ModuleType
    assert sys.modules["lazy"].save is late.save is package.save


def test_odd_entries_of_sys_modules(package: types.ModuleType, table: Table) -> None:
    class Odd:
        save = package.save

        @property
        def __class__(self) -> Any:  # as proxies do, which load something
            raise AssertionError("is asked for by isinstance")

    class Unhashable(types.ModuleType):
        def __eq__(self, other: object) -> bool:
            raise AssertionError("modules are the same or not")

    odd: dict[Any, Any] = {"none": None, "odd": Odd(), "space": types.SimpleNamespace(save=1)}
    odd["half"] = types.ModuleType.__new__(types.ModuleType)
    odd["empty"] = types.ModuleType("empty")
    vars(odd["empty"]).clear()
    odd["unhashable"] = Unhashable("unhashable")
    odd["unhashable"].save = package.save
    odd[7] = odd["twice"] = imported("twice", "from a_package import save")
    with mock.patch.dict(sys.modules, odd):
        with Patch(table, [GROUP]):
            assert odd["twice"].save() == odd["unhashable"].save() == "ours"
            assert vars(Odd)["save"]() == "stock"
        assert odd["twice"].save is odd["unhashable"].save is package.save


def test_a_module_without_a_name_is_named_in_the_log(
    package: types.ModuleType, table: Table, caplog: pytest.LogCaptureFixture
) -> None:
    client = imported("client", "from a_package import save")
    with Patch(table, [GROUP]):
        client.save = None
        del client.__name__
    assert "None.save has been rebound by other code meanwhile: it is left" in caplog.messages


def test_a_module_that_grows_while_it_is_walked(package: types.ModuleType, table: Table) -> None:
    """As by another thread: here by the group's being asked for, between two of its names."""
    client = imported("client", **{f"save_{number}": package.save for number in range(9)})

    def asked(group: str) -> bool:
        vars(client)[f"new_{len(vars(client))}"] = None
        return is_wanted(group)

    with mock.patch("torch_ckpt.patching.rebind.is_wanted", asked), Patch(table, [GROUP]):
        assert client.save_0() == client.save_8() == "ours"
    assert client.save_0 is client.save_8 is package.save
