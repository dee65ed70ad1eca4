"""Directories of Megatron's old backend zarr, as megatron-core 0.13.1 has written one."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner
from safetensors.torch import load_file

import torch_ckpt
from torch_ckpt.cli import cli
from torch_ckpt.megatron import dist_checkpointing
from torch_ckpt.megatron.dist_checkpointing.core import CheckpointingException
from torch_ckpt.megatron.dist_checkpointing.mapping import ShardedObject, ShardedTensor
from torch_ckpt.megatron.dist_checkpointing.validation import StrictHandling

FIXTURE = Path(__file__).parents[1] / "fixtures" / "megatron_zarr_2ranks"
SAID = json.loads((FIXTURE / "expected.json").read_text())


def wanted() -> dict[str, torch.Tensor]:
    return load_file(FIXTURE / "expected.safetensors")


@pytest.fixture
def copy(tmp_path: Path) -> Path:
    shutil.copytree(FIXTURE / "checkpoint", tmp_path / "c")
    return tmp_path / "c"


def test_it_is_read() -> None:
    checkpoint = torch_ckpt.open(FIXTURE / "checkpoint")
    assert checkpoint.format == "megatron"
    for name, value in wanted().items():
        found = checkpoint[name][...]
        assert found.dtype == value.dtype and torch.equal(found, value), name
    for name, value in SAID["objects"].items():
        assert checkpoint.objects[name] == value, name
    assert checkpoint.objects["iteration"] == SAID["iteration"]
    loaded = torch_ckpt.load(path=FIXTURE / "checkpoint")
    assert all(torch.equal(loaded[name], value) for name, value in wanted().items())


@pytest.mark.parametrize("strict", [*StrictHandling], ids=lambda each: each.value)
def test_keys_that_do_not_fit(strict: StrictHandling) -> None:
    path = FIXTURE / "checkpoint"
    request: dict[str, Any] = dict(dist_checkpointing.load_sharded_metadata(path))
    lacking = request.pop("rows")
    more = ShardedTensor.from_rank_offsets("more", torch.zeros(2))
    request["more"] = more

    def load() -> Any:
        return dist_checkpointing.load(
            request, path, validate_access_integrity=False, strict=strict
        )

    if strict.value in ("assume_ok_unexpected", "raise_unexpected", "raise_all"):
        with pytest.raises(CheckpointingException, match="Unexpected keys.*more") as caught:
            load()
        assert ("Missing keys" in str(caught.value)) == (strict.value == "raise_all")
        return
    found = load()
    if strict.value.startswith("return"):
        found, missing, unexpected = found
        all_ = strict.value == "return_all"
        assert (missing, unexpected) == ({lacking.key} if all_ else set(), {"more"})
    assert "more" not in found and "rows" not in found
    others = [name for name in wanted() if name != "rows"]
    assert others and all(torch.equal(found[name], wanted()[name]) for name in others)


def test_it_is_loaded_as_megatron_does() -> None:
    path = FIXTURE / "checkpoint"
    assert dist_checkpointing.check_is_distributed_checkpoint(path)
    assert dist_checkpointing.load_common_state_dict(path)["iteration"] == SAID["iteration"]
    found = dist_checkpointing.load_sharded_metadata(path)
    assert found.keys() == wanted().keys() | SAID["objects"].keys()
    loaded = dist_checkpointing.load(
        dict(found), path, ("zarr", 1), validate_access_integrity=False, strict="raise_all"
    )
    for name, value in wanted().items():
        assert torch.equal(loaded[name], value), name
    for name, value in SAID["objects"].items():
        assert isinstance(found[name], ShardedObject) and loaded[name] == value
    # In other cuts, over the edges of chunks.
    rows = wanted()["rows"]
    part = ShardedTensor(
        "rows",
        torch.zeros_like(rows[1:-1]),
        rows.dtype,
        tuple(rows[1:-1].shape),
        tuple(rows.shape),
        (1, *[0] * (rows.dim() - 1)),
        None,
    )
    loaded = dist_checkpointing.load({"x": part}, path, validate_access_integrity=False)
    assert torch.equal(loaded["x"], rows[1:-1])


def test_it_has_nothing_to_be_verified_by() -> None:
    path = FIXTURE / "checkpoint"
    with pytest.raises(torch_ckpt.UnsupportedError, match="has no digest"):
        torch_ckpt.Checkpoint(path).verify()
    with pytest.raises(CheckpointingException, match="has no digest"):
        dist_checkpointing.load({}, path, verify_integrity=True)


def test_objects_under_names_of_early_releases(copy: Path) -> None:
    """Which lacked the last size of the grid."""
    for number in range(2):
        early = copy / "rng_state" / f"shard_0.{number}_1.pt"
        (copy / "rng_state" / f"shard_0.{number}_1.2.pt").rename(early)
    asked = {at: ShardedObject("rng_state", None, (1, 2), (0, at)) for at in range(2)}
    loaded = dist_checkpointing.load({"rng": asked}, copy)
    for at in range(2):
        assert loaded["rng"][at] == SAID["objects"][f"rng_state/shard_0.{at}_1.2"]
    told = dist_checkpointing.load_sharded_metadata(copy)
    name = "rng_state/shard_0.1_1"
    assert told[name].global_shape == (1, -1)
    found = dist_checkpointing.load({"x": told[name]}, copy, validate_access_integrity=False)
    assert found["x"] == SAID["objects"][f"{name}.2"]
    beyond = ShardedObject("rng_state", None, (1, 3), (0, 2))
    with pytest.raises(CheckpointingException, match="rng_state/shard_0.2_1.3"):
        dist_checkpointing.load({"x": beyond}, copy, validate_access_integrity=False)


@pytest.mark.parametrize("to", ["torch_ckpt", "hf", "dcp", "megatron", "torch"])
def test_it_converts(tmp_path: Path, to: Any) -> None:
    torch_ckpt.convert(FIXTURE / "checkpoint", tmp_path / "out", to)
    loaded = torch_ckpt.load(path=tmp_path / "out")
    for name, value in wanted().items():
        assert torch.equal(loaded[name], value), name
    assert loaded["iteration"] == SAID["iteration"]


def test_the_command_line() -> None:
    told = CliRunner().invoke(cli, ["ls", str(FIXTURE / "checkpoint")])
    assert told.exit_code == 0, told.output
    assert all(name in told.output for name in wanted())


def test_chunks_at_an_edge(copy: Path) -> None:
    """Chunks are as large as the others where they reach beyond the tensor."""
    folder = copy / "edge"
    folder.mkdir()
    value = torch.arange(35.0).view(7, 5)
    padded = torch.full((8, 6), -1.0)
    padded[:7, :5] = value
    for row in range(2):
        for column in range(3):
            chunk = padded[4 * row : 4 * row + 4, 2 * column : 2 * column + 2].contiguous()
            (folder / f"{row}.{column}").write_bytes(chunk.numpy().tobytes())
    array = json.loads((copy / "vocab" / ".zarray").read_text())
    (folder / ".zarray").write_text(json.dumps({**array, "shape": [7, 5], "chunks": [4, 2]}))
    assert torch.equal(torch_ckpt.open(copy)["edge"][...], value)
    assert torch.equal(torch_ckpt.open(copy)["edge"][3:6, 1:], value[3:6, 1:])


@pytest.mark.parametrize(
    "count", [3_000, pytest.param(100_000, marks=pytest.mark.campaign)], ids=str
)
def test_many_chunks(copy: Path, count: int) -> None:
    folder = copy / "many"
    folder.mkdir()
    for number in range(count):
        (folder / str(number)).write_bytes(number.to_bytes(4, "little"))
    array = json.loads((copy / "vocab" / ".zarray").read_text())
    said = {**array, "shape": [count], "chunks": [1], "dtype": "<i4"}
    (folder / ".zarray").write_text(json.dumps(said))
    assert torch.equal(torch_ckpt.open(copy)["many"][...], torch.arange(count, dtype=torch.int32))


def first_chunk(copy: Path) -> Path:
    return copy / "vocab" / "1.0"


def damaged(copy: Path, kind: str) -> tuple[str, str]:
    """Damages it; what file the error names, and what it says."""
    chunk, array = first_chunk(copy), copy / "vocab" / ".zarray"
    said = json.loads(array.read_text())
    if kind == "missing":
        chunk.unlink()
        return "vocab/1.0", "is missing"
    if kind == "short":
        chunk.write_bytes(chunk.read_bytes()[:-1])
        return "vocab/1.0", "bytes, and its chunk has"
    if kind == "long":
        chunk.write_bytes(chunk.read_bytes() + b"x")
        return "vocab/1.0", "bytes, and its chunk has"
    if kind == "outside":
        chunk.rename(copy / "vocab" / "7.0")
        return "vocab/7.0", "does not have"
    if kind == "link":
        chunk.unlink()
        chunk.symlink_to("/etc/passwd")
        return "vocab/1.0", "is no file"
    if kind == "directory":
        chunk.unlink()
        chunk.mkdir()
        return "vocab/1.0", "is no file"
    if kind == "no JSON":
        array.write_text("{")
        return "vocab/.zarray", ""
    if kind == "no array":
        array.unlink()
        return "vocab/.zarray", "is missing.*0.0"
    if kind == "no array of no dimensions":
        (copy / "scalarish" / ".zarray").unlink()
        return "scalarish/.zarray", "is missing.*'0'"
    if kind == "array link":
        array.rename(copy / "elsewhere")
        array.symlink_to(copy / "elsewhere")
        return "vocab/.zarray", "is a link"
    changed = {
        "compressed": {"compressor": {"id": "blosc"}},
        "filtered": {"filters": [{"id": "delta"}]},
        "big-endian": {"dtype": ">f4"},
        "F order": {"order": "F"},
        "version 3": {"zarr_format": 3},
        "huge": {"shape": [1 << 40, 4], "chunks": [1, 4]},
        "other chunks": {"chunks": [8, 4]},
    }[kind]
    array.write_text(json.dumps({**said, **changed}))
    return ("vocab/", "") if kind in ("huge", "other chunks") else ("vocab/.zarray", "")


@pytest.mark.parametrize(
    "kind",
    [
        *("missing", "short", "long", "outside", "link", "directory", "no JSON", "compressed"),
        *("filtered", "big-endian", "F order", "version 3", "huge", "other chunks", "no array"),
        *("no array of no dimensions", "array link"),
    ],
)
def test_what_is_wrong_is_named(copy: Path, kind: str) -> None:
    file, says = damaged(copy, kind)
    with pytest.raises(torch_ckpt.CheckpointError, match=f"{file}.*{says}"):
        torch_ckpt.open(copy)
    with pytest.raises(CheckpointingException, match=f"{file}.*{says}"):
        dist_checkpointing.load({}, copy)


def test_locks_and_strangers_are_left_out(copy: Path) -> None:
    before = list(torch_ckpt.open(copy))
    # What zarr's ProcessSynchronizer leaves of flattened tensors: locks, called as the files are.
    (copy / "vocab.sync").mkdir()
    (copy / "vocab.sync" / ".zarray").touch()
    (copy / "vocab.sync" / "0.0").touch()
    (copy / "model" / "with" / "slash.sync").mkdir()
    (copy / "model" / "with" / "slash.sync" / ".zarray").touch()
    (copy / "tokenizer").mkdir()
    (copy / "tokenizer" / "vocab.json").write_text("{}")
    (copy / "tokenizer" / "merges.txt").symlink_to("vocab.json")
    (copy / "tokenizer" / "1.2.3.4.5.6.7.8.9").touch()  # more dimensions than there are
    (copy / "7").touch()
    (copy / ".hidden" / "deep").mkdir(parents=True)
    (copy / ".hidden" / "deep" / "0.0").write_bytes(b"1234")
    assert list(torch_ckpt.open(copy)) == before


def test_numbers_in_keys(copy: Path) -> None:
    shutil.copytree(copy / "vocab", copy / "layers" / "0" / "weight")
    assert torch.equal(torch_ckpt.open(copy)["layers/0/weight"][...], wanted()["vocab"])


@pytest.mark.parametrize("at", ["vocab", "model/with", "dangling", ".dots"])
def test_links_are_refused(copy: Path, tmp_path: Path, at: str) -> None:
    """A tensor behind one would be lost without a word."""
    if (copy / at).exists():
        (copy / at).rename(tmp_path / "moved")
    elif at == ".dots":
        (tmp_path / "moved").mkdir()
    (copy / at).symlink_to(tmp_path / "moved")
    with pytest.raises(torch_ckpt.UnsupportedError, match=f"{at}.*is a link"):
        torch_ckpt.open(copy)
    with pytest.raises(torch_ckpt.UnsupportedError, match=f"{at}.*is a link"):
        torch_ckpt.convert(copy, tmp_path / "out", "torch_ckpt")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("key", ["vocab.sync", ".vocab", "x/.vocab", "x/vocab.sync"])
@pytest.mark.parametrize("of", ["vocab", "rng_state"])
def test_keys_that_look_like_locks_are_refused(copy: Path, key: str, of: str) -> None:
    (copy / key).parent.mkdir(parents=True, exist_ok=True)
    (copy / of).rename(copy / key)
    file = ".zarray" if of == "vocab" else "shard_0.0_1.2.pt"
    with pytest.raises(torch_ckpt.UnsupportedError, match=f"{key}/{file}.*begins with a dot"):
        torch_ckpt.open(copy)


@pytest.mark.parametrize("place", [".snapshot/hourly", ".cache", "x.sync/a"])
def test_what_is_deeper_in_directories_of_others_is_nobodys(copy: Path, place: str) -> None:
    names = list(torch_ckpt.open(copy))
    shutil.copytree(copy, copy.with_name("other"))
    (copy / place).parent.mkdir(exist_ok=True)
    copy.with_name("other").rename(copy / place)
    assert list(torch_ckpt.open(copy)) == names


def test_names_that_cannot_be_keys(copy: Path) -> None:
    (copy / "a:b").mkdir()
    with pytest.raises(torch_ckpt.CheckpointError, match="a:b"):
        torch_ckpt.open(copy)
    (copy / "a:b").rmdir()
    deep = copy.joinpath(*"abcdefghijklmnopqrst")
    deep.mkdir(parents=True)
    with pytest.raises(torch_ckpt.CheckpointError, match="too deep"):
        torch_ckpt.open(copy)


def test_a_key_that_the_common_state_has(copy: Path) -> None:
    shutil.copytree(copy / "flag", copy / "iteration")
    with pytest.raises(torch_ckpt.ConflictError, match="iteration.*another file"):
        torch_ckpt.open(copy)


def test_dtypes_that_safetensors_has_no_name_for(copy: Path) -> None:
    array = copy / "f64" / ".zarray"
    said = json.loads(array.read_text())
    whole = copy / "f64"
    chunks = {path.name: path.read_bytes() for path in whole.iterdir() if path.name != ".zarray"}
    for name, data in chunks.items():
        (whole / name).write_bytes(data * 2)
    array.write_text(json.dumps({**said, "dtype": "<c16"}))
    checkpoint = torch_ckpt.open(copy)
    with pytest.raises(torch_ckpt.UnsupportedError, match="f64.*complex128"):
        checkpoint["f64"][...]
    assert torch.equal(checkpoint["vocab"][...], wanted()["vocab"])


def test_a_chunk_that_is_written_meanwhile(copy: Path) -> None:
    checkpoint = torch_ckpt.open(copy)
    chunk = first_chunk(copy)
    data = chunk.read_bytes()
    chunk.unlink()
    chunk.write_bytes(data)
    with pytest.raises(torch_ckpt.ConflictError, match=r"vocab/1\.0"):
        checkpoint["vocab"][...]


def test_what_is_no_whole_directory(copy: Path, tmp_path: Path) -> None:
    (copy / "common.pt").rename(tmp_path / "common.pt")
    with pytest.raises(torch_ckpt.IncompleteError, match=r"common\.pt.*missing"):
        torch_ckpt.open(copy)
    (tmp_path / "common.pt").rename(copy / "common.pt")
    (copy / ".metadata").touch()
    with pytest.raises(torch_ckpt.ConflictError, match=r"\.metadata.*zarr"):
        torch_ckpt.open(copy)
