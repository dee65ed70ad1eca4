"""One rank of a training run under a Checkpointer, where one rank dies, or is stopped, on its way.

python training_rank.py FOLDER JOB PHASE VICTIM kill|stop
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import dying
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import torch_ckpt.dcp.write.writer
import torch_ckpt.runs.directory
from torch_ckpt import Checkpointer
from torch_ckpt.native import operators
from torch_ckpt.training import checkpointer as of_training
from torch_ckpt.training import models, step_state

# Where a rank is when the function is called.
PHASES: dict[str, tuple[Any, str]] = {
    "began": (torch_ckpt.runs.directory, "_checked_step"),
    "said": (step_state.StepState, "state_dict"),
    "staged": (operators, "stage"),
    "written": (operators, "write"),
    "committed": (torch_ckpt.dcp.write.writer.HuggingFaceStorageWriter, "finish"),
    "asked": (Checkpointer, "_checked"),
    "named": (Checkpointer, "_named"),
    "opened": (of_training, "StepPlanner"),
    "looked": (step_state.Wanted, "look"),
    "read": (operators, "read"),
    "given": (step_state.Wanted, "give"),
    "planned": (models._ModelPlanner, "say"),
}


def whole(value: float) -> nn.Module:
    model = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(value)
    return model


def main(folder: str, job: str, phase: str, victim: str, how: str) -> None:
    dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    model = fully_shard(whole(1.0), mesh=mesh)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    model(torch.ones(2, 64)).sum().backward()
    optimizer.step()
    root, hub = Path(folder) / "run", Path(folder) / "hub"
    torch_ckpt.save_model(whole(4.0), hub)
    checkpointer = Checkpointer(root, model, optimizer, background=job == "save_beside")
    checkpointer.save(1).result()
    dist.barrier()
    if how == "stop":
        dying.wait_less()
    if dist.get_rank() == int(victim):
        dying.arm(*PHASES[phase], how)
    jobs = {
        "save": lambda: checkpointer.save(2),
        "save_beside": lambda: checkpointer.save(2).result(),
        "load": checkpointer.load,
        "load_model": lambda: torch_ckpt.load_model(model, hub),
    }
    dying.run(jobs[job], Path(folder), int(victim))


if __name__ == "__main__":
    main(*sys.argv[1:])
