"""Saves by several ranks that stock of torch 2.13.0 loses data in: ours first, then stock."""

from __future__ import annotations

import json
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from ranks.layouts import Layout, check, local_of, state
from ranks.run import Context, cases, everywhere
from ranks.saving import final_tensors, plain
from safetensors.torch import load_file
from sample_states import FAILED, STOCK_213, assert_same, blank, listing, load_stock
from stock_damage import FINAL, SHARD, listed
from torch.distributed.tensor import Shard

from torch_ckpt import HuggingFaceStorageReader, HuggingFaceStorageWriter

CASES, case = cases()


class InTurn(dcp.HuggingFaceStorageWriter):
    """Stock, with the ranks writing one after the other, so that it is known whose file is left."""

    def write_data(self, plan: Any, planner: Any) -> Any:
        self.names = [item.index.fqn for item in plan.items]
        for rank in range(dist.get_world_size()):
            if rank == dist.get_rank():
                future = super().write_data(plan, planner)
            dist.barrier()
        return future


@case
def plain_tensors_on_all_ranks(context: Context) -> None:
    """Stock divides them among the ranks, and every rank writes the same file."""
    ours, stock = context.folder / "ours", context.folder / "stock"
    dcp.save(plain(), storage_writer=HuggingFaceStorageWriter(ours))
    if context.rank == 0:
        assert_same(final_tensors(ours), plain())
    if not STOCK_213:
        return
    writer = InTurn(str(stock))
    dcp.save(plain(), storage_writer=writer)  # returns normally
    names = everywhere(writer.names)
    assert sorted(sum(names, [])) == sorted(plain()) and all(names), names
    kept = load_file(stock / FINAL)
    assert_same(kept, {name: plain()[name] for name in names[-1]})
    index = json.loads((stock / "model.safetensors.index.json").read_text())
    assert index["weight_map"] == dict.fromkeys(plain(), FINAL)
    try:
        load_stock(stock, plain())
    except FAILED as error:
        assert "Missing key" in str(error), error
    else:
        raise AssertionError("stock loaded what it has lost")


@case
def other_names_on_every_rank(context: Context) -> None:
    ours, stock = context.folder / "ours", context.folder / "stock"
    values = {f"w{rank}": torch.full((3,), float(rank)) for rank in range(context.world)}
    name = f"w{context.rank}"
    dcp.save({name: values[name]}, storage_writer=HuggingFaceStorageWriter(ours))
    if context.rank == 0:
        assert_same(final_tensors(ours), values)
    if STOCK_213:
        dcp.save({name: values[name]}, storage_writer=InTurn(str(stock)))
        last = f"w{context.world - 1}"
        assert_same(load_file(stock / FINAL), {last: values[last]})


@case
def shards_without_collectives(context: Context) -> None:
    """Every rank of stock takes itself for the first and writes the first shard file."""
    ours, stock = context.folder / "ours", context.folder / "stock"
    table = {"w": Layout((2 * context.world, 3), (context.world,), (Shard(0),))}
    writer = HuggingFaceStorageWriter(ours, save_distributed=True)
    dcp.save(state(table), storage_writer=writer, use_collectives=False)
    target = state(table, blank=True)
    dcp.load(target, storage_reader=HuggingFaceStorageReader(ours))
    check(target, table)
    if not STOCK_213:
        return
    stock_writer = InTurn(str(stock), save_distributed=True)
    dcp.save(state(table), storage_writer=stock_writer, use_collectives=False)
    dist.barrier()
    assert listing(stock) == [SHARD]
    parts = everywhere(local_of("w", table["w"]))
    assert_same(load_file(stock / SHARD), {"w": parts[-1]})
    # The load returns normally; the other ranks keep what they had.
    target = state(table, blank=True)
    dcp.load(target, storage_reader=dcp.HuggingFaceStorageReader(str(stock)))
    if context.rank == context.world - 1:
        check(target, table)
    else:
        assert_same({"w": target["w"].to_local()}, {"w": torch.full((2, 3), -77.0)})


@case
def fewer_ranks_save_again(context: Context) -> None:
    """All ranks save, then the first one alone; stock brings the rows of the others back."""
    table = {"w": Layout((2 * context.world, 3), (context.world,), (Shard(0),))}
    new = {"w": torch.full((2 * context.world, 3), 9.0)}
    kinds = [(HuggingFaceStorageWriter, HuggingFaceStorageReader)]
    if STOCK_213:
        kinds.append((dcp.HuggingFaceStorageWriter, dcp.HuggingFaceStorageReader))
    for number, (make, reader) in enumerate(kinds):
        path = str(context.folder / str(number))
        dcp.save(state(table), storage_writer=make(path, save_distributed=True))
        last = everywhere(local_of("w", table["w"]))[-1]
        if context.rank == 0:
            dcp.save(new, storage_writer=make(path, save_distributed=True), no_dist=True)
            target = blank(new)
            with listed():
                dcp.load(target, storage_reader=reader(path), no_dist=True)
            wanted = new["w"].clone()
            if number:
                wanted[-2:] = last
            assert_same(target, {"w": wanted})
        dist.barrier()
