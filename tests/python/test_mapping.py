"""What fqn_to_index_mapping may hold."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from safetensors.torch import load_file
from sample_states import FAILED, save

from torch_ckpt import HuggingFaceStorageWriter, consolidate_safetensors_files

STATE = {"w": torch.arange(6.0), "v": torch.ones(2)}
KINDS: list[dict[str, Any]] = [
    {},
    {"save_distributed": True},
    {"save_distributed": True, "enable_consolidation": True},
]


@pytest.mark.parametrize("options", KINDS, ids=lambda options: "+".join(options) or "final")
@pytest.mark.parametrize("index", [0, -1, True, 1.0, 1.5, "1", None, 100_000, 2**40])
def test_bad_indices_are_refused_before_anything_is_written(
    tmp_path: Path, options: dict[str, Any], index: Any
) -> None:
    writer = HuggingFaceStorageWriter(tmp_path / "c", {"v": 1, "w": index}, **options)
    with pytest.raises(FAILED, match="'w': has index .* integers from 1 to 99999"):
        save(STATE, writer)
    assert list(tmp_path.iterdir()) == []
    save(STATE, HuggingFaceStorageWriter(tmp_path / "in"))
    with pytest.raises(FAILED, match="'w': has index"):
        consolidate_safetensors_files(tmp_path / "in", tmp_path / "out", {"v": 1, "w": index})
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("options", KINDS, ids=lambda options: "+".join(options) or "final")
def test_integers_of_numpy(tmp_path: Path, options: dict[str, Any]) -> None:
    mapping = {"v": numpy.int64(1), "w": numpy.int32(2)}
    save(STATE, HuggingFaceStorageWriter(tmp_path / "c", mapping, **options))
    if options.get("enable_consolidation") or not options:
        assert list(load_file(tmp_path / "c" / "model-00002-of-00002.safetensors")) == ["w"]
