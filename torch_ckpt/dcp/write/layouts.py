"""Layouts: which files the tensors of a save go to. A save has one, or several, each in a
subdirectory of its own, for leaves whose names begin differently."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from torch.distributed.checkpoint.planner import SavePlan, TensorWriteData

from torch_ckpt.errors import InvalidArgumentError
from torch_ckpt.export.dtype_policy import DtypePolicy
from torch_ckpt.export.files import NAMINGS
from torch_ckpt.options import check_choice, parse_bytes

NamingWord = Literal["dcp", "hf", "diffusers", "peft"]

MOST_BYTES = 5 * 10**9  # of a final file, where nobody says max_shard_size


@dataclass(frozen=True, slots=True)
class Layout:
    """How tensors stand on disk.

    final: in files of whole tensors, for `from_pretrained`; else every rank has shards of its own.
    subdirectory: of the checkpoint, in which they stand, a plain name; "": the checkpoint's own.
    naming, max_shard_size (in bytes), dtype_policy: of final files.
    extras: what stands beside them. These are as HuggingFaceStorageWriter has them.
    """

    final: bool
    subdirectory: str = ""
    naming: NamingWord = "dcp"
    max_shard_size: int | None = None
    dtype_policy: DtypePolicy = field(default_factory=DtypePolicy)
    extras: Any = None

    def path(self, name: str) -> str:
        """The path of a file of this layout below the checkpoint's directory."""
        return f"{self.subdirectory}/{name}" if self.subdirectory else name

    def naming_request(self) -> dict[str, Any]:
        """How final files are called, as fields of a request."""
        return {**NAMINGS[self.naming]._asdict(), "subdirectory": self.subdirectory}


@dataclass(frozen=True, slots=True)
class Layouts:
    """The layouts of a save: of final files, of shards, or of both.

    main: of all leaves, but for
    beside: of leaves whose name has one of `names_beside` before its first dot; None for nothing.

    Of two the main one is final, and so is what is laid out for all ranks together; the other one
    is of shards. Leaves that are no tensors stand with the shards.
    """

    main: Layout
    beside: Layout | None = None
    names_beside: frozenset[str] = frozenset()

    def __post_init__(self) -> None:
        beside = self.beside
        if beside is None:
            if self.names_beside:
                raise InvalidArgumentError("names_beside needs a layout beside")
        elif not self.main.final or beside.final:
            raise InvalidArgumentError("of two layouts the main one is final, the other of shards")
        elif self.main.subdirectory == beside.subdirectory:
            raise InvalidArgumentError("two layouts of a save have one subdirectory")

    def __iter__(self) -> Iterator[Layout]:
        return iter((self.main,) if self.beside is None else (self.main, self.beside))

    def of(self, fqn: str) -> Layout:
        """That of a leaf."""
        if self.beside is None or fqn.partition(".")[0] not in self.names_beside:
            return self.main
        return self.beside

    @property
    def final(self) -> Layout | None:
        """The one of final files."""
        return self.main if self.main.final else None

    @property
    def sharded(self) -> Layout | None:
        """The one of shards."""
        return self.beside if self.main.final else self.main

    @property
    def of_objects(self) -> Layout:
        """Where leaves stand that are no tensors."""
        return self.sharded or self.main

    def in_final_files(self, plan: SavePlan) -> Iterator[tuple[str, TensorWriteData]]:
        """What of a plan goes to final files: the names of tensors, and their boxes."""
        for item in plan.items:
            if item.tensor_data is not None and self.of(item.index.fqn).final:
                yield item.index.fqn, item.tensor_data

    def mapped(self, change: Callable[[Layout], Layout]) -> Layouts:
        """With `change` of each layout in its place."""
        beside = None if self.beside is None else change(self.beside)
        return replace(self, main=change(self.main), beside=beside)


def layout_of_arguments(
    layout: str | None,
    max_shard_size: int | str | None,
    policy: DtypePolicy,
    naming: NamingWord,
    extras: Any,
    *,
    save_distributed: bool,
    enable_consolidation: bool,
    has_mapping: bool,
) -> tuple[Layout, Layout | None]:
    """What a writer's arguments say: the layout of what it writes, and that of the files into which
    its shards are consolidated then, if they are. Raises InvalidArgumentError for arguments that
    exclude each other."""
    check_choice("naming", naming, NAMINGS)
    if layout is not None:
        check_choice("layout", layout, ("sharded", "final"))
        if save_distributed and layout == "final":
            raise InvalidArgumentError(
                "save_distributed=True and layout='final' exclude each other"
            )
        save_distributed = layout == "sharded"
    if save_distributed and not enable_consolidation:
        if policy:
            raise InvalidArgumentError("dtype and keep_fp32 are of final files")
        if naming != "dcp":
            raise InvalidArgumentError("naming is of final files")
    if max_shard_size is None:
        divides = layout == "final" and not has_mapping
        most = MOST_BYTES if divides else None
    elif has_mapping or (save_distributed and not enable_consolidation):
        raise InvalidArgumentError(
            "max_shard_size is of final files, and without fqn_to_index_mapping"
        )
    else:
        most = parse_bytes(max_shard_size, "max_shard_size")
    final = Layout(True, "", naming, most, policy, extras)
    if not save_distributed:
        return final, None
    return (Layout(False), final) if enable_consolidation else (Layout(False, extras=extras), None)
