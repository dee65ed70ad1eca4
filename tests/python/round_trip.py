"""Save and load a small state through torch_ckpt, in a process of its own.

Run by `./dev asan`, `./dev tsan` and by the test of an installed wheel, where
pytest is not there or not wanted. Exit code 0 means that all came back.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

import torch
import torch.distributed.checkpoint as dcp

import torch_ckpt


def state() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    return {
        "matrix": torch.randn(300, 200, generator=generator),
        "half": torch.randn(5000, generator=generator).to(torch.bfloat16),
        "transposed": torch.arange(600, dtype=torch.int32).reshape(20, 30).t(),
        "scalar": torch.tensor(7, dtype=torch.int64),
        "empty": torch.empty(0, 4),
        "flag": torch.tensor([True, False, True]),
    }


def main() -> int:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "checkpoint"
        saved = state()
        dcp.save(
            saved,
            storage_writer=torch_ckpt.HuggingFaceStorageWriter(path=str(path)),
            no_dist=True,
        )
        loaded = {name: torch.zeros_like(tensor) for name, tensor in saved.items()}
        dcp.load(
            loaded,
            storage_reader=torch_ckpt.HuggingFaceStorageReader(path=str(path)),
            no_dist=True,
        )
        wrong = [name for name in saved if not torch.equal(saved[name], loaded[name])]
    print(f"torch_ckpt {torch_ckpt.__version__} from {Path(torch_ckpt.__file__).parent}")
    print(f"round trip: {len(saved)} tensors, {len(wrong)} wrong {wrong}")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
