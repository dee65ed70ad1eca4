"""use_collectives=False: parts of single ranks, by several processes and read by one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from launch import run_ranks, warm
from ranks import no_collectives
from ranks.layouts import layouts, whole

import torch_ckpt
from torch_ckpt import HuggingFaceStorageReader, HuggingFaceStorageWriter, IncompleteError
from torch_ckpt.checkpoint.checkpoint import Checkpoint
from torch_ckpt.dcp.write.parts import part_of, run_id

WORLD = 2
LAUNCH_VARIABLES = (
    *("TORCHELASTIC_RUN_ID", "TORCHELASTIC_RESTART_COUNT"),
    *("MASTER_ADDR", "MASTER_PORT"),
)


@pytest.fixture(scope="module")
def launch(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, str]]:
    folder = tmp_path_factory.mktemp("ranks")
    return folder, run_ranks("no_collectives", WORLD, folder)


@pytest.mark.parametrize("case", no_collectives.CASES)
def test_case(launch: Any, case: str) -> None:
    _, outcome = launch
    name = f"no_collectives-{case}"
    assert outcome.get(name, outcome.get("", "the launch ended before this case")) == "ok"


def test_one_process_loads_what_several_saved(launch: Any) -> None:
    folder, _ = launch
    table = layouts(WORLD)
    state: dict[str, Any] = {
        "model": {name: torch.zeros(layout.shape) for name, layout in table.items()},
        "plain": torch.zeros(6, 2),
        "step": 0,
    }
    reader = HuggingFaceStorageReader(folder / "no-collectives")
    dcp.load(state, storage_reader=reader, no_dist=True)
    for name, layout in table.items():
        assert torch.equal(state["model"][name], whole(name, layout.shape)), name
    assert torch.equal(state["plain"], whole("plain", (6, 2)))
    assert state["step"] == 7


def test_a_process_without_a_group(tmp_path: Path) -> None:
    value = {"w": torch.arange(6.0), "step": 3}
    for path in (tmp_path / "a", tmp_path / "b"):
        writer = HuggingFaceStorageWriter(path, save_distributed=True)
        dcp.save(value, storage_writer=writer, no_dist=True, use_collectives=False)
        loaded = {"w": torch.zeros(6), "step": 0}
        torch_ckpt.load(loaded, checkpoint_id=path, no_dist=True)
        assert torch.equal(loaded["w"], value["w"]) and loaded["step"] == 3


def save_rank(rank: int, path: Path, faults: str = "", *, same: bool = False) -> int:
    """Save this rank's tensor, "w" and its number, or just "w" if it is the same on all."""
    script = ["part_rank.py", str(rank), str(path), *(["same"] if same else [])]
    output = path.parent / "output"
    status = warm().wait(warm().start(script, {"TORCH_CKPT_FAULTS": faults}, output), 120)
    output.unlink()
    assert status in (0, -9)
    return status


def refused(path: Path, text: str) -> None:
    with pytest.raises(IncompleteError, match=text) as error:
        HuggingFaceStorageReader(path).read_metadata()
    assert str(path) in str(error.value)


@pytest.mark.usefixtures("fault_points")
@pytest.mark.parametrize("renames", [1, 2, 3])
def test_a_rank_killed_before_its_commit(tmp_path: Path, renames: int) -> None:
    """It renames its data file, its catalog, its manifest; the kill is before the n-th."""
    path = tmp_path / "c"
    assert save_rank(1, path, faults=f"renameat2:{renames}:kill") != 0
    refused(path, "no rank has committed")
    assert save_rank(0, path) == 0
    refused(path, "rank 1 of 2 is missing")
    # The rank's next start of the same run takes up where it died.
    assert save_rank(1, path) == 0
    loaded = {"w0": torch.zeros(4), "w1": torch.zeros(4)}
    torch_ckpt.load(loaded, checkpoint_id=path, no_dist=True)
    assert torch.equal(loaded["w1"], torch.ones(4))


def test_describe_verify_and_remove(tmp_path: Path) -> None:
    path = tmp_path / "c"
    for rank in (0, 1):
        assert save_rank(rank, path) == 0
    checkpoint = Checkpoint(path)
    description = checkpoint.describe()
    assert (description.source, description.world_size) == ("manifest", 2)
    assert [tensor.name for tensor in description.tensors] == ["w0", "w1"]
    assert checkpoint.verify().files == 4
    (path / "config.json").write_text("{}")
    report = checkpoint.remove()
    assert len(report.removed) == 6 and report.left == ("config.json",)
    with pytest.raises(IncompleteError):
        checkpoint.remove()


def test_the_chunks_that_a_subclass_sees_have_no_replicas(tmp_path: Path) -> None:
    class Reader(HuggingFaceStorageReader):
        def _process_read_request(self, f: Any, req: Any, planner: Any) -> None:
            super()._process_read_request(f, req, planner)

    path = tmp_path / "c"
    for rank in (0, 1):
        assert save_rank(rank, path, same=True) == 0
    chunks = Reader(path).read_metadata().state_dict_metadata["w"].chunks
    assert len(chunks) == 1
    loaded = {"w": torch.zeros(4)}
    dcp.load(loaded, storage_reader=Reader(path), no_dist=True)
    assert torch.equal(loaded["w"], torch.ones(4))


@pytest.mark.parametrize("by", ["checkpoint_id", "storage_writer"])
def test_a_save_that_fails_before_its_part_begins_counts(tmp_path: Path, by: str) -> None:
    """Else this rank's next part would make one checkpoint with the others' of the save before."""
    path = tmp_path / "c"
    writer = HuggingFaceStorageWriter(path, save_distributed=True)
    where: dict[str, Any] = {by: path if by == "checkpoint_id" else writer}
    twins = {"a": {"b": 1}, "a.b": 2}
    for _ in range(2):
        with pytest.raises(torch_ckpt.InvalidArgumentError):
            torch_ckpt.save(twins, use_collectives=False, no_dist=True, **where)
    torch_ckpt.save({"w": torch.ones(1)}, use_collectives=False, no_dist=True, **where)
    assert part_of(str(path), 0, None).sequence == 3


def test_which_save_a_part_is_of(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = str(tmp_path)
    first, second = part_of(path, 0, None), part_of(path, 0, None)
    assert (first.world_size, first.sequence, second.sequence) == (1, 0, 1)
    assert first.run_id == second.run_id and len(first.run_id) == 32
    assert part_of(path, 3, 4).world_size == 4
    ids = set()
    for variables in (
        {"TORCHELASTIC_RUN_ID": "a", "TORCHELASTIC_RESTART_COUNT": "0"},
        {"TORCHELASTIC_RUN_ID": "a", "TORCHELASTIC_RESTART_COUNT": "1"},
        {"TORCHELASTIC_RUN_ID": "b", "TORCHELASTIC_RESTART_COUNT": "0"},
        {"MASTER_ADDR": "h", "MASTER_PORT": "1"},
        {"MASTER_ADDR": "h", "MASTER_PORT": "2"},
        {},
    ):
        for name in LAUNCH_VARIABLES:
            monkeypatch.delenv(name, raising=False)
        for name, value in variables.items():
            monkeypatch.setenv(name, value)
        ids.add(run_id())
    assert len(ids) == 6
