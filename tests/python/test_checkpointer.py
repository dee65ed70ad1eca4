"""Checkpointer, in one process: a run goes on as if it had never stopped. By several ranks:
ranks/training.py."""

from __future__ import annotations

import copy
import json
import logging
import math
import random
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from safetensors.torch import load_file
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from training_loop import Loader, Net, losses_of, run_of

import torch_ckpt
from torch_ckpt import (
    Checkpointer,
    CheckpointError,
    ConflictError,
    IncompleteError,
    InvalidArgumentError,
    UnsupportedError,
)

OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "SGD": lambda p: torch.optim.SGD(p, 0.05),
    "momentum": lambda p: torch.optim.SGD(p, 0.05, momentum=0.9, nesterov=True),
    "Adam": lambda p: torch.optim.Adam(p, 0.01, amsgrad=True),
    "AdamW": lambda p: torch.optim.AdamW(p, 0.01),
    "fused": lambda p: torch.optim.AdamW(p, 0.01, fused=True),
    "tensor lr": lambda p: torch.optim.AdamW(p, torch.tensor(0.01), foreach=False),
    "NAdam": lambda p: torch.optim.NAdam(p, 0.01),
    "RAdam": lambda p: torch.optim.RAdam(p, 0.01),
    "Adagrad": lambda p: torch.optim.Adagrad(p, 0.01),
    "RMSprop": lambda p: torch.optim.RMSprop(p, 0.01, centered=True, momentum=0.5),
    "ASGD": lambda p: torch.optim.ASGD(p, 0.01, t0=2),
    "Rprop": lambda p: torch.optim.Rprop(p, 0.01),
    "Adadelta": lambda p: torch.optim.Adadelta(p),
    "Adafactor": lambda p: torch.optim.Adafactor(p, 0.01),
}


@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_a_run_goes_on_to_the_bit(tmp_path: Path, kind: str) -> None:
    whole = losses_of(run_of(OPTIMIZERS[kind]), 1, 8)
    run = run_of(OPTIMIZERS[kind])
    with Checkpointer(tmp_path, **run) as checkpointer:
        assert checkpointer.load() == 0
        first = losses_of(run, 1, 4)
        checkpointer.save(4)
        losses_of(run, 5, 6)  # what is saved is the state at the call
    other = run_of(OPTIMIZERS[kind], seed=17)
    losses_of(other, 1, 2)  # it has a state already, which is another one
    with Checkpointer(tmp_path, **other) as checkpointer:
        assert checkpointer.load() == 4
    assert first + losses_of(other, 5, 8) == whole


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


def test_moments_keep_their_own_dtype(tmp_path: Path) -> None:
    for dtype, moments in ((torch.bfloat16, torch.float32), (torch.float32, torch.bfloat16)):
        root = tmp_path / str(dtype)

        def made(dtype: torch.dtype = dtype) -> tuple[nn.Module, torch.optim.Optimizer]:
            model = nn.Linear(3, 3).to(dtype)
            return model, torch.optim.AdamW(model.parameters())

        model, optimizer = made()
        for parameter in model.parameters():
            optimizer.state[parameter] = {
                "step": torch.tensor(3.0),
                "exp_avg": torch.randn(parameter.shape).to(moments),
                "exp_avg_sq": torch.rand(parameter.shape).to(moments),
                "note": ("mine", 1),
            }
        with Checkpointer(root, model, optimizer, background=False) as checkpointer:
            checkpointer.save(1)
        loaded, fresh = made()
        with Checkpointer(root, loaded, fresh) as checkpointer:
            checkpointer.load()
        for old, new in zip(model.parameters(), loaded.parameters(), strict=True):
            a, b = optimizer.state[old], fresh.state[new]
            assert a.keys() == b.keys() and b["note"] == ("mine", 1)
            for key in ("step", "exp_avg", "exp_avg_sq"):
                assert a[key].dtype == b[key].dtype and torch.equal(a[key], b[key])


def test_hyperparameters_go_by_name(tmp_path: Path) -> None:
    def made(split: bool, lr: float = 0.5) -> tuple[nn.Module, torch.optim.Optimizer]:
        model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
        first, second = (list(part.parameters()) for part in model)
        groups = (
            [{"params": first, "lr": 0.1}, {"params": second, "lr": lr, "mine": 7}]
            if split
            else [{"params": [*second, *first]}]
        )
        return model, torch.optim.SGD(groups, lr=9.0)

    for step, lr in ((1, 0.5), (2, 0.1)):
        model, optimizer = made(True, lr)
        if step == 2:
            del optimizer.param_groups[1]["mine"]
        with Checkpointer(tmp_path, model, optimizer) as checkpointer:
            checkpointer.save(step)
    model, optimizer = made(True)
    optimizer.param_groups.reverse()  # another order
    Checkpointer(tmp_path, model, optimizer).load(1)
    assert [group["lr"] for group in optimizer.param_groups] == [0.5, 0.1]
    assert optimizer.param_groups[0]["mine"] == 7
    # Into one group only where both were saved alike.
    model, optimizer = made(False)
    with pytest.raises(InvalidArgumentError, match="saved with different"):
        Checkpointer(tmp_path, model, optimizer).load(1)
    Checkpointer(tmp_path, model, optimizer).load(2)
    assert optimizer.param_groups[0]["lr"] == 0.1
    # Two optimizers that share out what one had.
    model, _ = made(True)
    two = [torch.optim.SGD(part.parameters(), lr=3.0) for part in model]
    Checkpointer(tmp_path, model, two).load(1)
    assert [each.param_groups[0]["lr"] for each in two] == [0.1, 0.5]


def test_an_optimizer_with_lists_in_its_state(tmp_path: Path) -> None:
    def made() -> tuple[nn.Module, torch.optim.Optimizer]:
        torch.manual_seed(2)
        model = nn.Linear(3, 1)
        return model, torch.optim.LBFGS(model.parameters(), max_iter=3)

    def trained(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int) -> list[float]:
        x = torch.arange(12.0).reshape(4, 3) / 10

        def closure() -> torch.Tensor:
            optimizer.zero_grad()
            loss = (model(x).square() + model(x).cos()).mean()
            loss.backward()
            return loss

        return [optimizer.step(closure).item() for _ in range(steps)]

    model, optimizer = made()
    whole = trained(model, optimizer, 5)
    model, optimizer = made()
    trained(model, optimizer, 2)
    with Checkpointer(tmp_path, model, optimizer) as checkpointer:
        checkpointer.save(2)
    model, optimizer = made()
    Checkpointer(tmp_path, model, optimizer).load()
    assert trained(model, optimizer, 3) == whole[2:]


def test_state_in_mappings_and_of_other_shapes(tmp_path: Path) -> None:
    def made() -> tuple[nn.Module, torch.optim.Optimizer]:
        model = nn.Linear(3, 2)
        return model, torch.optim.SGD(model.named_parameters(), 0.1)  # with their names

    model, optimizer = made()
    held = {
        "left": {"factors": [torch.randn(3, 3), torch.randn(2, 2)], "done": True},
        "row": torch.randn(7),
        "like": torch.randn(2, 3, dtype=torch.float64),
        "step": 4,
    }
    optimizer.state[model.weight] = held
    with Checkpointer(tmp_path, model, optimizer) as checkpointer:
        checkpointer.save(1)
    other, fresh = made()
    Checkpointer(tmp_path, other, fresh).load()
    found = fresh.state[other.weight]
    assert found.keys() == held.keys() and found["step"] == 4
    assert found["left"]["done"] is True
    for a, b in zip(held["left"]["factors"], found["left"]["factors"], strict=True):
        assert torch.equal(a, b)
    assert torch.equal(found["row"], held["row"])
    assert torch.equal(found["like"], held["like"]) and found["like"].dtype == torch.float64
    assert other.bias not in fresh.state


def test_hyperparameters_of_one_group_are_not_shared(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    optimizer = torch.optim.SGD(model.parameters(), torch.tensor(0.5), foreach=False)
    with Checkpointer(tmp_path, model, optimizer) as checkpointer:
        checkpointer.save(1)
    two = [torch.optim.SGD(part.parameters(), lr=3.0) for part in model]
    Checkpointer(tmp_path, model, two).load()
    first, second = (each.param_groups[0]["lr"] for each in two)
    assert first == second == 0.5 and first is not second


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


def test_several_schedulers(tmp_path: Path) -> None:
    def made() -> tuple[nn.Module, list[Any], list[Any]]:
        model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
        optimizers = [torch.optim.SGD(part.parameters(), 1.0) for part in model]
        schedulers = [
            torch.optim.lr_scheduler.ExponentialLR(each, rate)
            for each, rate in zip(optimizers, (0.5, 0.25), strict=True)
        ]
        return model, optimizers, schedulers

    model, optimizers, schedulers = made()
    for optimizer, scheduler in zip(optimizers, schedulers, strict=True):
        optimizer.step()
        scheduler.step()
    with Checkpointer(tmp_path, model, optimizers, scheduler=schedulers) as checkpointer:
        checkpointer.save(1)
    model, optimizers, schedulers = made()
    Checkpointer(tmp_path, model, optimizers, scheduler=schedulers).load()
    assert [each.get_last_lr() for each in schedulers] == [[0.5], [0.25]]
    assert [each.param_groups[0]["lr"] for each in optimizers] == [0.5, 0.25]
    with pytest.raises(InvalidArgumentError, match="has 2 schedulers, and here are 1"):
        Checkpointer(tmp_path, model, optimizers, scheduler=schedulers[0]).load()


def test_a_model_without_memory(tmp_path: Path) -> None:
    with torch.device("meta"):
        bare = Net()
    for save in (
        lambda: Checkpointer(tmp_path, bare, background=False).save(1),
        lambda: torch_ckpt.save_model(bare, tmp_path / "a"),
    ):
        with pytest.raises(InvalidArgumentError, match="meta device"):
            save()
    torch_ckpt.save_model(Net(), tmp_path / "b")
    with pytest.raises(InvalidArgumentError, match="meta device"):
        torch_ckpt.load_model(bare, tmp_path / "b")


def test_wrappers_leave_no_trace(tmp_path: Path) -> None:
    plain = Net()
    checkpointer = Checkpointer(tmp_path, plain, torch.optim.Adam(plain.parameters()))
    checkpointer.save(1)
    checkpointer.close()
    wrapped = Net()
    wrapped.layers[0] = checkpoint_wrapper(wrapped.layers[0])
    wrapped.layers[1] = torch.compile(wrapped.layers[1])  # type: ignore[assignment]
    for model in (wrapped, torch.compile(wrapped)):
        optimizer = torch.optim.Adam(model.parameters())
        with Checkpointer(tmp_path, model, optimizer) as checkpointer:
            assert checkpointer.load(1) == 1
            for a, b in zip(plain.parameters(), model.parameters(), strict=True):
                assert torch.equal(a, b)
            checkpointer.save(2).result()
        names = set(torch_ckpt.open(tmp_path / "step-2/model"))
        assert names == set(plain.state_dict())


def test_tied_tensors_fill_an_untied_model(tmp_path: Path) -> None:
    model = Net()
    with Checkpointer(tmp_path, model) as checkpointer:
        checkpointer.save(1)
    untied = Net()
    untied.head.weight = nn.Parameter(torch.zeros_like(untied.head.weight))
    Checkpointer(tmp_path, untied).load()
    assert torch.equal(untied.head.weight, model.embed.weight)
    assert untied.head.weight is not untied.embed.weight
    again = Net()
    Checkpointer(tmp_path, again).load()
    assert again.head.weight is again.embed.weight


class Extra(nn.Module):
    """With what `get_extra_state` gives, buffers that are kept and that are not."""

    def __init__(self, extra: Any) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(3))
        self.register_buffer("kept", torch.randn(2))
        self.register_buffer("dropped", torch.randn(2), persistent=False)
        self.extra = extra

    def get_extra_state(self) -> Any:
        return self.extra

    def set_extra_state(self, state: Any) -> None:
        self.extra = state


EXTRAS = [{"a": {"b": [1, 2]}}, [1, {"x": 2.5}], "text", (1, 2), None, {}, {"$": 3}, torch.ones(3)]


@pytest.mark.parametrize("live", [*EXTRAS, torch.zeros(0, dtype=torch.uint8)])
@pytest.mark.parametrize("extra", EXTRAS)
def test_extra_states_and_buffers(tmp_path: Path, extra: Any, live: Any) -> None:
    model = nn.Sequential(Extra(extra), Extra(copy.deepcopy(extra)))
    with Checkpointer(tmp_path, model) as checkpointer:
        checkpointer.save(1)
    other = nn.Sequential(Extra(live), Extra(live))
    dropped = [part.dropped.clone() for part in other]
    Checkpointer(tmp_path, other).load()
    for a, b, kept in zip(model, other, dropped, strict=True):
        assert type(b.extra) is type(extra)
        if isinstance(extra, torch.Tensor):
            assert torch.equal(b.extra, extra)
        else:
            assert b.extra == extra
        assert torch.equal(a.kept, b.kept) and torch.equal(b.dropped, kept)


def test_parts_of_a_model(tmp_path: Path) -> None:
    whole = Net()
    parts = [nn.ModuleDict({"layers": whole.layers}), nn.ModuleDict({"norm": nn.LayerNorm(4)})]
    with Checkpointer(tmp_path, parts) as checkpointer:
        checkpointer.save(1)
    assert {name.partition(".")[0] for name in torch_ckpt.open(tmp_path / "step-1/model")} == {
        "layers",
        "norm",
    }
    with pytest.raises(InvalidArgumentError, match="two parts") as error:
        Checkpointer(tmp_path, [parts[0], parts[0]]).save(2).result()
    assert error.value.tensor is not None


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


def test_a_model_that_is_another_one(tmp_path: Path) -> None:
    with Checkpointer(tmp_path, Net()) as checkpointer:
        checkpointer.save(1)
    more = Net()
    more.add_module("more", nn.Linear(2, 2))
    with pytest.raises(IncompleteError, match=r"lacks what the model has: more\.bias, more\.w"):
        Checkpointer(tmp_path, more).load()
    less = Net()
    del less.layers[1]
    with pytest.raises(InvalidArgumentError, match=r"has what the model lacks.*layers\.1\.bias"):
        Checkpointer(tmp_path, less).load()
    wider = Net()
    wider.layers[0] = nn.Linear(5, 4)
    with pytest.raises(InvalidArgumentError, match=r"layers\.0\.weight"):
        Checkpointer(tmp_path, wider).load()


def test_names_that_meet(tmp_path: Path) -> None:
    model = nn.Module()
    model.optimizer = nn.Linear(2, 2)
    with pytest.raises(InvalidArgumentError, match="give the state, or the module") as error:
        Checkpointer(tmp_path, model, background=False).save(1)
    assert error.value.tensor == "optimizer.weight"
    net = Net()
    for name in ("model", "rng", "a.b", "", 3):
        with pytest.raises(InvalidArgumentError, match="no name for a state"):
            Checkpointer(tmp_path, net, states={name: net})
    for wrong in ({"states": {"a": 3}}, {"scheduler": 3}, {"dataloader": object()}):
        with pytest.raises(InvalidArgumentError, match="no state_dict"):
            Checkpointer(tmp_path, net, **wrong)
    with pytest.raises(InvalidArgumentError, match="no torch.optim"):
        Checkpointer(tmp_path, net, 3)
    with pytest.raises(InvalidArgumentError, match="model is a"):
        Checkpointer(tmp_path, {"a": net})
    with pytest.raises(TypeError):
        Checkpointer(tmp_path, net, keep_lst=3)
    other = nn.Linear(2, 2)
    with pytest.raises(InvalidArgumentError, match="does not have"):
        Checkpointer(
            tmp_path, net, torch.optim.SGD(other.parameters(), 0.1), background=False
        ).save(1)


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


def test_a_hugging_face_model(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        vocab_size=32,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        tie_word_embeddings=True,
    )
    model = transformers.LlamaForCausalLM(config)
    optimizer = torch.optim.AdamW(model.parameters())
    note = tmp_path / "README.md"
    note.write_text("mine")
    with Checkpointer(tmp_path / "run", model, optimizer, extras=str(note)) as checkpointer:
        checkpointer.save(5)
    step = tmp_path / "run/step-5/model"
    assert {path.name for path in step.iterdir()} >= {
        "config.json",
        "generation_config.json",
        "model.safetensors",
        "README.md",
    }
    loaded = transformers.LlamaForCausalLM.from_pretrained(step)
    for name, value in model.state_dict().items():
        assert torch.equal(loaded.state_dict()[name], value), name
    fresh = transformers.LlamaForCausalLM(config)
    report = torch_ckpt.load_model(fresh, step)
    assert (report.missing, report.unexpected) == ([], [])
    assert torch.equal(fresh.lm_head.weight, model.lm_head.weight)


@pytest.mark.parametrize("saved", ["plain", "wrapped", "compiled"])
def test_an_adapter_inside_wrappers(tmp_path: Path, saved: str) -> None:
    peft = pytest.importorskip("peft")

    def made(how: str) -> Any:
        torch.manual_seed(3)
        block = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
        model = peft.get_peft_model(
            nn.Sequential(block, nn.Linear(4, 2)),
            peft.LoraConfig(
                target_modules=["0.0"], modules_to_save=["0.1", "1"], r=2, init_lora_weights=False
            ),
        )
        layers = model.base_model.model
        if how == "wrapped":
            layers[0] = checkpoint_wrapper(layers[0])
        elif how == "compiled":
            layers[0] = torch.compile(layers[0])
        return model

    model = made(saved)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(1.0)
    with Checkpointer(tmp_path, model, background=False) as checkpointer:
        checkpointer.save(1)
    tensors = load_file(tmp_path / "step-1/model/adapter_model.safetensors")
    wanted = peft.get_peft_model_state_dict(made("plain"))
    assert tensors.keys() == wanted.keys() and len(tensors) > 6
    for how in ("plain", "wrapped", "compiled"):
        other = made(how)
        assert Checkpointer(tmp_path, other).load() == 1
        for (name, a), b in zip(model.named_parameters(), other.parameters(), strict=True):
            if a.requires_grad:
                assert torch.equal(a, b), name


def test_an_adapter(tmp_path: Path) -> None:
    peft = pytest.importorskip("peft")

    def made(**options: Any) -> Any:
        torch.manual_seed(3)
        base = nn.Sequential()
        base.add_module("first", nn.Linear(4, 4))
        base.add_module("head", nn.Linear(4, 2))
        return peft.get_peft_model(base, peft.LoraConfig(target_modules=["first"], r=2, **options))

    model = made(modules_to_save=["head"])
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], 0.1)
    model(torch.ones(1, 4)).sum().backward()
    optimizer.step()
    with Checkpointer(tmp_path / "run", model, optimizer) as checkpointer:
        checkpointer.save(1)
    step = tmp_path / "run/step-1/model"
    tensors = load_file(step / "adapter_model.safetensors")
    assert tensors and not any("base_layer" in name for name in tensors)
    assert json.loads((step / "adapter_config.json").read_text())["r"] == 2
    other = made(modules_to_save=["head"])
    fresh = torch.optim.AdamW([p for p in other.parameters() if p.requires_grad], 0.1)
    Checkpointer(tmp_path / "run", other, fresh).load()
    for (name, a), b in zip(model.named_parameters(), other.parameters(), strict=True):
        assert torch.equal(a, b), name
    base = made().unload()
    again = peft.PeftModel.from_pretrained(base, step)
    state = peft.get_peft_model_state_dict(again)
    assert state.keys() == tensors.keys()
    beside = made()
    beside.base_model.model.head.weight.requires_grad_(True)
    renamed = peft.get_peft_model(
        nn.Sequential(nn.Linear(4, 4)),
        peft.LoraConfig(target_modules=["0"], r=2),
        adapter_name="mine",
    )
    with Checkpointer(tmp_path / "renamed", renamed, background=False) as checkpointer:
        checkpointer.save(1)
        assert checkpointer.load() == 1
    with pytest.raises(UnsupportedError, match="is trained, and is no part") as error:
        Checkpointer(tmp_path / "beside", beside, background=False).save(1)
    assert "head.weight" in str(error.value.tensor)


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
