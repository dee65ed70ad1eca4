"""Checkpoint: describe, verify, recover and remove a directory."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

import torch_ckpt
from torch_ckpt import Checkpoint
from torch_ckpt.checkpoint.description import ObjectInfo, Placement
from torch_ckpt.native.sessions import SaveSession

SHARD = "shard-00001-model-00001-of-00001.safetensors"


def state() -> dict[str, Any]:
    return {
        "model": {
            "w": torch.randn(700, 513),
            "b": torch.randn(7).bfloat16(),
            "s": torch.tensor(3.5),
        },
        "step": 7,
    }


@pytest.fixture(scope="session")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("saved") / "c"
    torch_ckpt.save(state(), checkpoint_id=path)
    return path


@pytest.fixture
def path(saved: Path, tmp_path: Path) -> Path:
    """A copy that the test may break."""
    return Path(shutil.copytree(saved, tmp_path / "c"))


def flip(file: Path, at: int) -> None:
    data = bytearray(file.read_bytes())
    data[at] ^= 1
    file.write_bytes(data)


def kill_in_save(path: Path, call: str) -> None:
    """Leave `path` as a save into it does that is killed before the `call`, as in "fsync:2"."""
    other = path.parent / "other"
    torch_ckpt.save({"new": torch.arange(5)}, checkpoint_id=other)
    code = (
        "import sys; from torch_ckpt.export.merge import consolidate_safetensors_files as merge; "
        "merge(sys.argv[1], sys.argv[2], overwrite=True)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, str(other), str(path)],
        env={**os.environ, "TORCH_CKPT_FAULTS": f"{call}:kill"},
        check=False,
    )
    assert done.returncode == -signal.SIGKILL


def kill_in_replay(path: Path) -> None:
    """Leave `path` as a kill right behind the commit point of a save over it does."""
    # The first rename is a probe, the second names the save, the third commits it.
    kill_in_save(path, "renameat:4")
    assert (path / ".torch_ckpt-stage/committed/commit.json").exists()


@pytest.mark.parametrize("call", ["openat", "fstat", "pread"])
def test_a_handle_that_went_stale_is_no_error(path: Path, call: str, fault_points: None) -> None:
    """A network file system says so of a manifest that another node has just replaced."""
    code = (
        "import sys; from torch_ckpt import Checkpoint as C; print(C(sys.argv[1]).is_committed())"
    )
    for nth in (1, 2, 3):
        done = subprocess.run(
            [sys.executable, "-c", code, str(path)],
            env={**os.environ, "TORCH_CKPT_FAULTS": f"{call}:{nth}:ESTALE"},
            capture_output=True,
            text=True,
            check=False,
        )
        assert (done.stdout, done.stderr) == ("True\n", ""), (nth, done)


def test_describe_names_everything(path: Path) -> None:
    described = Checkpoint(path).describe()
    assert described.source == "manifest"
    assert described.world_size == 1
    assert described.save_id is not None and len(described.save_id) == 32
    assert {(file.name, file.role) for file in described.files} == {
        (SHARD, "data"),
        ("objects-00001.json", "objects"),
        ("torch_ckpt.catalog", "catalog"),
    }
    for file in described.files:
        assert file.bytes == (path / file.name).stat().st_size
    tensors = {tensor.name: tensor for tensor in described.tensors}
    assert set(tensors) == {"model.w", "model.b", "model.s"}
    w = tensors["model.w"]
    assert (w.dtype, w.shape, w.bytes, w.path) == ("F32", (700, 513), 700 * 513 * 4, ("model", "w"))
    (placement,) = w.placements
    assert placement == Placement(SHARD, placement.offset, (0, 0), (700, 513))
    assert tensors["model.b"].dtype == "BF16"
    assert tensors["model.s"].shape == ()
    assert described.objects == (ObjectInfo("step", "objects-00001.json", ("step",)),)
    assert Checkpoint(path).dtypes() == {name: info.dtype for name, info in tensors.items()}


def test_placements_point_at_the_bytes(path: Path) -> None:
    tensors = {"a": torch.arange(5, dtype=torch.int64), "b": torch.arange(9, dtype=torch.int32)}
    torch_ckpt.save(tensors, checkpoint_id=path)
    for tensor in Checkpoint(path).describe().tensors:
        (placement,) = tensor.placements
        data = (path / placement.file).read_bytes()[placement.offset :][: tensor.bytes]
        assert torch.equal(
            torch.frombuffer(bytearray(data), dtype=tensors[tensor.name].dtype),
            tensors[tensor.name],
        )


def test_describe_of_a_directory_of_others(tmp_path: Path) -> None:
    save_file({"x": torch.zeros(2, 3)}, tmp_path / "model.safetensors")
    described = Checkpoint(tmp_path).describe()
    assert (described.source, described.save_id, described.world_size) == ("headers", None, None)
    assert [(file.name, file.role) for file in described.files] == [("model.safetensors", "data")]
    assert [tensor.path for tensor in described.tensors] == [("x",)]


def test_describe_of_nothing(tmp_path: Path) -> None:
    with pytest.raises(torch_ckpt.IncompleteError, match="no such file or directory"):
        Checkpoint(tmp_path / "absent").describe()
    with pytest.raises(torch_ckpt.IncompleteError, match="holds no checkpoint"):
        Checkpoint(tmp_path).describe()


def test_verify_reads_every_byte(path: Path) -> None:
    files = Checkpoint(path).describe().files
    report = Checkpoint(path).verify()
    assert report.files == len(files)
    assert report.bytes == sum(file.bytes for file in files)


@pytest.mark.parametrize("at", [-1, 1 << 20, 5000])
def test_verify_finds_one_flipped_bit(path: Path, at: int) -> None:
    flip(path / SHARD, at)
    with pytest.raises(torch_ckpt.CorruptError) as caught:
        Checkpoint(path).verify()
    assert caught.value.file == str(path / SHARD)


def test_verify_tells_its_progress(path: Path) -> None:
    seen: list[tuple[int, int]] = []
    report = Checkpoint(path).verify(progress=lambda done, total: seen.append((done, total)))
    assert seen[-1] == (report.bytes, report.bytes)


def test_an_error_of_the_callback_comes_out(path: Path) -> None:
    def fail(done: int, total: int) -> None:
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        Checkpoint(path).verify(progress=fail)


def test_verify_needs_digests(tmp_path: Path) -> None:
    save_file({"x": torch.zeros(2)}, tmp_path / "model.safetensors")
    with pytest.raises(torch_ckpt.UnsupportedError, match="no manifest"):
        Checkpoint(tmp_path).verify()


def test_recover_has_nothing_to_do(path: Path) -> None:
    before = sorted(os.listdir(path))
    assert Checkpoint(path).recover() is False
    assert sorted(os.listdir(path)) == before


def test_recover_removes_what_a_dead_save_left(path: Path) -> None:
    stages = [path / ".torch_ckpt-stage", path.parent / ".c.torch_ckpt-stage"]
    for stage in stages:
        stage.mkdir()
        (stage / "half").write_bytes(b"x")
    assert Checkpoint(path).recover() is True
    assert not any(stage.exists() for stage in stages)
    Checkpoint(path).verify()


@pytest.mark.usefixtures("fault_points")
def test_recover_finishes_a_committed_save(path: Path) -> None:
    kill_in_replay(path)
    # Readers understand the journal as it stands.
    assert [tensor.name for tensor in Checkpoint(path).describe().tensors] == ["new"]
    assert Checkpoint(path).recover() is True
    assert [tensor.name for tensor in Checkpoint(path).describe().tensors] == ["new"]
    Checkpoint(path).verify()
    assert not (path / ".torch_ckpt-stage").exists()
    assert not (path / SHARD).exists()


def test_remove_takes_the_directory_too(path: Path) -> None:
    names = sorted(os.listdir(path))
    report = Checkpoint(path).remove()
    assert sorted(report.removed) == names
    assert report.removed[-1] == "torch_ckpt.json"
    assert (report.left, report.directory_removed) == ((), True)
    assert not path.exists()


def test_remove_keeps_what_is_not_ours(path: Path) -> None:
    (path / "config.json").write_text("{}")
    (path / "notes").mkdir()
    (path / "other.safetensors").write_bytes(b"")
    report = Checkpoint(path).remove()
    assert report.left == ("config.json", "notes", "other.safetensors")
    assert not report.directory_removed
    assert sorted(os.listdir(path)) == list(report.left)


def test_remove_follows_no_link(path: Path, tmp_path: Path) -> None:
    outside = tmp_path / "outside"
    (path / SHARD).rename(outside)
    (path / SHARD).symlink_to(outside)
    link = tmp_path / "link"
    link.symlink_to(path)
    with pytest.raises(torch_ckpt.InvalidArgumentError, match="symbolic link"):
        Checkpoint(link).remove()
    assert (path / "torch_ckpt.json").exists()
    Checkpoint(path).remove()
    assert outside.exists() and not path.exists()


def test_remove_of_a_damaged_checkpoint(path: Path) -> None:
    (path / SHARD).unlink()
    report = Checkpoint(path).remove()
    assert SHARD not in report.removed
    assert report.directory_removed


def test_remove_keeps_a_directory_of_a_name_in_the_manifest(path: Path) -> None:
    (path / SHARD).unlink()
    (path / SHARD).mkdir()
    assert Checkpoint(path).remove().left == (SHARD,)


@pytest.mark.parametrize("make", [False, True])
def test_remove_refuses_what_has_no_manifest(tmp_path: Path, make: bool) -> None:
    target = tmp_path / "x"
    if make:
        target.mkdir()
        save_file({"x": torch.zeros(2)}, target / "model.safetensors")
    before = sorted(os.listdir(tmp_path))
    with pytest.raises(torch_ckpt.IncompleteError):
        Checkpoint(target).remove()
    assert sorted(os.listdir(tmp_path)) == before
    assert not make or os.listdir(target) == ["model.safetensors"]


def test_remove_of_an_altered_manifest_goes_by_names(path: Path) -> None:
    """What may be of others stays: a final file has a name that they use too."""
    flip(path / "torch_ckpt.json", 40)
    names = sorted(os.listdir(path))
    shutil.copy(next(path.glob("*.safetensors")), path / "model.safetensors")
    report = Checkpoint(path).remove()
    assert sorted(report.removed) == names and report.left == ("model.safetensors",)


def test_a_save_over_an_altered_manifest_warns(path: Path) -> None:
    flip(path / "torch_ckpt.json", 40)
    with pytest.warns(UserWarning, match=r"torch_ckpt\.json.*called as those of our saves"):
        torch_ckpt.save({"w": torch.ones(3)}, path, no_dist=True)
    Checkpoint(path).verify()


def test_remove_waits_for_no_save(path: Path) -> None:
    session = SaveSession(str(path), overwrite=True)
    try:
        for act in (Checkpoint(path).remove, Checkpoint(path).recover):
            with pytest.raises(torch_ckpt.ConflictError):
                act()
    finally:
        session.end()
    Checkpoint(path).verify()


@pytest.mark.usefixtures("fault_points")
def test_remove_of_an_interrupted_commit(path: Path) -> None:
    kill_in_replay(path)
    report = Checkpoint(path).remove()
    assert "model-00001-of-00001.safetensors" in report.removed
    assert not path.exists()


@pytest.mark.usefixtures("fault_points")
@pytest.mark.parametrize("call", ["unlinkat", "renameat"])
def test_killed_while_removing_is_incomplete_and_removed_again(path: Path, call: str) -> None:
    # Files that are whole by themselves, so that the rest would do for a foreign directory.
    mapping = {"a": 1, "b": 2}
    torch_ckpt.save(
        {"a": torch.ones(3), "b": torch.ones(4)},
        storage_writer=torch_ckpt.HuggingFaceStorageWriter(path, mapping),
        no_dist=True,
    )
    code = "import sys; from torch_ckpt.checkpoint.checkpoint import Checkpoint; Checkpoint(sys.argv[1]).remove()"
    kept = killed = 0
    while killed == kept:
        copy = Path(shutil.copytree(path, path.with_name(f"copy{kept}")))
        done = subprocess.run(
            [sys.executable, "-c", code, str(copy)],
            # The first are of what the lock's session makes: a probe, and names of its own.
            env={**os.environ, "TORCH_CKPT_FAULTS": f"{call}:{kept + 1}:kill"},
            check=False,
        )
        kept += 1
        if done.returncode == 0:
            assert not copy.exists()
            break
        assert done.returncode == -signal.SIGKILL
        killed += 1
        if (copy / "torch_ckpt.json").exists() and len(list(copy.glob("*.safetensors"))) < 2:
            with pytest.raises(torch_ckpt.IncompleteError):
                torch_ckpt.load({"a": torch.zeros(3)}, checkpoint_id=copy, no_dist=True)
        if copy.exists() and os.listdir(copy):
            try:
                assert Checkpoint(copy).remove().directory_removed
            except torch_ckpt.IncompleteError:  # the manifest was the last to go
                assert not list(copy.glob("*.safetensors"))
                torch_ckpt.save({"new": torch.zeros(3)}, checkpoint_id=copy)
    assert killed > 4


def test_no_torch_is_needed(path: Path) -> None:
    code = (
        "import sys, torch_ckpt; torch_ckpt.Checkpoint(sys.argv[1]).verify(); "
        "torch_ckpt.consolidate_safetensors_files(sys.argv[1], sys.argv[1] + '-out', None); "
        "torch_ckpt.Checkpoint(sys.argv[1]).remove(); assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code, str(path)], check=True)
    assert not path.exists()
