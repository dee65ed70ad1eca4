"""What a load by stock's reader of torch 2.13.0 makes of damaged or stale files: silent holes and
old values, or errors that do not say which file is damaged. Ours: test_stock_faults.py."""

from __future__ import annotations

import traceback
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from sample_states import FAILED, STOCK_213, load, load_ours, save, stock_rows
from stock_damage import BROKEN, DAMAGE, listed


def value() -> torch.Tensor:
    return torch.arange(1.0, 17.0).reshape(8, 2)


def stock_loads(path: Path) -> torch.Tensor:
    """ "w" by stock, into a target of -1."""
    target = {"w": torch.full((8, 2), -1.0)}
    load(target, dcp.HuggingFaceStorageReader(str(path)))
    return target["w"]


# Damage; the rows that are wrong then; what is in them: -1 is what the target had.
SILENT: dict[str, list[tuple[slice, float]]] = {
    "missing first shard": [(slice(0, 2), -1)],
    "missing middle shard": [(slice(2, 4), -1)],
    "gap": [(slice(2, 3), -1), (slice(3, 4), 1)],
    "overlap": [(slice(1, 4), 1)],
}


@pytest.mark.parametrize("case", SILENT)
def test_stock_loads_damage_in_silence(tmp_path: Path, case: str) -> None:
    if not STOCK_213:
        pytest.skip("documents stock 2.13")
    DAMAGE[case][0](stock_rows(tmp_path / "in", value(), 4))
    wrong = value()
    for rows, content in SILENT[case]:
        wrong[rows] = content
    assert torch.equal(stock_loads(tmp_path / "in"), wrong)


@pytest.mark.parametrize("case", BROKEN)
def test_an_error_does_not_say_which_file(tmp_path: Path, case: str) -> None:
    """That ours does is in test_stock_faults.py."""
    if not STOCK_213:
        pytest.skip("documents stock 2.13")
    file = stock_rows(tmp_path / "in", value(), 4)[0]
    file.write_bytes(BROKEN[case](file.read_bytes()))
    with pytest.raises(FAILED) as caught:
        stock_loads(tmp_path / "in")
    said = "".join(traceback.format_exception(caught.value))
    assert "Error while deserializing header" in said, said
    assert "shard-0" not in said, said


def test_shards_of_an_earlier_save_by_more_ranks(tmp_path: Path) -> None:
    """Stock's writer leaves the shards of ranks that are gone; its reader lets one of them win."""
    new = value() + 100
    stock_rows(tmp_path / "in", value(), 4)
    if STOCK_213:
        writer = dcp.HuggingFaceStorageWriter(str(tmp_path / "in"), save_distributed=True)
        save({"w": new}, writer)
        with listed():
            got = stock_loads(tmp_path / "in")
        assert torch.equal(got, torch.cat([new[:6], value()[6:]]))
        with listed(reverse=True):  # the same files in another order of the directory
            assert torch.equal(stock_loads(tmp_path / "in"), new)
    else:
        stock_rows(tmp_path / "in", new, 1)
    with pytest.raises(FAILED, match="'w'"):
        load_ours(tmp_path / "in", {"w": new})
