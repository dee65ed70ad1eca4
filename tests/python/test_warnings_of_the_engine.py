"""What the engine has found and given up is a warning of whoever began: a save, a merge, a
removal, an operator."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp

import torch_ckpt
from torch_ckpt import Checkpoint, HuggingFaceStorageWriter

STATE = {"w": torch.arange(6.0)}
SAID = r"torch_ckpt: .*torch_ckpt\.json.*called as those of our saves"


def operator(path: Path) -> None:
    report = torch.zeros(4, dtype=torch.int64)
    torch.ops.dcp_ext.save([STATE["w"]], torch_ckpt.plan(path, ["w"]), report)


def consolidated(path: Path, _: Path) -> None:
    writer = HuggingFaceStorageWriter(
        path, save_distributed=True, enable_consolidation=True, overwrite=True
    )
    dcp.save(STATE, storage_writer=writer, no_dist=True)


ACTS: dict[str, Callable[[Path, Path], Any]] = {
    "save": lambda path, _: torch_ckpt.save(STATE, path, no_dist=True),
    "final": lambda path, _: torch_ckpt.save(STATE, path, layout="final", no_dist=True),
    "async": lambda path, _: torch_ckpt.async_save(STATE, path, no_dist=True).result(),
    "consolidate": lambda path, source: torch_ckpt.consolidate_safetensors_files(
        source, path, overwrite=True
    ),
    "convert": lambda path, source: torch_ckpt.convert(source, path, "hf", overwrite=True),
    "of ranks": lambda path, source: torch_ckpt.consolidate_safetensors_files_on_every_rank(
        source, path, overwrite=True
    ),
    "save and consolidate": consolidated,
    "remove": lambda path, _: Checkpoint(path).remove(),
}


@pytest.fixture
def damaged(tmp_path: Path) -> Path:
    """A checkpoint whose manifest is cut, and beside it a whole one: in."""
    for name in ("in", "c"):
        torch_ckpt.save(STATE, tmp_path / name, no_dist=True)
    manifest = tmp_path / "c" / "torch_ckpt.json"
    manifest.write_bytes(manifest.read_bytes()[:100])
    return tmp_path / "c"


@pytest.mark.parametrize("act", ACTS)
def test_a_damaged_manifest_is_told_of_once(damaged: Path, act: str) -> None:
    with pytest.warns(UserWarning, match=SAID) as caught:
        ACTS[act](damaged, damaged.parent / "in")
    said = [str(each.message) for each in caught if "called as those" in str(each.message)]
    # A check before shards are written, and the merge behind them.
    assert len(said) == (2 if act == "save and consolidate" else 1)
    if act != "remove":
        with warnings.catch_warnings():
            warnings.filterwarnings("error", message="torch_ckpt: ")
            ACTS[act](damaged, damaged.parent / "in")


def test_a_warning_that_is_an_error_ends_the_save(damaged: Path) -> None:
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message="torch_ckpt: ")
        with pytest.raises(Exception, match="called as those of our saves"):
            torch_ckpt.save(STATE, damaged, no_dist=True)
    with pytest.warns(UserWarning, match=SAID):  # nothing of it is in the way
        torch_ckpt.save(STATE, damaged, no_dist=True)


def test_operators_hand_it_to_torch(damaged: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """Whose calls of operators make Python warnings of them from 2.15 on; before, its log has
    them."""
    for expected in (1, 0):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            operator(damaged)
        said = capfd.readouterr().err + "".join(str(each.message) for each in caught)
        assert said.count("called as those of our saves") == expected
