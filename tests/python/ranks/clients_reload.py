"""What clients.py has saved, in other processes and with another number of them."""

from __future__ import annotations

import pickle

import torch
from ranks.clients import accelerator, prepared, run_trainer
from ranks.frameworks import same, state_of
from ranks.run import Context, cases
from torch.distributed.checkpoint.state_dict import StateDictOptions

import torch_ckpt

CASES, case = cases()


@case
def accelerate(context: Context) -> None:
    with torch_ckpt.patch_torch(file_system=True), accelerator(2) as made:
        built = prepared(made, 2, 2)
        made.load_state(str(context.shared / "accelerate"))
        loaded = state_of(built, StateDictOptions(full_state_dict=True, cpu_offload=True))
    if context.rank == 0:
        same(loaded, torch.load(context.shared / "accelerate.pt"))


@case
def trainer(context: Context) -> None:
    if context.world != 2:
        return  # each rank would be given other batches
    whole = pickle.loads((context.shared / f"trainer-{context.rank}.pkl").read_bytes())
    with torch_ckpt.patch_torch(file_system=True):
        assert run_trainer(context.shared / "trainer", 2, resume=True) == whole
