"""What the writer and the reader ask of the engine: how many calls, with how many threads."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner
from sample_states import assert_same, blank, load, save

import torch_ckpt
import torch_ckpt.native.core
import torch_ckpt.native.operators
from torch_ckpt import HuggingFaceStorageReader, HuggingFaceStorageWriter
from torch_ckpt.cli import cli
from torch_ckpt.dcp.node import transfer_workers

Calls = list[tuple[int, dict[str, Any]]]
STATE = {f"layers.{n}.weight": torch.full((5, n + 1), float(n)) for n in range(100)}


def watch(monkeypatch: pytest.MonkeyPatch, name: str) -> Calls:
    """The calls of operators.`name` from now on: (number of tensors, plan)."""
    calls: Calls = []
    call = getattr(torch_ckpt.native.operators, name)

    def watched(tensors: list[torch.Tensor], plan: dict[str, Any], job: Any) -> Any:
        calls.append((len(tensors), plan))
        return call(tensors, plan, job)

    monkeypatch.setattr(torch_ckpt.native.operators, name, watched)
    return calls


@pytest.mark.parametrize("distributed", [True, False])
@pytest.mark.parametrize(("threads", "workers"), [(1, 12), (15, 15)])
def test_threads_of_a_save(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    distributed: bool,
    threads: int,
    workers: int,
) -> None:
    """thread_count means the same in every mode; stock heeds it only without save_distributed."""
    calls = watch(monkeypatch, "write")
    writer = HuggingFaceStorageWriter(
        tmp_path / "c", thread_count=threads, save_distributed=distributed
    )
    save(STATE, writer)
    assert [plan["workers"] for _, plan in calls] == [workers]


@pytest.mark.parametrize(("ranks", "workers"), [(2, 6), (3, 4), (8, 4)])
def test_threads_of_ranks_that_share_a_node(
    monkeypatch: pytest.MonkeyPatch, ranks: int, workers: int
) -> None:
    monkeypatch.setenv("LOCAL_WORLD_SIZE", str(ranks))
    assert transfer_workers() == workers


@pytest.mark.parametrize(("threads", "workers"), [(1, 12), (15, 15)])
def test_threads_of_a_load(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, threads: int, workers: int
) -> None:
    save(STATE, HuggingFaceStorageWriter(tmp_path))
    calls = watch(monkeypatch, "read")
    load(blank(STATE), HuggingFaceStorageReader(tmp_path, thread_count=threads))
    assert [plan["workers"] for _, plan in calls] == [workers]


@pytest.mark.parametrize("planner", [None, torch_ckpt.LoadPlanner])
@pytest.mark.parametrize("files", [1, 3])
def test_one_call_reads_all_plain_tensors(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, planner: Any, files: int
) -> None:
    mapping = {name: 1 + number % files for number, name in enumerate(STATE)}
    save(STATE, HuggingFaceStorageWriter(tmp_path, mapping))
    calls = watch(monkeypatch, "read")
    into = blank(STATE)
    load(into, HuggingFaceStorageReader(tmp_path), planner=planner and planner())
    assert [count for count, _ in calls] == [len(STATE)]
    assert_same(into, STATE)


@pytest.mark.parametrize(("threads", "workers"), [(1, 4), (9, 9)])
def test_threads_of_a_merge(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, threads: int, workers: int
) -> None:
    requests = []
    call = torch_ckpt.native.core.call

    def watched(request: dict[str, Any]) -> Any:
        if request["op"] == "merge":
            requests.append(request)
        return call(request)

    monkeypatch.setattr(torch_ckpt.native.core, "call", watched)
    writer = HuggingFaceStorageWriter(
        tmp_path / "c",
        save_distributed=True,
        enable_consolidation=True,
        thread_count_consolidation=threads,
    )
    save(STATE, writer)
    for merge in (
        torch_ckpt.consolidate_safetensors_files,
        torch_ckpt.consolidate_safetensors_files_on_every_rank,
    ):
        merge(tmp_path / "c" / "sharded", tmp_path / "out", None, threads, overwrite=True)
    arguments = [str(tmp_path / "c" / "sharded"), str(tmp_path / "out"), "--overwrite"]
    arguments += ["--threads", str(threads)]
    assert CliRunner().invoke(cli, ["consolidate", *arguments]).exit_code == 0
    assert [request["workers"] for request in requests] == [workers] * 4
