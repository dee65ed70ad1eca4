"""What requests of torch_ckpt.megatron.dist_checkpointing hold, and what a load gives for them: all
that was asked for, from one save, or an error."""

from __future__ import annotations

import collections
import types
from argparse import Namespace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard

import torch_ckpt
from torch_ckpt.megatron import dist_checkpointing, loading, stored
from torch_ckpt.megatron.dist_checkpointing.core import CheckpointingException
from torch_ckpt.megatron.dist_checkpointing.mapping import (
    LocalNonpersistentObject,
    ShardedObject,
    ShardedTensor,
    ShardedTensorFactory,
)

load, save = dist_checkpointing.load, dist_checkpointing.save
place = ShardedTensor.from_rank_offsets

TORCH_DIST = Path(__file__).parents[1] / "fixtures" / "megatron_torch_dist_019_2ranks"


@pytest.mark.parametrize(
    "held",
    [
        tuple,
        collections.deque,
        lambda entries: {"deep": (1, [*entries])}["deep"],
        lambda entries: types.MappingProxyType({"in": entries[0]}),
        lambda entries: collections.UserDict({"in": entries[0]}),
        lambda entries: Namespace(entry=entries[0]),
        lambda entries: types.SimpleNamespace(entry=entries),
    ],
)
@pytest.mark.parametrize(
    "entry",
    [place("w", torch.zeros(2)), ShardedObject("w", 1, (1,), (0,)), LocalNonpersistentObject(1)],
)
def test_entries_in_values_are_refused(tmp_path: Path, held: Any, entry: Any) -> None:
    """They are looked for in dicts and lists; none is passed over, not by a load either."""
    save({"m": [place("w", torch.ones(2))]}, tmp_path / "c")
    for call in (save, load):
        with pytest.raises(CheckpointingException, match=r"m\..*a (Sharded|Local)\w+ in a \w+"):
            call({"m": held([entry])}, tmp_path / "c")


def test_a_dtensor_is_no_data(tmp_path: Path) -> None:
    save({"w": place("w", torch.ones(4))}, tmp_path / "c")
    torch.distributed.init_process_group(
        "gloo", store=torch.distributed.HashStore(), rank=0, world_size=1
    )
    try:
        whole = DTensor.from_local(torch.ones(4), init_device_mesh("cpu", (1,)), [Shard(0)])
        for call in (save, load):
            with pytest.raises(CheckpointingException, match=r"'w'.*DTensor.*to_local\(\)"):
                call({"w": place("w", whole)}, tmp_path / "c")
            with pytest.raises(CheckpointingException, match=r"m\.0: a DTensor.*to_local\(\)"):
                call({"m": [whole]}, tmp_path / "c")
    finally:
        torch.distributed.destroy_process_group()


def test_no_entry_moves_up_in_a_list(tmp_path: Path) -> None:
    def entry(key: str) -> ShardedTensor:
        return place(key, torch.zeros(1))

    save({"l": ["x", place("a", torch.ones(1)), "y"]}, tmp_path / "c")
    with pytest.raises(CheckpointingException, match=r"l: 4 entries .* has none at 1"):
        load({"l": [0, 0, 0, entry("a")]}, tmp_path / "c")
    with pytest.raises(CheckpointingException, match=r"new: 2 entries .* has none at 0"):
        load({"new": [0, entry("a")]}, tmp_path / "c")
    # An empty group of this rank's stays where it is.
    assert load({"new": [[], [entry("a")], {}]}, tmp_path / "c")["new"] == [[], [torch.ones(1)], {}]
    # What is asked for and not stored is left out, as the caller wants it.
    left_out = load({"l": [0, entry("no"), 0, entry("a")]}, tmp_path / "c", strict="ignore_all")
    assert left_out["l"] == ["x", "y", torch.ones(1)]


def halves(merge: Any, filled: bool) -> ShardedTensorFactory:
    def build(key: str, data: torch.Tensor, replica: Any, _: Any) -> list[ShardedTensor]:
        return [place(f"{key}.{at}", half) for at, half in enumerate(data.chunk(2))]

    data = torch.arange(4.0) if filled else torch.zeros(4)
    return ShardedTensorFactory("f", data, build, merge)


def test_a_merge_may_write_into_what_it_merged(tmp_path: Path) -> None:
    """But into no part that it has merged: that is the same memory, where torch.cat copies."""
    save({"f": halves(torch.cat, True)}, tmp_path / "c")

    def doubled(parts: list[torch.Tensor]) -> torch.Tensor:
        return torch.cat(parts).mul_(2)

    def swapped(parts: list[torch.Tensor]) -> torch.Tensor:
        whole = torch.cat(parts)
        parts[0][:].copy_(whole[2:])
        return torch.cat([whole[:2], parts[0]])

    assert load({"f": halves(doubled, False)}, tmp_path / "c")["f"].tolist() == [0, 2, 4, 6]
    with pytest.raises(CheckpointingException, match=r"'f': its merge_fn writes into parts"):
        load({"f": halves(swapped, False)}, tmp_path / "c")
    with torch.inference_mode():  # whose tensors have no versions: it is a copy
        assert load({"f": halves(swapped, False)}, tmp_path / "c")["f"].tolist() == [0, 1, 2, 3]


def later(path: Path, state: dict[str, Any]) -> Any:
    """Saves `state` into `path` when the first load there has agreed on what it reads."""
    keep, left = loading._read, [state]

    def read(*arguments: Any) -> Any:
        while left:
            save(left.pop(), path)
        return keep(*arguments)

    return mock.patch.object(loading, "_read", read)


def test_a_load_is_of_one_save(tmp_path: Path) -> None:
    """What is replaced while it is loaded is loaded anew: tensors, common state and keys."""
    path = tmp_path / "c"

    def state(value: int, **more: Any) -> dict[str, Any]:
        return {"w": place("w", torch.full((2,), float(value))), "step": value, **more}

    def request() -> dict[str, Any]:
        return {"w": place("w", torch.zeros(2))}

    save(state(1), path, content_metadata={"of": 1})
    with later(path, state(2, more=place("more", torch.ones(1)))):
        loaded, missing, _ = load(request(), path, strict="return_all")
    assert (loaded["w"].tolist(), loaded["step"], missing) == ([2, 2], 2, {"more"})
    assert dist_checkpointing.load_content_metadata(preloaded_state_dict=loaded) is None
    with later(path, {"other": place("other", torch.ones(1))}):
        with pytest.raises(CheckpointingException, match="'w'|w \\(rank 0\\)"):
            load(request(), path)


def test_a_load_of_what_was_converted_is_of_one_save(tmp_path: Path) -> None:
    """Its common state is read leaf by leaf, behind the tensors."""
    path = tmp_path / "c"
    torch_ckpt.convert(TORCH_DIST / "checkpoint", path, "torch_ckpt")
    request = dict(dist_checkpointing.load_tensors_metadata(path))
    keep, left = loading.deliver, [{"iteration": 7, **request}]

    def deliver(*arguments: Any) -> None:
        keep(*arguments)
        while left:
            for entry in request.values():
                entry.data = torch.zeros(entry.local_shape, dtype=entry.dtype)
            save(left.pop(), path)

    with mock.patch.object(loading, "deliver", deliver):
        loaded = load(dict(request), path)
    assert loaded["iteration"] == 7
    assert not any(loaded[key].any() for key in request)


def test_errors_of_a_load_name_the_checkpoint(tmp_path: Path) -> None:
    save({"w": place("w", torch.ones(4))}, tmp_path / "c")
    for request, strict in (
        ({"no": place("no", torch.ones(4))}, "raise_all"),
        ({"w": place("w", torch.ones(5))}, "raise_all"),
        ({"w": ShardedObject("w", 1, (1,), (0,))}, "raise_all"),
    ):
        with pytest.raises(CheckpointingException) as caught:
            load(request, tmp_path / "c", strict=strict)
        assert caught.value.file is not None and caught.value.file.startswith(str(tmp_path / "c"))


def test_objects_of_keys_with_dots(tmp_path: Path) -> None:
    """Early releases of Megatron cut the last size off an object's name, and nothing else."""
    key = "a/shard_0_1.b"
    cells = {str(at): ShardedObject(key, at, (2,), (at,)) for at in range(2)}
    save({"a": ShardedObject("a", 1, (1,), (0,)), **cells}, tmp_path / "c")
    with pytest.raises(CheckpointingException, match=f"'{key}/shard_0_1'.*not in the checkpoint"):
        load({"b": ShardedObject(key, 1, (1,), (0,))}, tmp_path / "c")


def test_common_state_is_of_one_save(tmp_path: Path) -> None:
    """Where it is replaced between the look and the reading, it is looked at again."""
    path = tmp_path / "c"
    save({"step": 1, "w": place("w", torch.ones(1))}, path, content_metadata={"of": 1})
    keep, left = stored.Stored.common_names, [{"step": 2, "w": place("w", torch.ones(1))}]

    def names(self: stored.Stored) -> list[str]:
        while left:
            save(left.pop(), path)
        return keep(self)

    with mock.patch.object(stored.Stored, "common_names", names):
        assert dist_checkpointing.load_common_state_dict(path) == {"step": 2}
