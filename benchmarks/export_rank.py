"""One rank of an export: from its part of a state in memory to a final Hugging Face directory.

``python -m benchmarks.export_rank`` is started once for each rank, since ranks are processes. The
ranks make their parts, export once between two barriers, and rank 0 prints a line of JSON: how long
the slowest rank took, the CPU of all, and the most memory that all of them took beside the state.
"""

from __future__ import annotations

import argparse
import importlib
import resource
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from unittest import mock

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from safetensors.torch import save_file
from torch.distributed.checkpoint._consolidate_hf_safetensors import (
    consolidate_safetensors_files_on_every_rank,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard

from benchmarks import ranks, rivals, states
from benchmarks.program import LimitsProgram, MemoryWatcher
from benchmarks.ranks import sync_everything

DTYPE = torch.bfloat16
Part = dict[str, DTensor]
Export = Callable[[Part, Path], None]


def column_shapes(run: int, scale: float, world: int) -> states.Shapes:
    """16 matrices of 64 MiB whose column shards have rows of ``run`` bytes."""
    width = world * run // DTYPE.itemsize
    height = states.scaled((64 << 20) // (world * run), scale)
    return {f"model.layers.{i}.weight": (height, width) for i in range(16)}


def shapes_of(state: str, scale: float, world: int) -> states.Shapes:
    """The state that a word stands for: "llama", "experts", or the bytes of a row of columns."""
    if state == "llama":
        return states.llama_1b(scale)
    if state == "experts":
        return states.mixture_of_experts(scale)
    return column_shapes(int(state), scale, world)


def part_of(shapes: Mapping[str, tuple[int, ...]], dim: int) -> Part:
    """This rank's part of every tensor, cut along ``dim``, or along the last one it has."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    part: Part = {}
    for name, tensor in states.random_tensors(shapes, DTYPE):
        axis = min(dim, tensor.dim() - 1)
        mine = Shard.local_shard_size_and_offset(
            tensor.shape[axis], dist.get_world_size(), dist.get_rank()
        )
        local = tensor.narrow(axis, mine[1] if mine[0] else 0, mine[0])
        part[name] = DTensor.from_local(
            local.clone(memory_format=torch.contiguous_format),
            mesh,
            [Shard(axis)],
            shape=tensor.shape,
            stride=tensor.stride(),
        )
    return part


def with_stock(part: Part, path: Path) -> None:
    """Shards, and a consolidation by all ranks; durable by one sync of the result."""
    shards = path.with_name("shards")
    writer = dcp.HuggingFaceStorageWriter(str(shards), save_distributed=True)
    dcp.save(part, storage_writer=writer)
    if dist.get_rank() == 0:
        path.mkdir()
    dist.barrier()
    world = dist.get_world_size()
    # A file for each rank, since ranks share files and not bytes.
    mapping = {name: 1 + number % world for number, name in enumerate(part)}
    consolidate_safetensors_files_on_every_rank(str(shards), str(path), mapping, num_threads=2)
    sync_everything(path)


def with_torch_checkpointing(part: Part, path: Path) -> None:
    """Its shards, saved without its other process, and its consolidation, which makes a file for
    each rank; durable by one sync of the result."""
    import torch_checkpointing as package
    from torch_checkpointing.checkpoint_layout import LayoutInfo, SafetensorsSerialization
    from torch_checkpointing.config import SyncCheckpointSaverConfig
    from torch_checkpointing.default_resharder import DefaultResharder
    from torch_checkpointing.hf.consolidation import consolidate_hf_safetensors_checkpoint
    from torch_checkpointing.metadata_manager import DefaultMetadataManager
    from torch_checkpointing.storage.filesystem import LocalFileSystemStorageConfig

    def gather(
        _: DefaultMetadataManager, data: object, process_group: dist.ProcessGroup | None = None
    ) -> dict[int, object]:
        everyone: list[object] = [None] * dist.get_world_size(process_group)
        dist.all_gather_object(everyone, data, group=process_group)
        return dict(enumerate(everyone))

    # It gathers its metadata through CUDA tensors, whatever the group; here they go through Gloo.
    DefaultMetadataManager._all_gather_pickled_data = gather

    shards = path.with_name("shards")
    # Its direct writes are not aligned, and file systems refuse them.
    storage = LocalFileSystemStorageConfig(use_direct_io=False)
    layout = LayoutInfo("model_{rank}.safetensors", SafetensorsSerialization())
    # The metadata that its consolidation goes by is written for items with a resharder only.
    item = package.ItemSpec(layout=layout, resharder=DefaultResharder())
    manager = package.CheckpointManager(
        package.CheckpointManager.Config(
            items={"model": item},
            save=SyncCheckpointSaverConfig(),
            storage_config=storage,
        )
    )
    manager.save(str(shards), {"model": part})
    manager.close()
    if dist.get_rank() == 0:
        path.mkdir()
    dist.barrier()
    consolidate_hf_safetensors_checkpoint(str(shards), output_dir=str(path), storage_config=storage)
    sync_everything(path)


def with_ours(part: Part, path: Path) -> None:
    """Straight into the final files."""
    rivals.ours("save")(part, checkpoint_id=str(path), layout="final")


def without_export(part: Part, path: Path) -> None:
    """Our sharded save alone, for comparison: no export at all."""
    rivals.ours("save")(part, checkpoint_id=str(path))


def with_stock_directly(part: Part, path: Path) -> None:
    """Stock's writer of final files; for one rank, which has all."""
    state = {name: tensor.to_local() for name, tensor in part.items()}
    dcp.save(state, storage_writer=dcp.HuggingFaceStorageWriter(str(path)))
    sync_everything(path)


def with_gather(part: Part, path: Path) -> None:
    """What a full state dict and save_pretrained do: all ranks gather each tensor, rank 0 keeps
    them and writes one file."""
    state: states.State = {}
    for name, tensor in part.items():
        whole = tensor.full_tensor()
        if dist.get_rank() == 0:
            state[name] = whole
    if dist.get_rank() == 0:
        path.mkdir()
        save_file(state, path / "model.safetensors", metadata={"format": "pt"})
    sync_everything(path)


def with_ours_on_own_nodes(part: Part, path: Path) -> None:
    """Straight into final files by ranks that are told to be on nodes of their own, so that no
    ring can take their columns: the coordinator puts them together, alone."""
    rings = importlib.import_module("torch_ckpt.dcp.plan.rings")
    node = rings.Node("boot", str(dist.get_rank()), 0)
    with mock.patch("torch_ckpt.dcp.write.directory_save.this_node", return_value=node):
        rivals.ours("save")(part, checkpoint_id=str(path), layout="final")


OURS = "ours, direct"
STOCK_DIRECTLY = "DCP HF writer, direct"
NODES = "nodes of their own"
EXPORTS: Mapping[str, Export] = {
    STOCK_DIRECTLY: with_stock_directly,
    "gather, save_file and fsync": with_gather,
    "DCP HF shards, then consolidate": with_stock,
    "torch_checkpointing, then consolidate": with_torch_checkpointing,
    OURS: with_ours,
    f"ours, direct, {NODES}": with_ours_on_own_nodes,
    "ours, shards alone": without_export,
}


def on_own_nodes(contender: str) -> bool:
    """Whether the ranks of a contender are told to be on nodes of their own."""
    return NODES in contender


def import_packages(contender: str) -> None:
    """A job imports what it exports with once, so that is not timed."""
    if contender.startswith("ours"):
        rivals.ours("save")
    elif contender.startswith("torch_checkpointing"):
        importlib.import_module("torch_checkpointing.hf.consolidation")


def main(arguments: list[str]) -> int:
    """Exports as the arguments say."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.export_rank")
    parser.add_argument("contender", choices=EXPORTS)
    parser.add_argument("--state", required=True)
    parser.add_argument("--dim", type=int, required=True)
    parser.add_argument("--scale", type=float, required=True)
    parser.add_argument("--path", type=Path, required=True)
    parser.add_argument("--program", type=Path, required=True)
    options = parser.parse_args(arguments)
    rivals.quiet()
    torch.set_num_threads(1)
    import_packages(options.contender)
    dist.init_process_group("gloo")
    part = part_of(shapes_of(options.state, options.scale, dist.get_world_size()), options.dim)
    with MemoryWatcher(LimitsProgram(options.program)) as watcher:
        dist.barrier()
        before = watcher.begin()
        usage = resource.getrusage(resource.RUSAGE_SELF)
        start = time.perf_counter()
        EXPORTS[options.contender](part, options.path)
        dist.barrier()
        seconds = time.perf_counter() - start
        ended = resource.getrusage(resource.RUSAGE_SELF)
        extra = watcher.end() - before
    cpu = ended.ru_utime + ended.ru_stime - usage.ru_utime - usage.ru_stime
    sums = torch.tensor([cpu, float(extra)], dtype=torch.float64)
    dist.all_reduce(sums)
    ranks.say({"seconds": seconds, "cpu": sums[0].item(), "extra_memory": int(sums[1].item())})
    return 0


if __name__ == "__main__":
    ranks.leave(main(sys.argv[1:]))
