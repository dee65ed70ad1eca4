"""What one rank writes and reports: when its tensors are read, and whose files are committed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.metadata import Metadata

import torch_ckpt
from torch_ckpt import ConflictError
from torch_ckpt.dcp.write import write_files
from torch_ckpt.dcp.write.commit import RankReport, commit_request
from torch_ckpt.dcp.write.layouts import Layout, Layouts


@pytest.mark.parametrize("layout", ["sharded", "final"])
def test_kernels_that_are_queued_are_waited_for_before_the_write(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, layout: str
) -> None:
    """The engine reads on streams of its own; without a GPU the order of the calls must do."""
    calls: list[str] = []
    write = write_files.operators.write

    class Event:
        def synchronize(self) -> None:
            calls.append("waited")

    def queued_kernels(tensors: list[torch.Tensor]) -> list[Any]:
        calls.append(f"{[len(tensor) for tensor in tensors if tensor.dtype.is_floating_point]}")
        return [Event(), Event()]

    def writing(*arguments: Any) -> Any:
        calls.append("written")
        return write(*arguments)

    monkeypatch.setattr(write_files, "queued_kernels", queued_kernels)
    monkeypatch.setattr(write_files.operators, "write", writing)
    state = {"a": torch.ones(3), "b": torch.ones(5)}
    torch_ckpt.save(state, checkpoint_id=tmp_path / "c", layout=layout)
    assert calls == ["[3, 5]", "waited", "waited", "written"]


@pytest.mark.parametrize("final", [False, True])
def test_a_rank_that_wrote_for_another_save_is_refused(final: bool) -> None:
    layouts = Layouts(Layout(final))
    file = {"staged": "0", "name": "a", "id": "", "role": "data", "bytes": 1, "crc32c": 0}
    files, finals = ([], [{}]) if final else ([file], [])
    reports = [[RankReport(rank, save_id, files, [], finals)] for rank, save_id in enumerate("aab")]
    with pytest.raises(ConflictError, match="found another save") as error:
        commit_request(Metadata({}), reports, "a", layouts)
    assert error.value.rank == 2
    assert commit_request(Metadata({}), reports[:2], "a", layouts)["world_size"] == 2
    nothing = [[RankReport(0, "a", [], [])], [RankReport(1, "b", [], [])]]
    with pytest.raises(ConflictError, match="found another save"):
        commit_request(Metadata({}), nothing, "a", layouts)
