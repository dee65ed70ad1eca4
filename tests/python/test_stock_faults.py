"""Damage that the stock Hugging Face path of torch 2.13.0 loads, merges or stumbles over, each refused
by ours with a reason.

In ./dev campaign stock is run too, and raises or returns other bytes: the asserts under STOCK_213
document the fault and say nothing about other releases.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file, save_file
from sample_states import (
    FAILED,
    STOCK_213,
    assert_same,
    bits,
    edit_header,
    listing,
    load,
    load_ours,
    save,
    stock_rows,
    stock_shard,
)
from torch.distributed.checkpoint._consolidate_hf_safetensors import (
    consolidate_safetensors_files as stock_consolidate,
)

from torch_ckpt import (
    CheckpointError,
    ConflictError,
    CorruptError,
    HuggingFaceStorageReader,
    HuggingFaceStorageWriter,
    IncompleteError,
    consolidate_safetensors_files,
)

FINAL = "model-00001-of-00001.safetensors"
SHARD = "shard-00001-model-00001-of-00001.safetensors"


def value() -> torch.Tensor:
    """What DAMAGE is done to: four shards of two rows."""
    return torch.arange(1.0, 17.0).reshape(8, 2)


def stock_is_wrong(call: Callable[[], torch.Tensor], right: torch.Tensor) -> None:
    """It raises, be it to refuse or where it stumbles, or returns other bytes as if all were
    well."""
    if STOCK_213:
        try:
            got = call()
        except FAILED + (MemoryError,) as error:
            assert not isinstance(error, (TypeError, AttributeError, NameError)), "of this test"
            return
        assert bits(got) != bits(right)


def stock_merged(source: Path, output: Path, mapping: dict[str, int]) -> dict[str, torch.Tensor]:
    """What stock makes of it, by name; raises where its output cannot be read."""
    output.mkdir(exist_ok=True)
    stock_consolidate(str(source), str(output), mapping)
    loaded: dict[str, torch.Tensor] = {}
    for file in output.glob("model-*.safetensors"):
        loaded.update(load_file(file))
    return loaded


def stock_loaded(path: Path, target: torch.Tensor) -> torch.Tensor:
    load({"w": target}, dcp.HuggingFaceStorageReader(str(path)))
    return target


def delete_shard(rank: int) -> Any:
    return lambda files: files[rank].unlink()


def second(data: torch.Tensor, *offsets: int) -> Any:
    """Another second shard."""
    return lambda files: stock_shard(files[0].parent, 1, {"w": (data, list(offsets))})


def empty_input(files: list[Path]) -> None:
    for file in files:
        file.unlink()


def unknown_dtype(files: list[Path]) -> None:
    edit_header(files[1], lambda header: header["w"].update(dtype="F7"))


def rewritten(change: Callable[[bytes], bytes]) -> Any:
    """The bytes of the second file changed."""
    return lambda files: files[1].write_bytes(change(files[1].read_bytes()))


def saved_by_fewer(ranks: int) -> Any:
    """Stock's writer leaves the shards of ranks that are gone."""
    return lambda files: stock_rows(files[0].parent, value() + 100, ranks)


BROKEN: dict[str, Callable[[bytes], bytes]] = {
    "empty file": lambda data: b"",
    "garbage": lambda data: b"\xff" * 64,
    "cut header": lambda data: data[:20],
    "cut data": lambda data: data[:-4],
    "longer": lambda data: data + b"\0" * 4,
}
# Damage to the four shards; the kind of error, and what its text must have.
DAMAGE: dict[str, tuple[Any, type[CheckpointError], str]] = {
    "missing first shard": (delete_shard(0), IncompleteError, "'w'"),
    "missing middle shard": (delete_shard(1), IncompleteError, "'w'"),
    "gap": (second(torch.ones(1, 2), 3, 0), IncompleteError, "'w'"),
    "overlap": (second(torch.ones(3, 2), 1, 0), ConflictError, "'w'"),
    "other dtype": (second(torch.ones(2, 2).half(), 2, 0), ConflictError, "'w'"),
    "other dtype of that size": (second(torch.ones(2, 2).int(), 2, 0), ConflictError, "'w'"),
    "saved again by one rank": (saved_by_fewer(1), ConflictError, "'w'"),
    "saved again by two ranks": (saved_by_fewer(2), ConflictError, "'w'"),
    "negative offset": (second(torch.ones(2, 2), -2, 0), CorruptError, "shard-00002"),
    "wrapping offset": (second(torch.ones(2, 2), -3, 0), CorruptError, "shard-00002"),
    "unknown dtype": (unknown_dtype, CorruptError, "shard-00002"),
    "empty input": (empty_input, IncompleteError, "/in"),
    **{case: (rewritten(change), CorruptError, "shard-00002") for case, change in BROKEN.items()},
    "empty file": (rewritten(BROKEN["empty file"]), IncompleteError, "shard-00002"),
}


@pytest.mark.parametrize("case", DAMAGE)
def test_consolidation_of_damage_is_an_error_and_leaves_what_there_was(
    tmp_path: Path, case: str
) -> None:
    damage, kind, text = DAMAGE[case]
    files = stock_rows(tmp_path / "in", value(), 4)
    consolidate_safetensors_files(tmp_path / "in", tmp_path / "earlier", None)
    before = {file.name: file.read_bytes() for file in (tmp_path / "earlier").iterdir()}
    damage(files)
    for output in ("out", "earlier"):
        with pytest.raises(CheckpointError) as caught:
            consolidate_safetensors_files(tmp_path / "in", tmp_path / output, None)
        assert isinstance(caught.value, kind), repr(caught.value)
        assert text in str(caught.value)
    assert not listing(tmp_path / "out")
    assert {file.name: file.read_bytes() for file in (tmp_path / "earlier").iterdir()} == before
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["earlier", "in"]
    # Stock takes an unknown dtype for that of the first shard, and reads no further than it must.
    if case not in ("unknown dtype", "longer"):
        merged = lambda: stock_merged(tmp_path / "in", tmp_path / "stock", {"w": 1})["w"]  # noqa: E731
        stock_is_wrong(merged, value())


@pytest.mark.parametrize("case", [case for case in DAMAGE if case != "empty input"])
def test_load_of_damage_is_an_error_that_names_it(tmp_path: Path, case: str) -> None:
    damage, _, text = DAMAGE[case]
    damage(stock_rows(tmp_path / "in", value(), 4))
    target = {"w": torch.full((8, 2), -1.0)}
    with pytest.raises(FAILED, match=re.escape(text)):
        load(target, HuggingFaceStorageReader(tmp_path / "in"))
    assert (target["w"] == -1).all(), "coverage is proved before a byte is copied"
    stock_is_wrong(lambda: stock_loaded(tmp_path / "in", target["w"]), value())


@pytest.mark.parametrize("case", BROKEN)
def test_damage_of_ours_names_the_file(tmp_path: Path, case: str) -> None:
    state = {"w": torch.randn(8, 2)}
    save(state, HuggingFaceStorageWriter(tmp_path / "in", save_distributed=True))
    file = tmp_path / "in" / SHARD
    file.write_bytes(BROKEN[case](file.read_bytes()))
    refused(tmp_path, state)


def test_a_missing_last_shard_of_ours_is_named(tmp_path: Path) -> None:
    # Stock's format does not say the global shape, so a tail that is gone cannot be seen in it.
    state = {"w": torch.randn(8, 2)}
    save(state, HuggingFaceStorageWriter(tmp_path / "in", save_distributed=True))
    (tmp_path / "in" / SHARD).unlink()
    refused(tmp_path, state)


def refused(folder: Path, state: dict[str, Any]) -> None:
    with pytest.raises(FAILED, match=SHARD):
        load_ours(folder / "in", state)
    with pytest.raises((CheckpointError, OSError), match=SHARD):
        consolidate_safetensors_files(folder / "in", folder / "out", None)
    assert not listing(folder / "out")


def test_consolidation_with_a_mapping_that_does_not_fit(tmp_path: Path) -> None:
    source = tmp_path / "in"
    stock_shard(source, 0, {"a": (torch.ones(2), [0]), "b": (torch.zeros(2), [0])})
    for mapping, name in (({"a": 1}, "b"), ({"a": 1, "b": 1, "c": 2}, "c")):
        with pytest.raises(CheckpointError, match=f"'{name}'"):
            consolidate_safetensors_files(source, tmp_path / "out", mapping)
        assert not listing(tmp_path / "out")
    consolidate_safetensors_files(source, tmp_path / "out", {"a": 1, "c": 1}, strict=False)
    assert list(load_file(tmp_path / "out" / FINAL)) == ["a"]
    if STOCK_213:
        assert list(stock_merged(source, tmp_path / "dropped", {"a": 1})) == ["a"]


def test_consolidation_of_a_file_without_tensors(tmp_path: Path) -> None:
    whole = {"w": torch.randn(4, 2), "s": torch.tensor(3.5)}
    stock_shard(tmp_path / "in", 0, {"w": (whole["w"], [0, 0]), "s": (whole["s"], [])})
    stock_shard(tmp_path / "in", 1, {})
    consolidate_safetensors_files(tmp_path / "in", tmp_path / "out", None)
    assert_same(load_file(tmp_path / "out" / FINAL), whole)
    mapping = {"w": 1, "s": 1}
    stock_is_wrong(lambda: stock_merged(tmp_path / "in", tmp_path / "s", mapping)["s"], whole["s"])


def test_consolidated_headers_are_aligned_and_say_their_format(tmp_path: Path) -> None:
    stock_rows(tmp_path / "in", torch.randn(8, 3), 2, name="odd one")
    consolidate_safetensors_files(tmp_path / "in", tmp_path / "out", None)
    data = (tmp_path / "out" / FINAL).read_bytes()
    size = int.from_bytes(data[:8], "little")
    assert (8 + size) % 4096 == 0
    assert json.loads(data[8 : 8 + size])["__metadata__"]["format"] == "pt"
    index = json.loads((tmp_path / "out" / "model.safetensors.index.json").read_text())
    assert index == {"metadata": {"total_size": 96}, "weight_map": {"odd one": FINAL}}


def test_checkpoint_id_moves_shards_and_output_together(tmp_path: Path) -> None:
    state = {"w": torch.randn(4)}
    path = tmp_path / "ctor"
    writer = HuggingFaceStorageWriter(path, save_distributed=True, enable_consolidation=True)
    save(state, writer, checkpoint_id=str(tmp_path / "id"))
    assert not path.exists()
    names = listing(tmp_path / "id")
    assert FINAL in names and f"sharded/{SHARD}" in names
    assert bits(load_file(tmp_path / "id" / FINAL)["w"]) == bits(state["w"])


# MXFP4: stock's quantized reader corrects the size of a tensor and not its chunks.


class OursQuantized(dcp.QuantizedHuggingFaceStorageReader, HuggingFaceStorageReader):
    """Stock's way of reading requests on our reader."""


def test_mxfp4_is_never_loaded_in_part(tmp_path: Path) -> None:
    rows, groups = 4, 3
    blocks = torch.randint(0, 255, (1, rows, groups, 16), dtype=torch.uint8)
    scales = torch.full((1, rows, groups), 127, dtype=torch.uint8)
    save_file({"w_blocks": blocks, "w_scales": scales}, tmp_path / FINAL)
    index = {"metadata": {}, "weight_map": {"w_blocks": FINAL, "w_scales": FINAL}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    target = {"w_blocks": torch.full((1, rows, groups * 32), -77.0)}
    if STOCK_213:
        load(target, dcp.QuantizedHuggingFaceStorageReader(str(tmp_path)))
        assert (target["w_blocks"] == -77).any()
    with pytest.raises(FAILED, match="'w_blocks'"):
        load(target, OursQuantized(str(tmp_path)))
