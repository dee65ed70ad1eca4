"""What people do with stock's functions: read everything, then write or compare it.

Each is called in a process of its own, and imports what it needs.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any


def _loaded(path: str) -> dict[str, Any]:
    """A directory of .distcp files, or of one safetensors file, with all of its tensors."""
    if not (Path(path) / ".metadata").exists():
        from safetensors.torch import load_file

        return load_file(Path(path) / "model.safetensors")
    from torch.distributed.checkpoint import FileSystemReader
    from torch.distributed.checkpoint.default_planner import _EmptyStateDictLoadPlanner
    from torch.distributed.checkpoint.state_dict_loader import _load_state_dict

    state: dict[str, Any] = {}
    # As format_utils.dcp_to_torch_save and accelerate's merge.
    _load_state_dict(
        state,
        storage_reader=FileSystemReader(path),
        planner=_EmptyStateDictLoadPlanner(),
        no_dist=True,
    )
    return state


def load_cast_and_save(source: str, target: str, dtype: str) -> None:
    """To one file of safetensors in ``target``, durable."""
    import torch
    from safetensors.torch import save_file

    from benchmarks import files

    wanted = getattr(torch, dtype)
    state = {name: tensor.to(wanted) for name, tensor in _loaded(source).items()}
    Path(target).mkdir()
    save_file(state, Path(target) / "model.safetensors", metadata={"format": "pt"})
    files.make_durable(Path(target))


def dcp_to_torch(source: str, target: str) -> None:
    """torch.distributed.checkpoint.format_utils, durable."""
    from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

    from benchmarks import files

    Path(target).mkdir()
    dcp_to_torch_save(source, str(Path(target) / "model.pt"))
    files.make_durable(Path(target))


def merge_weights(source: str, target: str) -> None:
    """accelerate merge-weights, durable."""
    from accelerate.utils import merge_fsdp_weights

    from benchmarks import files

    merge_fsdp_weights(source, target)
    files.make_durable(Path(target))


def compare(left: str, right: str) -> None:
    """Loads both, and compares them tensor by tensor."""
    import torch

    a, b = _loaded(left), _loaded(right)
    if a.keys() != b.keys() or not all(torch.equal(a[name], b[name]) for name in a):
        raise SystemExit("different")


def compare_values(left: str, right: str) -> None:
    """Loads both, and says of each tensor how many values differ and by how much at most."""
    a, b = _loaded(left), _loaded(right)
    said = {}
    for name in a:
        differing = int((a[name] != b[name]).sum())
        said[name] = differing, float((a[name].float() - b[name].float()).abs().max())
    if not all(number for number, _ in said.values()):
        raise SystemExit("equal")


def list_keys(path: str) -> None:
    """Names, dtypes and shapes of all tensors, by safetensors."""
    from safetensors import safe_open

    found = 0
    for file in Path(path).glob("*.safetensors"):
        with safe_open(file, "np") as opened:
            for name in opened.keys():  # noqa: SIM118
                part = opened.get_slice(name)
                found += bool(part.get_dtype()) + 0 * len(part.get_shape())
    if not found:
        raise SystemExit("nothing there")
