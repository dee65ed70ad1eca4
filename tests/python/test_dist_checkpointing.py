"""torch_ckpt.megatron.dist_checkpointing in one process: what its calls mean, and refuse."""

from __future__ import annotations

import collections
import contextlib
import hashlib
import inspect
import json
import os
import pickle
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

import torch_ckpt
from torch_ckpt.megatron import dist_checkpointing
from torch_ckpt.megatron.dist_checkpointing import serialization
from torch_ckpt.megatron.dist_checkpointing.core import (
    CheckpointingConfig,
    CheckpointingException,
    maybe_load_config,
    save_config,
)
from torch_ckpt.megatron.dist_checkpointing.mapping import (
    LocalNonpersistentObject,
    ShardedObject,
    ShardedTensor,
    ShardedTensorFactory,
)
from torch_ckpt.megatron.dist_checkpointing.strategies.fully_parallel import (
    FullyParallelLoadStrategyWrapper,
)
from torch_ckpt.planning.reserved import RESERVED

load, save = dist_checkpointing.load, dist_checkpointing.save
place = ShardedTensor.from_rank_offsets

TORCH_DIST = Path(__file__).parents[1] / "fixtures" / "megatron_torch_dist_019_2ranks"


def test_lists_keep_their_places(tmp_path: Path) -> None:
    def state(filled: bool) -> dict[str, Any]:
        value = 1.0 if filled else 0.0
        return {
            "mixed": [place("a", torch.full((2,), value)), 3, {"b": place("b", torch.ones(1))}],
            "values": [1, [2, collections.OrderedDict(x=3)]],
            ("a", 1): {5: [], "none": None},
            "groups": [{"lr": 0.1, "params": LocalNonpersistentObject([7])}],
        }

    save(state(True), tmp_path / "c")
    loaded = load(state(False), tmp_path / "c")
    assert torch.equal(loaded["mixed"][0], torch.ones(2))
    assert loaded["mixed"][1] == 3 and torch.equal(loaded["mixed"][2]["b"], torch.ones(1))
    assert loaded["values"] == [1, [2, {"x": 3}]]
    assert type(loaded["values"][1][1]) is collections.OrderedDict
    assert loaded["a", 1] == {5: [], "none": None}
    assert loaded["groups"] == [{"lr": 0.1, "params": [7]}]
    # Without the entries a list of both is a dict of the places of its values.
    common = dist_checkpointing.load_common_state_dict(tmp_path / "c")
    assert common["mixed"] == {1: 3}
    assert common["groups"] == [{"lr": 0.1}]


def test_the_memory_of_the_request_is_filled(tmp_path: Path) -> None:
    value = torch.arange(6.0).view(2, 3)
    parameter = torch.nn.Parameter(torch.zeros(2, 3))
    view = torch.zeros(3, 2).t()
    save({"w": place("w", value)}, tmp_path / "c")
    request = {
        "parameter": place("w", parameter),
        "view": place("w", view, replica_id=1),
        "none": place("w", value, replica_id=1).without_data(),
        "meta": place("w", torch.empty(2, 3, device="meta"), replica_id=1),
    }
    loaded = load(request, tmp_path / "c")
    for found in loaded.values():
        assert torch.equal(found, value) and not found.requires_grad
    assert torch.equal(parameter, value) and torch.equal(view, value)
    assert loaded["parameter"].data_ptr() == parameter.data_ptr()
    assert request["none"].data is None and request["meta"].data.is_meta


def test_entries_may_stand_in_any_dict_of_the_common_state(tmp_path: Path) -> None:
    save({"m": collections.OrderedDict(step=5), "w": place("w", torch.ones(2))}, tmp_path / "c")
    own = {"lr": LocalNonpersistentObject(3.0), "w": place("w", torch.zeros(2))}
    found = load({"m": own}, tmp_path / "c")["m"]
    assert torch.equal(found.pop("w"), torch.ones(2))
    assert found == collections.OrderedDict(step=5, lr=3.0)


def test_what_has_no_elements_is_stored(tmp_path: Path) -> None:
    halves = [
        ShardedTensor("e", torch.empty(0, 2), torch.float32, (0, 2), (0, 4), (0, at), (1, 2))
        for at in (2, 0)
    ]
    save({"e": halves}, tmp_path / "c")
    assert tuple(torch_ckpt.open(tmp_path / "c")["e"].shape) == (0, 4)
    assert [tuple(half.shape) for half in load({"e": halves}, tmp_path / "c")["e"]] == [(0, 2)] * 2


@pytest.mark.parametrize(
    "count", [5_000, pytest.param(50_000, marks=pytest.mark.campaign)], ids=str
)
def test_many_objects(tmp_path: Path, count: int) -> None:
    def state(filled: bool) -> dict[str, Any]:
        return {
            str(n): ShardedObject(f"o.{n}", {"n": n} if filled else None, (1,), (0,))
            for n in range(count)
        }

    save(state(True), tmp_path / "c")
    assert len([*(tmp_path / "c").iterdir()]) < 10  # they share a file
    loaded = load(state(False), tmp_path / "c")
    assert all(loaded[str(n)] == {"n": n} for n in range(count))
    assert len(dist_checkpointing.load_sharded_metadata(tmp_path / "c")) == count


def test_an_empty_main_replica_stores_nothing(tmp_path: Path) -> None:
    state = [
        ShardedTensor("k", torch.empty(0), torch.float32, (0,), (4,), (0,), None),
        ShardedTensor("k", torch.ones(4), torch.float32, (4,), (4,), (0,), None, replica_id=1),
    ]
    with pytest.raises(CheckpointingException, match="'k'.*no rank is the main replica"):
        save({"k": state}, tmp_path / "c", validate_access_integrity=False)
    assert not (tmp_path / "c").exists()


def test_memory_is_made_on_the_cpu(tmp_path: Path) -> None:
    save({"w": place("w", torch.ones(2))}, tmp_path / "c")
    with torch.device("meta"):
        found = load({"w": place("w", torch.ones(2)).without_data()}, tmp_path / "c")["w"]
    assert torch.equal(found, torch.ones(2))


def test_objects_are_objects(tmp_path: Path) -> None:
    values: dict[str, Any] = {
        "tensor": torch.arange(3),
        "dict": {"a": [1, (2, None)]},
        "list": [torch.ones(2)],
        "slash/in/key": "x",
    }
    state = {name: ShardedObject(name, value, (1,), (0,)) for name, value in values.items()}
    save(state, tmp_path / "c")
    assert torch_ckpt.open(tmp_path / "c").keys() == set()
    loaded = load({name: each.without_data() for name, each in state.items()}, tmp_path / "c")
    assert torch.equal(loaded["tensor"], values["tensor"])
    assert torch.equal(loaded["list"][0], torch.ones(2))
    assert loaded["dict"] == values["dict"] and loaded["slash/in/key"] == "x"
    request = dist_checkpointing.load_sharded_metadata(tmp_path / "c")
    assert {each.key for each in request.values()} == set(values)
    assert load(dict(request), tmp_path / "c")["dict/shard_0_1"] == values["dict"]


def test_other_shapes(tmp_path: Path) -> None:
    save({"w": place("w", torch.arange(8.0).view(4, 2))}, tmp_path / "c")
    for rows in (3, 6):
        with pytest.raises(CheckpointingException, match=r"'w'.*stored with shape \[4, 2\]"):
            load({"w": place("w", torch.ones(rows, 2))}, tmp_path / "c")
        bends = place("w", torch.ones(rows, 2), allow_shape_mismatch=True)
        found = load({"w": bends}, tmp_path / "c")["w"]
        wanted = torch.zeros(rows, 2)
        wanted[:4] = torch.arange(8.0).view(4, 2)[:rows]
        assert torch.equal(found, wanted)
    beyond = place("w", torch.ones(4, 2), (0, 1, 2), allow_shape_mismatch=True)
    loaded = load({"w": beyond}, tmp_path / "c", validate_access_integrity=False)
    assert torch.equal(loaded["w"], torch.zeros(4, 2))


def test_a_key_twice(tmp_path: Path) -> None:
    data = torch.ones(2)
    with pytest.raises(CheckpointingException, match="main replica on rank 0, twice"):
        save({"a": place("w", data), "b": place("w", data)}, tmp_path / "c")
    with pytest.raises(CheckpointingException, match="is a tensor on rank 0 and an object"):
        save({"a": place("w", data), "b": ShardedObject("w", 1, (1,), (0,))}, tmp_path / "c")
    save({"a": place("w", data), "b": place("w", data, replica_id=1)}, tmp_path / "c")
    assert not (tmp_path / "c" / ".torch_ckpt-stage").exists()


@pytest.mark.parametrize("key", ["common_state", "content_metadata", *sorted(RESERVED)])
def test_reserved_keys(tmp_path: Path, key: str) -> None:
    with pytest.raises(CheckpointingException, match=f"'{key}'.*reserved"):
        save({"a": ShardedObject(key, 1, (1,), (0,))}, tmp_path / "c")
    assert not (tmp_path / "c").exists()


@pytest.mark.parametrize("key", ["common_state/shard_0_1", "content_metadata/shard_0_1"])
def test_keys_that_are_names_of_what_is_beside(tmp_path: Path, key: str) -> None:
    for content in (None, {"kind": "x"}):
        with pytest.raises(CheckpointingException, match=f"rank 0: tensor '{key}'.*reserved"):
            save({"a": place(key, torch.ones(3))}, tmp_path / "c", content_metadata=content)
    assert not (tmp_path / "c").exists()


def test_content_metadata(tmp_path: Path) -> None:
    entry = place("w", torch.ones(1))
    for value in (1, entry, {"w": entry}, [entry], LocalNonpersistentObject(1)):
        with pytest.raises(CheckpointingException, match="content_metadata"):
            save({"content_metadata": value}, tmp_path / "c", content_metadata={})
    save({"common_state": 4}, tmp_path / "c", content_metadata={"kind": "x"})
    loaded = load({}, tmp_path / "c")
    assert loaded == {"common_state": 4, "content_metadata": {"kind": "x"}}
    read = dist_checkpointing.load_content_metadata
    assert read(tmp_path / "c") == read(preloaded_state_dict=loaded) == {"kind": "x"}
    with pytest.raises(ValueError, match="a directory, or a state"):
        read()


def test_what_is_no_checkpoint(tmp_path: Path) -> None:
    check = dist_checkpointing.check_is_distributed_checkpoint
    path = tmp_path / "c"
    for call in (lambda: load({}, path), lambda: dist_checkpointing.load_common_state_dict(path)):
        with pytest.raises(CheckpointingException, match="no such directory"):
            call()
    assert not check(path)
    path.mkdir()
    with pytest.raises(CheckpointingException, match=r"no metadata\.json"):
        load({}, path)
    for text, says in (
        ("[]", "is not the metadata.json"),
        ("{", r"metadata\.json.*is no JSON"),
        ('{"sharded_backend": 5}', "a text and a number"),
        ('{"sharded_backend": "zarr3"}', "is of the backend zarr3"),
        ('{"sharded_backend": "torch_ckpt", "sharded_backend_version": 3}', "version 3"),
    ):
        (path / "metadata.json").write_text(text)
        with pytest.raises(CheckpointingException, match=says):
            load({}, path)
    save_config(CheckpointingConfig("torch_ckpt"), path)
    assert maybe_load_config(path) == CheckpointingConfig("torch_ckpt", 1)
    assert not check(path)  # no save was committed there
    with pytest.raises(CheckpointingException):
        load({}, path)


def test_damage_is_an_error(tmp_path: Path) -> None:
    path = tmp_path / "c"
    value = torch.arange(4096.0)
    save({"w": place("w", value), "o": ShardedObject("o", "text", (1,), (0,))}, path)
    (file,) = path.glob("shard-*.safetensors")
    good = file.read_bytes()

    def request() -> dict[str, Any]:
        return {"w": place("w", torch.zeros(4096))}

    flipped = bytearray(good)
    flipped[-100] ^= 4
    for content in (bytes(flipped), good[:-8]):
        file.write_bytes(content)
        with pytest.raises(CheckpointingException, match="shard-"):
            load(request(), path)
        with pytest.raises(CheckpointingException, match="shard-"):
            load({}, path, verify_integrity=True)
    file.unlink()
    with pytest.raises(CheckpointingException, match="shard-"):
        load(request(), path)
    file.write_bytes(good)
    assert torch.equal(load(request(), path, verify_integrity=True)["w"], value)


def test_the_digests_that_megatron_writes_are_compared(tmp_path: Path) -> None:
    path = tmp_path / "c"
    shutil.copytree(TORCH_DIST / "checkpoint", path)
    files = {
        each.name: hashlib.sha256(each.read_bytes()).hexdigest()
        for each in path.iterdir()
        if each.is_file()
    }

    def lists(listed: Any, algorithm: str = "sha256") -> None:
        said = {"algorithm": algorithm, "files": listed}
        (path / "integrity.json").write_text(json.dumps(said))

    lists(files)
    load({}, path, verify_integrity=True)
    data = path / "__0_0.distcp"
    content = data.read_bytes()
    data.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    with pytest.raises(CheckpointingException, match=r"__0_0\.distcp.*not what was written"):
        load({}, path, verify_integrity=True)
    data.write_bytes(content)
    place = path / "metadata.json"
    whole = place.read_bytes()
    place.write_bytes(whole + b" ")  # of which nothing else tells
    load({}, path)
    with pytest.raises(CheckpointingException, match=r"metadata\.json.*not what was written"):
        load({}, path, verify_integrity=True)
    place.write_bytes(whole)
    for listed, algorithm, says in (
        ({**files, "gone": "0"}, "sha256", "gone.*no such file"),
        ({**files, "../c/metadata.json": "0"}, "sha256", "no such file"),
        (files, "md5", "integrity.json.*no list"),
        ({}, "sha256", "has no digest of it"),
        ({k: v for k, v in files.items() if k != "__1_0.distcp"}, "sha256", "__1_0.*no digest"),
        ([1], "sha256", "integrity.json"),
    ):
        lists(listed, algorithm)
        with pytest.raises(CheckpointingException, match=says):
            load({}, path, verify_integrity=True)
    for text in ("{", "[" * 100_000, "null", "[]"):
        (path / "integrity.json").write_text(text)
        with pytest.raises(CheckpointingException, match="integrity.json.*(is no|null)"):
            load({}, path, verify_integrity=True)
    (path / "integrity.json").unlink()
    (path / "integrity.json").mkdir()
    with pytest.raises(CheckpointingException, match="integrity.json.*is no file"):
        load({}, path, verify_integrity=True)


def test_arguments(tmp_path: Path) -> None:
    path = tmp_path / "c"
    save({"a": 1}, path, ("torch_dist", 1), common_strategy=("torch", 1))
    assert load({}, path, ("torch_dist", 1), common_strategy=None) == {"a": 1}
    for strict in ("no", True, None):
        with pytest.raises(ValueError, match="strict is one of"):
            load({}, path, strict=strict)
    for call, backend in ((save, ("zarr", 1)), (load, ("zarr", 2)), (load, ("other", 1))):
        with pytest.raises(ValueError, match="is none of .'torch_dist', 1."):
            call({}, path, backend)
    for call in (save, load):
        with pytest.raises(TypeError, match="no strategy"):
            call({}, path, object())
    with pytest.raises(TypeError, match="async_strategy"):
        save({}, path, async_strategy="other")
    with pytest.raises(NotImplementedError, match="exchange_algo"):
        FullyParallelLoadStrategyWrapper(None, exchange_algo="ring")
    with pytest.raises(CheckpointingException, match="is a dict"):
        save([1], path)
    for path_like in ("msc://profile/c", "s3://bucket/c"):
        with pytest.raises(CheckpointingException, match=r"://"):
            save({"a": 1}, path_like)


def test_an_unstorable_value_is_named(tmp_path: Path) -> None:
    class Own:
        pass

    for state, says in (
        ({"a": {"b": Own()}}, r"a\.b.*Own"),
        ({"a": ShardedObject("o", [Own()], (1,), (0,))}, "o/shard_0_1.*Own"),
        ({"a": [(1, place("w", torch.ones(1)))]}, r"a\.0\.1: a ShardedTensor in a tuple.*a list"),
    ):
        with pytest.raises(CheckpointingException, match=says):
            save(state, tmp_path / "c")
    assert not (tmp_path / "c").exists()


def test_an_axis_that_is_named_twice() -> None:
    with pytest.raises(CheckpointingException, match="'k'.*named twice"):
        place("k", torch.ones(2, 2), (0, 0, 2), (0, 1, 2))


def test_what_is_something_else_in_the_checkpoint(tmp_path: Path) -> None:
    path = tmp_path / "c"
    save({"t": place("t", torch.ones(2)), "o": ShardedObject("o", 1, (1,), (0,))}, path)
    with pytest.raises(CheckpointingException, match="'t/shard_0_1'.*not in the checkpoint"):
        load({"t": ShardedObject("t", None, (1,), (0,))}, path)
    with pytest.raises(CheckpointingException, match="'o'.*(object|not in the checkpoint)"):
        load({"o": place("o", torch.ones(2))}, path)
    outside = ShardedTensor("t", torch.ones(2), torch.float32, (2,), (2,), (1,), None)
    with pytest.raises(CheckpointingException, match="'t'.*not inside"):
        save({"t": outside}, path)
    torch_ckpt.save({"o/shard_0_1": 5, "w": torch.ones(1)}, tmp_path / "plain")
    save_config(CheckpointingConfig("torch_ckpt"), tmp_path / "plain")
    with pytest.raises(CheckpointingException, match="o/shard_0_1.*list of one"):
        load({"o": ShardedObject("o", None, (1,), (0,))}, tmp_path / "plain")


def test_it_is_a_checkpoint_like_others(tmp_path: Path) -> None:
    save({"w": place("w", torch.arange(4.0)), "step": 3}, tmp_path / "c")
    state = {"w": torch.zeros(4)}
    torch_ckpt.load(state, tmp_path / "c")
    assert state["w"].tolist() == [0.0, 1.0, 2.0, 3.0]
    torch_ckpt.Checkpoint(tmp_path / "c").verify()


def test_nothing_of_megatron_is_imported() -> None:
    code = (
        "import sys; from torch_ckpt.megatron import dist_checkpointing as d; "
        "d.strategies.fully_parallel.FullyParallelSaveStrategyWrapper(None); "
        "assert not [name for name in sys.modules if name.split('.')[0] == 'megatron']"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_it_saves_over_a_checkpoint_of_megatron(tmp_path: Path) -> None:
    path = tmp_path / "c"
    shutil.copytree(TORCH_DIST / "checkpoint", path)
    save({"a": 1}, path)
    assert load({}, path) == {"a": 1}


def test_checkpoints_of_megatron_0_19_are_read() -> None:
    path = TORCH_DIST / "checkpoint"
    assert dist_checkpointing.check_is_distributed_checkpoint(path)
    wanted = load_file(TORCH_DIST / "expected.safetensors")
    said = json.loads((TORCH_DIST / "expected.json").read_text())
    found = dist_checkpointing.load_tensors_metadata(path)
    assert found.keys() == wanted.keys()
    loaded = dist_checkpointing.load_plain_tensors(path)
    for key, value in wanted.items():
        assert loaded[key].dtype == value.dtype and torch.equal(loaded[key], value), key
    assert loaded["iteration"] == said["iteration"]
    objects = {
        name: each
        for name, each in dist_checkpointing.load_sharded_metadata(path).items()
        if isinstance(each, ShardedObject)
    }
    values = load(dict(objects), path, validate_access_integrity=False)
    assert {name: values[name] for name in said["objects"]} == said["objects"]
    half = {
        key: place(key, torch.zeros_like(value[: value.shape[0] // 2]), (0, 1, 2))
        for key, value in wanted.items()
        if value.dim() and value.shape[0] % 2 == 0
    }
    assert half
    loaded = load(dict(half), path, validate_access_integrity=False)
    for key in half:
        assert torch.equal(loaded[key], wanted[key][wanted[key].shape[0] // 2 :]), key


def test_signatures_are_those_of_megatron() -> None:
    theirs = pytest.importorskip("megatron.core.dist_checkpointing.serialization")
    for name in serialization.__all__:
        their = getattr(theirs, name, None)
        if not inspect.isfunction(their) or name == "check_is_distributed_checkpoint":
            continue
        ours = set(inspect.signature(getattr(serialization, name)).parameters)
        assert inspect.signature(their).parameters.keys() <= ours, name


def comes_first(theirs: Any, ours: Any, name: str) -> None:
    """A call of `theirs`, by places or names, is one of `ours`, and what it leaves out is the same:
    but for arguments that do nothing here."""
    own = list(inspect.signature(ours).parameters.values())
    for place, their in enumerate(inspect.signature(theirs).parameters.values()):
        our = own[place]
        assert (our.name, our.kind) == (their.name, their.kind), name
        if their.default is not their.empty and their.name != "thread_count":
            assert our.default == their.default, (name, their.name)


@pytest.mark.parametrize(
    ("module", "names"),
    [
        ("torch", ["TorchDistLoadShardedStrategy", "TorchDistSaveShardedStrategy"]),
        (
            "fully_parallel",
            ["FullyParallelLoadStrategyWrapper", "FullyParallelSaveStrategyWrapper"],
        ),
        ("async_utils", ["AsyncCallsQueue", "AsyncRequest"]),
    ],
)
def test_strategies_and_queues_are_made_and_called_as_megatrons(
    module: str, names: list[str]
) -> None:
    theirs = pytest.importorskip(f"megatron.core.dist_checkpointing.strategies.{module}")
    ours = getattr(dist_checkpointing.strategies, module)
    assert set(names) == set(ours.__all__) - {"get_async_strategy"}
    for name in names:
        their, our = getattr(theirs, name), getattr(ours, name)
        comes_first(their, our, name)
        # Methods of strategies do I/O, and nobody calls them here.
        for method in vars(their) if module == "async_utils" else ():
            if callable(getattr(their, method)) and not method.startswith("_"):
                comes_first(getattr(their, method), getattr(our, method), f"{name}.{method}")


def test_async_strategies_are_asked_for_as_megatrons() -> None:
    theirs = pytest.importorskip("megatron.core.dist_checkpointing.strategies.torch")
    if not hasattr(theirs, "get_async_strategy"):
        pytest.skip("since 0.17")
    ours = dist_checkpointing.strategies.torch.get_async_strategy
    comes_first(theirs.get_async_strategy, ours, "get_async_strategy")


def test_modules_are_reached_through_the_package_as_megatrons_are() -> None:
    script = (
        "from torch_ckpt.megatron import dist_checkpointing as ours\n"
        "for name in ('core', 'dict_utils', 'mapping', 'optimizer', 'serialization', 'utils'):\n"
        "    getattr(ours, name)\n"
        "ours.validation.StrictHandling, ours.strategies.async_utils.AsyncRequest\n"
        "ours.strategies.torch.get_async_strategy\n"
        "ours.strategies.fully_parallel.FullyParallelLoadStrategyWrapper\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_classes_of_megatron_are_taken(tmp_path: Path) -> None:
    theirs = pytest.importorskip("megatron.core.dist_checkpointing.mapping")
    state = {
        "w": theirs.ShardedTensor.from_rank_offsets("w", torch.arange(4.0)),
        "ours": place("v", torch.ones(2)),
        "o": theirs.ShardedObject("o", {"x": 1}, (1,), (0,)),
        "own": theirs.LocalNonpersistentObject(3),
        "f": theirs.ShardedTensorFactory(
            "f",
            torch.arange(4.0),
            lambda key, data, replica, _: {
                str(at): theirs.ShardedTensor.from_rank_offsets(f"{key}.{at}", half)
                for at, half in enumerate(data.chunk(2))
            },
            lambda parts: torch.cat([*parts.values()]),
        ),
    }
    save(state, tmp_path / "c")
    for entry in (state["w"], state["ours"], state["f"]):
        entry.data.zero_()
    loaded = load(state, tmp_path / "c")
    assert torch.equal(loaded["w"], torch.arange(4.0))
    assert torch.equal(loaded["f"], torch.arange(4.0))
    assert torch.equal(loaded["ours"], torch.ones(2))
    assert loaded["o"] == {"x": 1} and loaded["own"] == 3


def test_merges_of_other_parts_are_copies(tmp_path: Path) -> None:
    def factory(data: torch.Tensor) -> ShardedTensorFactory:
        def build(key: str, data: torch.Tensor, replica: Any, _: Any) -> list[ShardedTensor]:
            return [place(f"{key}.{at}", half.contiguous()) for at, half in enumerate(data.t())]

        return ShardedTensorFactory("f", data, build, torch.cat)

    value = torch.arange(6.0).view(3, 2)
    save({"f": factory(value)}, tmp_path / "c")
    loaded = load({"f": factory(torch.zeros(3, 2))}, tmp_path / "c")
    assert torch.equal(loaded["f"], value.t().reshape(-1))


WRONG = [
    ("global_offset", (1,), r"off its grid.*\[4\] at \[1\] of \[8\]"),
    ("global_offset", (-4,), "no such numbers"),
    ("global_offset", (4, 0), "dimensions differ"),
    ("global_offset", (4.0,), "no such numbers"),
    ("global_offset", None, "no such numbers"),
    ("global_shape", (-8,), "no such numbers"),
    ("global_shape", None, "no such numbers"),
    ("local_shape", (3,), "its data are"),
    ("local_shape", (4.0,), "no such numbers"),
    ("local_shape", None, "no such numbers"),
    ("axis_fragmentations", (2, 1), "dimensions differ"),
    ("axis_fragmentations", (4,), "which make"),
    ("axis_fragmentations", 5, "no such numbers"),
    ("prepend_axis_num", "a", "no such numbers"),
    ("prepend_axis_num", -1, "no such numbers"),
    ("prepend_axis_num", 1, "dimensions differ"),
    ("replica_id", None, "replica_id"),
    ("replica_id", 0.0, "replica_id"),
    ("replica_id", "x", "replica_id"),
    ("replica_id", (None,), "replica_id"),
    ("dtype", torch.float64, "its data are"),
    ("dtype", None, "no dtype"),
    ("data", torch.ones(4, 1), "its data are"),
    ("flattened_range", slice(0, 2), "flattened_range"),
]


@pytest.mark.parametrize(("attribute", "value", "says"), WRONG)
def test_attributes_that_were_changed(
    tmp_path: Path, attribute: str, value: Any, says: str
) -> None:
    """After the class has looked at them."""

    def state() -> dict[str, Any]:
        made = {str(n): place("w", torch.ones(4), (0, n, 2)) for n in range(2)}
        for each in made.values() if attribute == "axis_fragmentations" else [made["1"]]:
            setattr(each, attribute, value)
        return made

    match = f"rank 0: (/.*/c: )?tensor 'w': .*{says}"
    with pytest.raises(CheckpointingException, match=match):
        save(state(), tmp_path / "new")
    save({str(n): place("w", torch.ones(4), (0, n, 2)) for n in range(2)}, tmp_path / "c")
    with pytest.raises(CheckpointingException, match=match):
        load(state(), tmp_path / "c")


@pytest.mark.parametrize(
    ("attribute", "value"),
    [
        *(("global_shape", value) for value in (None, ("x",), (2.0,), (0,), (1, 1))),
        *(("global_offset", value) for value in (None, ("x",), (0.0,), (2,), (-1,))),
        *(("replica_id", value) for value in (None, "x", 0.0)),
    ],
)
def test_attributes_of_objects_that_were_changed(
    tmp_path: Path, attribute: str, value: Any
) -> None:
    entry = ShardedObject("o", 1, (1,), (0,))
    save({"o": entry}, tmp_path / "c")
    setattr(entry, attribute, value)
    for call in (save, load):
        with pytest.raises(CheckpointingException, match="rank 0: (/.*/c: )?tensor 'o': "):
            call({"o": entry}, tmp_path / "c")


def test_the_sets_of_a_cached_load_are_the_callers(tmp_path: Path) -> None:
    save({"a": place("a", torch.ones(2)), "b": place("b", torch.ones(2))}, tmp_path / "c")
    strategy = FullyParallelLoadStrategyWrapper(None, do_cache_distribution=True)
    for _ in range(3):
        request = {"a": place("a", torch.zeros(2)), "x": place("x", torch.zeros(2))}
        loaded, missing, unexpected = load(request, tmp_path / "c", strategy, strict="return_all")
        assert loaded.keys() == {"a"} and missing == {"b"} and unexpected == {"x"}
        missing.add("y")
        unexpected.clear()


def removable(path: Path) -> dict[str, torch.Tensor]:
    values = {
        f"{part}.{number}": torch.arange(number + 2.0) for part in "ab" for number in range(3)
    }
    state = {name: place(name, value) for name, value in values.items()}
    for key in ("a.object", "b.object", "c.object"):
        state[key] = ShardedObject(key, "text", (1,), (0,))
    save({**state, "step": 5}, path, content_metadata={"kind": "x"})
    return values


def test_tensors_are_removed(tmp_path: Path, caplog: Any) -> None:
    path = tmp_path / "c"
    values = removable(path)
    before = {each.name for each in path.iterdir()}
    dist_checkpointing.remove_sharded_tensors(path, "none")
    assert "no key begins with 'none'" in caplog.text
    dist_checkpointing.remove_sharded_tensors(path, "b.")
    dist_checkpointing.remove_sharded_tensors(path, "c.")  # where there are only objects
    for prefix in ("common_state", "content_metadata"):
        caplog.clear()
        dist_checkpointing.remove_sharded_tensors(path, prefix)
        assert f"no key begins with '{prefix}'" in caplog.text
    assert dist_checkpointing.check_is_distributed_checkpoint(path)
    found = dist_checkpointing.load_sharded_metadata(path)
    assert found.keys() == {"a.0", "a.1", "a.2", "a.object/shard_0_1"}
    loaded = load(dict(found), path, verify_integrity=True)
    assert all(torch.equal(loaded[f"a.{n}"], values[f"a.{n}"]) for n in range(3))
    assert loaded["step"] == 5 and loaded["content_metadata"] == {"kind": "x"}
    assert loaded["a.object/shard_0_1"] == "text"
    assert {each.name for each in path.iterdir()} == before
    names = {name for each in path.glob("*.safetensors") for name in load_file(each)}
    assert names == {"a.0", "a.1", "a.2"}
    with pytest.raises(CheckpointingException, match="remove the checkpoint"):
        dist_checkpointing.remove_sharded_tensors(path, "a.")
    with pytest.raises(CheckpointingException, match="Megatron's"):
        dist_checkpointing.remove_sharded_tensors(TORCH_DIST / "checkpoint", "a")
    save({"o": ShardedObject("o", 1, (1,), (0,))}, tmp_path / "objects")
    with pytest.raises(CheckpointingException, match="no tensor .*'o': remove the checkpoint"):
        dist_checkpointing.remove_sharded_tensors(tmp_path / "objects", "o")


def test_ranks_verify_shares(tmp_path: Path) -> None:
    path = tmp_path / "c"
    save({"w": place("w", torch.zeros(9 << 20))}, path)
    whole = torch_ckpt.Checkpoint(path).verify()
    parts = [torch_ckpt.Checkpoint(path).verify(share=(which, 3)) for which in range(3)]
    assert sum(part.bytes for part in parts) == whole.bytes
    for share in ((3, 3), (-1, 2), (0, 0)):
        with pytest.raises(torch_ckpt.InvalidArgumentError, match="share"):
            torch_ckpt.Checkpoint(path).verify(share=share)
    (file,) = path.glob("shard-*.safetensors")
    content = bytearray(file.read_bytes())
    content[20 << 20] ^= 1
    file.write_bytes(content)
    outcomes = []
    for which in range(3):
        try:
            torch_ckpt.Checkpoint(path).verify(share=(which, 3))
            outcomes.append("ok")
        except torch_ckpt.CorruptError:
            outcomes.append("corrupt")
    assert sorted(outcomes) == ["corrupt", "ok", "ok"]


def test_a_queue_of_others_finalizes_no_save_that_was_not(tmp_path: Path) -> None:
    """Megatron's runs a request in a process of its own, does not look how that ended, and then
    calls the functions, of which one says to all that the checkpoint is there."""
    state = {"w": ShardedTensor.from_rank_offsets("w", torch.ones(2))}
    request = dist_checkpointing.save(state, tmp_path / "c", async_sharded_save=True)
    assert request is not None
    pickle.loads(pickle.dumps(request.async_fn))()  # as one does that is started and not forked
    child = os.fork()
    if child == 0:
        status = 1
        with contextlib.suppress(CheckpointingException):
            request.async_fn(*request.async_fn_args, **request.async_fn_kwargs)
            status = 0
        os._exit(status)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 1
    assert not (tmp_path / "c").exists()
    with pytest.raises(CheckpointingException, match="AsyncCallsQueue of torch_ckpt"):
        for finalize in request.finalize_fns:
            finalize()
    request.execute_sync()
    assert dist_checkpointing.check_is_distributed_checkpoint(tmp_path / "c")


def test_common_values_that_contain_themselves_are_named(tmp_path: Path) -> None:
    inner: list[Any] = []
    inner.append((inner,))
    with pytest.raises(CheckpointingException, match=r"x.*contains itself"):
        dist_checkpointing.save({"x": (inner,)}, tmp_path / "c")
