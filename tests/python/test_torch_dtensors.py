"""DTensors in files of torch.save: the shape of the whole, and the part that one rank saved."""

from __future__ import annotations

import copyreg
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
from foreign_samples import same
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.placement_types import _StridedShard
from torch.testing._internal.distributed.fake_pg import FakeStore

import torch_ckpt


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


PLACES = [Replicate(), Shard(0), Shard(1), _StridedShard(0, split_factor=2)]


@settings(max_examples=25, deadline=None)
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
    assert list(checkpoint) == []
    with pytest.raises(torch_ckpt.UnsupportedError, match="'w'"):
        checkpoint.objects["w"]


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
    assert list(checkpoint) == ["plain"]
    with pytest.raises(torch_ckpt.UnsupportedError, match="'w'"):
        checkpoint.objects["w"]


def test_a_part_that_is_not_what_its_placements_say(tmp_path: Path) -> None:
    path = tmp_path / "a.pt"
    with as_rank(0, (2,)) as devices:
        part = distribute_tensor(torch.ones(6, 2), devices, [Shard(0)], src_data_rank=None)
        part._local_tensor = torch.ones(2, 2)
        torch.save({"w": part}, path)
    with pytest.raises(torch_ckpt.CorruptError, match=r"a\.pt.*'w'.*\(2, 2\) is not what its"):
        torch_ckpt.open(path)


def test_tensors_with_attributes(tmp_path: Path) -> None:
    tensor = torch.arange(6.0).view(2, 3)
    tensor.partition_dim = 1  # type: ignore[attr-defined]
    parameter = torch.nn.Parameter(torch.ones(2))
    parameter.shared = True  # type: ignore[attr-defined]
    torch.save({"t": tensor, "p": parameter}, tmp_path / "a.pt")
    checkpoint = torch_ckpt.open(tmp_path / "a.pt")
    assert same(checkpoint["t"][...], torch.arange(6.0).view(2, 3))
    assert same(checkpoint["p"][...], torch.ones(2))
