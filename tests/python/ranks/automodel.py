"""Runs of NeMo AutoModel's BaseRecipe: as many ranks, others, what AutoModel saved, and failures."""

from __future__ import annotations

import os
import shutil
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from automodel_recipe import Recipe, llama, same_state, whole_state
from nemo_automodel.components.checkpoint import lifecycle
from nemo_automodel.components.checkpoint.utils import is_checkpoint_incomplete
from ranks.run import Context, cases, everywhere, raised
from torch.nn.parallel import DistributedDataParallel
from transformers import LlamaForCausalLM

import torch_ckpt
from torch_ckpt.integrations.automodel import Checkpointer, install

CASES, case = cases()


def eventually(holds: Callable[[], bool]) -> None:
    """Wait for what a thread does."""
    end = time.monotonic() + 30
    while not holds():
        assert time.monotonic() < end, "did not happen"
        time.sleep(0.05)


def leads_to(pointer: Path) -> str | None:
    return os.readlink(pointer) if pointer.is_symlink() else None


def latest(root: Path) -> str | None:
    return leads_to(root / "LATEST")


def warned(call: Callable[[], Any]) -> list[str]:
    """What `call` warns of."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        call()
    return [str(each.message) for each in caught]


def run_and_save(context: Context, root: Path, **config: Any) -> list[float]:
    """Train, save a step, and keep in `root`.pt what it holds. The next losses."""
    recipe = Recipe(root, 3, **config)
    recipe.train(2)
    held = whole_state(recipe.model), recipe.moments()
    recipe.save()
    wanted = recipe.train(3)
    recipe.checkpointer.finalize()
    if context.rank == 0:
        torch.save(held, f"{root}.pt")
    dist.barrier()
    return wanted


@case
def goes_on_to_the_bit(context: Context) -> None:
    with install():
        for mode in (False, True):
            root = context.shared / f"run-{context.world}-{mode}"
            wanted = run_and_save(context, root, is_async=mode)
            assert latest(root) == "epoch_0_step_2"
            assert not is_checkpoint_incomplete(root / "epoch_0_step_2")
            recipe = Recipe(root, 5, is_async=mode)
            assert isinstance(recipe.checkpointer, Checkpointer)
            recipe.load_checkpoint()
            assert recipe.train(3) == wanted
            recipe.checkpointer.finalize()
            for part in ("model", "optim"):
                torch_ckpt.open(root / "epoch_0_step_2" / part).verify()


def from_two_ranks(context: Context, root: Path) -> None:
    """Load what two ranks have saved on another number of them."""
    weights, moments = torch.load(f"{root}.pt")
    recipe = Recipe(root, 5)
    raised(recipe.load_checkpoint, "saved by 2 data-parallel ranks", "untrack_state('dataloader')")
    draws = []
    for _ in range(2):
        recipe = Recipe(root, 5, loader=False)
        said = warned(recipe.load_checkpoint)
        same_state(whole_state(recipe.model), weights)
        assert all(map(torch.equal, recipe.moments(), moments))
        assert recipe.step_scheduler.step == 2
        told = [text for text in said if f"of 2 ranks, and here are {context.world}" in text]
        assert len(told) == (context.rank == 0)
        draws.append(torch.rand(3).tolist())
    assert draws[0] == draws[1]
    assert len(set(map(str, everywhere(draws[0])))) == context.world


@case
def other_numbers_of_ranks(context: Context) -> None:
    if context.world == 2:
        return  # which saves
    with install():
        for mode in (False, True):
            from_two_ranks(context, context.shared / f"run-2-{mode}")


@case
def a_run_that_automodel_saved(context: Context) -> None:
    root = context.shared / "stock"
    if context.world != 2:
        with install():
            from_two_ranks(context, root)
        return
    wanted = run_and_save(context, root)
    assert (root / "epoch_0_step_2/optim/.metadata").exists()
    with install():
        recipe = Recipe(root, 5)
        recipe.load_checkpoint()
        assert recipe.train(3) == wanted
    # And the other way round: it reads our model, loader and random states.
    ours = context.folder / "ours"
    with install():
        run_and_save(context, ours)
    recipe = Recipe(ours, 5)
    step = str(ours / "epoch_0_step_2")
    recipe.checkpointer.load_model(recipe.model, f"{step}/model")
    recipe.checkpointer.load_on_global_ranks(recipe.rng, "rng", step)
    recipe.checkpointer.load_on_dp_ranks(recipe.dataloader, "dataloader", step)
    same_state(whole_state(recipe.model), torch.load(f"{ours}.pt")[0])


@case
def other_forms_of_a_step(context: Context) -> None:
    """torch_save, and the names that random states had before 0.7."""
    root = context.folder / "stock"
    wanted = run_and_save(context, root, model_save_format="torch_save")
    rng = root / "epoch_0_step_2/rng"
    if context.rank == 0:
        assert (root / "epoch_0_step_2/model/.metadata").exists()
        for file in rng.iterdir():
            file.rename(rng / file.name.replace("_global_", "_dp_"))
    dist.barrier()
    with install():
        ours = context.folder / "ours"
        assert run_and_save(context, ours, model_save_format="torch_save") == wanted
        for each in (root, ours):
            recipe = Recipe(each, 5, model_save_format="torch_save")
            recipe.load_checkpoint()
            assert recipe.train(3) == wanted


@case
def tied_weights_under_ddp(context: Context) -> None:
    def made(seed: int) -> Recipe:
        model: torch.nn.Module = llama(1, shard=False, tie_word_embeddings=True)
        model = DistributedDataParallel(model) if context.world > 1 else model
        return Recipe(context.folder / "run", seed, model=model, save_consolidated="every")

    with install():
        recipe = made(3)
        recipe.train(2)
        held = whole_state(getattr(recipe.model, "module", recipe.model))
        step = recipe.save()
        wanted = recipe.train(2)
        recipe = made(4)
        recipe.train(1)
        recipe.load_checkpoint()
        assert recipe.train(2) == wanted
        loaded = LlamaForCausalLM.from_pretrained(f"{step}/model/consolidated")
        same_state(loaded.state_dict(), held)


@case
def one_step_over_an_interrupted_one(context: Context) -> None:
    """What AutoModel's own save has left, with its .metadata and shards."""
    root = context.folder / "run"
    recipe = Recipe(root, 3)
    recipe.train(1)
    step = Path(recipe.save())
    if context.rank == 0:
        (step / ".incomplete").touch()
        os.unlink(root / "LATEST")
    dist.barrier()
    with install():
        recipe = Recipe(root, 4)
        recipe.train(1)
        recipe.save()
        assert not list(root.glob("*.reserving-*"))
        assert not (step / "optim/.metadata").exists()
        recipe = Recipe(root, 5)
        recipe.load_checkpoint()


# --- what goes wrong ------------------------------------------------------------------------


@case
def an_async_step_is_published_when_it_is_done(context: Context) -> None:
    """F11: it was by the next save."""
    root = context.folder / "run"
    with install():
        recipe = Recipe(root, 3, is_async=True, max_recent_checkpoints=1)
        for step in (1, 2, 3):
            recipe.train(1)
            recipe.save(val_loss={"default": 1.0 / step})
            name = f"epoch_0_step_{step}"
            eventually(lambda name=name: latest(root) == name)
            eventually(lambda name=name: not is_checkpoint_incomplete(root / name))
            eventually(lambda name=name: leads_to(root / "LOWEST_VAL") == name)
            eventually(lambda name=name: [e.name for e in root.glob("epoch_*")] == [name])
        recipe.checkpointer.finalize()


class Fails:
    """A state that fails on one rank."""

    use_distributed_checkpointing = True

    def __init__(self, rank: int) -> None:
        self.rank = rank

    def state_dict(self) -> dict[str, Any]:
        if dist.get_rank() == self.rank:
            raise ZeroDivisionError("of this state")
        return {"w": torch.ones(2)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        pass


def failing_saves(context: Context) -> Iterator[tuple[Callable[[Recipe], None], tuple[str, ...]]]:
    """What is done to a recipe on one rank, and what the error of its save says."""
    last = context.world - 1

    def in_the_model(recipe: Recipe) -> None:
        if context.rank == last:

            def fail(*_: Any, **__: Any) -> None:
                raise ZeroDivisionError("of this model")

            recipe.model._register_state_dict_hook(fail)

    def in_the_optimizer(recipe: Recipe) -> None:
        if context.rank == last:

            def fail(*_: Any) -> None:
                raise ZeroDivisionError("of this optimizer")

            recipe.optimizer.register_state_dict_post_hook(fail)

    def in_random_states(recipe: Recipe) -> None:
        if context.rank == last:
            recipe.rng.state_dict = lambda: 1 // 0

    def in_a_tokenizer(recipe: Recipe) -> None:
        if context.rank == 0:
            recipe.model.config.to_json_string = lambda **_: 1 // 0

    yield in_the_model, ("of this model", f"rank {last}")
    yield in_the_optimizer, ("of this optimizer", f"rank {last}")
    yield in_random_states, ("by zero", f"rank {last}")
    yield lambda recipe: setattr(recipe, "ema", Fails(last)), ("of this state", f"rank {last}")
    yield in_a_tokenizer, ("by zero", "rank 0")


@case
def what_fails_on_one_rank_fails_on_all(context: Context) -> None:
    with install():
        for mode in (False, True):
            root = context.folder / f"run-{mode}"
            recipe = Recipe(root, 3, is_async=mode)
            recipe.train(1)
            recipe.save()
            recipe.checkpointer.finalize()
            for number, (break_it, said) in enumerate(failing_saves(context)):
                recipe = Recipe(root, 3, is_async=mode)
                recipe.load_checkpoint()
                recipe.train(1)
                break_it(recipe)

                def save_and_wait(recipe: Recipe = recipe) -> None:
                    recipe.save()
                    recipe.checkpointer.async_wait()

                began = time.monotonic()
                error = raised(save_and_wait)
                assert time.monotonic() - began < 15
                texts = everywhere(f"{error}")
                assert all(said[0] in text for text in texts)
                assert any(said[1] in text for text in texts) or context.world == 1
                assert latest(root) == f"epoch_0_step_{number + 1}"
                recipe.checkpointer.close()
                # What was there loads, and the next save works, of the same step.
                recipe = Recipe(root, 4, is_async=mode)
                recipe.load_checkpoint()
                assert recipe.step_scheduler.step == number + 1
                recipe.train(1)
                recipe.save()
                recipe.checkpointer.finalize()
                assert latest(root) == f"epoch_0_step_{number + 2}"


@case
def a_step_that_is_damaged(context: Context) -> None:
    """F3: of a matrix whose shard was missing half was loaded. A bit, a file, a part: an error."""
    root = context.folder / "run"
    with install():
        recipe = Recipe(root, 3)
        recipe.train(1)
        first = recipe.save()
        recipe.train(1)
        step = Path(recipe.save())
        last = context.world
        for name in (
            "model/shard-00001-model-00001-of-00001.safetensors",
            "optim/shard-00001-model-00001-of-00001.safetensors",
            f"rng/rng_global_rank_{last - 1}.pt",
            f"dataloader/dataloader_dp_rank_{last - 1}.pt",
        ):
            for damage in ("lost", "flipped"):
                dist.barrier()
                if context.rank == 0:
                    shutil.copy(step / name, context.folder / "kept")
                    os.unlink(step / name)
                    if damage == "flipped":
                        data = bytearray((context.folder / "kept").read_bytes())
                        data[len(data) // 2] ^= 4
                        (step / name).write_bytes(data)
                dist.barrier()
                recipe = Recipe(root, 4)
                raised(recipe.load_checkpoint, Path(name).name)
                dist.barrier()
                if context.rank == 0:
                    shutil.copy(context.folder / "kept", step / name)
        dist.barrier()
        recipe.load_checkpoint()
        assert recipe.step_scheduler.step == 2
        Recipe(root, 4).load_checkpoint(first)


@case
def a_missing_shard_of_automodels(context: Context) -> None:
    root = context.folder / "run"
    recipe = Recipe(root, 3)
    step = Path(recipe.save())
    dist.barrier()
    if context.rank == 0 and context.world > 1:
        shard = step / f"model/shard-{context.world:05}-model-00001-of-00001.safetensors"
        shard.unlink()
    dist.barrier()
    with install():
        recipe = Recipe(root, 4)
        if context.world > 1:
            raised(lambda: recipe.checkpointer.load_model(recipe.model, str(step / "model")))


@case
def in_the_way(context: Context) -> None:
    """Files and directories where a step, or a pointer, is to be."""
    root = context.folder / "run"
    with install():
        recipe = Recipe(root, 3)
        recipe.train(1)
        recipe.save()
        recipe.train(1)
        places: tuple[Path, ...] = (root / "epoch_0_step_2", root / "LOWEST_VAL")
        for place, make in ((places[0], Path.touch), (places[1], Path.mkdir)):
            if context.rank == 0:
                make(place)
            dist.barrier()
            raised(recipe.save, place.name)
            dist.barrier()
            if context.rank == 0:
                place.rmdir() if place.is_dir() else place.unlink()
            dist.barrier()
            Recipe(root, 4).load_checkpoint()
        recipe.save()
        assert latest(root) == "epoch_0_step_2"
        raised(recipe.save, "already holds a published checkpoint")


@case
def a_failed_publication(context: Context) -> None:
    """In the background, on rank 0: the next save raises it on all ranks, and the one after works."""
    root = context.folder / "run"
    with install():
        recipe = Recipe(root, 3, is_async=True)
        recipe.train(1)
        with pytest.MonkeyPatch.context() as patch:
            done = []

            def fail(*_: Any) -> None:
                done.append(1)
                raise OSError(28, "no space", "LATEST")

            own = lifecycle.CheckpointLifecycle
            patch.setattr(own, "_update_checkpoint_pointer", fail)
            recipe.save()
            recipe.checkpointer.async_wait()
            if context.rank == 0:
                eventually(lambda: bool(done))
            dist.barrier()
        recipe.train(1)
        raised(recipe.save, "no space")
        assert not (root / "LATEST").exists()
        recipe.save()
        recipe.checkpointer.finalize()
        assert latest(root) == "epoch_0_step_2"
