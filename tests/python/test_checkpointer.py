"""Checkpointer, in one process: steps, states, errors. By several ranks:
ranks/training.py."""

from __future__ import annotations

import copy
import logging
import math
import random
import warnings
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from safetensors.torch import load_file
from training_loop import OPTIMIZERS, Loader, Net, losses_of, run_of

import torch_ckpt
from torch_ckpt import (
    Checkpointer,
    CheckpointError,
    ConflictError,
    IncompleteError,
    InvalidArgumentError,
    UnsupportedError,
)


def test_a_step_is_a_model_and_a_state(tmp_path: Path) -> None:
    run = run_of(OPTIMIZERS["AdamW"])
    losses_of(run, 1, 2)
    before = random.getstate(), numpy.random.get_state()[1].tolist(), torch.get_rng_state().tolist()
    with Checkpointer(tmp_path, **run, keep_last=2) as checkpointer:
        saved = checkpointer.save(2, metrics={"loss": 1.5})
        saved.result()
        assert checkpointer.directory.metrics(2) == {"loss": 1.5}
    # A save draws no number.
    after = random.getstate(), numpy.random.get_state()[1].tolist(), torch.get_rng_state().tolist()
    assert before == after
    step = tmp_path / "step-2"
    assert sorted(path.name for path in step.iterdir()) == [
        "model",
        "state",
        "torch_ckpt.catalog",
        "torch_ckpt.json",
    ]
    tensors = load_file(step / "model/model.safetensors")
    assert tensors.keys() == run["model"].state_dict().keys() - {"head.weight"}  # tied
    names = set(torch_ckpt.open(step / "state"))
    assert "optimizer.state.embed.weight.exp_avg" in names
    assert all(name.partition(".")[0] in ("optimizer", "rng", "ema") for name in names)
    # No pickle is there, and the model loads by its own names from the step, too.
    model = Net()
    torch_ckpt.load(model, step)
    assert all(
        torch.equal(a, b)
        for a, b in zip(model.parameters(), run["model"].parameters(), strict=True)
    )
    torch_ckpt.Checkpoint(step).verify()


class Drawing:
    """As loaders that make an iterator for their state."""

    def __init__(self, state: Any) -> None:
        self.state = state

    def state_dict(self) -> Any:
        random.random()
        numpy.random.rand()
        torch.rand(1)
        return self.state

    def load_state_dict(self, state: Any) -> None:
        self.state = state


@pytest.mark.parametrize(
    "state", [{}, {"a": {}}, [1, 2], [torch.ones(2)], None, 3, {"x": [{"y": torch.ones(1)}, 2]}]
)
def test_states_of_any_form(tmp_path: Path, state: Any) -> None:
    loader, mine = Drawing(state), Drawing(state)
    with Checkpointer(tmp_path, Net(), dataloader=loader, states={"mine": mine}) as checkpointer:
        before = torch.get_rng_state(), random.getstate()
        checkpointer.save(1)
        assert torch.equal(before[0], torch.get_rng_state()) and before[1] == random.getstate()
    # A target of the same form, and one of another.
    for live in (state, {"other": torch.zeros(5)}):
        loader, mine = Drawing(live), Drawing(live)
        Checkpointer(tmp_path, Net(), dataloader=loader, states={"mine": mine}).load()
        assert repr(loader.state) == repr(mine.state) == repr(state)


def test_a_load_waits_for_the_save_before_it(tmp_path: Path) -> None:
    model = Net()
    with Checkpointer(tmp_path, model, keep_last=1) as checkpointer:
        for step in range(1, 6):
            checkpointer.save(step)
            assert checkpointer.load() == step


def test_a_save_in_the_foreground_says_what_it_took(tmp_path: Path) -> None:
    with Checkpointer(tmp_path, Net(), background=False) as checkpointer:
        saved = checkpointer.save(1)
    assert saved.done() and saved.stats.error is None
    assert saved.stats.total_s > saved.stats.written_s > 0
    assert saved.staging_completion.done()


@pytest.mark.parametrize("background", [True, False])
def test_what_fails_leaves_what_was_there(tmp_path: Path, background: bool) -> None:
    class Broken:
        broken = True

        def state_dict(self) -> dict[str, Any]:
            if self.broken:
                raise RuntimeError("out of order")
            return {"x": 1}

        def load_state_dict(self, state: Any) -> None:
            if self.broken:
                raise RuntimeError("out of order")

    model, broken = Net(), Broken()
    checkpointer = Checkpointer(tmp_path, model, states={"mine": broken}, background=background)
    broken.broken = False
    checkpointer.save(1).result()
    broken.broken = True
    with pytest.raises((CheckpointError, RuntimeError), match="out of order"):
        checkpointer.save(2).result()
    with pytest.raises((CheckpointError, RuntimeError), match="out of order"):
        checkpointer.load()
    broken.broken = False
    assert checkpointer.load() == 1
    checkpointer.save(2).result()
    checkpointer.close()
    checkpointer.close()
    assert checkpointer.directory.steps() == [1, 2]


def test_what_typed_json_does_not_say_is_refused_by_its_path(tmp_path: Path) -> None:
    class Opaque:
        def state_dict(self) -> dict[str, Any]:
            return {"deep": {"er": object()}}

        def load_state_dict(self, state: Any) -> None:
            pass

    checkpointer = Checkpointer(tmp_path, Net(), states={"mine": Opaque()}, background=False)
    with pytest.raises(UnsupportedError, match=r"mine\.deep\.er"):
        checkpointer.save(1)
    assert checkpointer.load() == 0


def test_parts_that_are_lacking_or_left_alone(tmp_path: Path) -> None:
    run = run_of(OPTIMIZERS["Adam"])
    losses_of(run, 1, 2)
    with Checkpointer(tmp_path, **run) as checkpointer:
        checkpointer.save(2)
    model = Net()
    with pytest.warns(UserWarning, match="nobody takes its dataloader, ema, optimizer, scheduler"):
        Checkpointer(tmp_path, model).load()
    with Checkpointer(tmp_path / "bare", model) as checkpointer:
        checkpointer.save(1)
    run = run_of(OPTIMIZERS["Adam"])
    checkpointer = Checkpointer(tmp_path / "bare", **run)
    with pytest.raises(IncompleteError, match="without dataloader, ema, optimizer, scheduler"):
        checkpointer.load()
    left = ["optimizer", "scheduler", "dataloader", "ema"]
    before = copy.deepcopy(run["optimizer"].state_dict())
    assert checkpointer.load(exclude=left) == 1
    assert run["optimizer"].state_dict() == before
    bare = Checkpointer(tmp_path / "bare", Net())
    assert bare.load(exclude=["optimizer", "scheduler", "dataloader"]) == 1
    for wrong in (["model"], ["optim"], "emma"):
        with pytest.raises(InvalidArgumentError, match="exclude"):
            checkpointer.load(exclude=wrong)


def test_which_step_is_loaded(tmp_path: Path) -> None:
    model = Net()
    with Checkpointer(tmp_path, model, keep_last=2, best="loss") as checkpointer:
        with pytest.raises(IncompleteError, match="no best"):
            checkpointer.load("best")
        values = {}
        for step, loss in enumerate([3.0, 1.0, 2.0, 5.0], start=1):
            with torch.no_grad():
                model.embed.weight.fill_(step)
            checkpointer.save(step, metrics={"loss": torch.tensor(loss)})
            values[step] = float(step)
    checkpointer = Checkpointer(tmp_path, model)
    for step, found in ((None, 4), ("best", 2), (3, 3), (2, 2)):
        assert checkpointer.load(step) == found
        assert model.embed.weight[0, 0] == found
    with pytest.raises(IncompleteError):
        checkpointer.load(1)
    assert checkpointer.load(numpy.int64(2)) == 2
    for wrong in ("latest", 2.5):
        with pytest.raises(InvalidArgumentError):
            checkpointer.load(wrong)
    torch_ckpt.CheckpointDirectory(tmp_path).save({"a": torch.ones(1)}, 9)
    with pytest.raises(InvalidArgumentError, match="was not saved by a Checkpointer"):
        checkpointer.load()


def test_damage_is_named_and_nothing_older_is_loaded(tmp_path: Path) -> None:
    run = run_of(OPTIMIZERS["Adam"])
    losses_of(run, 1, 1)
    with Checkpointer(tmp_path, **run) as checkpointer:
        for step in (1, 2):
            checkpointer.save(step)
    for part, file in (
        ("model", "model.safetensors"),
        ("state", "shard-00001-model-00001-of-00001.safetensors"),
    ):
        path = tmp_path / "step-2" / part / file
        data = path.read_bytes()
        path.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
        with pytest.raises(torch_ckpt.CorruptError) as error:
            checkpointer.load()
        assert error.value.file == str(path)
        path.unlink()
        with pytest.raises(IncompleteError) as missing:
            checkpointer.load()
        assert missing.value.file == str(path)
        path.write_bytes(data)
    assert checkpointer.load() == 2


def test_random_states_of_another_number_of_ranks(tmp_path: Path) -> None:
    from torch_ckpt.training.rank_state import new_random_state, random_state

    def drawn() -> tuple[Any, ...]:
        return random.random(), numpy.random.rand(), torch.rand(1).item()

    state = random_state()
    streams = {}
    for world in (2, 3):
        for rank in range(world):
            new_random_state(state, rank, world)
            streams[rank, world] = drawn()
    assert len(set(streams.values())) == 5
    new_random_state(state, 1, 3)
    assert drawn() == streams[1, 3]


def test_data_ranks_that_cannot_be(tmp_path: Path) -> None:
    for wrong in ((2, 2), (-1, 2), (0, 0)):
        with pytest.raises(InvalidArgumentError, match="data_rank is"):
            Checkpointer(tmp_path, **run_of(OPTIMIZERS["SGD"]), data_rank=wrong)
    with pytest.raises(InvalidArgumentError, match="nobody is data rank 0"):
        Checkpointer(tmp_path, **run_of(OPTIMIZERS["SGD"]), data_rank=(1, 2))


def test_a_step_saved_again_and_one_below_the_newest(tmp_path: Path) -> None:
    model = Net()
    with Checkpointer(tmp_path, model) as checkpointer:
        for value in (1.0, 2.0):
            with torch.no_grad():
                model.embed.weight.fill_(value)
            checkpointer.save(5).result()
        with pytest.warns(UserWarning, match="saved a step below step-5"):
            checkpointer.save(3).result()
    other = Net()
    assert Checkpointer(tmp_path, other).load() == 5
    assert other.embed.weight[0, 0] == 2.0
    assert (tmp_path / "LATEST").read_text() == "step-5\n"


def test_waiting_for_staging_alone(tmp_path: Path) -> None:
    model = Net()
    with Checkpointer(tmp_path, model) as checkpointer:
        checkpointer.wait_for_staging()  # nothing to wait for
        checkpointer.save(1)
        checkpointer.wait_for_staging()
        with torch.no_grad():
            model.embed.weight.fill_(7.0)
    other = Net()
    Checkpointer(tmp_path, other).load()
    assert other.embed.weight[0, 0] != 7.0


def test_a_save_into_a_part_of_a_step_is_refused(tmp_path: Path) -> None:
    model = Net()
    with Checkpointer(tmp_path, model) as checkpointer:
        checkpointer.save(1)
    with pytest.raises(ConflictError, match="is a part of the checkpoint"):
        torch_ckpt.save_model(model, tmp_path / "step-1/model")
    torch_ckpt.save_model(model, tmp_path / "alone")
    other = Net()
    torch_ckpt.load_model(other, tmp_path / "alone")
    assert torch.equal(other.embed.weight, model.embed.weight)


def test_a_load_says_nothing_that_is_not_wrong(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    run = run_of(OPTIMIZERS["Adam"])
    losses_of(run, 1, 1)
    checkpointer = Checkpointer(tmp_path, **run)
    checkpointer.save(1).result()
    with warnings.catch_warnings(), caplog.at_level(logging.WARNING):
        warnings.simplefilter("error")
        checkpointer.load()
        checkpointer.load(exclude=["optimizer"])
    assert not caplog.records
    assert math.isfinite(losses_of(run, 2, 2)[0])
    assert isinstance(run["dataloader"], Loader)
