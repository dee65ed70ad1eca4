"""torchtitan's own checkpoint manager on this engine: its steps, retention, exports and loads."""

from __future__ import annotations

import json
import os
import shutil
import time
from pathlib import Path
from typing import Any

import scaled_bases
import torch
import torch.distributed as dist
from ranks.run import Context, cases, everywhere, raised
from titan_job import Job
from torch.distributed.checkpoint.quantized_hf_storage import (
    QuantizedHuggingFaceStorageReader as StockQuantizedReader,
)
from torch.distributed.tensor import DTensor

import torch_ckpt
from torch_ckpt import Checkpoint
from torch_ckpt.errors import UnsupportedError

CASES, case = cases()
MODES = ("disabled", "async", "async_with_pinned_mem")


def whole(tensor: torch.Tensor) -> torch.Tensor:
    """Also a DTensor. A collective call."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor.clone()


def tensors_of(job: Job) -> dict[str, torch.Tensor]:
    """The model and the optimizer's state, whole. A collective call."""
    found = {**job.model.state_dict(), **job.optimizers.state_dict()}
    return {name: whole(value) for name, value in found.items() if isinstance(value, torch.Tensor)}


def assert_same(found: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor]) -> None:
    assert found.keys() == wanted.keys()
    for name, tensor in wanted.items():
        torch.testing.assert_close(found[name], tensor, rtol=0, atol=0)


def names_in(folder: Path) -> list[str]:
    """What stands there, when all deletions are through."""
    dist.barrier()
    return sorted(name for name in os.listdir(folder) if not name.startswith("."))


def begin(root: Path, **options: Any) -> Job:
    dist.barrier()
    return Job(root, **options)


@case
def losses_go_on_to_the_bit(context: Context) -> None:
    for mode in MODES:
        root = context.folder / mode
        job = begin(root, async_mode=mode)
        job.train(3)
        wanted = job.train(2, saves=False)
        job.manager.maybe_wait_for_saving()
        job.manager.close()
        again = begin(root, async_mode=mode)
        again.train(1, saves=False)
        assert again.manager.load() is True
        assert (again.step, again.ntokens_seen) == (3, 96)
        assert again.train(2, saves=False) == wanted, mode
        again.manager.close()
        Checkpoint(root / "steps/step-3").verify()


@case
def other_numbers_of_ranks(context: Context) -> None:
    # At 2 ranks first, see test_torchtitan.py.
    root = context.shared / "resharded"
    if context.world == 2:
        job = begin(root)
        job.train(2)
        tensors = tensors_of(job)
        job.manager.close()
        if context.rank == 0:
            torch.save(tensors, root / "wanted.pt")
        return
    wanted = torch.load(root / "wanted.pt")
    job = begin(root, load_only=True, exclude_from_loading=["dataloader"])
    assert job.manager.load() is True
    assert_same(tensors_of(job), wanted)
    assert job.step == 2 and job.schedulers.state_dict()["last_epoch"] == 2
    job.manager.close()
    with_loader = begin(root, load_only=True)
    try:
        with_loader.manager.load()
    except AssertionError as error:  # torchtitan's, of ranks that the state knows
        assert "resharding is not supported" in str(error)
    except torch_ckpt.CheckpointError as error:  # ours, of a rank that the state does not know
        assert "dataloader" in str(error)
    else:
        raise AssertionError("a loader went on at another number of ranks")


@case
def steps_of_torchtitan_go_on_and_go(context: Context) -> None:
    steps = context.folder / "steps"
    job = begin(context.folder, ours=False)
    job.train(3)
    wanted = job.train(2, saves=False)
    job.manager.close()
    again = begin(context.folder, keep_latest_k=2)
    assert again.manager.load() is True
    assert again.train(2) == wanted
    again.manager.close()
    assert names_in(steps) == ["LATEST", "step-4", "step-5"]
    # Over a step that torchtitan wrote, of which nothing is read any more.
    job = begin(context.folder / "over", ours=False)
    job.train(2)
    job.manager.close()
    again = begin(context.folder / "over")
    assert again.manager.load(1) is True
    again.train(1)
    wanted = tensors_of(again)
    again.manager.close()
    assert not (context.folder / "over/steps/step-2/.metadata").exists()
    last = begin(context.folder / "over")
    assert last.manager.load() is True
    assert_same(tensors_of(last), wanted)
    last.manager.close()


@case
def torchtitan_goes_on_from_a_converted_step(context: Context) -> None:
    job = begin(context.folder)
    job.train(2)
    wanted = job.train(2, saves=False)
    job.manager.close()
    back = context.folder / "back"
    if context.rank == 0:
        (back / "steps").mkdir(parents=True)
        torch_ckpt.convert(context.folder / "steps/step-2", back / "steps/step-2", "dcp")
    again = begin(back, ours=False)
    assert again.manager.load() is True and again.step == 2
    assert again.train(2, saves=False) == wanted
    again.manager.close()


@case
def whole_steps_alone_count_and_go(context: Context) -> None:
    for mode in MODES:
        root = context.folder / mode
        job = begin(root, async_mode=mode, keep_latest_k=2)
        job.train(2)
        job.manager.maybe_wait_for_saving()
        if context.rank == 0:
            (root / "steps/step-3").mkdir()  # of a save that died
            (root / "steps/step-3/__0_0.distcp").write_bytes(b"half")
            (root / "steps/not-step-9").mkdir()
            (root / "steps/not-step-9/.metadata").write_bytes(b"")
        dist.barrier()
        again = begin(root, async_mode=mode, keep_latest_k=2)
        assert again.manager.load() is True and again.step == 2
        again.step = 3
        again.train(2)
        again.manager.maybe_wait_for_saving()
        again.manager.close()
        kept = ["LATEST", "not-step-9", "step-3", "step-4", "step-5"]
        assert names_in(root / "steps") == kept, mode
        job.manager.close()


def assets_of(folder: Path, names: list[str], rank: int) -> Path:
    """A directory of a model on the Hub that has two files."""
    if rank == 0:
        folder.mkdir(parents=True)
        files = {
            name: f"model-{1 + number % 2:05}-of-00002.safetensors"
            for number, name in enumerate(names)
        }
        index = {"metadata": {}, "weight_map": files}
        (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    dist.barrier()
    return folder


def hub_of(job: Job) -> dict[str, torch.Tensor]:
    stored = job.manager.sd_adapter.to_hf(job.model.state_dict())
    return {name: whole(tensor) for name, tensor in stored.items()}


@case
def the_last_step_is_a_model_of_the_hub(context: Context) -> None:
    export = {"last_save_in_hf": True, "last_save_model_only": True, "export_dtype": "bfloat16"}
    one = begin(context.folder / "one", **export)
    one.train(2, last=True)
    wanted = hub_of(one)
    one.manager.close()
    assets = assets_of(context.folder / "assets", [*wanted, "not.in.the.model"], context.rank)
    two = begin(context.folder / "two", assets=assets, **export)
    two.train(2, last=True)
    two.manager.close()
    for name, count in (("one", 1), ("two", 2)):
        step = context.folder / name / "steps/step-2"
        index = json.loads((step / "model.safetensors.index.json").read_text())["weight_map"]
        assert index.keys() == wanted.keys()
        assert set(index.values()) == {
            f"model-{n:05}-of-{count:05}.safetensors" for n in range(1, count + 1)
        }
        found = torch_ckpt.load(path=step, no_dist=True)
        assert_same(found, {name: tensor.bfloat16() for name, tensor in wanted.items()})
        assert not (step / "sharded").exists()
    # And a training begins with it.
    path = str((context.folder / "two/steps/step-2").resolve())
    fresh = begin(context.folder / "fresh", initial_load_path=path, initial_load_in_hf=True)
    with torch.no_grad():
        for parameter in fresh.model.parameters():
            parameter.fill_(9)
    assert fresh.manager.load() is True
    assert_same(hub_of(fresh), {name: tensor.bfloat16().float() for name, tensor in wanted.items()})
    fresh.manager.close()
    if context.rank == 0:
        broken = context.folder / "broken"
        shutil.copytree(path, broken)
        os.unlink(broken / "model-00002-of-00002.safetensors")
    broken_path = str((context.folder / "broken").resolve())
    fresh = begin(context.folder / "fresh2", initial_load_path=broken_path, initial_load_in_hf=True)
    raised(fresh.manager.load, "model-00002-of-00002.safetensors")
    fresh.manager.close()


@case
def it_begins_with_a_quantized_base(context: Context) -> None:
    """As torchtitan's DeepSeek, whose adapter asks for stock's reader of such bases. Each rank has
    rows that begin in the middle of blocks."""
    folder = context.folder / "base"
    job = begin(
        context.folder / "run",
        initial_load_path=str(folder.resolve()),
        initial_load_in_hf=True,
        initial_load_in_hf_quantized=True,
    )
    adapter = job.manager.sd_adapter
    adapter.get_hf_storage_reader = lambda path, _=False: StockQuantizedReader(
        path=path, target_dtype=torch.float32, block_size=128, thread_count=4
    )
    wanted: dict[str, torch.Tensor] = {}
    stored: dict[str, torch.Tensor] = {}
    for name, tensor in hub_of(job).items():
        wanted[name] = stored[name] = tensor
        if tensor.dim() == 2 and "embed" not in name:
            codes = tensor.to(torch.float8_e4m3fn)
            grid = torch.rand([-(-size // 128) for size in tensor.shape]) + 0.5
            stored |= {name: codes, f"{name}_scale_inv": grid}
            wanted[name] = scaled_bases.numbers(codes, grid, (128, 128))
    if context.rank == 0:
        scaled_bases.base(folder, {name: each.contiguous() for name, each in stored.items()})
    given = [wanted if context.rank == 0 else None]
    dist.broadcast_object_list(given)
    assert given[0] is not None and len(stored) > len(wanted)
    with torch.no_grad():
        for parameter in job.model.parameters():
            parameter.fill_(9)
    assert job.manager.load() is True
    assert_same(hub_of(job), given[0])
    job.manager.close()


@case
def the_last_step_alone_is_the_model(context: Context) -> None:
    job = begin(context.folder, export_dtype="bfloat16", async_mode="async")
    job.train(2, last=True)
    wanted = {name: whole(value).bfloat16() for name, value in job.model.state_dict().items()}
    job.manager.close()
    found = torch_ckpt.load(path=context.folder / "steps/step-2", no_dist=True)
    assert_same(found, wanted)
    path = str((context.folder / "steps/step-2").resolve())
    fresh = begin(context.folder / "fresh", initial_load_path=path)
    assert fresh.manager.load() is True
    assert fresh.step == 0
    state = fresh.model.state_dict()
    assert_same(
        {name: whole(value) for name, value in state.items()},
        {n: t.float() for n, t in wanted.items()},
    )
    fresh.manager.close()


@case
def one_rank_that_fails_is_heard(context: Context) -> None:
    class Broken:
        fails = True

        def state_dict(self) -> dict[str, Any]:
            if self.fails and dist.get_rank() == context.world - 1:
                raise ValueError("no state to be had")
            return {"value": 3}

        def load_state_dict(self, state: dict[str, Any]) -> None:
            if self.fails and dist.get_rank() == context.world - 1:
                raise ValueError("no use for it")

    last = f"rank {context.world - 1}"
    for mode in MODES:
        job = begin(context.folder / mode, async_mode=mode)
        job.train(1)
        job.manager.maybe_wait_for_saving()
        broken = job.manager.states["broken"] = Broken()

        def fails(job: Job = job) -> None:
            job.step += 1
            job.manager.save(job.step)
            job.manager.maybe_wait_for_saving()

        began = time.monotonic()
        # The rank itself hears its own error.
        raised(fails, "no state to be had", *(() if context.rank == context.world - 1 else (last,)))
        assert time.monotonic() - began < 15
        broken.fails = False
        job.train(1)  # the next save works
        job.manager.maybe_wait_for_saving()
        broken.fails = True
        job.manager.load_only = True
        del broken
        job.manager.close()
    job = begin(context.folder / "disabled")
    job.manager.states["broken"] = Broken()
    raised(job.manager.load, "no ")
    model = job.manager.states["model"]
    state_of = model.state_dict
    # After the collectives in it, which are torchtitan's.
    if context.rank == context.world - 1:
        model.state_dict = lambda: len(state_of()) // 0
    raised(lambda: job.manager.save(7), "zero")
    raised(lambda: job.manager.save(7, last_step=True), "zero")
    if context.rank == 0:
        (context.folder / "disabled" / "steps/step-0").mkdir()
    dist.barrier()
    raised(lambda: job.manager.load(0), "zero")
    job.manager.close()


@case
def a_step_that_lost_a_file_is_an_error(context: Context) -> None:
    job = begin(context.folder)
    job.train(2)
    job.manager.close()
    if context.rank == 0:
        lost = sorted((context.folder / "steps/step-2").glob("*.safetensors"))[0]
        lost.unlink()
    again = begin(context.folder)
    raised(again.manager.load, "step-2", ".safetensors")
    assert again.manager.load(1) is True
    again.manager.close()


@case
def a_seed_is_a_step_0(context: Context) -> None:
    job = begin(context.folder, create_seed_checkpoint=True)
    assert job.manager.save(0, last_step=True) is True
    wanted = tensors_of(job)
    job.manager.close()
    again = begin(context.folder)
    with torch.no_grad():
        for parameter in again.model.parameters():
            parameter.fill_(9)
    assert again.manager.load() is True and again.step == 0
    model = job.model.state_dict().keys()
    found = {name: whole(value) for name, value in again.model.state_dict().items()}
    assert_same(found, {name: wanted[name] for name in model})
    again.manager.close()


@case
def a_save_elsewhere(context: Context) -> None:
    """By a program's own call: no step of the folder, so nothing of that goes."""
    for mode in MODES:
        job = begin(context.folder / mode, async_mode=mode, keep_latest_k=2)
        job.train(2)
        job.manager.maybe_wait_for_saving()
        place = context.folder / mode / "mine"
        state = {"w": torch.arange(3.0), "step": 7}
        saved = job.manager.dcp_save(state, str(place), job.manager.async_mode)
        if saved is not None:
            saved.result()
        found = torch_ckpt.load(path=place, no_dist=True)
        assert torch.equal(found["w"], state["w"]) and found["step"] == 7
        assert names_in(context.folder / mode / "steps") == ["LATEST", "step-1", "step-2"]
        job.manager.close()


@case
def what_is_not_there_is_said(context: Context) -> None:
    job = begin(context.folder / "none")
    assert job.manager.load() is False
    raised(lambda: job.manager.load(4), "load_step=4")
    job.train(1)
    raised(lambda: job.manager.load(4), "load_step=4")
    job.manager.close()
    raised(
        lambda: begin(context.folder, folder="gs://bucket/steps"), "gs://bucket/steps", "mounted"
    )
    off = begin(context.folder / "off", enable=False)
    assert off.manager.save(1) is False and off.manager.load() is False
    off.manager.close()
    assert not (context.folder / "off").exists()


@case
def another_manager_is_not_replaced(context: Context) -> None:
    from dataclasses import dataclass

    from torchtitan.components.checkpointer.dcp import CheckpointManager as Titans

    from torch_ckpt.integrations.torchtitan import CheckpointManager, use_torch_ckpt

    class Mine(Titans):
        @dataclass(kw_only=True, slots=True)
        class Config(Titans.Config):
            extra: int = 3

    raised(lambda: use_torch_ckpt(Mine.Config()), "Mine.Config")
    try:
        use_torch_ckpt(Mine.Config())
    except UnsupportedError:
        pass
    config = use_torch_ckpt(use_torch_ckpt(Titans.Config(interval=7, keep_latest_k=3)))
    assert type(config) is CheckpointManager.Config
    assert (config.interval, config.keep_latest_k) == (7, 3)
    assert all(each is True for each in everywhere(config._owner is CheckpointManager))
