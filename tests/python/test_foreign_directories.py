"""Directories that are not ours: what their files leave unsaid, and what this torch cannot hold."""

from __future__ import annotations

import json
import logging
import queue
from pathlib import Path
from typing import Any

import pytest
import torch
from sample_states import stock_rows

import torch_ckpt
from torch_ckpt import HuggingFaceStorageReader
from torch_ckpt.native.dtypes import TORCH_DTYPES

SHAPE_UNSAID = "no file says the whole shape of w"


def write_raw(path: Path, entries: dict[str, tuple[str, list[int], bytes]]) -> None:
    """A safetensors file of any dtype, by hand."""
    header, data = {}, b""
    for name, (dtype, shape, content) in entries.items():
        offsets = [len(data), len(data) + len(content)]
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": offsets}
        data += content
    text = json.dumps(header).encode()
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(len(text).to_bytes(8, "little") + text + data)


@pytest.mark.skipif("F6_E2M3" in TORCH_DTYPES, reason="this torch has six-bit floats")
def test_a_dtype_that_torch_lacks_leaves_out_its_tensors_only(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    floats = torch.tensor([1.0, 2.0])
    write_raw(
        tmp_path / "in" / "model.safetensors",
        {
            "w": ("F32", [2], floats.numpy().tobytes()),
            "six": ("F6_E2M3", [4], bytes(3)),
        },
    )
    target = {"w": torch.zeros(2)}
    with caplog.at_level(logging.WARNING):
        torch_ckpt.load(target, checkpoint_id=tmp_path / "in", no_dist=True)
    assert torch.equal(target["w"], floats)
    assert "tensor 'six' is left out: it has dtype F6_E2M3" in caplog.text
    with pytest.raises(Exception, match="six"):
        torch_ckpt.load({"six": torch.zeros(4)}, checkpoint_id=tmp_path / "in", no_dist=True)


def test_shapes_that_no_file_says_are_warned_of(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    whole = torch.arange(24.0).reshape(12, 2)
    stock_rows(tmp_path / "stock", whole, 3)
    torch_ckpt.save({"w": whole}, checkpoint_id=tmp_path / "ours", no_dist=True)
    target = {"w": torch.zeros(12, 2)}
    for act in (
        lambda path: torch_ckpt.load(target, checkpoint_id=path, no_dist=True),
        lambda path: torch_ckpt.consolidate_safetensors_files(
            path, tmp_path / "out", overwrite=True
        ),
    ):
        with caplog.at_level(logging.WARNING):
            act(tmp_path / "ours")
        assert SHAPE_UNSAID not in caplog.text
        with caplog.at_level(logging.WARNING):
            act(tmp_path / "stock")
        assert caplog.text.count(SHAPE_UNSAID) == 1
        caplog.clear()


def test_a_missing_last_shard_of_stock_is_warned_of(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    stock_rows(tmp_path / "in", torch.arange(24.0).reshape(12, 2), 3)
    sorted((tmp_path / "in").glob("shard-*"))[-1].unlink()
    with caplog.at_level(logging.WARNING):
        torch_ckpt.consolidate_safetensors_files(tmp_path / "in", tmp_path / "out", None)
    assert SHAPE_UNSAID in caplog.text


def test_a_hook_around_the_queue_of_files_is_called(tmp_path: Path) -> None:
    class Counting(HuggingFaceStorageReader):
        files = 0

        def _read_files_from_queue(
            self, file_queue: queue.Queue[Any], result_queue: queue.Queue[Any], planner: Any
        ) -> None:
            self.files += file_queue.qsize()
            super()._read_files_from_queue(file_queue, result_queue, planner)

    whole = torch.arange(24.0).reshape(12, 2)
    stock_rows(tmp_path / "in", whole, 3)
    reader = Counting(tmp_path / "in", 2)  # stock takes the queue for more threads than one
    target = {"w": torch.zeros(12, 2)}
    torch_ckpt.load(target, storage_reader=reader, no_dist=True)
    assert torch.equal(target["w"], whole)
    assert reader.files >= 3
