"""Which checkpoints of a run stay: the newest, multiples of a number, and the best by a metric."""

from __future__ import annotations

import json
import math
import os
import random
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch

import torch_ckpt
from torch_ckpt import CheckpointDirectory, IncompleteError, InvalidArgumentError

STATE = {"w": torch.ones(2)}


def saved(directory: CheckpointDirectory, step: int, metrics: Any = None) -> None:
    directory.save(STATE, step, metrics=metrics)
    directory._deletions.wait()


def steps_of(root: Path) -> list[int]:
    return sorted(int(path.name.removeprefix("step-")) for path in root.glob("step-*"))


def test_multiples_stay(tmp_path: Path) -> None:
    directory = CheckpointDirectory(tmp_path, keep_last=2, keep_every=4)
    for step in range(1, 11):
        saved(directory, step)
    assert steps_of(tmp_path) == [4, 8, 9, 10]
    directory.close()


@pytest.mark.parametrize("mode", ["min", "max"])
def test_the_best_stays_and_is_named(tmp_path: Path, mode: Any) -> None:
    sign = 1 if mode == "min" else -1
    losses = [3.0, 1.0, 2.0, 1.0, math.nan, math.inf, 0.5, 4.0, 5.0]
    with CheckpointDirectory(tmp_path, keep_last=1, best="loss", best_mode=mode) as directory:
        assert directory.best() is None
        named = []
        for step, loss in enumerate(losses):
            saved(directory, step, {"loss": sign * loss, "epoch": step})
            named.append((tmp_path / "BEST").read_text())
        # Strictly better, and finite.
        assert named == [f"step-{step}\n" for step in (0, 1, 1, 1, 1, 1, 6, 6, 6)]
        assert steps_of(tmp_path) == [6, 8]
        assert directory.best() == str(tmp_path / "step-6")
        assert directory.metrics(6) == {"loss": sign * 0.5, "epoch": 6}
        assert type(directory.metrics(6)["epoch"]) is int
        assert torch_ckpt.open(tmp_path / "step-8").metadata["step"] == 8
    # Over a restart, too.
    directory = CheckpointDirectory(tmp_path, keep_last=1, best="loss", best_mode=mode)
    saved(directory, 9, {"loss": sign * 0.7})
    assert steps_of(tmp_path) == [6, 9]
    saved(directory, 10, {"loss": sign * 0.4})
    assert steps_of(tmp_path) == [10]
    assert directory.best() == str(tmp_path / "step-10")


def test_metrics_that_are_no_finite_numbers_come_back(tmp_path: Path) -> None:
    directory = CheckpointDirectory(tmp_path)
    metrics = {
        "a": math.nan,
        "b": -math.inf,
        "c": torch.tensor([[2.5]]),
        "d": numpy.float32(0.5),
        "e": True,
        "f": torch.tensor(7),
        "g": 10**30,
    }
    directory.save(STATE, 3, metrics=metrics)
    read = directory.metrics(3)
    assert math.isnan(read.pop("a"))
    assert read == {"b": -math.inf, "c": 2.5, "d": 0.5, "e": 1, "f": 7, "g": 10**30}
    directory.save(STATE, 4)
    assert directory.metrics(4) == {}
    with pytest.raises(IncompleteError):
        directory.metrics(5)


def test_a_best_that_is_saved_again_or_removed_is_looked_for_anew(tmp_path: Path) -> None:
    directory = CheckpointDirectory(tmp_path, best="loss")
    for step, loss in enumerate([3.0, 1.0, 2.0]):
        saved(directory, step, {"loss": loss})
    assert directory.best() == str(tmp_path / "step-1")
    with pytest.warns(UserWarning, match="below step-2"):
        saved(directory, 1, {"loss": 9.0})
    assert (tmp_path / "BEST").read_text() == "step-2\n"
    torch_ckpt.Checkpoint(tmp_path / "step-2").remove()
    assert directory.best() == str(tmp_path / "step-0")
    saved(directory, 3, {"loss": 4.0})
    assert (tmp_path / "BEST").read_text() == "step-0\n"
    # One that says nothing of it is not the best, and BEST goes with the last one that did.
    for step in (0, 1, 3):
        torch_ckpt.Checkpoint(tmp_path / f"step-{step}").remove()
    saved(directory, 4)
    assert not (tmp_path / "BEST").exists() and directory.best() is None
    assert sorted(os.listdir(tmp_path)) == ["LATEST", "step-4"]


def test_another_metric_than_before(tmp_path: Path) -> None:
    saved(CheckpointDirectory(tmp_path, best="loss"), 1, {"loss": 1.0, "score": 1.0})
    saved(CheckpointDirectory(tmp_path, best="loss"), 2, {"loss": 2.0, "score": 5.0})
    directory = CheckpointDirectory(tmp_path, best="score", best_mode="max")
    assert directory.best() == str(tmp_path / "step-1")  # as BEST says
    saved(directory, 3, {"score": 3.0})
    assert (tmp_path / "BEST").read_text() == "step-3\n"


def test_a_save_in_the_background(tmp_path: Path) -> None:
    with CheckpointDirectory(tmp_path, keep_last=1, best="loss") as directory:
        futures = [
            directory.async_save(STATE, step, metrics={"loss": loss})
            for step, loss in enumerate([2.0, 1.0, 3.0])
        ]
        for future in futures:
            future.result()
    assert steps_of(tmp_path) == [1, 2]
    assert directory.best() == str(tmp_path / "step-1")


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ({"keep_last": 0}, "keep_last"),
        ({"keep_last": 2, "keep_every": 0}, "keep_every"),
        ({"keep_every": 10}, "keep_every needs keep_last"),
        ({"best": ""}, "best"),
        ({"best": 3}, "best"),
        ({"best": "loss", "best_mode": "least"}, "best_mode"),
    ],
)
def test_arguments_that_make_no_sense(tmp_path: Path, arguments: Any, says: str) -> None:
    with pytest.raises(InvalidArgumentError, match=says):
        CheckpointDirectory(tmp_path, **arguments)


@pytest.mark.parametrize(
    ("metrics", "says"),
    [
        ({"los": 1.0}, "metrics lacks 'loss'"),
        ({"loss": "1.0"}, "'loss' is a str"),
        ({"loss": None}, "'loss' is a NoneType"),
        ({"loss": torch.ones(2)}, "'loss' is a Tensor"),
        ({"loss": 1 + 1j}, "'loss' is a complex"),
    ],
)
def test_metrics_that_are_none(tmp_path: Path, metrics: Any, says: str) -> None:
    directory = CheckpointDirectory(tmp_path, best="loss")
    with pytest.raises(InvalidArgumentError, match=says):
        directory.save(STATE, 1, metrics=metrics)
    with pytest.raises(InvalidArgumentError, match=says):
        directory.async_save(STATE, 1, metrics=metrics)
    assert directory.latest() is None


def test_metadata_is_kept_beside_the_step(tmp_path: Path) -> None:
    directory = CheckpointDirectory(tmp_path)
    said = {"data": {"tokens": 10**15, "mix": ["a", 0.5, None]}, "": "empty"}
    directory.save(STATE, 7, metadata=said, metrics={"loss": 0.25})
    read = torch_ckpt.open(directory.path(7)).metadata
    assert read == {**said, "step": 7, "metrics": {"loss": 0.25}}
    for name in ("step", "metrics"):
        with pytest.raises(InvalidArgumentError, match=name):
            directory.save(STATE, 8, metadata={name: 1})


@pytest.mark.parametrize("layout", ["sharded", "final"])
def test_metadata_of_a_plain_save(tmp_path: Path, layout: Any) -> None:
    path = tmp_path / "c"
    for said in ({"a": 1}, {}, {"b": [True, '\u00fc"\\\n']}):
        torch_ckpt.save(STATE, path, layout=layout, metadata=said)
        assert torch_ckpt.open(path).metadata == said
        assert torch_ckpt.Checkpoint(path).describe().metadata == said
        torch_ckpt.Checkpoint(path).verify()
    assert json.loads((path / "torch_ckpt.json").read_text())["metadata"] == {
        "b": json.dumps(said["b"])
    }
    process = torch_ckpt.async_save(STATE, path, metadata={"c": 2})
    process.result()
    assert torch_ckpt.open(path).metadata == {"c": 2}


@pytest.mark.parametrize(
    "said",
    [
        {1: 2},
        {"a": math.nan},
        {"a": {1: 2}},
        {"a": (1, 2)},
        {"a": torch.ones(1)},
        {"\ud800": 1},
        {"a": "x" * (1 << 20)},
    ],
)
def test_metadata_that_json_does_not_have(tmp_path: Path, said: Any) -> None:
    with pytest.raises(InvalidArgumentError, match="metadata"):
        torch_ckpt.save(STATE, tmp_path / "c", metadata=said)
    assert not (tmp_path / "c").exists()


def test_random_runs_keep_what_they_should(tmp_path: Path) -> None:
    for seed in range(20):
        rng = random.Random(seed)
        root = tmp_path / str(seed)
        keep, every = rng.randint(1, 3), rng.choice([None, 2, 3])
        mode = rng.choice(["min", "max"])
        there: dict[int, float] = {}
        best: int | None = None
        step = 0
        for _ in range(rng.randint(3, 8)):
            # A new object each time, as after a restart.
            directory = CheckpointDirectory(
                root, keep_last=keep, keep_every=every, best="x", best_mode=mode
            )
            step += rng.randint(1, 3)
            value = rng.choice([0.0, 1.0, 2.0, math.nan])
            saved(directory, step, {"x": value})
            there[step] = value
            sign = 1 if mode == "min" else -1
            if math.isfinite(value) and (best is None or sign * value < sign * there[best]):
                best = step
            newest = sorted(there)[-keep:]
            there = {
                each: loss
                for each, loss in there.items()
                if each in newest or each == best or (every and each % every == 0)
            }
            assert steps_of(root) == sorted(there), (seed, step)
            assert directory.best() == (None if best is None else directory.path(best))
            directory.close()
