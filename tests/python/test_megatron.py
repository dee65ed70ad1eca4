"""Directories of Megatron Core's dist_checkpointing (torch_dist), as Megatron itself writes them."""

from __future__ import annotations

import io
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from click.testing import CliRunner
from foreign_samples import Payload, same
from launch import run_ranks
from ranks.megatron import common_state, layer
from test_torch_dtensors import as_rank
from torch.distributed.tensor import Shard, distribute_tensor

import torch_ckpt
from torch_ckpt.cli import cli
from torch_ckpt.megatron import dist_checkpointing
from torch_ckpt.megatron.dist_checkpointing import ShardedObject, ShardedTensor
from torch_ckpt.objects.types import STOOD_FOR, class_reference


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    pytest.importorskip("megatron.core.dist_checkpointing")
    folder = tmp_path_factory.mktemp("megatron")
    outcome = run_ranks("megatron", 2, folder)
    assert set(outcome.values()) == {"ok"}, outcome
    (found,) = folder.rglob("iter_0000100")
    return found


@pytest.fixture
def with_common_file(written: Path) -> Path:
    if not (written / "common.pt").exists():
        pytest.skip("this release writes no common.pt")
    return written


def whole() -> dict[str, torch.Tensor]:
    return {
        "layer.weight": torch.cat([layer(0), layer(1)]),
        "decoder.layers.w": torch.stack(
            [torch.full((3, 5), rank + 0.5, dtype=torch.bfloat16) for rank in range(2)]
        ),
        "layer.bias": torch.arange(5.0),
    }


def test_a_checkpoint_of_megatron_is_read(written: Path) -> None:
    checkpoint = torch_ckpt.open(written)
    assert checkpoint.format == "megatron"
    assert checkpoint.topology.world_size == 2
    wanted = {**whole(), "optimizer.step": torch.tensor(7)}
    assert set(checkpoint) == set(wanted)
    for name, value in wanted.items():
        assert same(checkpoint[name][...], value), name
    assert same(checkpoint["layer.weight"][3:5, 1:], wanted["layer.weight"][3:5, 1:])
    assert checkpoint.objects["args"] == common_state()["args"]
    assert checkpoint.objects["iteration"] == 100
    assert checkpoint.objects["layer._extra_state/shard_1_2"] == [{"rank": 1}]
    state = checkpoint.objects["rng_state/shard_0_1"][0]["torch"]
    assert state.dtype == torch.uint8 and state.shape == torch.get_rng_state().shape
    checkpoint.verify()


def test_load_returns_the_common_state_as_it_was(written: Path) -> None:
    loaded = torch_ckpt.load(path=written)
    common = common_state()
    assert same({key: loaded[key] for key in common}, common)
    assert type(loaded["args"]) is type(common["args"])
    assert same({key: loaded[key] for key in whole()}, whole())


def test_dist_checkpointing_loads_it(written: Path) -> None:
    common = dist_checkpointing.load_common_state_dict(written)
    assert same(common, common_state())
    loaded = dist_checkpointing.load_plain_tensors(written)
    assert same({key: loaded[key] for key in whole()}, whole())
    assert same({key: loaded[key] for key in common}, common)
    # A number in the common state is none of the tensors.
    assert dist_checkpointing.load_tensors_metadata(written).keys() == whole().keys()


@pytest.mark.parametrize("world", [pytest.param(1, marks=pytest.mark.campaign), 2])
def test_the_same_calls_have_the_same_answers(tmp_path: Path, world: int) -> None:
    pytest.importorskip("megatron.core.dist_checkpointing")
    outcome = run_ranks("megatron_beside", world, tmp_path)
    assert outcome and set(outcome.values()) == {"ok"}, outcome


def test_stock_load_through_our_reader(written: Path) -> None:
    target = {name: torch.zeros_like(value) for name, value in whole().items()}
    dcp.load(target, storage_reader=torch_ckpt.CheckpointReader(written))
    assert same(target, whole())


@pytest.mark.parametrize("to", ["torch_ckpt", "hf", "dcp", "megatron", "torch"])
def test_it_converts_to_what_is_written(written: Path, tmp_path: Path, to: Any) -> None:
    torch_ckpt.convert(written, tmp_path / "out", to)
    assert same(torch_ckpt.load(path=tmp_path / "out"), torch_ckpt.load(path=written))


def test_the_way_back(written: Path, tmp_path: Path) -> None:
    """Megatron's own reading of what was converted, from its directory and from ours."""
    torch_ckpt.convert(written, tmp_path / "back")  # as the source is
    entries = {key: ShardedTensor.from_rank_offsets(key, each) for key, each in whole().items()}
    cells = {
        str(rank): ShardedObject("layer._extra_state", {"rank": rank}, (2,), (rank,))
        for rank in range(2)
    }
    dist_checkpointing.save({**common_state(), **entries, **cells}, tmp_path / "ours")
    torch_ckpt.convert(tmp_path / "ours", tmp_path / "again", "megatron")
    for path in (tmp_path / "back", tmp_path / "again"):
        assert same(dist_checkpointing.load_common_state_dict(path), common_state())
        loaded = dist_checkpointing.load_plain_tensors(path)
        assert same({key: loaded[key] for key in whole()}, whole())
    outcome = run_ranks("megatron_back", 2, tmp_path)
    assert set(outcome.values()) == {"ok"}, outcome


class BytesPlanner(dcp.DefaultSavePlanner):
    """Objects are bytes already, as for Megatron's planner."""

    def transform_object(self, write_item: Any, object: Any) -> Any:
        return object


def test_common_state_as_an_object(tmp_path: Path) -> None:
    # As later versions of Megatron save it, which pip does not have yet.
    common = io.BytesIO()
    torch.save([common_state()], common)
    dcp.save(
        {"w": torch.ones(3), "common_state/shard_0_1": common},
        storage_writer=dcp.FileSystemWriter(tmp_path / "a"),
        planner=BytesPlanner(flatten_state_dict=False),
    )
    (tmp_path / "a" / "metadata.json").write_text('{"sharded_backend": "torch_dist"}')
    checkpoint = torch_ckpt.open(tmp_path / "a")
    assert checkpoint.format == "megatron"
    assert same(torch_ckpt.load(path=tmp_path / "a"), {"w": torch.ones(3), **common_state()})
    checkpoint.verify()
    # The same directory, said to be stock DCP's, has one object.
    assert "common_state/shard_0_1" in torch_ckpt.open(tmp_path / "a", format="dcp").objects


def test_a_flipped_bit_of_the_common_state_is_found(with_common_file: Path, tmp_path: Path) -> None:
    damaged = tmp_path / "a"
    shutil.copytree(with_common_file, damaged)
    content = bytearray((damaged / "common.pt").read_bytes())
    at = content.index((7).to_bytes(8, "little"))  # of optimizer.step
    content[at] ^= 1
    (damaged / "common.pt").write_bytes(content)
    with pytest.raises(torch_ckpt.CorruptError, match=r"common\.pt.*CRC-32"):
        torch_ckpt.open(damaged).verify()


def test_a_payload_in_the_common_state_does_not_run(with_common_file: Path, tmp_path: Path) -> None:
    bad = tmp_path / "a"
    shutil.copytree(with_common_file, bad)
    marker = tmp_path / "ran"
    torch.save({"iteration": 5, "evil": Payload(marker)}, bad / "common.pt")
    checkpoint = torch_ckpt.open(bad)
    assert checkpoint.objects["iteration"] == 5
    with pytest.raises(torch_ckpt.UnsupportedError, match="'evil'.*system"):
        checkpoint.objects["evil"]
    assert not marker.exists()


@pytest.mark.parametrize(
    ("config", "format"),
    [
        ('{"sharded_backend": "torch_dist", "later": [{"x": 1.5}, null, true]}', "megatron"),
        ('{"mine": 1}', "dcp"),
        ("no json", "dcp"),
        ('{"inner": {"sharded_backend": "torch_dist"}}', "dcp"),
        (" " * (1 << 20) + "{}", "dcp"),
    ],
)
def test_whose_metadata_json_it_is(tmp_path: Path, config: str, format: str) -> None:
    dcp.save({"w": torch.ones(2)}, checkpoint_id=tmp_path / "a")
    (tmp_path / "a" / "metadata.json").write_text(config)
    assert torch_ckpt.open(tmp_path / "a").format == format


def test_other_backends_are_refused(tmp_path: Path) -> None:
    dcp.save({"w": torch.ones(2)}, checkpoint_id=tmp_path / "a")
    (tmp_path / "a" / "metadata.json").write_text(json.dumps({"sharded_backend": "zarr3"}))
    with pytest.raises(torch_ckpt.UnsupportedError, match=r"metadata\.json.*'zarr3'.*torch_dist"):
        torch_ckpt.open(tmp_path / "a")


class Options:
    """Of no library's."""

    def __init__(self) -> None:
        self.rate = 0.5


def test_a_class_in_the_common_state_that_nobody_lists(
    with_common_file: Path, tmp_path: Path
) -> None:
    path = tmp_path / "a"
    shutil.copytree(with_common_file, path)
    torch.save({"iteration": 7, "own": Options()}, path / "common.pt")
    calls = (
        lambda: dist_checkpointing.load({}, path),
        lambda: dist_checkpointing.load_common_state_dict(path),
    )
    for call in calls:
        with pytest.raises(
            dist_checkpointing.core.CheckpointingException, match="own.*Options.*add_safe_globals"
        ):
            call()
    with torch.serialization.safe_globals([Options]):
        for call in calls:
            assert call()["iteration"] == 7 and call()["own"].rate == 0.5


def test_classes_that_megatron_lists_are_read() -> None:
    safe_globals = pytest.importorskip("megatron.core.safe_globals").SAFE_GLOBALS
    of_megatron = {class_reference(cls) for cls in safe_globals if "megatron" in cls.__module__}
    assert of_megatron and of_megatron <= STOOD_FOR


def test_a_part_of_a_dtensor_in_the_common_state(with_common_file: Path, tmp_path: Path) -> None:
    both = tmp_path / "a"
    shutil.copytree(with_common_file, both)
    with as_rank(0, (2,)) as devices:
        part = distribute_tensor(torch.ones(4), devices, [Shard(0)], src_data_rank=None)
        torch.save({"d": part}, both / "common.pt")
    checkpoint = torch_ckpt.open(both)
    assert {each.name for each in checkpoint.describe().tensors} == {*whole(), "d"}
    with pytest.raises(torch_ckpt.IncompleteError, match=r"common\.pt.*'d'.*one rank saved"):
        checkpoint["d"][...]


def test_a_name_in_both_states_is_a_conflict(written: Path, tmp_path: Path) -> None:
    twice = tmp_path / "a"
    shutil.copytree(written, twice)
    torch.save({"layer.bias": 1}, twice / "common.pt")
    with pytest.raises(torch_ckpt.ConflictError, match=r"'layer\.bias'.*common\.pt"):
        torch_ckpt.open(twice)


def test_stock_directories_with_dtypes_that_are_not_read(tmp_path: Path) -> None:
    """One tensor of complex128 leaves the others readable."""
    state = {"w": torch.ones(3), "z": torch.ones(2, 2, dtype=torch.complex128)}
    dcp.save(state, checkpoint_id=tmp_path / "a")
    checkpoint = torch_ckpt.open(tmp_path / "a")
    assert list(checkpoint) == ["w", "z"]
    assert same(checkpoint["w"][...], torch.ones(3))
    with pytest.raises(torch_ckpt.UnsupportedError, match="z.*complex128"):
        checkpoint["z"][...]
    # As a directory of Megatron's.
    config = dist_checkpointing.core.CheckpointingConfig("torch_dist", 1)
    dist_checkpointing.core.save_config(config, tmp_path / "a")
    torch.save({}, tmp_path / "a" / "common.pt")
    found = dist_checkpointing.load_tensors_metadata(tmp_path / "a")
    assert {name: (each.dtype, each.global_shape) for name, each in found.items()} == {
        "w": (torch.float32, (3,)),
        "z": (torch.complex128, (2, 2)),
    }


def test_it_is_looked_into(written: Path) -> None:
    def told(*arguments: str) -> Any:
        done = CliRunner().invoke(cli, [*arguments, "--json"])
        assert done.exit_code == 0, done.output
        return json.loads(done.stdout)

    found = told("inspect", str(written))
    assert (found["format"], found["step"], found["tensor_count"]) == (
        "megatron",
        100,
        len(torch_ckpt.open(written)),
    )
    (step,) = told("inspect", str(written.parent))["steps"]
    assert (step["step"], step["state"], step["format"]) == (100, "whole", "megatron")
    boxes = told("inspect", str(written / "__0_0.distcp"))["boxes"]
    assert "layer.weight" in {box["name"] for box in boxes}
    assert len(told("ls", str(written))["leaves"]) == found["tensor_count"] + found["object_count"]
