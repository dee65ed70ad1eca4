"""A consolidation of which nothing is said but where from and where to."""

from __future__ import annotations

import inspect
from pathlib import Path

import torch
from safetensors.torch import load_file
from torch.distributed.checkpoint._consolidate_hf_safetensors import (
    consolidate_safetensors_files as stock_consolidate,
)

import torch_ckpt


def test_two_directories_are_enough(tmp_path: Path) -> None:
    state = {"a": torch.arange(6.0), "b": torch.ones(2)}
    torch_ckpt.save(state, tmp_path / "in")
    torch_ckpt.consolidate_safetensors_files(tmp_path / "in", tmp_path / "out")
    merged = load_file(tmp_path / "out" / "model-00001-of-00001.safetensors")
    assert merged.keys() == state.keys() and torch.equal(merged["a"], state["a"])


def test_all_else_is_as_stock_has_it() -> None:
    ours = list(inspect.signature(torch_ckpt.consolidate_safetensors_files).parameters.values())
    stock = list(inspect.signature(stock_consolidate).parameters.values())
    assert stock[2].default is inspect.Parameter.empty and ours[2].default is None
    for own, theirs in zip(ours, stock, strict=False):
        assert (own.name, own.kind) == (theirs.name, theirs.kind)
        assert own is ours[2] or own.default == theirs.default
    assert {own.kind for own in ours[len(stock) :]} <= {
        inspect.Parameter.KEYWORD_ONLY,
        inspect.Parameter.VAR_KEYWORD,  # MergeOptions
    }
