"""States that stage as they save: themselves inside, odd dicts, tensors with attributes, values of
single ranks."""

from __future__ import annotations

import collections
from pathlib import Path
from typing import Any

import pytest
import torch
from async_writers import BLOCKING
from sample_states import FAILED
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard

import torch_ckpt
from torch_ckpt import PerRank, PinnedMemoryStager
from torch_ckpt.native.torch_private import LocalShardsWrapper
from torch_ckpt.staging.staged_state import StagedState


def stage(state: dict[str, Any]) -> StagedState:
    staged = PinnedMemoryStager(BLOCKING).stage(state)
    assert isinstance(staged, StagedState)
    return staged


def itself(kind: str) -> dict[str, Any]:
    state: dict[str, Any] = {"w": torch.ones(1), "options": {1, 2}}
    inner: list[Any] = [state]
    state["again"] = {"dict": state, "list": inner, "tuple": (inner,)}[kind]
    return state


@pytest.mark.parametrize("kind", ["dict", "list", "tuple"])
def test_a_state_that_contains_itself(tmp_path: Path, kind: str) -> None:
    with pytest.raises(
        torch_ckpt.InvalidArgumentError, match=r"state_dict\['again'\].* contains itself"
    ):
        stage(itself(kind))
    with pytest.raises(FAILED, match=r"state_dict\['again'\].* contains itself"):
        torch_ckpt.async_save(itself(kind), checkpoint_id=tmp_path / "c").result()
    with pytest.raises(FAILED, match="again.* contains itself"):
        torch_ckpt.save(itself(kind), tmp_path / "c", no_dist=True)
    assert not (tmp_path / "c").exists()


class Frozen(dict[str, Any]):
    def __setitem__(self, key: str, value: Any) -> None:
        raise TypeError("is frozen")


class Uncopied(dict[str, Any]):
    def __copy__(self) -> Any:
        raise RuntimeError("there is one only")


class Converting(dict[str, Any]):
    """As EasyDict and the like: what is put in is not what is kept."""

    def __setitem__(self, key: str, value: Any) -> None:
        super().__setitem__(key, list(value) if isinstance(value, list) else value)


class Deaf(dict[str, Any]):
    def __setitem__(self, key: str, value: Any) -> None:
        pass


@pytest.mark.parametrize("kind", [Frozen, Uncopied, Converting, Deaf])
def test_dicts_that_do_not_take_values(tmp_path: Path, kind: Any) -> None:
    inner = {"w": torch.arange(3.0), "parts": [torch.ones(2), {"lr": 0.5}], "step": 4}
    state = {"model": kind(inner), "first": torch.ones(1)}
    staged = stage(state)
    assert list(staged) == ["model", "first"]
    assert list(staged["model"]) == ["w", "parts", "step"]
    state["model"]["w"].zero_()
    state["model"]["parts"][0].zero_()
    assert staged["model"]["w"].tolist() == [0, 1, 2]
    assert staged["model"]["parts"][0].tolist() == [1, 1]
    assert staged["model"]["parts"][1] == {"lr": 0.5}
    torch_ckpt.async_save(staged, checkpoint_id=tmp_path / "c").result()
    loaded = torch_ckpt.load(None, tmp_path / "c")
    assert loaded["model"]["w"].tolist() == [0, 1, 2]
    assert loaded["model"]["step"] == 4


class Kept(collections.OrderedDict[str, Any]):
    pass


def test_dicts_that_take_values_keep_their_type() -> None:
    value = Kept(w=torch.ones(2), step=3)
    value.version = 7  # type: ignore[attr-defined]
    staged = stage({"a": value})["a"]
    value["w"].zero_()
    assert type(staged) is Kept and list(staged) == ["w", "step"] and staged.version == 7
    assert staged["w"].tolist() == [1, 1]


def test_attributes_of_tensors() -> None:
    """Those that are data, as stock's stager does; not what refers to more memory."""
    parameter = torch.nn.Parameter(torch.ones(2))
    parameter.tag = 1  # type: ignore[attr-defined]
    parameter.axes = {"rows": [0, 1]}  # type: ignore[attr-defined]
    parameter.main_grad = torch.ones(1000)  # type: ignore[attr-defined]
    parameter.module = torch.nn.Linear(1, 1)  # type: ignore[attr-defined]
    sparse = torch.eye(2).to_sparse()
    sparse.tag = 2  # type: ignore[attr-defined]
    state = {"p": parameter, "in": [(parameter,)], "sparse": sparse, "plain": torch.ones(1)}
    staged = stage(state)
    parameter.axes["rows"].append(2)  # type: ignore[attr-defined]
    for copied in (staged["p"], staged["in"][0][0]):
        assert vars(copied) == {"tag": 1, "axes": {"rows": [0, 1]}}
    assert vars(staged["sparse"]) == {"tag": 2} and vars(staged["plain"]) == {}
    assert staged.staged_bytes < 1000


def test_values_of_single_ranks_are_staged_like_others(tmp_path: Path) -> None:
    value = torch.arange(1000.0)
    nested = {"rng": torch.arange(8, dtype=torch.uint8), "step": 3}
    state = {"own": PerRank(value), "nested": PerRank(nested), "none": PerRank()}
    staged = stage(state)
    value.zero_()
    assert [type(copied) for copied in staged.values()] == [PerRank] * 3
    assert staged["own"].value.tolist() == list(range(1000))
    assert staged["nested"].value["step"] == 3 and staged["none"].value is None
    region = staged["own"].value.untyped_storage().data_ptr()
    assert staged["nested"].value["rng"].untyped_storage().data_ptr() == region
    assert staged.staged_bytes >= 4008
    torch_ckpt.async_save(state, checkpoint_id=tmp_path / "c").result()
    target = {"own": PerRank(torch.ones(1000)), "nested": PerRank(), "none": PerRank(1)}
    torch_ckpt.load(target, checkpoint_id=tmp_path / "c")
    assert not target["own"].value.any() and target["none"].value is None
    assert torch.equal(target["nested"].value["rng"], nested["rng"])


def test_a_part_in_several_pieces(tmp_path: Path, group: None) -> None:
    """As torchrec has them: a local tensor that says its boxes by itself."""
    pieces = [torch.arange(8.0).view(2, 4), torch.arange(100.0, 108.0).view(2, 4)]
    part = LocalShardsWrapper([piece.clone() for piece in pieces], [(0, 0), (2, 0)])
    mesh = init_device_mesh("cpu", (1,))
    size, stride = torch.Size([4, 4]), (4, 1)
    state = {
        "t": DTensor.from_local(  # type: ignore[call-arg]
            part, mesh, [Shard(0)], run_check=False, shape=size, stride=stride
        )
    }
    save = torch_ckpt.async_save(state, tmp_path / "c")
    for piece in part.local_shards():
        piece.zero_()
    save.result(20)
    assert save.stats.staged_bytes == 64
    assert torch.equal(torch_ckpt.load(path=tmp_path / "c")["t"], torch.cat(pieces))
