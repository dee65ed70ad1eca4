"""What stock's consolidation of torch 2.13.0 makes of damaged shards, byte by byte: the proof that
the errors of ours, which test_stock_faults.py asks for, replace silent corruption."""

from __future__ import annotations

import json
import traceback
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from sample_states import (
    FAILED,
    STOCK_213,
    assert_same,
    bits,
    edit_header,
    listing,
    stock_rows,
    stock_shard,
)
from stock_damage import (
    BROKEN,
    DAMAGE,
    FINAL,
    consolidate,
    delete_shard,
    header_of,
    listed,
    stock_consolidated,
)

from torch_ckpt import CheckpointError, IncompleteError

INDEX = "model.safetensors.index.json"


def value() -> torch.Tensor:
    """What DAMAGE is done to: four shards of two rows."""
    return torch.arange(1.0, 17.0).reshape(8, 2)


def with_rows(content: float, *rows: int) -> torch.Tensor:
    changed = value()
    changed[list(rows)] = content
    return changed


# Damage; whether the files are seen in reverse order; what stock makes of it.
SILENT: dict[str, tuple[Any, bool, torch.Tensor]] = {
    "missing first shard": (DAMAGE["missing first shard"][0], False, with_rows(0, 0, 1)),
    "missing middle shard": (DAMAGE["missing middle shard"][0], False, with_rows(0, 2, 3)),
    "missing last shard": (delete_shard(3), False, value()[:6]),
    "gap": (DAMAGE["gap"][0], False, torch.cat([with_rows(0, 2)[:3], with_rows(1, 3)[3:]])),
    # Row 1 is in two shards: the last one that is listed wins.
    "overlap": (DAMAGE["overlap"][0], False, with_rows(1, 1, 2, 3)),
    "overlap, reversed": (DAMAGE["overlap"][0], True, with_rows(1, 2, 3)),
    # Rows -3 and -2 are taken for rows 5 and 6.
    "wrapping offset": (
        DAMAGE["wrapping offset"][0],
        True,
        torch.cat([with_rows(0, 2, 3)[:5], with_rows(1, 5, 6)[5:]]),
    ),
}


@pytest.mark.parametrize("case", SILENT)
def test_stock_consolidates_damage_in_silence(tmp_path: Path, case: str) -> None:
    if not STOCK_213:
        pytest.skip("documents stock 2.13")
    damage, reverse, wrong = SILENT[case]
    damage(stock_rows(tmp_path / "in", value(), 4))
    with listed(reverse=reverse):
        got = stock_consolidated(tmp_path / "in", tmp_path / "stock", {"w": 1})
    assert_same(got, {"w": wrong})
    assert bits(wrong) != bits(value())


@pytest.mark.parametrize("first", [torch.bfloat16, torch.float16], ids=str)
def test_shards_of_two_types_of_one_size(tmp_path: Path, first: torch.dtype) -> None:
    other = torch.float16 if first == torch.bfloat16 else torch.bfloat16
    stock_shard(tmp_path / "in", 0, {"w": (torch.ones(2, 2, dtype=first), [0, 0])})
    stock_shard(tmp_path / "in", 1, {"w": (torch.ones(2, 2, dtype=other), [2, 0])})
    with pytest.raises(CheckpointError, match="'w'"):
        consolidate(tmp_path / "in", tmp_path / "out")
    assert not listing(tmp_path / "out")
    if STOCK_213:
        with listed():
            got = stock_consolidated(tmp_path / "in", tmp_path / "stock", {"w": 1})["w"]
        # The ones of the other type, read as the first type.
        seen = torch.ones(1, dtype=other).view(first).item()
        assert seen == (0.0078125 if first == torch.bfloat16 else 1.875)
        assert got.dtype == first
        assert (got[:2] == 1).all() and (got[2:] == seen).all()


def test_a_type_that_nobody_knows_is_taken_for_the_first_shards(tmp_path: Path) -> None:
    """Ours says that it is unknown: "unknown dtype" of DAMAGE."""
    if not STOCK_213:
        pytest.skip("documents stock 2.13")
    DAMAGE["unknown dtype"][0](stock_rows(tmp_path / "in", value(), 4))
    with listed():
        got = stock_consolidated(tmp_path / "in", tmp_path / "stock", {"w": 1})
    assert_same(got, {"w": value()})  # float32, of which the second shard says nothing


def test_one_tensor_of_a_shard_deleted(tmp_path: Path) -> None:
    """All files are there; one of them has lost its part of one of two tensors."""
    twice = value() * 2
    for rank in range(4):
        rows = slice(2 * rank, 2 * rank + 2)
        parts = {"v": (twice[rows].clone(), [2 * rank, 0]), "w": (value()[rows], [2 * rank, 0])}
        if rank == 1:
            del parts["v"]
        stock_shard(tmp_path / "in", rank, parts)
    with pytest.raises(IncompleteError, match="'v'"):
        consolidate(tmp_path / "in", tmp_path / "out")
    assert not listing(tmp_path / "out")
    if STOCK_213:
        got = stock_consolidated(tmp_path / "in", tmp_path / "stock", {"v": 1, "w": 1})
        assert_same(got, {"v": with_rows(0, 2, 3) * 2, "w": value()})


@pytest.mark.parametrize("case", ["empty input", "name without data"])
def test_a_name_that_no_shard_has(tmp_path: Path, case: str) -> None:
    """Stock returns normally and leaves a file and an index that look whole."""
    source = tmp_path / "in"
    files = stock_rows(source, value(), 4)
    mapping = {"w": 1, "x": 1}
    if case == "empty input":
        mapping = {"x": 1}
        for file in files:
            file.unlink()
    with pytest.raises(CheckpointError, match="/in" if case == "empty input" else "'x'"):
        consolidate(source, tmp_path / "out", mapping)
    assert not listing(tmp_path / "out")
    if not STOCK_213:
        return
    stock = tmp_path / "stock"
    with pytest.raises(FAILED, match="unknown variant"):  # of the library that reads the result
        stock_consolidated(source, stock, mapping)
    assert listing(stock) == [FINAL, INDEX]
    _, header = header_of(stock / FINAL)
    assert (header["x"]["dtype"], header["x"]["shape"]) == ("", [])
    assert set(json.loads((stock / INDEX).read_text())["weight_map"]) == set(mapping)


def other_width(files: list[Path]) -> None:
    stock_shard(files[0].parent, 1, {"w": (torch.ones(2, 2).half(), [2, 0])})


def unknown_first(files: list[Path]) -> None:
    edit_header(files[0], lambda header: header["w"].update(dtype="F7"))


def broken(case: str) -> Any:
    def damage(files: list[Path]) -> None:
        files[1].write_bytes(BROKEN[case](files[1].read_bytes()))

    return damage


# Damage that stock does not survive: with the error comes half of an output, ...
HALF: dict[str, Any] = {
    "truncated": DAMAGE["truncated"][0],
    "negative offset": DAMAGE["negative offset"][0],
    "other width": other_width,
}
# ... or none yet.
NOTHING: dict[str, Any] = {
    "unknown dtype": unknown_first,
    **{f"{case} in the second": broken(case) for case in ("empty file", "garbage", "cut header")},
}


@pytest.mark.parametrize("case", [*HALF, *NOTHING])
def test_an_error_says_which_file(tmp_path: Path, case: str) -> None:
    damage = {**HALF, **NOTHING}[case]
    damage(stock_rows(tmp_path / "in", value(), 4))
    with pytest.raises(CheckpointError) as ours:
        consolidate(tmp_path / "in", tmp_path / "out")
    if case == "other width":  # shards of one tensor that disagree
        assert "'w'" in str(ours.value)
    else:
        assert ("shard-00001" if damage is unknown_first else "shard-00002") in str(ours.value)
    if not STOCK_213:
        return
    with listed(), pytest.raises(FAILED + (MemoryError,)) as caught:
        stock_consolidated(tmp_path / "in", tmp_path / "stock", {"w": 1})
    said = "".join(traceback.format_exception(caught.value))
    assert "shard-0" not in said, said


@pytest.mark.parametrize("case", HALF)
def test_a_consolidation_that_fails_over_an_earlier_output(tmp_path: Path, case: str) -> None:
    """Ours leaves the earlier one; stock has overwritten it with a header that nothing follows."""
    files = stock_rows(tmp_path / "in", value(), 4)
    ours, stock = tmp_path / "out", tmp_path / "stock"
    consolidate(tmp_path / "in", ours)
    before = {name: (ours / name).read_bytes() for name in listing(ours)}
    if STOCK_213:
        assert_same(stock_consolidated(tmp_path / "in", stock, {"w": 1}), {"w": value()})
    HALF[case](files)
    with pytest.raises(CheckpointError):
        consolidate(tmp_path / "in", ours)
    assert {name: (ours / name).read_bytes() for name in listing(ours)} == before
    if not STOCK_213:
        return
    with listed(), pytest.raises(ValueError):
        stock_consolidated(tmp_path / "in", stock, {"w": 1})
    assert listing(stock) == [FINAL, INDEX]
    size, header = header_of(stock / FINAL)
    assert header["w"]["data_offsets"] == [0, 64]
    assert (stock / FINAL).stat().st_size == 8 + size
    with pytest.raises(FAILED):
        load_file(stock / FINAL)


@pytest.mark.parametrize("case", HALF)
def test_a_consolidation_that_fails_leaves_half_of_an_output(tmp_path: Path, case: str) -> None:
    """The same into an empty directory: that ours leaves nothing is in test_stock_faults.py."""
    if not STOCK_213:
        pytest.skip("documents stock 2.13")
    HALF[case](stock_rows(tmp_path / "in", value(), 4))
    with listed(), pytest.raises(ValueError):
        stock_consolidated(tmp_path / "in", tmp_path / "stock", {"w": 1})
    assert listing(tmp_path / "stock") == [FINAL]
    with pytest.raises(FAILED):
        load_file(tmp_path / "stock" / FINAL)


@pytest.mark.parametrize(("ranks", "old_rows"), [(1, slice(2, 8)), (2, slice(4, 8))])
def test_shards_of_an_earlier_save_by_more_ranks(
    tmp_path: Path, ranks: int, old_rows: slice
) -> None:
    """Stock's writer leaves the shards of ranks that are gone; its consolidation takes them in."""
    new = value() + 100
    stock_rows(tmp_path / "in", value(), 4)
    stock_rows(tmp_path / "in", new, ranks)
    with pytest.raises(CheckpointError, match="'w'"):
        consolidate(tmp_path / "in", tmp_path / "out")
    assert not listing(tmp_path / "out")
    if STOCK_213:
        with listed():
            got = stock_consolidated(tmp_path / "in", tmp_path / "stock", {"w": 1})
        mixed = new.clone()
        mixed[old_rows] = value()[old_rows]
        assert_same(got, {"w": mixed})
