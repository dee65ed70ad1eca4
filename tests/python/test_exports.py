"""What users catch and hold is to be had from the package itself."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch

import torch_ckpt
from torch_ckpt.dcp.plan import load_planner
from torch_ckpt.export import consolidate


def test_every_name_is_there() -> None:
    for name in torch_ckpt.__all__:
        assert getattr(torch_ckpt, name) is not None
    assert sorted(torch_ckpt.__all__) == torch_ckpt.__all__


def test_a_missing_key_is_caught_by_its_own_name(tmp_path: Path) -> None:
    assert torch_ckpt.MissingKeyError is load_planner.MissingKeyError
    for kind in (torch_ckpt.IncompleteError, RuntimeError):
        assert issubclass(torch_ckpt.MissingKeyError, kind)
    torch_ckpt.save({"a": torch.ones(1)}, tmp_path / "c")
    with pytest.raises(torch_ckpt.MissingKeyError, match="Missing key .*: b"):
        torch_ckpt.load({"a": torch.ones(1), "b": torch.ones(1)}, tmp_path / "c")


def test_a_merge_in_the_background_has_a_type(tmp_path: Path) -> None:
    assert torch_ckpt.MergeFuture is consolidate.MergeFuture
    torch_ckpt.save({"a": torch.ones(1)}, tmp_path / "c")
    merged = torch_ckpt.consolidate_safetensors_files_on_every_rank(
        tmp_path / "c", tmp_path / "out", None, background=True
    )
    assert isinstance(merged, torch_ckpt.MergeFuture)
    merged.result()


def test_errors_need_no_torch() -> None:
    code = (
        "import sys, torch_ckpt\n"
        "for name in torch_ckpt.__all__:\n"
        "    if name.endswith('Error'): getattr(torch_ckpt, name)\n"
        "assert torch_ckpt.MissingKeyError and 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
