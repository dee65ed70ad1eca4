"""From a checkpoint of one format to one of another; torch only where pickles are written."""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Sequence
from typing import Any, Literal

from torch_ckpt.checkpoint.hulls import warn_of_hulls
from torch_ckpt.checkpoint.megatron_form import form_files, form_of
from torch_ckpt.checkpoint.names import rank_of
from torch_ckpt.checkpoint.quantization import codes_left, quantization_of
from torch_ckpt.checkpoint.selection import Patterns
from torch_ckpt.errors import CheckpointError, InvalidArgumentError, UnsupportedError
from torch_ckpt.export.dtype_policy import DtypePolicy
from torch_ckpt.export.extras import extra_files, files_beside
from torch_ckpt.export.files import NAMINGS, SHARDS, Naming
from torch_ckpt.export.merge import MEMORY_BUDGET, FileNames, merge, merge_request
from torch_ckpt.export.renames import KeyMapping
from torch_ckpt.native import core
from torch_ckpt.native.opened import OpenedCheckpoint
from torch_ckpt.native.progress import Progress
from torch_ckpt.options import check_choice, local_path
from torch_ckpt.tensor_mapping.mapping import TensorMapping

logger = logging.getLogger(__name__)

_GROWTH = 1 << 30  # bytes that are worth a warning

Target = Literal["torch_ckpt", "hf", "dcp", "megatron", "torch"]
TARGETS = ("torch_ckpt", "hf", "dcp", "megatron", "torch")
_ARCHIVES = ("dcp", "megatron", "torch")  # which are pickles of torch's


def convert(
    source: str | os.PathLike[str],
    target: str | os.PathLike[str],
    to: Target | None = None,
    *,
    format: str | None = None,
    dtype: Any = None,
    keep_fp32: Sequence[str] = (),
    key_mapping: KeyMapping | None = None,
    tensor_mapping: TensorMapping | None = None,
    objects: bool = True,
    include: Patterns = None,
    exclude: Patterns = None,
    overwrite: bool | Literal["all"] = False,
    max_shard_size: int | str | None = None,
    naming: FileNames | None = None,
    extras: Any = None,
    verify: bool = True,
    memory_budget: int | str = MEMORY_BUDGET,
    num_threads: int = 1,
    direct_io: bool = True,
    progress: Progress | None = None,
) -> dict[str, Any]:
    """Write the checkpoint at `source`, of any format that is read, to `target`.

    Tensors are streamed, whatever the size of the checkpoint; leaves that are none are held in
    memory. All or nothing: on an error no output is left; what a kill leaves is removed when it is
    called again. A tensor that cannot be read, as a sparse one, is an error that names it, unless
    `exclude` does. The source is untouched; `target` must be elsewhere.

    to: what `target` is to be; None for what the source is.
        "torch_ckpt": a directory of shards as `save` writes them; of a checkpoint of Megatron's
        programs one that `torch_ckpt.megatron` loads. "hf": one of whole tensors as
        `from_pretrained` reads them (model.safetensors, or several files and their index). "dcp":
        one of stock DCP, as if saved by one rank, which must not be there yet. "megatron": the
        same as torch_dist of Megatron Core, which loads it; what is no tensor and no object of its
        own is its common state. "torch": a file of `torch.save`, with `overwrite` in place of such
        a file and of nothing else. The last three import torch, which pickles what is no tensor's
        elements.
    format: what the source is read as, see Checkpoint; None to find out.
    include, exclude, overwrite: as those of `consolidate_safetensors_files`.
    objects: False leaves out the leaves that are no tensors; one that holds a tensor, as a tuple
        may, is an error that names it, unless it is a PerRank value. Else one that cannot be
        written, as an object of some class in a pickle, is an error that names it.
    dtype, keep_fp32, max_shard_size: as HuggingFaceStorageWriter's. With a dtype of 16 bits or more
        for all floats, or for these, codes with scales (float8, MXFP4) become the numbers that they
        are, rounded once, and config.json says no quantization any more; else they stay codes.
    naming: with "hf", what the files are called, as HuggingFaceStorageWriter's; None as those of
        the source are: of an adapter as "peft", of a diffusion model as "diffusers", else as "hf".
    extras: with "hf", what stands beside the tensors, as HuggingFaceStorageWriter's. None takes
        what the source has, where that is a directory of whole safetensors or torch.save files: all
        of it but weights. () for nothing.
    verify: compare what is read with its digests: those of ours, and of files of stock DCP and
        torch.save the CRC-32 of every entry of an archive of which anything is read.
    key_mapping, memory_budget, num_threads, direct_io, progress: as those of
        `consolidate_safetensors_files`.
    tensor_mapping: pairs of views, the name of a table of torch_ckpt's, a path or a dict:
        docs/tensor_mapping.md. A source whose names are those of the first views is written as the
        second ones say, in the smallest shapes that have all elements; one that has names of the
        second ones alone the other way. What no pair names stays as it is. Numbers that views name
        are those of config.json beside the source.

    Returns {"files", "bytes", "hulls"} of what was written; `hulls` are tensors whose shape no file
    of the source says. Raises InvalidArgumentError, ConflictError for a target that stands in the
    way, UnsupportedError, and what `consolidate_safetensors_files` raises.
    """
    kind = _format_of(source, format) if to is None else to
    check_choice("to", kind, TARGETS)
    if kind in _ARCHIVES and max_shard_size is not None:
        raise InvalidArgumentError(f"max_shard_size: there are no shards of the format {kind}")
    if kind != "hf" and (naming is not None or extras):
        given = "extras" if naming is None else "naming"
        raise InvalidArgumentError(f"{given}: is of the format hf, and not of {kind}")
    if naming is not None:
        check_choice("naming", naming, NAMINGS)
    policy = DtypePolicy(dtype, keep_fp32)
    request = merge_request(
        source,
        target,
        None,
        num_threads,
        strict=True,
        verify=verify,
        max_shard_size=max_shard_size,
        naming=SHARDS if kind == "torch_ckpt" else naming or "hf",
        policy=policy,
        memory_budget=memory_budget,
        key_mapping=key_mapping,
        tensor_mapping=tensor_mapping,
        direct_io=direct_io,
        format=format,
        objects=objects,
        include=include,
        exclude=exclude,
        overwrite=overwrite,
    )
    place = os.path.realpath(local_path(target))
    opened = request.opened
    if not objects:
        _check_no_tensor_is_dropped(opened, verify)
    listed = opened.files()
    files = [each.name for each in listed if each.role != "extra"]
    names = [each.name for each in listed]
    _check_apart(opened.path, names, place, into_directory=kind != "torch")
    _warn_of_growth(opened, sum(each.bytes for each in listed))
    if kind == "hf" and naming is None:
        request.update(_naming_of(files)._asdict())
    beside = extra_files(extras, policy.torch_name)
    if kind == "hf" and extras is None and _is_of_the_hub(opened.path, files):
        taken = _names_of_others(place)
        plain = bool(opened.listing(tensors=False).scaled)
        if plain:
            _check_all_numbers(opened)
        beside = files_beside(opened.path, files, taken, policy.torch_name, plain=plain)
    form = form_of(opened) if kind == "torch_ckpt" else None
    if form is not None:
        listing = opened.listing()
        kept = listing.names if objects else listing.tensors()
        beside = form_files(form.of(kept, request["new_names"]))
    try:
        if objects:
            _check_classes_are_known(opened, verify)
        if kind not in _ARCHIVES:
            return merge(request, beside, progress)
        from torch_ckpt.conversion import archives  # imports torch

        answer = archives.write_archives(request, place, kind, progress)
    except UnsupportedError as error:
        error.file = error.file or opened.path
        listing = opened.listing()
        if error.tensor in listing.objects():
            error.message += "; objects=False (--no-objects) leaves out what is no tensor"
        elif error.tensor in listing.names:
            error.message += (
                f"; exclude={error.tensor!r} (--exclude {error.tensor!r}) leaves it out"
            )
        raise
    warn_of_hulls(opened.path, answer["hulls"])
    return answer


def _check_all_numbers(opened: OpenedCheckpoint) -> None:
    """Raises UnsupportedError where some codes have become numbers and others have not, of which
    config.json would say nothing any more."""
    left = codes_left(opened)
    if left and quantization_of(opened.path) is not None:
        raise UnsupportedError(
            f"stays codes, with the scales '{next(iter(left.values()))}', where others become "
            "numbers, and config.json says one of all: give a dtype for all, or for none",
            file=opened.path,
            tensor=next(iter(left)),
        )


def _format_of(source: str | os.PathLike[str], format: str | None) -> str:
    """In the words of Checkpoint.format; what is to be said of it is said when it is converted."""
    return OpenedCheckpoint(local_path(source), format).listing(tensors=False).format


def _check_classes_are_known(opened: OpenedCheckpoint, verify: bool) -> None:
    """Raises UnsupportedError for an archived leaf that nobody could read where it is written to:
    the core says of some class what it is made of, and who reads that has to know the class."""
    listing = opened.listing(tensors=False)
    values = opened.archived_objects(listing.archived)
    named = [
        name for name, value in zip(listing.archived, values, strict=True) if _names_class(value)
    ]
    if not named:
        return
    from torch_ckpt.dcp.read import read_objects  # imports torch
    from torch_ckpt.objects.stand_ins import StandIns

    reader = read_objects.ObjectReader(
        opened, listing, verify=verify, allow_pickle=False, stand_ins=StandIns()
    )
    for name in named:
        reader.read_one(name)


def _names_class(value: Any) -> bool:
    """Whether a member of an enum, or a record, is in the typed JSON of an object."""
    left = [value]
    while left:
        each = left.pop()
        if isinstance(each, dict):
            if each.get("$") in ("enum", "record"):
                return True
            left += each.values()
        elif isinstance(each, list):
            left += each
    return False


def _check_no_tensor_is_dropped(opened: OpenedCheckpoint, verify: bool) -> None:
    """Raises UnsupportedError for a leaf that is no tensor and holds one, as a tuple may."""
    listing = opened.listing()
    names = listing.objects()
    if not names:
        return
    from torch_ckpt.dcp.read import read_objects  # imports torch
    from torch_ckpt.objects.stand_ins import StandIns
    from torch_ckpt.planning.per_rank import is_rank_part

    reader = read_objects.ObjectReader(
        opened, listing, verify=verify, allow_pickle=False, stand_ins=StandIns()
    )
    for name in names:
        if is_rank_part(name.rpartition(".")[2]):
            continue  # what one rank had: a random state, and no part of a model
        try:
            holds = read_objects.holds_tensor(reader.read_one(name))
        except UnsupportedError:
            continue  # an object of some class
        if holds:
            raise UnsupportedError(
                "is no tensor, but holds one that objects=False (--no-objects) would drop; "
                f"exclude={name!r} (--exclude {name!r}) leaves it out",
                file=opened.path,
                tensor=name,
            )


def _warn_of_growth(opened: OpenedCheckpoint, stored: int) -> None:
    """Log a warning where much more is written than `stored` bytes: a tensor that torch.save wrote
    of an expanded one has few bytes and may be of any size."""
    listing = opened.listing(tensors=False)
    if listing.scaled:
        return  # from codes, as was asked for
    totals = listing.dtypes.values()
    written = sum(total["bytes"] for total in totals)
    if written - stored > _GROWTH and written > 2 * stored:
        logger.warning(
            "%s: its tensors are expanded from less: of %d bytes in files %d will be written",
            opened.path,
            stored,
            written,
        )


def _naming_of(files: list[str]) -> Naming:
    """The naming that a source's file of tensors has."""
    for name in ("peft", "diffusers"):
        naming = NAMINGS[name]
        if any(file.startswith(naming.stem) for file in files):
            return naming
    return NAMINGS["hf"]


def _is_of_the_hub(source: str, files: list[str]) -> bool:
    """Whether it is a directory as the Hub has them, where more stands beside the tensors."""
    return not os.path.isfile(source) and any(
        file.endswith(".bin") or (file.endswith(".safetensors") and rank_of(file) is None)
        for file in files
    )


def _names_of_others(target: str) -> set[str]:
    """What is in the directory `target` and was not written by a save or a conversion of ours, so
    that nobody has asked to replace it."""
    if not os.path.isdir(target):
        return set()
    ours: set[str] = set()
    with contextlib.suppress(CheckpointError):  # no manifest, or none that can be read
        named = core.call({"op": "manifest", "path": target})["files"]
        ours = {file["name"] for file in named}
    return set(os.listdir(target)) - ours


def _check_apart(source: str, names: list[str], target: str, *, into_directory: bool) -> None:
    """Refuses a target, a real path, where what is written could replace a part of the source."""
    is_file = os.path.isfile(source)
    root = os.path.dirname(source) if is_file else source
    files = {os.path.realpath(os.path.join(root, name)) for name in names}
    folders = {os.path.realpath(root), *map(os.path.dirname, files)}
    if into_directory:
        taken = target in folders
    else:  # a file of one directory may become another one there
        taken = target in files or (not is_file and os.path.dirname(target) in folders)
    if taken:
        raise InvalidArgumentError(
            "is the source, or its directory; give another path", file=target
        )
