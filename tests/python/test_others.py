"""Directories in which files of others stand: what is read, what goes, what is refused."""

from __future__ import annotations

import json
import logging
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner
from safetensors.torch import load_file, save_file
from sample_states import FAILED, assert_same, stock_rows

import torch_ckpt
from torch_ckpt import (
    Checkpoint,
    HuggingFaceStorageWriter,
    _core,
    consolidate_safetensors_files,
)
from torch_ckpt.cli import cli
from torch_ckpt.dtype_policy import DtypePolicy
from torch_ckpt.jobs import Job, end_session
from torch_ckpt.merge import merge_request

STATE = {"a": torch.linspace(-1, 1, 100), "b": torch.arange(30.0).reshape(5, 6)}
OLD = {name: torch.zeros_like(value) for name, value in STATE.items()}
STEMS = ("model", "diffusion_pytorch_model", "adapter_model")


def names_in(path: Path) -> list[str]:
    return sorted(os.listdir(path))


def as_transformers(path: Path, stem: str = "model") -> dict[str, torch.Tensor]:
    """What `from_pretrained` takes: one file before an index of several."""
    if (path / f"{stem}.safetensors").exists():
        return load_file(path / f"{stem}.safetensors")
    index = json.loads((path / f"{stem}.safetensors.index.json").read_text())["weight_map"]
    return {name: load_file(path / file)[name] for name, file in index.items()}


def hub(path: Path, stem: str = "model", state: dict[str, torch.Tensor] = OLD) -> None:
    """A Hugging Face directory of several files, as others write it."""
    path.mkdir(exist_ok=True)
    files = {name: f"{stem}-{n + 1:05}-of-00002.safetensors" for n, name in enumerate(state)}
    for name, file in files.items():
        save_file({name: state[name]}, path / file, metadata={"format": "pt"})
    index = {"metadata": {"total_size": 1}, "weight_map": files}
    (path / f"{stem}.safetensors.index.json").write_text(json.dumps(index))
    (path / "config.json").write_text("{}")


def test_ranks_of_a_merge_that_see_another_input(tmp_path: Path) -> None:
    """As under node-local paths: nothing but the times tells files of one layout."""
    requests = []
    for number in range(2):
        path = tmp_path / str(number)
        stock_rows(path, torch.full((12, 2), float(number)), 3)
        for file in path.iterdir():
            os.utime(file, (1e9 + number, 1e9 + number))
        requests.append(
            merge_request(
                path,
                tmp_path / "out",
                None,
                1,
                strict=True,
                max_shard_size=None,
                naming="dcp",
                policy=DtypePolicy(None, ()),
            )
        )
    begun = _core.call({"op": "merge_begin", **requests[0]})
    try:
        with Job("merge") as job:
            part = {"op": "merge_part", "job": job.id, "part": 0, "parts": 1}
            _core.call({**begun, **requests[0], **part})
            with pytest.raises(torch_ckpt.ConflictError, match=r"/1: is not what the merge began"):
                _core.call({**begun, **requests[1], **part})
        with pytest.raises(torch_ckpt.ConflictError, match=r"/1: is not what the merge began"):
            _core.call({**begun, **requests[1], "op": "merge_commit", "parts": []})
    finally:
        end_session("save", begun["session"])
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("stem", STEMS)
def test_hub_directories_with_more_in_them(tmp_path: Path, stem: str) -> None:
    """Mistral's second copy under names of its own, variants, other formats, what git left."""
    path = tmp_path / "c"
    hub(path, stem, STATE)
    save_file({"layers.0.w": torch.zeros(3)}, path / "consolidated.safetensors")
    save_file({n: v.half() for n, v in STATE.items()}, path / f"{stem}.fp16.safetensors")
    (path / "broken.safetensors").write_text("version https://git-lfs.github.com/spec/v1\n")
    (path / "pytorch_model.bin").write_bytes(b"not read")
    (path / "original").mkdir()
    (path / "original" / "consolidated.00.pth").write_bytes(b"not read")
    target = {name: torch.zeros_like(value) for name, value in STATE.items()}
    torch_ckpt.load(target, checkpoint_id=path, no_dist=True)
    assert_same(target, STATE)
    described = Checkpoint(path).describe()
    assert described.source == "index"
    beside = ("broken.safetensors", "consolidated.safetensors", f"{stem}.fp16.safetensors")
    beside = tuple(sorted(beside))
    assert described.beside == beside
    done = CliRunner().invoke(cli, ["inspect", str(path)])
    assert f"not read: {', '.join(beside)}" in done.output
    fields = json.loads(CliRunner().invoke(cli, ["inspect", "--json", str(path)]).output)
    assert tuple(fields["beside"]) == beside
    # Of ours all is said by the manifest.
    torch_ckpt.save(STATE, checkpoint_id=tmp_path / "ours", no_dist=True)
    assert Checkpoint(tmp_path / "ours").describe().beside == ()
    assert "not read" not in CliRunner().invoke(cli, ["inspect", str(tmp_path / "ours")]).output


def test_a_variant_beside_a_single_file(tmp_path: Path) -> None:
    save_file(STATE, tmp_path / "diffusion_pytorch_model.safetensors")
    half = {name: value.half() for name, value in STATE.items()}
    save_file(half, tmp_path / "diffusion_pytorch_model.fp16.safetensors")
    assert Checkpoint(tmp_path).dtypes() == dict.fromkeys(STATE, "F32")
    assert Checkpoint(tmp_path).describe().beside == ("diffusion_pytorch_model.fp16.safetensors",)


def test_a_single_file_that_differs_from_the_index(tmp_path: Path) -> None:
    """transformers would load that one."""
    hub(tmp_path, state=STATE)
    save_file({"c": torch.zeros(3)}, tmp_path / "model.safetensors")
    with pytest.raises(torch_ckpt.ConflictError, match=r"'c'.*model\.safetensors"):
        Checkpoint(tmp_path).describe()
    save_file(STATE, tmp_path / "model.safetensors")
    assert Checkpoint(tmp_path).describe().source == "index"


def test_extras_leave_out_subdirectories(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    model = tmp_path / "model"
    hub(model)
    for name in ("original", "onnx"):
        (model / name).mkdir()
        (model / name / "params.json").write_text("{}")
    with caplog.at_level(logging.INFO, logger="torch_ckpt"):
        torch_ckpt.save(
            STATE, checkpoint_id=tmp_path / "c", layout="final", extras=model, no_dist=True
        )
    assert "config.json" in names_in(tmp_path / "c")
    assert not {"original", "onnx", "params.json"} & set(names_in(tmp_path / "c"))
    assert [record.message for record in caplog.records if "extras" in record.message] == [
        f"extras leave out the subdirectories of {model}: onnx, original"
    ]
