"""python part_rank.py RANK PATH [same]: one rank of two saves its part, without the other."""

from __future__ import annotations

import sys

import torch
import torch.distributed.checkpoint as dcp

from torch_ckpt import HuggingFaceStorageWriter

rank, path = int(sys.argv[1]), sys.argv[2]
writer = HuggingFaceStorageWriter(path, save_distributed=True, world_size=2)
planner = dcp.DefaultSavePlanner()
name = "w" if "same" in sys.argv else f"w{rank}"
planner.set_up_planner({name: torch.ones(4)}, None, rank == 0)
writer.set_up_storage_writer(rank == 0, rank=rank, use_collectives=False)
plan = writer.prepare_local_plan(planner.create_local_plan())
plans, metadata = planner.create_global_plan([plan])
plan = planner.finish_plan(writer.prepare_global_plan(plans)[0])
results = writer.write_data(plan, planner).wait()
writer.finish(metadata=metadata, results=[results])
