"""Tensors that are made of others, in one process: saved as these, loaded into their like,
refused elsewhere. Sharded ones are in ranks/wrapped.py, those of torchao in
test_optional_packages.py."""

from __future__ import annotations

import dataclasses
import enum
import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed.checkpoint as dcp
from blocked import Blocked, blocked, same, zeros_like
from safetensors import safe_open
from safetensors.torch import save_file
from sample_states import FAILED, SAVES_OF_OURS
from test_simulated_ranks import as_rank
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard
from wrapped_tensor import Wrapped

import torch_ckpt
from torch_ckpt import HuggingFaceStorageWriter, LocalBoxes, PerRank, SavePlanner
from torch_ckpt.errors import InvalidArgumentError, MissingKeyError, UnsupportedError
from torch_ckpt.native.torch_private import dtensor_of
from torch_ckpt.planning.renaming import rename_words
from torch_ckpt.planning.wrappers import agreed_words, inner_tensors

SAVES: dict[str, Callable[[dict[str, Any], Path], Any]] = {
    **SAVES_OF_OURS,
    "plain": lambda state, path: dcp.save(
        state, storage_writer=dcp.FileSystemWriter(path), planner=SavePlanner(), no_dist=True
    ),
}


class Sub(Blocked):
    """The same bits in another class."""


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    torch_ckpt.save({"a": {"w": blocked(4, 1)}, "b": torch.ones(2)}, tmp_path / "saved")
    return tmp_path / "saved"


@pytest.mark.parametrize("save", SAVES)
def test_every_bit_comes_back(tmp_path: Path, save: str) -> None:
    value, other = blocked(4, 1), blocked(3, 2)
    state = {"w": value, "in": [{0: torch.nn.Parameter(other, requires_grad=False)}], "n": 3}
    SAVES[save](state, tmp_path / "c")
    target: Any = {"w": zeros_like(value), "in": [{0: zeros_like(other)}], "n": 0}
    if save == "plain":
        dcp.load(
            target,
            storage_reader=dcp.FileSystemReader(tmp_path / "c"),
            planner=torch_ckpt.LoadPlanner(),
            no_dist=True,
        )
    else:
        torch_ckpt.load(target, tmp_path / "c")
    assert same(target["w"], value) and same(target["in"][0][0], other) and target["n"] == 3


def test_without_a_target_the_parts_come_in_a_dict(saved: Path) -> None:
    value = blocked(4, 1)
    found: Any = torch_ckpt.load(None, saved)
    assert list(found["a"]["w"]) == ["codes", "scale", "table"]
    assert torch.equal(found["a"]["w"]["scale"], value.scale)
    assert torch.equal(torch_ckpt.open(saved)["a.w.codes"].read(), value.codes)


@pytest.mark.parametrize(
    ("target", "message"),
    [
        (
            Sub(*(torch.zeros_like(p) for p in inner_tensors(blocked(4, 1), "")[0].values())),
            "class",
        ),
        (Blocked(*inner_tensors(blocked(4, 1), "")[0].values(), signed=False), "context"),
        (blocked(5, 1), "shape"),
        (blocked(4, 1).codes, "was saved as the inner tensors of a blocked.Blocked: load into one"),
    ],
)
def test_another_target_is_an_error(saved: Path, target: Any, message: str) -> None:
    before = (
        {name: part.clone() for name, part in inner_tensors(target, "")[0].items()}
        if isinstance(target, Blocked)
        else {}
    )
    with pytest.raises((InvalidArgumentError, MissingKeyError), match=rf"a\.w.*{message}"):
        torch_ckpt.load({"a": {"w": target}}, saved)
    for name, part in before.items():
        assert torch.equal(getattr(target, name), part)


def test_what_is_missing_is_named(saved: Path) -> None:
    with pytest.raises(MissingKeyError, match=r"a\.v\.codes, a\.v\.scale, a\.v\.table"):
        torch_ckpt.load({"a": {"v": blocked(4, 1)}}, saved)


def test_with_other_planners_it_is_refused(tmp_path: Path) -> None:
    message = "(?s)tensor 'w'.*blocked.Blocked.*save with torch_ckpt.SavePlanner"
    writer = HuggingFaceStorageWriter(tmp_path / "c", layout="sharded")
    for planner in (dcp.DefaultSavePlanner(), SavePlanner(flatten_state_dict=False)):
        with pytest.raises(FAILED, match=message):
            dcp.save({"w": blocked(4, 1)}, storage_writer=writer, planner=planner, no_dist=True)
    with pytest.raises(UnsupportedError, match="blocked.Blocked.*not as a PerRank"):
        torch_ckpt.save({"w": PerRank(blocked(4, 1))}, tmp_path / "c")
    assert not (tmp_path / "c").exists()


def test_two_names_of_one_are_stored_once_in_final_files(tmp_path: Path) -> None:
    value = blocked(4, 1)
    torch_ckpt.save({"w": value, "v": value}, tmp_path / "c", layout="final")
    target = {"w": zeros_like(value), "v": zeros_like(value)}
    torch_ckpt.load(target, tmp_path / "c")
    assert same(target["w"], value) and same(target["v"], value)
    with safe_open(tmp_path / "c" / "model-00001-of-00001.safetensors", "pt") as file:
        assert sorted(file.keys()) == ["w.codes", "w.scale", "w.table"]


def test_its_parts_can_have_other_names(tmp_path: Path, saved: Path) -> None:
    value, target = blocked(4, 1), zeros_like(blocked(4, 1))
    torch_ckpt.load({"m": {"v": target}}, saved, key_mapping=[(r"^a\.w\.", "m.v.")])
    assert same(target, value)
    torch_ckpt.save({"a": {"w": value}}, tmp_path / "c", key_mapping=[(r"^a\.w\.", "v.")])
    target = zeros_like(value)
    torch_ckpt.load({"v": target}, tmp_path / "c")
    assert same(target, value)
    with pytest.raises(InvalidArgumentError, match="context"):
        torch_ckpt.load(
            {"v": Blocked(*inner_tensors(target, "")[0].values(), signed=False)}, tmp_path / "c"
        )
    with pytest.raises(InvalidArgumentError, match=r"'a\.w'.*do not belong together"):
        torch_ckpt.save({"a": {"w": value}}, tmp_path / "d", key_mapping=[("scale", "s")])


def test_a_part_does_not_take_the_name_of_the_whole(tmp_path: Path) -> None:
    # It would be loaded as values of the whole, by the target's `copy_`.
    state = {"w": Wrapped(torch.arange(4, dtype=torch.int8), 0.5)}
    with pytest.raises(InvalidArgumentError, match=r"'w'.*do not belong together"):
        torch_ckpt.save(state, tmp_path / "c", key_mapping=[(r"^w\.inner$", "w")])
    assert not (tmp_path / "c").exists()


def test_names_of_parts_that_have_parts() -> None:
    words = {"w": {"inner": ["data", "scale"]}, "w.data": {"inner": ["low", "high"]}}
    old = ["w.data.low", "w.data.high", "w.scale"]
    names = {name: f"v{name[1:]}" for name in old}
    renamed = rename_words(words, names)
    assert renamed == {"v": words["w"], "v.data": words["w.data"]}
    with pytest.raises(InvalidArgumentError, match="do not belong together"):
        rename_words(words, {"w.data.low": "v.data.low"})


def test_a_name_that_a_part_would_have(tmp_path: Path) -> None:
    with pytest.raises(InvalidArgumentError, match=r"w\.codes: two leaves"):
        torch_ckpt.save({"w": blocked(4, 1), "w.codes": 3}, tmp_path / "c")


def test_files_that_do_not_say_what_it_was(tmp_path: Path) -> None:
    parts = inner_tensors(blocked(4, 1), "")[0]
    save_file({f"a.w.{name}": part for name, part in parts.items()}, tmp_path / "m.safetensors")
    target = zeros_like(blocked(4, 1))
    with pytest.warns(UserWarning, match=r"nothing in the checkpoint says what a\.w was made of"):
        torch_ckpt.load({"a": {"w": target}}, tmp_path / "m.safetensors")
    assert same(target, blocked(4, 1))


class Spread(Blocked):
    """Its scales are cut whichever dimension is."""

    @classmethod
    def part(cls, whole: Blocked, dim: int = 0, start: int = 0, end: int = 0) -> Blocked:
        scales = len(whole.scale)
        begin, count = (scales * n // whole.shape[dim] for n in (start, end - start))
        codes = whole.codes.narrow(dim, start, end - start)
        return cls(codes, whole.scale.narrow(0, begin, count), whole.table)


@pytest.mark.parametrize("rank", range(4))
def test_a_part_that_two_dimensions_cut(rank: int) -> None:
    with as_rank(rank, 4):
        mesh = init_device_mesh("cpu", (2, 2))
        like = DTensor.from_local(torch.empty(4, 16), mesh, [Shard(0), Shard(1)], run_check=False)
        local = Spread(torch.zeros(4, 16, dtype=torch.uint8), torch.rand(4), torch.ones(2))
        with pytest.raises(UnsupportedError, match="tensor 'w': is sharded where its scale"):
            inner_tensors(dtensor_of(local, like), "w")


class Shade(enum.Enum):
    DARK = 1


@dataclasses.dataclass
class Kind:
    bits: int
    shade: Shade
    requires_grad: bool = False


class Pair(NamedTuple):
    first: Any
    second: Any


def words_of(context: Any) -> Any:
    class Odd(Blocked):
        def __tensor_flatten__(self) -> Any:
            return ["codes"], context

    one = blocked(4, 1)
    return inner_tensors(Odd(one.codes, one.scale, one.table), "w")[1]["context"]


def test_contexts_in_words() -> None:
    assert words_of(None) is None
    assert words_of((4, 48)) == {"shape or": [4, 48]}  # of this rank's part: others have another
    assert words_of({"b": [1, (2.5, "t")], "device": torch.device("cpu")}) == {"b": [1, [2.5, "t"]]}
    assert words_of([torch.device("cuda")]) == ["device"]
    assert words_of([torch.int8, torch.strided]) == ["torch.int8", "torch.strided"]
    name = __name__
    assert words_of(Kind(4, Shade.DARK, True)) == {
        "class": f"{name}.Kind",
        "bits": 4,
        "shade": f"{name}.Shade.DARK",
    }
    assert words_of(Pair(1, same)) == {
        "class": f"{name}.Pair",
        "first": 1,
        "second": "blocked.same",
    }
    for value in (object(), lambda: 1, {1: 2}, {"shape or": 2}, torch.ones(2)):
        with pytest.raises(UnsupportedError, match="tensor 'w': its context holds a"):
            words_of([value])


def test_one_without_inner_tensors_has_words() -> None:
    class Empty(Blocked):
        def __tensor_flatten__(self) -> Any:
            return [], {"value": 3}

    one = blocked(4, 1)
    inner, words = inner_tensors(Empty(one.codes, one.scale, one.table), "w")
    assert inner == {} and words is not None and words["context"] == {"value": 3}


def test_what_ranks_say_together() -> None:
    def said(*blocks: Any) -> Any:
        words = [{"class": "c", "context": {"block": block}} for block in blocks]
        return functools.reduce(agreed_words, words)["context"]["block"]

    one, two, three = ({"shape or": [rows, 4]} for rows in (1, 2, 3))
    assert said(one, one) == one
    assert said([1, 4], one) == said(one, [1, 4], one) == [1, 4]
    assert said(one, two) == said(one, two, three) == said("shape", one) == "shape"
    assert said([7, one], [7, [1, 4]]) == [7, [1, 4]]
    for blocks in ([2, 4], one), (one, two, [1, 4]), ("shape", [1, 4]), ([1], [1, 2]):
        with pytest.raises(ValueError):
            said(*blocks)
    with pytest.raises(ValueError):
        agreed_words({"class": "c", "context": one}, {"class": "d", "context": one})


def test_local_boxes_that_do_not_fit() -> None:
    one = torch.ones(2, 2)
    for shape, held, message in (
        ((3, 3), [((0,), one)], "none of a tensor of 2 dimensions"),
        ((3, 3), [((2, 0), one)], "not inside"),
        ((3, 3), [((-1, 0), one)], "not inside"),
        ((3, 3), [((0, 0), one), ((0, 2), torch.ones(2, 1, dtype=torch.int8))], "the others are"),
        ((3, 3), [], "need a dtype"),
    ):
        with pytest.raises(InvalidArgumentError, match=message):
            LocalBoxes(shape, held)
    with pytest.raises(UnsupportedError, match="use the tensors in its `boxes`"):
        LocalBoxes((3, 3), [((0, 0), one)]) + 1


def test_local_boxes_without_boxes_are_staged() -> None:
    import torch._subclasses.fake_tensor  # which says of no tensors that all of them are fake

    staged = torch_ckpt.PinnedMemoryStager().stage({"w": LocalBoxes((3,), [], torch.int8)})
    assert isinstance(staged, dict) and isinstance(staged["w"], LocalBoxes)
    assert staged["w"].boxes == () and staged["w"].dtype is torch.int8


@pytest.mark.parametrize("save", sorted(SAVES.keys() - {"plain"}))
def test_boxes_that_leave_a_hole_or_overlap(tmp_path: Path, save: str) -> None:
    one = torch.ones(2, 2)
    for held in ([((0, 0), one)], [((0, 0), one), ((0, 2), one), ((0, 1), one)]):
        with pytest.raises((*FAILED, ValueError), match="(?s)w.*"):
            SAVES[save]({"w": LocalBoxes((2, 4), held)}, tmp_path / "c")
    assert not (tmp_path / "c").exists()


@pytest.mark.parametrize("save", SAVES)
def test_boxes_of_one_rank(tmp_path: Path, save: str) -> None:
    whole = torch.arange(24.0).view(4, 6)
    held = [((0, 0), whole[:, :1]), ((0, 1), whole[:3, 1:]), ((3, 1), whole[3:, 1:].clone())]
    SAVES[save]({"w": LocalBoxes((4, 6), held)}, tmp_path / "c")
    into = torch.full((5, 5), -1.0)
    wanted = [((1, 2), into[:3, :2]), ((0, 0), into[3:4])]
    target = LocalBoxes((4, 6), [(at, box) for at, box in wanted])
    if save == "plain":
        dcp.load({"w": target}, checkpoint_id=tmp_path / "c", no_dist=True)
    else:
        torch_ckpt.load({"w": target}, tmp_path / "c")
    assert torch.equal(into[:3, :2], whole[1:4, 2:4]) and torch.equal(into[3], whole[0, :5])
    assert bool((into[:3, 2:] == -1).all()) and bool((into[4] == -1).all())
    with pytest.raises(InvalidArgumentError, match=r"w.*expects shape \[4, 7\]"):
        torch_ckpt.load({"w": LocalBoxes((4, 7), wanted)}, tmp_path / "c")
