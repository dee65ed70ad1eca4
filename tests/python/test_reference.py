"""docs/reference.md says what the docstrings say, and these tell of every argument."""

from __future__ import annotations

import enum
import importlib.util
import inspect
from functools import reduce
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch.distributed.checkpoint  # noqa: F401  # named by AS_IN

import torch_ckpt
from torch_ckpt.megatron import dist_checkpointing

DOCS = Path(__file__).resolve().parents[2] / "docs"


@pytest.fixture(scope="module")
def maker() -> ModuleType:
    spec = importlib.util.spec_from_file_location("make_reference", DOCS / "make_reference.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_page_is_what_the_command_writes(maker: ModuleType) -> None:
    written = (DOCS / "reference.md").read_text(encoding="utf-8")
    assert written == maker.page(), "run ./dev reference"


def test_every_exported_name_is_there(maker: ModuleType) -> None:
    lines = maker.page().splitlines()
    for name in torch_ckpt.__all__:
        assert f"### {name}" in lines or any(line.startswith(f"| `{name}`") for line in lines), name


def test_every_call_of_megatron_is_there(maker: ModuleType) -> None:
    """What the package itself has, strategies, and what runs saves in the background."""
    strategies = dist_checkpointing.strategies
    rooms: dict[str, ModuleType] = {
        "": dist_checkpointing,
        **{f"strategies.{name}.": getattr(strategies, name) for name in strategies.__all__},
    }
    names = {
        f"dist_checkpointing.{room}{name}"
        for room, module in rooms.items()
        for name in module.__all__
        if not inspect.ismodule(getattr(module, name))
    }
    # It is called by Megatron, which asks it for the queue.
    names -= {"dist_checkpointing.strategies.torch.get_async_strategy"}
    assert names | {"patch_megatron", "MegatronPatch"} <= {*maker.MEGATRON}
    lines = maker.page().splitlines()
    assert [name for name in maker.MEGATRON if f"### {name}" not in lines] == []


def found(dotted: str) -> Any:
    """The object of a name as "torch.distributed.checkpoint.save"."""
    first, *rest = dotted.split(".")
    return reduce(getattr, rest, importlib.import_module(first))


def test_every_argument_is_told(maker: ModuleType) -> None:
    """By the docstring, or by that of the function which the page names."""
    items = {name: getattr(torch_ckpt, name) for names in maker.SECTIONS.values() for name in names}
    items |= {name: maker.of_megatron(name) for name in maker.MEGATRON}
    for name, item in items.items():
        is_enum = inspect.isclass(item) and issubclass(item, enum.Enum)
        if name in maker.RECEIVED or name == "SaveStats" or is_enum:
            continue
        left = set(maker.undescribed(item))
        for other in maker.AS_IN.get(name, ()):
            left -= inspect.signature(found(other)).parameters.keys()
        assert left == set(), name


def test_an_argument_that_nobody_tells_is_noticed(maker: ModuleType) -> None:
    def some(path: str, told: int, untold: int, **others: Any) -> None:
        """Does it with `path`.

        told: how often.
        """

    assert maker.undescribed(some) == ["untold"]


def test_docstrings_become_lists_and_paragraphs(maker: ModuleType) -> None:
    docstring = """One line with a <tag>.

        first, second: numbers,
            any `<n>` of them.
        third(): more.

        A line that has colon: but not a term on every line
        is a paragraph.
        """
    assert maker.markdown(docstring) == (
        "One line with a \\<tag>.\n\n"
        "- `first`, `second`: numbers,\n"
        "  any `<n>` of them.\n"
        "- `third()`: more.\n\n"
        "A line that has colon: but not a term on every line\n"
        "is a paragraph.\n"
    )
