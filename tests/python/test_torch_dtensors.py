"""DTensors in files of torch.save: the shape of the whole, and the part that one rank saved."""

from __future__ import annotations

import copyreg
import json
import pickle
import types
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
import torch.distributed as dist
from click.testing import CliRunner
from foreign_samples import same
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor._dtensor_spec import DTensorSpec, ShardOrderEntry
from torch.distributed.tensor.placement_types import _StridedShard
from torch.testing._internal.distributed.fake_pg import FakeStore

import torch_ckpt
from torch_ckpt.cli import cli
from torch_ckpt.planning.boxes import local_boxes


@contextmanager
def as_rank(rank: int, mesh: tuple[int, ...]) -> Iterator[DeviceMesh]:
    """This process as one of the ranks of a mesh, with nobody to talk to."""
    world = int(numpy.prod(mesh))
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world)
    try:
        names = tuple("abc"[: len(mesh)])
        yield init_device_mesh("cpu", mesh, mesh_dim_names=names)
    finally:
        dist.destroy_process_group()


def save_part(
    path: Path, rank: int, mesh: tuple[int, ...], whole: torch.Tensor, places: Any, **options: Any
) -> None:
    with as_rank(rank, mesh) as devices:
        part = distribute_tensor(whole, devices, places, src_data_rank=None)
        torch.save({"w": part, "plain": torch.ones(2)}, path, **options)


def fill(target: numpy.ndarray[Any, Any], path: Path) -> None:
    """Copies the boxes of "w" that the file has, from where the description says they are."""
    (tensor,) = [each for each in torch_ckpt.open(path).describe().tensors if each.name == "w"]
    content = path.read_bytes()
    for place in tensor.placements:
        box = numpy.ndarray(place.sizes, target.dtype, content, place.offset, place.strides)
        at = tuple(slice(o, o + n) for o, n in zip(place.offsets, place.sizes, strict=True))
        target[at] = box


class Other(Shard):
    """A placement that only its program knows."""


PLACES = [Replicate(), Shard(0), Shard(1), _StridedShard(0, split_factor=2)]


def expect_unread(checkpoint: torch_ckpt.Checkpoint, *names: str) -> None:
    """Beside a plain tensor, which can be read, those of `names` are listed and cannot."""
    assert sorted(checkpoint) == sorted(["plain", *names])
    assert same(checkpoint["plain"][...], torch.ones(2))
    for name in names:
        with pytest.raises(torch_ckpt.UnsupportedError, match=f"'{name}'"):
            checkpoint[name][...]


@settings(max_examples=25)
@given(
    mesh=st.sampled_from([(1,), (2,), (5,), (2, 3), (2, 2, 2)]),
    shape=st.tuples(st.integers(0, 9), st.integers(0, 7)),
    data=st.data(),
)
def test_the_parts_of_all_ranks_make_the_whole(
    tmp_path_factory: pytest.TempPathFactory,
    mesh: tuple[int, ...],
    shape: tuple[int, int],
    data: st.DataObject,
) -> None:
    places = [data.draw(st.sampled_from(PLACES[:3])) for _ in mesh]
    if mesh == (2, 3) and data.draw(st.booleans()):
        places = [PLACES[3], Shard(0)]  # as FSDP over tensor parallelism
    whole = torch.arange(shape[0] * shape[1], dtype=torch.float32).view(shape)
    found = numpy.full(shape, -1, dtype=numpy.float32)
    folder = tmp_path_factory.mktemp("parts")
    for rank in range(int(numpy.prod(mesh))):
        path = folder / f"rank_{rank}.pt"
        save_part(path, rank, mesh, whole, places)
        checkpoint = torch_ckpt.open(path)
        assert checkpoint["w"].shape == whole.shape
        fill(found, path)
        if all(each.is_replicate() for each in places) or len(set(mesh)) == 1 == mesh[0]:
            assert same(torch_ckpt.load(path=path)["w"], whole)
    assert numpy.array_equal(found, whole.numpy())


def test_a_part_of_a_tensor_is_not_taken_for_it(tmp_path: Path) -> None:
    path = tmp_path / "rank_1.pt"
    save_part(path, 1, (2,), torch.arange(10.0).view(5, 2), [Shard(0)])
    checkpoint = torch_ckpt.open(path)
    assert same(checkpoint["plain"][...], torch.ones(2))
    says = r"rank_1\.pt.*'w'.*a DTensor of which one rank saved its part.*\[0:3, 0:2\]"
    with pytest.raises(torch_ckpt.IncompleteError, match=says):
        checkpoint["w"][...]
    with pytest.raises(torch_ckpt.IncompleteError, match="one rank saved its part"):
        torch_ckpt.convert(path, tmp_path / "out", "hf")
    assert not (tmp_path / "out").exists()


def test_the_layout_of_a_part(tmp_path: Path) -> None:
    path, picture = tmp_path / "rank_1.pt", tmp_path / "w.svg"
    save_part(path, 1, (2,), torch.arange(10.0).view(5, 2), [Shard(0)])
    (tensor,) = [each for each in torch_ckpt.open(path).describe().tensors if each.name == "w"]
    (box,) = tensor.placements
    words = ["layout", str(path), "w", "--svg", str(picture)]
    done = CliRunner().invoke(cli, [*words, "--json"])
    assert done.exit_code == 0, done.output
    (shown,) = json.loads(done.stdout)["boxes"]
    assert (shown["offsets"], shown["sizes"]) == ([3, 0], [2, 2])
    assert shown["at"] == box.offset
    assert picture.read_text().count('class="box"') == 1
    assert "[3, 0]" in CliRunner().invoke(cli, words).stdout
    # Who reads is told that it is not all.
    with pytest.raises(torch_ckpt.IncompleteError, match="one rank saved its part"):
        torch_ckpt.open(path)["w"].mmap()


def test_parameters(tmp_path: Path) -> None:
    whole = torch.arange(14.0).view(7, 2)
    # Of a mesh that no other test has: torch keeps what it knows of one, with the rank.
    with as_rank(3, (7,)) as devices:
        part = distribute_tensor(whole, devices, [Shard(0)], src_data_rank=None)
        copied = distribute_tensor(whole, devices, [Replicate()], src_data_rank=None)
        torch.save(
            {"w": torch.nn.Parameter(part), "c": torch.nn.Parameter(copied)}, tmp_path / "a.pt"
        )
    found = numpy.full((7, 2), -1, dtype=numpy.float32)
    fill(found, tmp_path / "a.pt")
    assert numpy.array_equal(found[3], [6, 7]) and (numpy.delete(found, 3, 0) == -1).all()
    assert same(torch_ckpt.open(tmp_path / "a.pt")["c"][...], whole)


def test_partial_sums_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "a.pt"
    with as_rank(0, (2,)) as devices:
        part = DTensor.from_local(torch.ones(3), devices, [Partial()], run_check=False)
        torch.save({"w": part, "n": 1}, path)
    checkpoint = torch_ckpt.open(path)
    assert list(checkpoint) == ["w"]  # listed, and an error when it is asked for
    with pytest.raises(torch_ckpt.UnsupportedError, match="'w'"):
        checkpoint["w"][...]


def old_mesh(mesh: DeviceMesh) -> dict[str, Any]:
    """As torch 2.2 to 2.8 pickle one: the ranks as a tensor."""
    return {
        "device_type": "cpu",
        "mesh": mesh.mesh,
        "mesh_dim_names": mesh.mesh_dim_names,
        "_flatten_mesh_list": tuple(mesh.mesh.flatten().tolist()),
        "_coordinate_on_dim": list(mesh.get_coordinate() or ()),
        "_thread_id": 140000000000000,
    }


def layout_mesh(mesh: DeviceMesh) -> dict[str, Any]:
    """As torch 2.9 and 2.10: a layout of sizes and strides."""
    layout = type(mesh._layout).__new__(type(mesh._layout))
    vars(layout).update(shape=tuple(mesh.shape), stride=(1,) * mesh.ndim)
    return {
        "_device_type": "cpu",
        "_layout": layout,
        "_rank_map": mesh.mesh.flatten(),
        "_mesh_dim_names": mesh.mesh_dim_names,
        "_coordinate_on_dim": list(mesh.get_coordinate() or ()),
    }


def without_rank(mesh: DeviceMesh) -> dict[str, Any]:
    return {**old_mesh(mesh), "_coordinate_on_dim": None}


def pickling(state_of: Callable[[DeviceMesh], dict[str, Any]]) -> Any:
    """A pickle module that writes meshes with another state."""

    class Pickler(pickle._Pickler):
        def reducer_override(self, obj: Any) -> Any:
            if isinstance(obj, DeviceMesh):
                return copyreg.__newobj__, (DeviceMesh,), state_of(obj)
            return NotImplemented

    return types.SimpleNamespace(Pickler=Pickler, __name__="pickling")


@pytest.mark.parametrize("state_of", [old_mesh, layout_mesh], ids=lambda each: each.__name__)
def test_meshes_of_earlier_versions(tmp_path: Path, state_of: Any) -> None:
    whole = torch.arange(30.0).view(5, 6)
    found = numpy.full((5, 6), -1, dtype=numpy.float32)
    for rank in range(6):
        path = tmp_path / f"{rank}.pt"
        save_part(path, rank, (2, 3), whole, [Shard(0), Shard(1)], pickle_module=pickling(state_of))
        fill(found, path)
    assert numpy.array_equal(found, whole.numpy())


def test_a_part_of_an_unknown_rank_is_an_error_of_its_own(tmp_path: Path) -> None:
    path = tmp_path / "a.pt"
    mesh = pickling(without_rank)
    save_part(path, 0, (2,), torch.ones(4, 2), [Shard(0)], pickle_module=mesh)
    checkpoint = torch_ckpt.open(path)
    expect_unread(checkpoint, "w")
    with pytest.raises(torch_ckpt.UnsupportedError, match="'w'"):
        checkpoint["w"][...]


def test_a_part_that_is_not_what_its_placements_say(tmp_path: Path) -> None:
    path = tmp_path / "a.pt"
    with as_rank(0, (2,)) as devices:
        part = distribute_tensor(torch.ones(6, 2), devices, [Shard(0)], src_data_rank=None)
        part._local_tensor = torch.ones(2, 2)
        # As DTensor.from_local makes it of uneven parts.
        uneven = DTensor.from_local(torch.ones(3), devices, [Shard(0)], shape=(8,), stride=(1,))
        torch.save({"w": part, "u": uneven, "plain": torch.ones(2)}, path)
    checkpoint = torch_ckpt.open(path)
    expect_unread(checkpoint, "u", "w")
    with pytest.raises(torch_ckpt.UnsupportedError, match=r"a\.pt.*'w'"):
        checkpoint["w"][...]


def test_tensors_with_attributes(tmp_path: Path) -> None:
    tensor = torch.arange(6.0).view(2, 3)
    tensor.partition_dim = 1  # type: ignore[attr-defined]
    parameter = torch.nn.Parameter(torch.ones(2))
    parameter.shared = True  # type: ignore[attr-defined]
    torch.save({"t": tensor, "p": parameter}, tmp_path / "a.pt")
    checkpoint = torch_ckpt.open(tmp_path / "a.pt")
    assert same(checkpoint["t"][...], torch.arange(6.0).view(2, 3))
    assert same(checkpoint["p"][...], torch.ones(2))


def test_an_order_of_shards_that_is_not_from_left_to_right(tmp_path: Path) -> None:
    """No public function of torch makes one; files of it must not be read as if it were none."""
    path = tmp_path / "a.pt"
    with as_rank(1, (2, 2)) as devices:
        part = distribute_tensor(
            torch.arange(8.0), devices, [Shard(0), Shard(0)], src_data_rank=None
        )
        order = ShardOrderEntry(tensor_dim=0, mesh_dims=(1, 0))
        object.__setattr__(part._spec, "shard_order", (order,))
        torch.save({"w": part, "plain": torch.ones(2)}, path)
        with pytest.raises(torch_ckpt.UnsupportedError, match="w: .*another order"):
            local_boxes(part, "w")
    expect_unread(torch_ckpt.open(path), "w")


def test_the_order_that_strided_placements_say(tmp_path: Path) -> None:
    """Torch 2.10 writes it beside those of FSDP over tensor parallelism. Another one is refused."""
    whole = torch.arange(32.0).view(8, 4)
    for order, is_read in (((1, 0), True), ((0, 1), True), ((1, 1), False)):
        path = tmp_path / f"{order}.pt"
        with as_rank(1, (2, 2)) as devices:
            places = [_StridedShard(0, split_factor=2), Shard(0)]
            part = distribute_tensor(whole, devices, places, src_data_rank=None)
            local = part.to_local().clone()
            entry = ShardOrderEntry(tensor_dim=0, mesh_dims=order)
            object.__setattr__(part._spec, "shard_order", (entry,))
            torch.save({"w": part, "plain": torch.ones(2)}, path)
        checkpoint = torch_ckpt.open(path)
        if not is_read:
            expect_unread(checkpoint, "w")
            continue
        # Tensor parallelism gave it the second half, and FSDP the first half of that.
        found = numpy.zeros((8, 4), numpy.float32)
        fill(found, path)
        assert torch.equal(local, whole[4:6])
        assert numpy.array_equal(found[4:6], local.numpy()) and not found[:4].any()


def test_an_order_of_more_dimensions_than_the_mesh_has(tmp_path: Path) -> None:
    """Nobody looks through 30,000 of them for each of the leaves that share them."""
    path = tmp_path / "a.pt"
    with as_rank(1, (2, 2)) as devices:
        part = distribute_tensor(
            torch.arange(8.0), devices, [Shard(0), Shard(0)], src_data_rank=None
        )
        order = ShardOrderEntry(tensor_dim=0, mesh_dims=tuple(range(30_000)))
        object.__setattr__(part._spec, "shard_order", (order,))
        torch.save({"w": part, "plain": torch.ones(2)}, path)
    expect_unread(torch_ckpt.open(path), "w")


def test_two_shards_of_one_dimension_by_an_old_torch(tmp_path: Path) -> None:
    """FSDP over tensor parallelism stored them in another order before torch 2.5."""
    path = tmp_path / "a.pt"
    places, mesh = [Shard(0), Shard(0)], pickling(old_mesh)
    save_part(path, 0, (2, 2), torch.arange(8.0), places, pickle_module=without_order(mesh))
    expect_unread(torch_ckpt.open(path), "w")


def without_order(module: Any) -> Any:
    class Pickler(module.Pickler):  # type: ignore[misc,name-defined]
        def reducer_override(self, obj: Any) -> Any:
            if isinstance(obj, DTensorSpec):
                state = {"mesh": obj.mesh, "placements": obj.placements}
                return copyreg.__newobj__, (DTensorSpec,), state
            return super().reducer_override(obj)

    return types.SimpleNamespace(Pickler=Pickler, __name__="pickling")


def test_parts_of_nothing_are_not_tied(tmp_path: Path) -> None:
    path = tmp_path / "a.pt"
    with as_rank(1, (2,)) as devices:
        parts = {
            name: distribute_tensor(torch.ones(1, 4), devices, [Shard(0)], src_data_rank=None)
            for name in "ab"
        }
        torch.save({**parts, "step": torch.tensor(3)}, path)
    described = {each.name: each for each in torch_ckpt.open(path).describe().tensors}
    assert all(described[name].alias_of is None for name in "ab")
    assert described["a"].placements == ()
    assert described["a"].shape == (1, 4)


def hostile(path: Path, split: int, size: int, leaves: int) -> None:
    """Names of one DTensor, whose placement makes a box of every other element."""
    with as_rank(0, (2,)) as devices:
        part = distribute_tensor(torch.ones(4), devices, [Shard(0)], src_data_rank=None)
        spec = DTensorSpec(devices, (_StridedShard(0, split_factor=split),))
        part._spec = spec
        state = {f"w{i}": part for i in range(leaves)}

        class Pickler(pickle._Pickler):
            def reducer_override(self, obj: Any) -> Any:
                if obj is part:
                    function, (rebuild, kind, arguments, rest) = part.__reduce_ex__(2)
                    changed = (*arguments[:2], (size,), (1,), *arguments[4:])
                    return function, (rebuild, kind, changed, rest)
                return NotImplemented

        module = types.SimpleNamespace(Pickler=Pickler, __name__="pickling")
        torch.save(state, path, pickle_module=module)


@pytest.mark.parametrize(
    ("split", "size", "leaves"), [(2**40, 2**40, 1), (2**19, 2**20, 1), (2**15, 2**16, 20)]
)
def test_placements_that_make_very_many_boxes(
    tmp_path: Path, split: int, size: int, leaves: int
) -> None:
    hostile(tmp_path / "a.pt", split, size, leaves)
    with pytest.raises(torch_ckpt.CheckpointError):
        torch_ckpt.open(tmp_path / "a.pt").describe()


def test_a_placement_of_an_unknown_class(tmp_path: Path) -> None:
    path = tmp_path / "a.pt"
    with as_rank(0, (2,)) as devices:
        part = distribute_tensor(torch.ones(4), devices, [Shard(0)], src_data_rank=None)
        part._spec = DTensorSpec(devices, (Other(0),))
        torch.save({"w": part, "plain": torch.ones(2)}, path)
    expect_unread(torch_ckpt.open(path), "w")


def test_dtypes_that_safetensors_has_no_name_for(tmp_path: Path) -> None:
    state = {
        "z": torch.zeros(3, dtype=torch.complex32),
        "y": torch.zeros(3, dtype=torch.complex128),
    }
    torch.save({**state, "plain": torch.ones(2)}, tmp_path / "a.pt")
    checkpoint = torch_ckpt.open(tmp_path / "a.pt")
    expect_unread(checkpoint, "y", "z")
    with pytest.raises(torch_ckpt.UnsupportedError, match="'z'.*no name for"):
        checkpoint["z"][...]


def test_tensors_with_attributes_inside_of_objects(tmp_path: Path) -> None:
    tensor = torch.ones(2)
    tensor.foo = 1  # type: ignore[attr-defined]
    parameter = torch.nn.Parameter(torch.ones(2), requires_grad=True)
    parameter.foo = 1  # type: ignore[attr-defined]
    torch.save({"a": (tensor, parameter)}, tmp_path / "a.pt")
    plain, made = torch_ckpt.open(tmp_path / "a.pt").objects["a"]
    assert type(plain) is torch.Tensor and not plain.requires_grad
    assert type(made) is torch.nn.Parameter and made.requires_grad
