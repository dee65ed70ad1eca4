"""Consolidation on one process: sharded checkpoints to final Hugging Face files, without torch."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal, TypedDict

from torch_ckpt.checkpoint.hulls import warn_of_hulls, warn_of_notes
from torch_ckpt.checkpoint.quantization import (
    INTEGERS,
    check_method,
    codes_left,
    config_at,
    with_numbers,
)
from torch_ckpt.checkpoint.selection import Patterns, left_out_of, warn_of_moments
from torch_ckpt.errors import InvalidArgumentError
from torch_ckpt.export.dtype_policy import DtypePolicy
from torch_ckpt.export.extras import ExtraFiles, extra_files
from torch_ckpt.export.files import NAMINGS, SHARDS, Naming, checked_mapping
from torch_ckpt.export.renames import KeyMapping, renamed
from torch_ckpt.native import core
from torch_ckpt.native.jobs import MIN_WORKERS, Job
from torch_ckpt.native.opened import OpenedCheckpoint, ScaledPair
from torch_ckpt.native.progress import Progress, told
from torch_ckpt.native.sessions import replaces, warn_of
from torch_ckpt.options import check_choice, local_path, parse_bytes
from torch_ckpt.tensor_mapping.mapping import Pairs, TensorMapping, checked_pairs

if TYPE_CHECKING:
    from typing_extensions import Unpack  # typing has it from Python 3.11 on

WORKER_BYTES = 16 << 20  # that a worker leases at most: see OfExtents in engine/merge/merge_plan.cc
MEMORY_BUDGET = "512MiB"
FileNames = Literal["dcp", "hf", "diffusers", "peft"]


class MergeOptions(TypedDict, total=False):
    """The keywords of the functions that consolidate, for editors and type checkers; what they mean
    is in `consolidate_safetensors_files`."""

    strict: bool
    verify: bool
    max_shard_size: int | str | None
    naming: FileNames
    dtype: Any
    keep_fp32: Sequence[str]
    memory_budget: int | str
    extras: Any
    key_mapping: KeyMapping | None
    include: Patterns
    exclude: Patterns
    overwrite: bool | Literal["all"]
    direct_io: bool


def consolidate_safetensors_files(
    input_dir: str | os.PathLike[str],
    output_dir: str | os.PathLike[str],
    fqn_to_index_mapping: Mapping[str, int] | str | os.PathLike[str] | None = None,
    num_threads: int = 1,
    *,
    progress: Progress | None = None,
    **options: Unpack[MergeOptions],
) -> None:
    """Merge the checkpoint in `input_dir` into whole tensors in `output_dir`, on this process.

    Writes model-XXXXX-of-XXXXX.safetensors and model.safetensors.index.json. The directory is
    created, and may be `input_dir` itself: the shards then stay, and with `overwrite` the files of
    an earlier consolidation go. All or nothing: on an error no output is left; what a kill leaves
    is removed when it is called again.

    fqn_to_index_mapping: fqn to index of its file, from 1; an index file, or a directory with one,
        that divides the tensors so; None: one file, or files by `max_shard_size`.
    num_threads: threads; fewer than 4 mean 4, and `memory_budget` may hold fewer.
    strict: a tensor that is not in the mapping, or a name of the mapping that is not in the
        checkpoint, is an error. False leaves it out.
    verify: compare all bytes that are read with their digests, where there are any. True by
        default.
    max_shard_size, naming, dtype, keep_fp32, extras: as HuggingFaceStorageWriter's, of the files
        that are written.
    memory_budget: bytes, or text, that the threads' buffers take at most; "512MiB" by default.
    key_mapping: other names for the tensors that are written: a function from name to name, or
        (regular expression, replacement) pairs, of which the first that is found in a name is
        applied. All other arguments but include and exclude mean the new names.
    include, exclude: patterns of names as in a shell ("optim*"), or a list of such: of the
        checkpoint's leaves those that one of `include` matches, and none of `exclude`.
    overwrite: False, the default, replaces nothing that is there, and refuses a directory with
        another checkpoint (ConflictError). True, "all": as HuggingFaceStorageWriter's.
    direct_io: False reads and writes through the page cache.
    progress: called with bytes written and bytes in all, about ten times a second, on another
        thread.

    Raises IncompleteError for a hole, ConflictError for overlapping shards, CorruptError for
    damage, InvalidArgumentError for a value that `dtype` loses, OSError; they name file and tensor.
    Logs a warning for shapes that no file says (stock's shards).
    """
    request, extras = make_merge(
        input_dir, output_dir, fqn_to_index_mapping, num_threads, **options
    )
    merge(request, extras, progress)


def make_merge(
    input_dir: str | os.PathLike[str],
    output_dir: str | os.PathLike[str],
    mapping: Mapping[str, int] | str | os.PathLike[str] | None,
    num_threads: int,
    *,
    dtype: Any = None,
    keep_fp32: Sequence[str] = (),
    extras: Any = None,
    **others: Any,
) -> tuple[MergeRequest, ExtraFiles]:
    """The request that `merge` carries out, of MergeOptions, and what is to stand beside."""
    policy = DtypePolicy(dtype, keep_fp32)
    request = merge_request(input_dir, output_dir, mapping, num_threads, policy=policy, **others)
    return request, extra_files(extras, policy.torch_name)


def merge_request(
    input_dir: str | os.PathLike[str],
    output_dir: str | os.PathLike[str],
    mapping: Mapping[str, int] | str | os.PathLike[str] | None,
    num_threads: int,
    *,
    policy: DtypePolicy,
    strict: bool = True,
    verify: bool = True,
    max_shard_size: int | str | None = None,
    naming: FileNames | Naming = "dcp",
    memory_budget: int | str = MEMORY_BUDGET,
    key_mapping: KeyMapping | None = None,
    direct_io: bool = True,
    format: str | None = None,
    objects: bool = True,
    include: Patterns = None,
    exclude: Patterns = None,
    overwrite: bool | Literal["all"] = False,
    tensor_mapping: TensorMapping | None = None,
) -> MergeRequest:
    """Opens the input, as `format`, and tells what is wrong with it. Raises what that does
    (csrc/engine/open/checkpoint.h)."""
    pairs = None
    if tensor_mapping is not None:
        pairs = checked_pairs(tensor_mapping, key_mapping)
    if not isinstance(naming, Naming):
        check_choice("naming", naming, NAMINGS)
        naming = NAMINGS[naming]
    workers = min(
        max(MIN_WORKERS, num_threads), parse_bytes(memory_budget, "memory_budget") // WORKER_BYTES
    )
    if workers < 1:
        raise InvalidArgumentError(
            f"memory_budget={memory_budget!r} is less than the {WORKER_BYTES} bytes that a thread "
            "needs"
        )
    if max_shard_size is not None and mapping is not None:
        raise InvalidArgumentError("a mapping and max_shard_size exclude each other")
    checked = checked_mapping(mapping)
    whole = OpenedCheckpoint(local_path(input_dir), format)
    warn_of_notes(whole.path, whole.notes)
    if policy:
        # What is beside such codes would be cast, and they would stay.
        check_method(
            whole,
            {
                name: kind
                for name, kind in whole.listing().tensors().items()
                if kind.dtype in INTEGERS and policy.makes_numbers(name)
            },
        )
        unread = set(left_out_of(whole, include, exclude))

        def is_number(pair: ScaledPair) -> bool:
            new = renamed(key_mapping, [pair.name])
            return pair.codes not in unread and policy.makes_numbers(new.get(pair.name, pair.name))

        whole = with_numbers(whole, is_number)
    left_out = left_out_of(whole, include, exclude)

    def look(without: list[str]) -> OpenedCheckpoint:
        left = whole.without(without) if without else whole
        return left if pairs is None else _mapped(left, pairs)

    opened = look(left_out)
    dtypes = opened.dtypes() if policy or key_mapping else {}
    new_names = renamed(key_mapping, list(dtypes))
    scales = set(codes_left(opened).values()) if policy else set[str]()
    return MergeRequest(
        opened,
        look,
        left_out,
        {
            "output": local_path(output_dir),
            "mapping": checked,
            "max_bytes": parse_bytes(max_shard_size, "max_shard_size") if max_shard_size else 0,
            **naming._asdict(),
            "new_names": new_names,
            "dtypes": _changed_dtypes(
                {
                    new_names.get(name, name): dtype
                    for name, dtype in dtypes.items()
                    if name not in scales
                },
                policy,
            ),
            "workers": workers,
            "strict": strict,
            "objects": objects,
            **replaces(overwrite),
            "verify": verify,
            "direct_io": direct_io,
        },
    )


class MergeRequest(dict[str, Any]):
    """The fields that all requests of one merge have in common (csrc/capi/merge_requests.cc), and
    the input, looked at once for all of them."""

    def __init__(
        self,
        opened: OpenedCheckpoint,
        look: Callable[[list[str]], OpenedCheckpoint],
        left_out: list[str],
        fields: dict[str, Any],
    ) -> None:
        """opened: what `look` gives for all of the input but the leaves `left_out`."""
        super().__init__(fields)
        self._look = look
        self._take(opened, left_out)

    def leave_out(self, names: list[str]) -> None:
        """Merge all of the input but the leaves of these names."""
        self._take(self._look(names), names)

    def _take(self, opened: OpenedCheckpoint, left_out: list[str]) -> None:
        self.opened = opened
        self.update(checkpoint=opened.id, left_out=left_out)


def _mapped(opened: OpenedCheckpoint, pairs: Pairs) -> OpenedCheckpoint:
    found = opened.mapped_onto_new(pairs.pairs, pairs.numbers_in(config_at(opened.path)))
    pairs.check_matched(found.unmatched)
    return found.opened


# What decides over the output, and must be the same on all ranks.
OUTPUT_FIELDS = (
    "mapping",
    "max_bytes",
    *Naming._fields,
    "left_out",
    "new_names",
    "dtypes",
    "strict",
    "objects",
    "verify",
)


def _changed_dtypes(dtypes: Mapping[str, str], policy: DtypePolicy) -> dict[str, str]:
    """The dtypes, by fqn, that `policy` changes."""
    stored = {fqn: policy.stored(fqn, dtype) for fqn, dtype in dtypes.items()}
    return {fqn: dtype for fqn, dtype in stored.items() if dtype != dtypes[fqn]}


def merge(
    request: MergeRequest,
    extras: ExtraFiles,
    progress: Progress | None = None,
    cancel: threading.Event | None = None,
) -> dict[str, Any]:
    """The whole merge. Returns {"save_id", "files", "bytes", "hulls"} of what was written. Once
    `cancel` is set, which is looked at every 0.1 s, it ends with a CancelledError, unless all is
    written by then."""
    with extras as files, Job() as job, told(job, progress, cancel):
        whole = {"op": "merge", "job": job.id, "extras": files, **request}
        answer: dict[str, Any] = job.run(lambda: core.call(whole))
    tell_of_merge(request, answer)
    return answer


def tell_of_merge(request: MergeRequest, answer: dict[str, Any]) -> None:
    """What is to be said of a merge that is done."""
    warn_of(answer)
    warn_of_hulls(request.opened.path, answer["hulls"])
    if request["stem"] != SHARDS.stem:
        listing = request.opened.listing()
        columns = zip(listing.names, listing.kinds, strict=True)
        warn_of_moments(
            request["output"],
            (name for name, kind in columns if kind != core.OBJECT),
            "exclude=['optim*'] (--exclude 'optim*'), or what they are called here, leaves them "
            "out",
        )
