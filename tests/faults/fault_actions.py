"""What the children of the fault tests do. Each function runs in a process of its own.

States are numbered: state i has its own bytes and leaves in the same shapes.
"""

from __future__ import annotations

import os
import pathlib
import time
from typing import Any

import torch

STAGE_SUFFIX = ".torch_ckpt-stage"


def state(number: int) -> dict[str, Any]:
    random = torch.Generator().manual_seed(number)
    return {
        "model": {
            "w": torch.randn(40, 30, generator=random),
            "b": torch.randn(7, generator=random).bfloat16(),
            "t": torch.randn(6, 5, generator=random).t(),
        },
        "step": number,
        "name": f"state {number}",
    }


def _empty() -> dict[str, Any]:
    empty = state(0)
    empty["model"] = {name: torch.zeros_like(value) for name, value in empty["model"].items()}
    return {**empty, "step": -1, "name": ""}


def _equal(a: dict[str, Any], b: dict[str, Any]) -> bool:
    return (
        a["step"] == b["step"]
        and a["name"] == b["name"]
        and all(torch.equal(a["model"][name], b["model"][name]) for name in b["model"])
    )


def save(path: str, number: int) -> None:
    import torch_ckpt

    torch_ckpt.save(state(number), checkpoint_id=path, no_dist=True)


def save_final(path: str, number: int) -> None:
    import torch_ckpt

    torch_ckpt.save(
        state(number), checkpoint_id=path, no_dist=True, layout="final", max_shard_size=200
    )


def async_save(path: str, number: int) -> None:
    """Changes its tensors as soon as they are staged."""
    import torch_ckpt

    saved = state(number)
    # Without the default stager's thread, in which calls would come in any order.
    began = torch_ckpt.async_save(saved, checkpoint_id=path, no_dist=True)
    for tensor in saved["model"].values():
        tensor.fill_(-1)
    began.upload_completion.result()


def save_large(path: str, elements: int) -> None:
    import torch_ckpt

    torch_ckpt.save({"x": torch.ones(elements)}, checkpoint_id=path, no_dist=True)


def consolidate(source: str, path: str) -> None:
    import torch_ckpt

    torch_ckpt.consolidate_safetensors_files(source, path, None, overwrite=True)


def load(path: str, numbers: list[int]) -> int:
    """The number of the state that `path` holds, bit for bit."""
    import torch_ckpt

    loaded = _empty()
    torch_ckpt.load(loaded, checkpoint_id=path, no_dist=True)
    for number in numbers:
        if _equal(loaded, state(number)):
            return number
    raise AssertionError(f"{path} holds a mixture: step {loaded['step']}")


def _megatron_state(number: int, *, filled: bool = True) -> dict[str, Any]:
    """`state(number)` as Megatron would cut it: in boxes, with an axis before, with an object."""
    from torch_ckpt.megatron.dist_checkpointing import ShardedObject, ShardedTensor

    of = state(number)
    place = ShardedTensor.from_rank_offsets
    model = of["model"]
    if not filled:
        model = {name: torch.full_like(value, -1) for name, value in model.items()}
    upper, lower = model["w"].chunk(2)
    return {
        "upper": place("w", upper, (0, 0, 2)),
        "lower": place("w", lower, (0, 1, 2)),
        "layer": place("layers", model["b"], (0, 0, 1), prepend_axis_num=1),
        "t": place("t", model["t"]),
        "object": ShardedObject("object", of["name"] if filled else None, (1,), (0,)),
        "step": number if filled else -1,
    }


def save_sharded(path: str, number: int) -> None:
    from torch_ckpt.megatron import dist_checkpointing

    dist_checkpointing.save(_megatron_state(number), path)


def async_save_sharded(path: str, number: int) -> None:
    """Changes its tensors as soon as the request is scheduled."""
    from torch_ckpt.megatron import dist_checkpointing
    from torch_ckpt.megatron.dist_checkpointing.strategies.async_utils import AsyncCallsQueue

    queue = AsyncCallsQueue()
    saved = _megatron_state(number)
    queue.schedule_async_request(dist_checkpointing.save(saved, path, async_sharded_save=True))
    for name in ("upper", "lower", "layer", "t"):
        saved[name].data.fill_(-1)
    queue.maybe_finalize_async_calls(blocking=True)


def load_sharded(path: str, numbers: list[int]) -> int | None:
    """As `load`, by Megatron's calls. None where these say that there is no checkpoint."""
    from torch_ckpt.megatron import dist_checkpointing

    if not dist_checkpointing.check_is_distributed_checkpoint(path):
        return None
    loaded = dist_checkpointing.load(_megatron_state(0, filled=False), path)
    model = {
        "w": torch.cat([loaded["upper"], loaded["lower"]]),
        "b": loaded["layer"],
        "t": loaded["t"],
    }
    found = {"model": model, "step": loaded["step"], "name": loaded["object"]}
    for number in numbers:
        if _equal(found, state(number)):
            return number
    raise AssertionError(f"{path} holds a mixture: step {found['step']}, {found['name']}")


def leftovers(path: str) -> list[str]:
    """Staging directories and locks in `path` and beside it."""
    folder = pathlib.Path(path)
    found = [*folder.glob(f"*{STAGE_SUFFIX}*"), *folder.glob(".lock*"), *folder.glob("*.new")]
    found += folder.parent.glob(f".{folder.name}{STAGE_SUFFIX}*")
    return [str(entry) for entry in found]


def inspect(paths: list[str], numbers: list[int], following: int) -> list[dict[str, Any]]:
    """For each path: the state found (or why none), then one more save, and what that leaves."""
    import torch_ckpt

    answers = []
    for path in paths:
        answer: dict[str, Any] = {"path": path}
        try:
            answer["found"] = load(path, numbers)
        except torch_ckpt.IncompleteError as error:
            answer["found"] = None
            answer["why"] = str(error)
        save(path, following)
        answer["then"] = load(path, [following])
        answer["leftovers"] = leftovers(path)
        answers.append(answer)
    return answers


def inspect_sharded(paths: list[str], numbers: list[int], following: int) -> list[dict[str, Any]]:
    """As `inspect`, by Megatron's calls."""
    answers = []
    for path in paths:
        answer: dict[str, Any] = {"path": path, "found": load_sharded(path, numbers)}
        save_sharded(path, following)
        answer["then"] = load_sharded(path, [following])
        answer["leftovers"] = leftovers(path)
        answers.append(answer)
    return answers


def hold(path: str, ready: str, release: str, number: int) -> None:
    """Save; once all is written say so, and wait until told to commit."""
    import torch_ckpt

    class Held(torch_ckpt.HuggingFaceStorageWriter):
        def finish(self, *args: Any, **kwargs: Any) -> None:
            pathlib.Path(ready).touch()
            while not os.path.exists(release):
                time.sleep(0.005)
            super().finish(*args, **kwargs)

    writer = Held(path, save_distributed=True)
    torch_ckpt.save(state(number), storage_writer=writer, no_dist=True)


def save_at(path: str, number: int, start: str) -> None:
    """Save when the file `start` is there."""
    import torch_ckpt

    assert torch_ckpt.save  # the import is done before the race
    while not os.path.exists(start):
        time.sleep(0.0005)
    save(path, number)


def overwrite_many(path: str, numbers: list[int], done: str) -> None:
    for number in numbers:
        save(path, number)
    pathlib.Path(done).touch()


def load_many(path: str, numbers: list[int], done: str) -> dict[str, int]:
    """Load until `done` is there. Every load is one of the states or a ConflictError."""
    import torch_ckpt

    seen = {"loads": 0, "conflicts": 0}
    while not os.path.exists(done):
        try:
            load(path, numbers)
            seen["loads"] += 1
        except torch_ckpt.ConflictError as error:
            if "replaced" not in str(error):
                raise
            seen["conflicts"] += 1
    return seen


def _keys(prefix: str) -> dict[str, torch.Tensor]:
    return {f"{prefix}.{number}": torch.arange(1000.0 + number) for number in range(3)}


def save_megatron(path: str) -> None:
    from torch_ckpt.megatron import dist_checkpointing
    from torch_ckpt.megatron.dist_checkpointing import ShardedObject, ShardedTensor

    values = {**_keys("keep"), **_keys("go")}
    state = {key: ShardedTensor.from_rank_offsets(key, each) for key, each in values.items()}
    object_ = ShardedObject("object", "text", (1,), (0,))
    dist_checkpointing.save({**state, "object": object_, "step": 7}, path)


def remove_tensors(path: str) -> None:
    from torch_ckpt.megatron import dist_checkpointing

    dist_checkpointing.remove_sharded_tensors(path, "go.")


def whole_megatron(paths: list[str]) -> list[bool]:
    """Of each path whether what goes is still there; all else must be."""
    from torch_ckpt.megatron import dist_checkpointing

    answers = []
    for path in paths:
        assert dist_checkpointing.check_is_distributed_checkpoint(path), path
        loaded = dist_checkpointing.load_plain_tensors(path)
        assert loaded.pop("step") == 7
        wanted = _keys("keep")
        if "go.0" in loaded:
            wanted.update(_keys("go"))
        assert loaded.keys() == wanted.keys()
        assert all(torch.equal(loaded[key], value) for key, value in wanted.items())
        request = dist_checkpointing.load_sharded_metadata(path)
        name = "object/shard_0_1"
        assert dist_checkpointing.load({name: request[name]}, path)[name] == "text"
        answers.append("go.0" in wanted)
    return answers
