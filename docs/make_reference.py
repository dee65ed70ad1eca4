"""Writes docs/reference.md from the docstrings of what torch_ckpt exports and the help of its
command.

    ./dev reference

Run it whenever a public signature, docstring or option changes: tests/python/test_reference.py
fails while the page is not what this would write. Signatures are printed from the text of their
annotations, and help at a fixed width, so that the page is the same under every Python.
"""

from __future__ import annotations

import ast
import dataclasses
import enum
import functools
import importlib
import inspect
import re
import sys
import textwrap
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import click

import torch_ckpt
import torch_ckpt.calls.stored  # of what `open` gives
import torch_ckpt.megatron.dist_checkpointing
from torch_ckpt.cli import cli

PAGE = Path(__file__).with_name("reference.md")

# `open` would hide the built-in one in a star import.
EXPORTED = [*torch_ckpt.__all__, "open"]
# Every one of these but the errors, and after them what those return or name.
SECTIONS = {
    "Saving and loading": (
        *("save", "load", "async_save", "AsyncSave", "SaveStats", "PerRank", "LocalBoxes"),
    ),
    "A training run": ("Checkpointer", "load_model", "save_model"),
    "Checkpoints on disk": ("CheckpointDirectory", "open", "Checkpoint"),
    "Consolidation and conversion": (
        "consolidate_safetensors_files",
        "consolidate_safetensors_files_on_every_rank",
        "MergeFuture",
        "convert",
    ),
    "Operators": ("plan", "library_path"),
    "Parts for DCP's own functions": (
        "HuggingFaceStorageWriter",
        "CheckpointReader",
        "HuggingFaceStorageReader",
        "QuantizedHuggingFaceStorageReader",
        "PinnedMemoryStager",
        "SavePlanner",
        "LoadPlanner",
    ),
    "For programs that call stock": ("patch_torch", "TorchPatch"),
}
# Below torch_ckpt.megatron, by the names under which programs import them.
MEGATRON = (
    *("patch_megatron", "MegatronPatch"),
    *(
        f"dist_checkpointing.{name}"
        for name in (
            *("save", "load", "load_common_state_dict", "load_content_metadata"),
            *("load_tensors_metadata", "load_sharded_metadata", "load_plain_tensors"),
            *("check_is_distributed_checkpoint", "remove_sharded_tensors"),
            *("mapping.ShardedBase", "ShardedTensor", "ShardedObject"),
            "mapping.ShardedTensorFactory",
            *("LocalNonpersistentObject", "validation.StrictHandling"),
            "core.CheckpointingException",
            "strategies.torch.TorchDistSaveShardedStrategy",
            "strategies.torch.TorchDistLoadShardedStrategy",
            "strategies.fully_parallel.FullyParallelSaveStrategyWrapper",
            "strategies.fully_parallel.FullyParallelLoadStrategyWrapper",
            *("strategies.async_utils.AsyncCallsQueue", "strategies.async_utils.AsyncRequest"),
        )
    ),
)
MEGATRON_TITLE = """\
## For programs on Megatron Core

[megatron.md](megatron.md) says how a state dict is stored, what differs from Megatron, and which
arguments do nothing. What else the modules of `torch_ckpt.megatron.dist_checkpointing` have
(`dict_utils`, `optimizer`, `utils`, and more of `core` and `mapping`) is told by its docstrings.
"""
ERRORS = "Errors"
BESIDE = (
    *("StoredTensor", "StoredObjects", "Topology"),
    *("Description", "FileInfo", "TensorInfo", "ObjectInfo", "Placement"),
    *("VerifyReport", "RemoveReport", "LoadReport", "SavedMetadata", "Phases", "DtypePolicy"),
)

# Where the arguments that a docstring does not describe are described.
AS_IN = {
    "save": ("torch.distributed.checkpoint.save",),
    "async_save": ("torch_ckpt.save", "torch.distributed.checkpoint.async_save"),
    "load": ("torch.distributed.checkpoint.load",),
    "open": ("torch_ckpt.Checkpoint",),
    "convert": (
        "torch_ckpt.consolidate_safetensors_files",
        "torch_ckpt.HuggingFaceStorageWriter",
    ),
    "HuggingFaceStorageReader": ("torch_ckpt.CheckpointReader",),
    "QuantizedHuggingFaceStorageReader": ("torch_ckpt.CheckpointReader",),
    "SavePlanner": ("torch.distributed.checkpoint.DefaultSavePlanner",),
    "LoadPlanner": ("torch.distributed.checkpoint.DefaultLoadPlanner",),
    "consolidate_safetensors_files_on_every_rank": ("torch_ckpt.consolidate_safetensors_files",),
}

# Users receive these and do not make them.
RECEIVED = (
    *("AsyncSave", "MergeFuture", "TorchPatch", "MegatronPatch", "StoredTensor", "StoredObjects"),
    "dist_checkpointing.core.CheckpointingException",
)
# What only torch_ckpt calls, although the names do not say so.
INTERNAL = {
    "DtypePolicy": {"check_tied", "stored", "stored_dtypes", "torch_name"},
    "HuggingFaceStorageWriter": {"count_save", "end_save", "final_names"},
    "LoadPlanner": {"look", "new_value", "say"},
    "SavePlanner": {"begin"},
    "SaveStats": {"count"},
}

WIDTH = 88

INTRODUCTION = """\
# Reference

Written by `./dev reference` from the docstrings; edit those instead. "Stock" is what torch itself
has in `torch.distributed.checkpoint` (DCP). [guide.md](guide.md) shows how to use it all, and
[guarantees.md](guarantees.md) says what holds when something fails.
"""


def modules() -> list[ModuleType]:
    """Those of torch_ckpt, all that its names have imported."""
    return [module for name, module in sorted(sys.modules.items()) if name.startswith("torch_ckpt")]


def of_package(name: str) -> Any:
    """The class `name`, wherever it is defined."""
    found = {getattr(module, name) for module in modules() if hasattr(module, name)}
    (item,) = (item for item in found if item.__module__.startswith("torch_ckpt"))
    return item


@functools.cache
def aliases() -> dict[str, str]:
    """Types that modules have a name for (`OnBusy = Literal["wait", ...]`), as text: what a
    reader of a signature wants to see."""
    return {
        target.id: ast.unparse(node.value)
        for module in modules()
        for node in ast.parse(inspect.getsource(module)).body
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Subscript | ast.BinOp)
        for target in node.targets
        if isinstance(target, ast.Name) and re.fullmatch("_?[A-Z][a-z].*", target.id)
    }


def annotation(text: Any) -> str:
    text = getattr(text, "__forward_arg__", text)  # of a NamedTuple
    said = text if isinstance(text, str) else getattr(text, "__name__", str(text))
    said = re.sub(r"\b(dist|stock_planner|threading)\.", "", said)
    said = re.sub(r"(?<![.\w])_?[A-Z]\w+", lambda match: aliases().get(match[0], match[0]), said)
    return said.replace("'", '"')


def default(value: Any) -> str:
    if inspect.isroutine(value):
        return str(value.__name__)
    # In the quotes of `ruff format`, which formats Markdown too.
    return str(value) if isinstance(value, enum.Enum) else repr(value).replace("'", '"')


def parameter_text(parameter: inspect.Parameter) -> str:
    stars = {parameter.VAR_POSITIONAL: "*", parameter.VAR_KEYWORD: "**"}.get(parameter.kind, "")
    text = stars + parameter.name
    if parameter.annotation is not parameter.empty:
        text += f": {annotation(parameter.annotation)}"
    if parameter.default is not parameter.empty:
        text += f" = {default(parameter.default)}"
    return text


def parameters_of(item: Any, *, bound: bool = False) -> list[inspect.Parameter]:
    return list(inspect.signature(item).parameters.values())[1 if bound else 0 :]


def signature(shown: str, item: Any, *, bound: bool = False) -> str:
    """A fenced block: on one line where it fits, else a line for each parameter."""
    said: list[str] = []
    for parameter in parameters_of(item, bound=bound):
        if parameter.kind is parameter.KEYWORD_ONLY and not any(s.startswith("*") for s in said):
            said.append("*")
        said.append(parameter_text(parameter))
    returned = inspect.signature(item).return_annotation
    after = "" if inspect.isclass(item) else f" -> {annotation(returned)}"
    text = f"{shown}({', '.join(said)}){after}"
    if len(text) > WIDTH:
        lines = "".join(f"    {line},\n" for line in said)
        text = f"{shown}(\n{lines}){after}"
    return f"```python\n{text}\n```\n"


def fields(item: Any) -> str:
    """A fenced block of the fields of a dataclass, but for those of a base that has an entry."""
    ours = [base for base in item.__bases__ if base.__name__ in BESIDE]
    known = {field.name for base in ours for field in dataclasses.fields(base)}
    bases = f"({', '.join(base.__name__ for base in ours)})" if ours else ""
    lines = [f"class {item.__name__}{bases}:"]
    for field in dataclasses.fields(item):
        if field.name in known:
            continue
        value = "" if field.default is dataclasses.MISSING else f" = {default(field.default)}"
        lines.append(f"    {field.name}: {annotation(field.type)}{value}")
    return "```python\n" + "\n".join(lines) + "\n```\n"


def enum_members(item: type[enum.Enum]) -> str:
    lines = [f"class {item.__name__}(Enum):"]
    lines += [f"    {member.name} = {default(member.value)}" for member in item]
    return "```python\n" + "\n".join(lines) + "\n```\n"


# --- docstrings to Markdown ---------------------------------------------------

# "name: what it is", "one, other: ...", "result(), exception(): ..."; further lines are indented.
_NAME = r"[a-z_]\w*(?:\(\))?"
_TERM = re.compile(rf"({_NAME}(?:, {_NAME})*): ")


def escaped(text: str) -> str:
    """`text` with what Markdown would take for markup escaped, outside of backticks."""
    parts = re.split(r"(`[^`]*`)", text)
    return "".join(
        part if part.startswith("`") else re.sub(r"([<*])", r"\\\1", part) for part in parts
    )


def markdown(docstring: str) -> str:
    """A docstring of this package: paragraphs, and lists of terms."""
    blocks = inspect.cleandoc(docstring).split("\n\n")
    return "\n\n".join(_block(block.splitlines()) for block in blocks) + "\n"


def _block(lines: list[str]) -> str:
    heads = [line for line in lines if not line.startswith(" ")]
    if not all(_TERM.match(line) for line in heads):
        return "\n".join(escaped(line.strip()) for line in lines)
    out = []
    for line in lines:
        head = None if line.startswith(" ") else _TERM.match(line)
        if head is None:
            out.append(f"  {escaped(line.strip())}")
        else:
            out.append(f"- {names_text(head[1].split(', '))}: {escaped(line[head.end() :])}")
    return "\n".join(out)


def described(name: str, docstring: str) -> bool:
    """Whether `docstring` says something of the argument `name`."""
    return bool(re.search(rf"`{name}\b|\b{name}(, \w+)*: ", docstring))


def undescribed(item: Any) -> list[str]:
    docstring = inspect.getdoc(item) or ""
    return [
        parameter.name
        for parameter in parameters_of(item)
        if parameter.kind is not parameter.VAR_KEYWORD and not described(parameter.name, docstring)
    ]


# --- the page -----------------------------------------------------------------


def of_megatron(name: str) -> Any:
    """What programs import by `name`, which is one of MEGATRON."""
    module, _, last = f"torch_ckpt.megatron.{name}".rpartition(".")
    return getattr(importlib.import_module(module), last)


def entry(name: str, item: Any) -> Iterator[str]:
    yield f"### {name}\n"
    if inspect.isclass(item) and issubclass(item, enum.Enum):
        yield enum_members(item)
    elif dataclasses.is_dataclass(item) and name not in RECEIVED:
        yield fields(item)
    elif name not in RECEIVED:
        room = "torch_ckpt.megatron." if name in MEGATRON else "torch_ckpt."
        yield signature(room + name if name in (*EXPORTED, *MEGATRON) else name, item)
    yield markdown(item.__doc__)
    if name in AS_IN:
        yield listed(f"As in {names_text(AS_IN[name], ' and ')}", undescribed(item))
    if inspect.isclass(item):
        yield from members(name, item)


def members(name: str, item: type) -> Iterator[str]:
    """Methods and properties with docstrings of their own, then the names of those without: they
    override a method of a base class, and do what its documentation says."""
    silent = []
    for member, value in vars(item).items():
        if member.startswith("_") or member in INTERNAL.get(name, ()):
            continue
        is_property = isinstance(value, property)
        value = value.__func__ if isinstance(value, classmethod) else value
        if not is_property and not inspect.isfunction(value):
            continue
        if value.__doc__ is None:
            silent.append(member)
            continue
        yield f"#### {name}.{member}\n"
        if not is_property:
            yield signature(member, value, bound=True)
        yield markdown(value.__doc__)
    # Of some the class says enough.
    silent = [member for member in silent if f"{member}()" not in (item.__doc__ or "")]
    if silent:
        yield listed("Overrides, as its base class describes them", silent)


def names_text(names: Sequence[str], between: str = ", ") -> str:
    return between.join(f"`{name}`" for name in names)


def listed(before: str, names: Sequence[str]) -> str:
    return textwrap.fill(f"{before}: {names_text(names)}.", 100) + "\n"


def errors() -> Iterator[str]:
    kinds = [name for name in torch_ckpt.__all__ if is_error(name)]
    yield f"## {ERRORS}\n"
    yield "### CheckpointError\n"
    yield markdown(torch_ckpt.CheckpointError.__doc__ or "")
    rows = ["| error | what went wrong |", "|---|---|"]
    for name in kinds:
        if name != "CheckpointError":
            bases = [base.__name__ for base in getattr(torch_ckpt, name).__bases__[1:]]
            also = f" (also a `{bases[0]}`)" if bases else ""
            text = " ".join(inspect.cleandoc(getattr(torch_ckpt, name).__doc__).split())
            rows.append(f"| `{name}`{also} | {escaped(text)} |")
    yield "\n".join(rows) + "\n"


def help_text(command: click.Command, name: str, parent: click.Context | None = None) -> str:
    context = context_of(command, name, parent)
    return f"```\n{command.get_help(context)}\n```\n"


def context_of(
    command: click.Command, name: str, parent: click.Context | None = None
) -> click.Context:
    settings = command.context_settings
    return click.Context(command, parent, info_name=name, terminal_width=WIDTH, **settings)


def command_line() -> Iterator[str]:
    yield "## Command line\n"
    yield help_text(cli, "torch-ckpt")
    group = context_of(cli, "torch-ckpt")
    for name in cli.list_commands(group):
        command = cli.get_command(group, name)
        assert command is not None
        yield f"### torch-ckpt {name}\n"
        yield help_text(command, name, group)


def check_sections() -> None:
    """Every exported name is in one section, and no other."""
    known = [name for names in SECTIONS.values() for name in names]
    exported = [name for name in EXPORTED if not is_error(name)]
    if sorted(known) != sorted(exported):
        raise SystemExit(f"SECTIONS and EXPORTED differ: {set(known) ^ set(exported)}")


def is_error(name: str) -> bool:
    item = getattr(torch_ckpt, name)
    return inspect.isclass(item) and issubclass(item, torch_ckpt.CheckpointError)


def page() -> str:
    check_sections()
    out = [INTRODUCTION]
    for title, names in SECTIONS.items():
        out.append(f"## {title}\n")
        for name in names:
            out += entry(name, getattr(torch_ckpt, name))
    out.append(MEGATRON_TITLE)
    for name in MEGATRON:
        out += entry(name, of_megatron(name))
    out.append("## What these return or name\n")
    for name in BESIDE:
        out += entry(name, of_package(name))
    out += errors()
    out += command_line()
    return "\n".join(out)


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
    print(f"wrote {PAGE}", file=sys.stderr)
