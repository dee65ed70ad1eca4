"""URLs, which stock takes: refused, and no directory "s3:" is made."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from click.testing import CliRunner

import torch_ckpt
from torch_ckpt.cli import cli

URL = "s3://bucket/run/step-1"
STATE = {"w": torch.ones(3)}
CALLS: dict[str, Callable[[Any], Any]] = {
    "save": lambda url: torch_ckpt.save(STATE, checkpoint_id=url),
    "async_save": lambda url: torch_ckpt.async_save(STATE, checkpoint_id=url).result(),
    "load": lambda url: torch_ckpt.load(dict(STATE), checkpoint_id=url),
    "dcp.save": lambda url: dcp.save(
        STATE, storage_writer=torch_ckpt.HuggingFaceStorageWriter(url)
    ),
    "dcp.load": lambda url: dcp.load(
        dict(STATE), storage_reader=torch_ckpt.HuggingFaceStorageReader(url)
    ),
    "Checkpoint": torch_ckpt.Checkpoint,
    "CheckpointDirectory": torch_ckpt.CheckpointDirectory,
    "consolidate from": lambda url: torch_ckpt.consolidate_safetensors_files(url, "out", None),
    "consolidate to": lambda url: torch_ckpt.consolidate_safetensors_files("in", url, None),
}


@pytest.mark.parametrize("url", [URL, "hf://meta-llama/Llama-3.2-1B", Path(URL)])
@pytest.mark.parametrize("call", CALLS)
def test_a_url_is_refused(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    call: str,
    url: Any,
) -> None:
    monkeypatch.chdir(tmp_path)
    torch_ckpt.save(STATE, checkpoint_id="in")
    with pytest.raises((torch_ckpt.InvalidArgumentError, dcp.api.CheckpointException)) as caught:
        CALLS[call](url)
    # Stock of torch 2.10 and 2.11 says that there is no metadata, and our log why.
    assert (
        "URL" in f"{caught.value} {caplog.text if 'metadata is None' in str(caught.value) else ''}"
    )
    assert os.listdir(tmp_path) == ["in"]


def test_the_command_refuses_a_url(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for words in (["inspect", URL], ["consolidate", URL, "out"]):
        done = CliRunner().invoke(cli, words)
        assert done.exit_code != 0 and "URL" in done.output, done.output
    assert os.listdir(tmp_path) == []


def test_a_colon_in_a_name_is_no_url(tmp_path: Path) -> None:
    path = tmp_path / "run:1" / "step:2"
    torch_ckpt.save(STATE, checkpoint_id=path)
    target = {"w": torch.zeros(3)}
    torch_ckpt.load(target, checkpoint_id=path)
    assert torch.equal(target["w"], STATE["w"])


def test_an_id_of_the_hub_is_told_what_to_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    name = "meta-llama/Llama-3.2-1B"
    with pytest.raises(torch_ckpt.IncompleteError, match=f"snapshot_download.'{name}'"):
        torch_ckpt.load(dict(STATE), checkpoint_id=name)
    for path in ("checkpoints/", str(tmp_path / "a/b"), "a/b/c"):
        with pytest.raises(torch_ckpt.IncompleteError) as caught:
            torch_ckpt.load(dict(STATE), checkpoint_id=path)
        assert "Hub" not in str(caught.value)
