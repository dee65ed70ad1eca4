"""Makes the pictures of docs/pictures, which guide.md shows, from saves by four ranks.

    python docs/make_pictures.py

Needs torch and matplotlib. Run it when the commands draw something else than before; what is in
the pictures follows from the run, so no test compares them.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

import torch_ckpt

PICTURES = Path(__file__).with_name("pictures")
RANKS = 4
WEIGHT = "model.layers.0.mlp.weight"


def save(rank: int, folder: str) -> None:
    """What one rank does: two saves in the background, as a training run makes them."""
    store = dist.FileStore(os.path.join(folder, "store"), RANKS)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=RANKS)
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    state = {WEIGHT: distribute_tensor(torch.randn(4096, 5504), mesh, [Shard(0), Shard(1)])}
    for layer in range(1, 6):
        whole = torch.randn(2048, 4096)
        state[f"model.layers.{layer}.mlp.weight"] = distribute_tensor(
            whole, mesh, [Shard(0), Replicate()]
        )
    for step in (100, 200):
        torch_ckpt.async_save(
            state, f"{folder}/step-{step}", log_path=f"{folder}/saves.jsonl"
        ).result()
    dist.barrier()
    sys.stdout.flush()
    os._exit(0)  # a Gloo thread may end the interpreter's finalization with an abort


def main() -> None:
    PICTURES.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="run-") as folder:
        mp.spawn(save, (folder,), nprocs=RANKS)
        command = [sys.executable, "-m", "torch_ckpt"]
        checkpoint, log = f"{folder}/step-200", f"{folder}/saves.jsonl"
        layout = ["layout", checkpoint, WEIGHT, "--svg", str(PICTURES / "layout.svg")]
        timeline = ["timeline", log, "--png", str(PICTURES / "timeline.png")]
        for arguments in (layout, timeline):
            subprocess.run([*command, *arguments], check=True)


if __name__ == "__main__":
    main()
