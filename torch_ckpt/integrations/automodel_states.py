"""States that each rank keeps in a file of its own, as AutoModel has them in a step:

    rng/rng_global_rank_<rank>.pt                  random states (before 0.7: rng_dp_rank_<rank>.pt)
    dataloader/dataloader_dp_rank_<data rank>.pt   where a loader is

They are files of torch.save, read with weights_only=True unless AutoModel's configuration says
otherwise. Ours say beside the state which ranks have saved theirs: without that nobody could tell a
lost file from fewer ranks. AutoModel reads them all the same.
"""

from __future__ import annotations

import os
import re
import zipfile
from collections.abc import Collection, Mapping
from typing import Any

import torch
from nemo_automodel.components.checkpoint.checkpointing import load_torch_ckpt as _stock_load

from torch_ckpt.errors import CorruptError, IncompleteError, InvalidArgumentError
from torch_ckpt.runs.place import sync_directory
from torch_ckpt.training.rank_state import restore_random_state

_RANKS = "torch_ckpt_ranks"  # in a state: the numbers of all ranks that have saved one
GLOBAL, DATA = "global_rank", "dp_rank"  # what a file's number is
_PICKLE = b"\x80"  # with which files of torch.save before 1.6 begin


def load_torch_ckpt(f: Any, *arguments: Any, **keywords: Any) -> Any:
    """AutoModel's `load_torch_ckpt`, of a file that is whole. Raises CorruptError where it is
    damaged, and what AutoModel's does."""
    if isinstance(f, str | os.PathLike):
        _check_archive(os.fspath(f))
    return _stock_load(f, *arguments, **keywords)


def _check_archive(path: str) -> None:
    """Compare the entries of a file of torch.save with their CRC-32, which torch does not."""
    try:
        if zipfile.is_zipfile(path):
            with zipfile.ZipFile(path) as archive:
                damaged = archive.testzip() if torch.serialization.get_crc32_options() else None
            if damaged is not None:
                raise CorruptError(f"its entry {damaged} does not match its CRC-32", file=path)
            return
    except zipfile.BadZipFile as error:
        raise CorruptError(f"is a damaged archive: {error}", file=path) from error
    with open(path, "rb") as file:
        if file.read(1) != _PICKLE:
            raise CorruptError("is no file of torch.save, or a part of one", file=path)


def file_of(directory: str, name: str, kind: str, rank: int) -> str:
    """The path of the state `name` of a rank."""
    return os.path.join(directory, f"{name}_{kind}_{rank}.pt")


def write(state: Any, path: str, ranks: Collection[int]) -> None:
    """Write `state`, durably, and which `ranks` do so."""
    os.makedirs(os.path.dirname(path), exist_ok=True)
    if isinstance(state, dict):
        state = {**state, _RANKS: sorted(ranks)}
    with open(path, "wb") as file:
        torch.save(state, file)
        file.flush()
        os.fsync(file.fileno())
    sync_directory(os.path.dirname(path))


def read(path: str, *, weights_only: bool) -> Any:
    """What `write`, or AutoModel, has written. Raises IncompleteError where there is no such file,
    and what `load_torch_ckpt` does."""
    return _read(path, weights_only)[0]


def _read(path: str, weights_only: bool) -> tuple[Any, list[int] | None]:
    try:
        state = load_torch_ckpt(path, weights_only=weights_only)
    except FileNotFoundError:
        raise IncompleteError("is missing", file=path) from None
    return state, state.pop(_RANKS, None) if isinstance(state, dict) else None


def find(
    directory: str, name: str, kinds: Collection[str], here: Collection[int], *, weights_only: bool
) -> tuple[str, list[int]]:
    """Of the first of `kinds` that `directory` has files of: it, and the ranks that have saved
    their states.

    here: the numbers of the ranks that load. Raises IncompleteError for a file that is not there.
    """
    names = os.listdir(directory) if os.path.isdir(directory) else []
    for kind in kinds:
        pattern = re.compile(rf"{re.escape(name)}_{kind}_([0-9]+)\.pt")
        found = sorted(int(match[1]) for match in map(pattern.fullmatch, names) if match)
        if not found:
            continue
        said = _read(file_of(directory, name, kind, found[0]), weights_only)[1]
        saved = said or (found if set(found) == set(here) else range(found[-1] + 1))
        for rank in saved:
            if rank not in found:
                path = file_of(directory, name, kind, rank)
                raise IncompleteError(
                    f"is missing: {len(saved)} ranks have saved their states", file=path
                )
        return kind, list(saved)
    path = file_of(directory, name, next(iter(kinds)), next(iter(here)))
    raise IncompleteError("is missing, and so are those of other ranks", file=path)


def begin_new_streams(state: Any, saved: int, rank: int, size: int, path: str) -> None:
    """Random numbers where `saved` ranks have saved theirs and `size` go on: see
    `restore_random_state`. `state`: of the first rank, by AutoModel's StatefulRNG.

    Raises InvalidArgumentError where it is another kind of state.
    """

    def part(name: str) -> Any:
        if isinstance(state, Mapping):
            return state.get(name)
        return getattr(state, name, None)  # of AutoModel before 0.6

    python, of_torch = part("random_rng_state"), part("torch_rng_state")
    if python is None or of_torch is None:
        raise InvalidArgumentError(
            f"was saved by {saved} ranks and is to be loaded by {size}, and only random states can "
            "be begun anew",
            file=path,
        )
    first = {"python": python, "torch": bytes(of_torch.cpu().numpy())}
    restore_random_state({"world_size": saved, "0": first}, rank, size)
