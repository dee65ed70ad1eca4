"""The demo, shrunk: the same code path as ``./dev demo``, and the parts its checks rest on."""

from __future__ import annotations

import copy
import dataclasses
import json
import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
import torch.nn.functional as F

DEMO = Path(__file__).parents[2] / "examples" / "demo"


@pytest.fixture(scope="module")
def demo() -> Any:
    """The demo's modules, imported as its scripts import them, and forgotten afterwards."""
    before = set(sys.modules)
    sys.path.insert(0, str(DEMO))
    try:
        import checkpoints
        import corpus
        import settings
        import state
        import verify

        names = ModuleType("demo_parts")
        for module in (checkpoints, corpus, settings, state, verify):
            setattr(names, module.__name__, module)
        yield names
    finally:
        sys.path.remove(str(DEMO))
        for name in set(sys.modules) - before:
            origin = getattr(sys.modules[name], "__file__", None) or ""
            if origin.startswith(str(DEMO)):
                del sys.modules[name]


@pytest.mark.campaign
def test_quick_demo_passes_every_check(tmp_path: Path) -> None:
    result_file = tmp_path / "result.json"
    work = tmp_path / "work"
    command = [sys.executable, str(DEMO / "run.py"), "--quick"]
    command += ["--workdir", str(work), "--json", str(result_file)]
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=300, env=os.environ | {"COLUMNS": "100"}
    )
    assert done.returncode == 0, done.stdout + done.stderr
    result = json.loads(result_file.read_text())
    assert [check["name"] for check in result["checks"] if not check["passed"]] == []
    assert len(result["checks"]) == 11

    loss = result["training"]["loss"]
    assert not loss["committed"]
    assert loss["files"] > 0
    # The checkpoint resumed from is the one before the interrupted save.
    assert loss["resume_from"] == f"step-{loss['step'] - 3}"
    assert result["training"]["losses"]["first"] == loss["step"] - 2
    assert result["model"]["tensors"] == 21
    assert result["model"]["different"] == []
    assert "times as fast as stock DCP" in done.stdout and "GB/s" in done.stdout
    assert result["speed"]["ratio"] > 0
    sides = result["speed"]["sides"]
    assert all(side["bytes"] > result["model"]["size"] for side in sides.values())
    # What it left: whole checkpoints only, and a model directory with config and tokenizer.
    kept = [d for d in (work / "checkpoints").iterdir() if d.is_dir()]
    assert len(kept) == 3
    assert all((d / "torch_ckpt.json").is_file() for d in kept)
    left = {path.name for path in (work / "checkpoints" / "step-18" / "model").iterdir()}
    assert {"config.json", "tokenizer.json", "model.safetensors"} <= left


def test_a_full_workdir_is_refused(tmp_path: Path) -> None:
    (tmp_path / "mine.txt").write_text("keep me")
    command = [sys.executable, str(DEMO / "run.py"), "--quick", "--workdir", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 2
    assert "is not empty" in done.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["mine.txt"]


def test_only_whole_checkpoints_count(demo: Any, tmp_path: Path) -> None:
    parts = demo.checkpoints
    assert parts.latest_whole(tmp_path) is None
    for step in (3, 12, 20):
        parts.directory_of(tmp_path, step).mkdir()
    for step in (3, 12):
        (parts.directory_of(tmp_path, step) / "torch_ckpt.json").write_text("{}")
    staging = tmp_path / ".step-30.torch_ckpt-stage"
    staging.mkdir()
    (staging / "torch_ckpt.json").write_text("{}")
    newest = parts.latest_whole(tmp_path)
    assert parts.step_of(newest) == 12
    assert parts.staging_of(parts.directory_of(tmp_path, 30)) == staging
    assert parts.staging_of(newest) is None
    assert parts.left_behind(tmp_path) == [staging]


def test_bits_are_compared_not_values(demo: Any) -> None:
    same_bits = demo.verify.same_bits
    nan = torch.tensor([float("nan"), 1.0])
    assert same_bits(nan, nan.clone())
    assert not same_bits(torch.tensor([0.0]), torch.tensor([-0.0]))
    assert not same_bits(torch.zeros(2), torch.zeros(2, dtype=torch.bfloat16))
    assert not same_bits(torch.zeros(2), torch.zeros(1, 2))
    names = demo.verify.different_names({"a": nan, "b": nan}, {"b": nan + 1, "c": nan})
    assert names == ["a", "b", "c"]


def test_batches_go_on_where_they_were(demo: Any) -> None:
    def make() -> Any:
        return demo.corpus.Batches(torch.arange(400), batch=6, length=16, seed=1)

    batches = make()
    for _ in range(5):  # into the second epoch
        batches.next()
    state = copy.deepcopy(batches.state_dict())
    expected = [batches.next() for _ in range(9)]
    again = make()
    again.load_state_dict(state)
    for batch in expected:
        assert torch.equal(again.next(), batch)
    # Without a generator's state the data differ: saving it matters.
    for lost in ("generator", "places"):
        again.load_state_dict({**state, lost: make().state_dict()[lost]})
        assert not all(torch.equal(again.next(), batch) for batch in expected)


@pytest.fixture
def one_thread() -> Any:
    """The model is so small that a second thread only adds waiting."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.mark.parametrize("lost", [None, "optimizer", "scheduler"])
def test_the_tolerance_notices_what_is_lost(
    demo: Any, one_thread: None, lost: str | None, tmp_path: Path
) -> None:
    """A resume without optimizer moments or scheduler must fail the demo's own loss check."""
    settings = dataclasses.replace(demo.settings.QUICK, steps=16)
    tokenizer = demo.corpus.build_tokenizer(settings.vocabulary)

    def make() -> Any:
        batches = demo.corpus.Batches(
            demo.corpus.read_tokens(tokenizer)[:20000],
            settings.global_batch,
            settings.sequence_length,
            settings.seed,
        )
        model = demo.state.build_model(settings, tokenizer)
        return demo.state.Training(model, batches, settings)

    def step(state: Any) -> float:
        batch = state.batches.next()
        logits = state.model(input_ids=batch[:, :-1], use_cache=False).logits
        loss = F.cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten())
        loss.backward()
        state.optimizer.step()
        state.optimizer.zero_grad()
        state.scheduler.step()
        return loss.item()

    state = make()
    for _ in range(6):
        step(state)
    with state.checkpointer(tmp_path) as checkpointer:
        checkpointer.save(6)
    expected = [step(state) for _ in range(6)]

    again = make()
    assert again.checkpointer(tmp_path).load(exclude=[lost] if lost else []) == 6
    found = [step(again) for _ in range(6)]
    largest = max(abs(f / e - 1) for f, e in zip(found, expected, strict=True))
    if lost is None:
        assert largest <= settings.first_loss_tolerance
    else:
        assert largest > 10 * settings.loss_tolerance
