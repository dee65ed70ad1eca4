"""include=, exclude= and overwrite= of conversions, consolidations and loads; integers of numpy; and
a LATEST that is no file."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from click.testing import CliRunner
from safetensors.torch import load_file, save_file
from torch import nn

import torch_ckpt
from torch_ckpt.checkpoint.checkpoint import Checkpoint
from torch_ckpt.cli import cli as main

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is")


def run(*arguments: str) -> tuple[int, str]:
    done = CliRunner().invoke(main, list(arguments))
    return done.exit_code, done.output


@pytest.fixture
def train(tmp_path: Path) -> Path:
    model = nn.Linear(4, 4)
    optim = torch.optim.AdamW(model.parameters())
    model(torch.ones(1, 4)).sum().backward()
    optim.step()
    state = {"model": model.state_dict(), "optim": optim.state_dict(), "step": 3}
    torch_ckpt.save(state, tmp_path / "train")
    return tmp_path / "train"


@pytest.mark.parametrize("to", ["hf", "torch_ckpt", "dcp", "torch"])
def test_a_conversion_of_a_part(to: Any, train: Path, tmp_path: Path) -> None:
    for number, chosen in enumerate(
        (
            {"include": "model.*"},
            {"include": ["model.*"], "exclude": []},
            {"exclude": ["optim.*", "step"]},
        )
    ):
        out = tmp_path / f"{to}{number}"
        torch_ckpt.convert(train, out, to, key_mapping=[(r"^model\.", "")], **chosen)
        assert set(torch_ckpt.open(out)) == {"weight", "bias"}
        assert set(torch_ckpt.open(out).objects) == set()
    out = tmp_path / "rest"
    torch_ckpt.convert(train, out, to, exclude="model.*")
    found = torch_ckpt.load(path=out)
    assert "model.weight" not in torch_ckpt.open(out)
    assert any(name.endswith("exp_avg") for name in torch_ckpt.open(out))
    assert found["step"] == 3


@pytest.mark.parametrize("to", ["hf", "torch_ckpt"])
def test_objects_that_are_left_out_are_in_no_file(to: Any, tmp_path: Path) -> None:
    secret, large = "hunter2-hunter2", b"L" * 100_000
    state = {"w": torch.ones(2), "a": {"note": "kept", "secret\n\u00e9": secret}, "blob": large}
    torch_ckpt.save(state, tmp_path / "c")
    for number, (chosen, files) in enumerate(
        (
            ({"exclude": "a.secret*"}, {"objects-00001.json", "objects-00001.bin"}),
            ({"exclude": ["a.secret*", "blob"]}, {"objects-00001.json"}),
            ({"include": ["w", "blob"]}, {"objects-00001.json", "objects-00001.bin"}),
            ({"include": ["w"]}, set()),
        )
    ):
        out = tmp_path / f"out{number}"
        torch_ckpt.convert(tmp_path / "c", out, to, **chosen)
        assert {path.name for path in out.glob("objects-*")} == files
        texts = b"".join(path.read_bytes() for path in out.iterdir())
        assert secret.encode() not in texts
        assert (large in texts) == ("objects-00001.bin" in files)
        assert (b"kept" in texts) == ("exclude" in chosen)
        Checkpoint(out).verify()
        found = torch_ckpt.load(path=out)
        assert found.get("blob") == (large if large in texts else None)
        assert found.get("a") == ({"note": "kept"} if "exclude" in chosen else None)


def test_moments_in_an_export_are_said(train: Path, tmp_path: Path, caplog: Any) -> None:
    torch_ckpt.convert(train, tmp_path / "hf", "hf")
    (said,) = (record.getMessage() for record in caplog.records)
    assert "exp_avg" in said and "exclude=" in said
    for options in ({"to": "torch_ckpt"}, {"to": "hf", "exclude": "optim*"}):
        caplog.clear()
        torch_ckpt.convert(train, tmp_path / options["to"], overwrite=True, **options)  # type: ignore[arg-type]
        assert not caplog.records


def test_moments_in_a_save_for_hugging_face_are_said_once(
    train: Path, tmp_path: Path, caplog: Any
) -> None:
    state = torch_ckpt.load(path=train)
    torch_ckpt.save(state, tmp_path / "hf", layout="final", naming="hf")
    (said,) = (record.getMessage() for record in caplog.records)
    assert str(tmp_path / "hf") in said and "exp_avg" in said
    assert "directories of their own" in said
    caplog.clear()
    torch_ckpt.save(state["model"], tmp_path / "m", layout="final", naming="hf")
    torch_ckpt.save(state, tmp_path / "d", layout="final")
    torch_ckpt.save(state, tmp_path / "s")
    assert not caplog.records


def test_the_command(train: Path, tmp_path: Path) -> None:
    out = str(tmp_path / "hf")
    status, output = run("convert", str(train), out, "--to", "hf", "--exclude", "optim*")
    assert status == 0, output
    assert set(load_file(tmp_path / "hf" / "model.safetensors")) == {"model.weight", "model.bias"}
    status, output = run("convert", str(train), out, "--to", "hf")
    assert status != 0 and "overwrite" in output
    status, output = run("convert", str(train), out, "--to", "hf", "--overwrite")
    assert status == 0 and len(load_file(tmp_path / "hf" / "model.safetensors")) > 2
    status, output = run(
        *("consolidate", str(train), str(tmp_path / "c"), "--include", "model.w*", "--naming", "hf")
    )
    assert status == 0, output
    assert set(load_file(tmp_path / "c" / "model.safetensors")) == {"model.weight"}


def test_a_load_of_a_part(train: Path) -> None:
    assert torch_ckpt.load(path=train, include="model.*").keys() == {"model"}
    assert torch_ckpt.load(path=train, exclude=["model.*", "optim.*"]) == {"step": 3}
    target = {"model": {"weight": torch.zeros(4, 4)}}
    torch_ckpt.load(target, train, include="model.weight")
    assert target["model"]["weight"].abs().sum() > 0
    with pytest.raises(torch_ckpt.MissingKeyError, match="model.weight"):
        torch_ckpt.load(target, train, exclude="model.*")
    with pytest.raises(torch_ckpt.InvalidArgumentError, match="matches no name"):
        torch_ckpt.load(path=train, include="modle.*")
    with pytest.raises(torch_ckpt.InvalidArgumentError, match="give it to the storage_reader"):
        reader = torch_ckpt.CheckpointReader(train)
        torch_ckpt.load(target, storage_reader=reader, include="model.*")


@pytest.mark.parametrize("to", ["hf", "torch"])
def test_a_tied_tensor_whose_first_name_goes(to: Any, tmp_path: Path) -> None:
    w = torch.arange(6.0)
    torch_ckpt.save({"a": w, "b": w, "c": w, "d": torch.ones(1)}, tmp_path / "tied")
    torch_ckpt.convert(tmp_path / "tied", tmp_path / "out", to, exclude=["a"])
    opened = torch_ckpt.open(tmp_path / "out")
    assert set(opened) == {"b", "c", "d"}
    assert opened["b"].read().tolist() == opened["c"].read().tolist() == w.tolist()
    assert torch_ckpt.load(path=tmp_path / "tied", exclude="a")["c"].tolist() == w.tolist()


def test_a_part_is_not_merged_in_place(train: Path) -> None:
    with pytest.raises(torch_ckpt.InvalidArgumentError, match="give another one"):
        torch_ckpt.consolidate_safetensors_files(train, train, include="model.*")
    assert "step" in torch_ckpt.open(train).objects


def test_nothing_that_is_there_is_replaced_unasked(train: Path, tmp_path: Path) -> None:
    others = tmp_path / "others"
    others.mkdir()
    save_file({"a": torch.ones(2)}, others / "model.safetensors")
    good = tmp_path / "good.pt"
    torch.save({"a": torch.ones(2)}, good)
    ours = tmp_path / "ours"
    torch_ckpt.save({"a": torch.ones(2)}, ours)
    noted = tmp_path / "noted"
    noted.mkdir()
    (noted / "notes.txt").write_text("mine")
    (tmp_path / "config.json").write_text("{}")
    (noted / "config.json").write_text("[]")
    for target, to in ((others, "hf"), (good, "torch"), (ours, "hf"), (ours, "torch_ckpt")):
        before = {
            file: file.read_bytes()
            for file in (target.iterdir() if target.is_dir() else [target])
            if file.is_file()
        }
        with pytest.raises(torch_ckpt.ConflictError, match="overwrite"):
            torch_ckpt.convert(train, target, to)  # type: ignore[arg-type]
        if to != "torch":
            with pytest.raises(torch_ckpt.ConflictError, match="overwrite"):
                torch_ckpt.consolidate_safetensors_files(train, target, naming="hf")
        assert all(file.read_bytes() == bytes_ for file, bytes_ in before.items())
        torch_ckpt.convert(train, target, to, overwrite=True)  # type: ignore[arg-type]
        assert "model.weight" in torch_ckpt.open(target)
    with pytest.raises(torch_ckpt.ConflictError, match=r"config\.json.*overwrite"):
        torch_ckpt.convert(train, noted, "hf", extras=tmp_path / "config.json")
    torch_ckpt.convert(train, noted, "hf")
    assert (noted / "notes.txt").read_text() == "mine"
    # In place too.
    torch_ckpt.consolidate_safetensors_files(train, train)
    with pytest.raises(torch_ckpt.ConflictError, match="overwrite"):
        torch_ckpt.consolidate_safetensors_files(train, train)
    torch_ckpt.consolidate_safetensors_files(train, train, overwrite=True)


def test_integers_of_numpy_are_integers(tmp_path: Path) -> None:
    one, four = np.int64(1), np.uint8(4)
    with torch_ckpt.CheckpointDirectory(tmp_path / "run", keep_last=np.int32(2)) as run_directory:  # type: ignore[arg-type]
        for step in np.arange(3):
            run_directory.save({"w": torch.ones(2)}, step, thread_count=four)
        assert run_directory.steps() == [1, 2] or run_directory.steps() == [0, 1, 2]
        assert run_directory.path(one).endswith("step-1")
        assert run_directory.load({"w": torch.zeros(2)}, np.int16(2)) == 2
    path = tmp_path / "c"
    torch_ckpt.save(
        *({"w": torch.ones(2), "v": torch.ones(2)}, path),
        layout="final",
        max_shard_size=np.int64(8),  # type: ignore[typeddict-item]
    )
    assert Checkpoint(path).verify(workers=four).files > 0  # type: ignore[arg-type]
    torch_ckpt.consolidate_safetensors_files(
        path,
        tmp_path / "d",
        {"w": one, "v": np.int8(2)},  # type: ignore[dict-item]
        four,  # type: ignore[arg-type]
        memory_budget=np.int64(64 << 20),  # type: ignore[arg-type]
    )
    torch_ckpt.convert(path, tmp_path / "e", "hf", num_threads=four)  # type: ignore[arg-type]
    plan = torch_ckpt.plan(path, ["w"], workers=four)
    assert b'"workers": 4' in bytes(plan.tolist())
    for step in (True, 1.0, "1", None, -1):
        with pytest.raises(torch_ckpt.InvalidArgumentError, match="a step is an integer"):
            run_directory.path(step)  # type: ignore[arg-type]


def test_a_directory_called_latest(tmp_path: Path) -> None:
    (tmp_path / "run" / "LATEST" / "x").mkdir(parents=True)
    directory = torch_ckpt.CheckpointDirectory(tmp_path / "run")
    with pytest.raises(torch_ckpt.InvalidArgumentError, match="LATEST.*is a directory"):
        directory.save({"w": torch.ones(2)}, 1)
    assert directory.steps() == []
