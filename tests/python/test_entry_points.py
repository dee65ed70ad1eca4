"""torch_ckpt.save and async_save: what a caller sees of a failure; consolidation of a link."""

from __future__ import annotations

import inspect
import os
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions

import torch_ckpt


class Unwritable:
    """A leaf that typed JSON cannot say."""


def test_async_save_settles_with_the_ranks_own_error(tmp_path: Path) -> None:
    state = {"w": torch.ones(3), "bad": Unwritable()}
    future = torch_ckpt.async_save(state, checkpoint_id=tmp_path / "c", no_dist=True)
    with pytest.raises(torch_ckpt.CheckpointError, match="bad") as caught:
        future.result(timeout=60)
    assert caught.value.rank == 0
    assert os.listdir(tmp_path) == [], "the staging directory is gone when the future is done"


def test_async_save_takes_every_keyword_of_stock(tmp_path: Path) -> None:
    stock = inspect.signature(dcp.async_save).parameters
    ours = inspect.signature(torch_ckpt.async_save).parameters
    for name in stock:
        assert (ours[name].default, ours[name].kind) == (stock[name].default, stock[name].kind)
    keywords = {
        name: parameter.default
        for name, parameter in stock.items()
        if parameter.kind is inspect.Parameter.KEYWORD_ONLY
    }
    assert len(keywords) == len(stock) - 1, "all but the state dict are keywords"
    given = {
        **keywords,
        "checkpoint_id": str(tmp_path / "c"),
        "async_stager": DefaultStager(StagingOptions(False, False, False, False)),
        "no_dist": True,
    }
    state = {"w": torch.arange(3.0)}
    torch_ckpt.async_save(state, **given).result(timeout=60)
    loaded = {"w": torch.zeros(3)}
    torch_ckpt.load(loaded, checkpoint_id=tmp_path / "c", no_dist=True)
    assert torch.equal(loaded["w"], state["w"])
    with pytest.raises(TypeError, match="no_such_option"):
        torch_ckpt.async_save(state, checkpoint_id=tmp_path / "d", no_such_option=1)


def test_mapping_with_an_unknown_name_fails_before_anything_is_written(tmp_path: Path) -> None:
    target = tmp_path / "c"
    mapping = {"w": 1, "nobody": 1}
    for strict in (True, False):
        writer = torch_ckpt.HuggingFaceStorageWriter(
            target, mapping, save_distributed=True, enable_consolidation=True, strict=strict
        )
        if strict:
            with pytest.raises(torch_ckpt.InvalidArgumentError, match="nobody"):
                torch_ckpt.save({"w": torch.ones(2)}, storage_writer=writer, no_dist=True)
            assert not target.exists()
        else:
            torch_ckpt.save({"w": torch.ones(2)}, storage_writer=writer, no_dist=True)
            assert (target / "model-00001-of-00001.safetensors").exists()


def test_consolidation_in_place_through_a_link_keeps_the_shards(tmp_path: Path) -> None:
    target, link = tmp_path / "c", tmp_path / "link"
    torch_ckpt.save({"w": torch.ones(2)}, checkpoint_id=target, no_dist=True)
    link.symlink_to(target)
    torch_ckpt.consolidate_safetensors_files(target, link, None)
    names = os.listdir(target)
    assert "shard-00001-model-00001-of-00001.safetensors" in names
    assert "model-00001-of-00001.safetensors" in names
