"""A save of two layouts: the model in final files, and the rest of the state in shards, in
subdirectories of one checkpoint. By several ranks: ranks/two_layouts.py."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Literal

import pytest
import torch
import torch.distributed.checkpoint as dcp
from ranks.two_layouts import LAYOUTS, files_below, writer
from safetensors import safe_open
from safetensors.torch import load_file

import torch_ckpt
from torch_ckpt import (
    Checkpoint,
    ConflictError,
    CorruptError,
    IncompleteError,
    InvalidArgumentError,
    SavePlanner,
)
from torch_ckpt.dcp.write.layouts import Layout, Layouts


def state() -> dict[str, Any]:
    weight = torch.arange(12.0).reshape(3, 4)
    return {
        "embed.weight": weight,
        "head.weight": weight,  # tied
        "norm": torch.arange(5).to(torch.bfloat16),
        "optimizer": {
            "state": {"embed.weight": {"exp_avg": weight + 1, "step": 7}, "norm": {"same": weight}},
            "groups": [{"lr": 0.1, "params": ["embed.weight"]}],
        },
        "rng": {"torch": torch.arange(9, dtype=torch.uint8), "python": (1, (2, 3), None)},
        "version": 3,
    }


def assert_same(loaded: Any, saved: Any) -> None:
    assert type(loaded) is type(saved), (loaded, saved)
    if isinstance(saved, dict):
        assert loaded.keys() == saved.keys()
        for key, value in saved.items():
            assert_same(loaded[key], value)
    elif isinstance(saved, torch.Tensor):
        assert loaded.dtype == saved.dtype and torch.equal(loaded, saved)
    else:
        assert loaded == saved


MODEL = ["embed.weight", "head.weight", "norm"]
FILES = [
    "model/config.json",
    "model/model.safetensors",
    "state/objects-00001.json",
    "state/shard-00001-model-00001-of-00001.safetensors",
    "torch_ckpt.catalog",
    "torch_ckpt.json",
]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    config = tmp_path / "config.json"
    config.write_text('{"model_type": "mine"}')
    path = tmp_path / "c"
    torch_ckpt.save(state(), storage_writer=writer(path, extras=str(config)))
    return path


def test_each_part_is_where_it_belongs(path: Path) -> None:
    assert files_below(path) == FILES
    assert_same(torch_ckpt.load(path=path), state())
    # As others read them.
    with safe_open(path / FILES[1], "pt") as file:
        assert sorted(file.keys()) == ["embed.weight", "norm"]
    assert set(load_file(path / FILES[3])) == {
        "optimizer.state.embed.weight.exp_avg",
        "optimizer.state.norm.same",
        "rng.torch",
    }
    description = Checkpoint(path).describe()
    assert {tensor.name for tensor in description.tensors} >= {*MODEL, "rng.torch"}
    assert sorted(file.name for file in description.files) == FILES[:-1]
    assert Checkpoint(path).is_committed()
    Checkpoint(path).verify()


def test_a_part_is_opened_by_the_manifest_above(path: Path) -> None:
    whole = Checkpoint(path).describe()
    model = torch_ckpt.open(path / "model")
    assert sorted(model) == MODEL and not model.objects
    assert torch.equal(model["head.weight"][:], state()["head.weight"])
    described = model.describe()
    assert (described.format, described.source) == ("hf", "manifest")
    assert described.save_id == whole.save_id
    assert sorted(file.name for file in described.files) == ["config.json", "model.safetensors"]
    assert model.verify().files == 2
    assert Checkpoint(path / "model").is_committed()
    target = {name: torch.zeros_like(value) for name, value in state().items() if name in MODEL}
    torch_ckpt.load(target, path / "model")
    assert_same(target, {name: state()[name] for name in MODEL})

    rest = torch_ckpt.load(path=path / "state")
    assert_same(rest, {name: value for name, value in state().items() if name not in MODEL})
    assert torch_ckpt.open(path / "state").objects["version"] == 3


def test_damage_is_found_in_its_part(path: Path) -> None:
    shard = path / FILES[3]
    data = bytearray(shard.read_bytes())
    data[-1] ^= 1
    shard.write_bytes(data)
    Checkpoint(path / "model").verify()
    for damaged in (path, path / "state"):
        with pytest.raises(CorruptError, match="CRC-32C") as error:
            Checkpoint(damaged).verify()
        assert error.value.file == str(shard)
    (path / FILES[1]).unlink()
    for lacking in (path, path / "model"):
        with pytest.raises(IncompleteError) as missing:
            Checkpoint(lacking).describe()
        assert missing.value.file == str(path / FILES[1])
    with pytest.raises(IncompleteError):
        torch_ckpt.load({"norm": torch.zeros(5, dtype=torch.bfloat16)}, path / "model")


def test_a_part_is_no_place_to_save_into_or_to_remove(path: Path) -> None:
    with pytest.raises(ConflictError, match="is a part of the checkpoint") as error:
        torch_ckpt.save({"a": torch.ones(2)}, path / "model")
    assert error.value.file == str(path / "model")
    other = path.parent / "other"
    torch_ckpt.save({"a": torch.ones(2)}, other)
    with pytest.raises(ConflictError, match="is a part of the checkpoint"):
        torch_ckpt.convert(other, path / "model", to="hf", overwrite=True)
    with pytest.raises(IncompleteError):
        Checkpoint(path / "model").remove()
    assert_same(torch_ckpt.load(path=path), state())
    Checkpoint(path).remove()
    assert not path.exists()


def test_other_layouts_take_its_place_and_it_theirs(path: Path) -> None:
    torch_ckpt.save({"a": torch.ones(2), "b": 1}, path)
    assert files_below(path) == [
        "objects-00001.json",
        "shard-00001-model-00001-of-00001.safetensors",
        *FILES[4:],
    ]
    torch_ckpt.save(state(), storage_writer=writer(path))
    assert files_below(path) == FILES[1:]
    assert_same(torch_ckpt.load(path=path), state())


def test_several_files_have_an_index_of_their_own(tmp_path: Path) -> None:
    layouts = Layouts(
        Layout(True, "model", "hf", max_shard_size=50), Layout(False, "state"), frozenset({"rng"})
    )
    saved = {f"w{i}": torch.full((3, 4), float(i)) for i in range(3)} | {"rng": torch.ones(4)}
    torch_ckpt.save(saved, storage_writer=writer(tmp_path / "c", layouts))
    index = json.loads((tmp_path / "c/model/model.safetensors.index.json").read_text())
    assert index["weight_map"] == {
        f"w{i}": f"model-0000{i + 1}-of-00003.safetensors" for i in range(3)
    }
    assert sorted(torch_ckpt.open(tmp_path / "c/model")) == ["w0", "w1", "w2"]


def test_final_files_have_their_dtype_and_shards_their_own(tmp_path: Path) -> None:
    layouts = Layouts(
        Layout(
            True, "model", dtype_policy=torch_ckpt.export.dtype_policy.DtypePolicy("bfloat16", ())
        ),
        Layout(False, "state"),
        frozenset({"optimizer"}),
    )
    saved = {"w": torch.ones(3), "optimizer": {"w": torch.ones(3)}}
    torch_ckpt.save(saved, storage_writer=writer(tmp_path / "c", layouts))
    dtypes = Checkpoint(tmp_path / "c").dtypes()
    assert dtypes == {"w": "BF16", "optimizer.w": "F32"}


@pytest.mark.parametrize("how", ["thread", "stock", "stock planner"])
def test_every_kind_of_save(
    tmp_path: Path, how: Literal["thread", "stock", "stock planner"]
) -> None:
    config = tmp_path / "config.json"
    config.write_text("{}")
    path = tmp_path / "c"
    by = writer(path, extras=str(config))
    if how == "stock":
        dcp.save(state(), storage_writer=by, planner=SavePlanner())
    elif how == "stock planner":
        dcp.save(state(), storage_writer=by)
    else:
        torch_ckpt.async_save(state(), storage_writer=by).result()
    assert [file for file in files_below(path) if "objects" not in file] == [
        file for file in FILES if "objects" not in file
    ]
    assert_same(torch_ckpt.load(path=path / "model"), {name: state()[name] for name in MODEL})
    Checkpoint(path).verify()


def test_a_cached_plan_is_of_its_layouts(tmp_path: Path) -> None:
    planner = SavePlanner(enable_plan_caching=True)
    for step, layouts in enumerate([LAYOUTS, LAYOUTS, Layouts(Layout(True)), LAYOUTS]):
        path = tmp_path / str(step)
        torch_ckpt.save(state(), storage_writer=writer(path, layouts), planner=planner)
        loaded = torch_ckpt.load(path=path)
        assert_same(loaded, state())
        assert (path / "model").exists() == (layouts is LAYOUTS)


def test_layouts_that_make_no_save() -> None:
    for layouts in (
        (Layout(False, "a"), Layout(False, "b")),
        (Layout(True, "a"), Layout(True, "b")),
        (Layout(False, "a"), Layout(True, "b")),
        (Layout(True, "a"), Layout(False, "a")),
        (Layout(True), Layout(False)),
    ):
        with pytest.raises(InvalidArgumentError):
            Layouts(*layouts, frozenset({"x"}))
    with pytest.raises(InvalidArgumentError):
        Layouts(Layout(True), None, frozenset({"x"}))


@pytest.mark.parametrize("name", ["..", "a/b", ".hidden", "/", "a\0"])
def test_a_subdirectory_is_a_plain_name(tmp_path: Path, name: str) -> None:
    layouts = Layouts(Layout(True, "model"), Layout(False, name), frozenset({"rng"}))
    with pytest.raises(torch_ckpt.CheckpointError, match="file name"):
        torch_ckpt.save(state(), storage_writer=writer(tmp_path / "c", layouts))
    assert not (tmp_path / "c").exists()
