"""A rank of the transformers Trainer: "killed" in its second save, "resumed" from
what is there, or "whole"."""

from __future__ import annotations

import os
import pickle
import signal
import sys
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from ranks.clients import run_trainer

import torch_ckpt


def main() -> None:
    what, path, result = sys.argv[1], Path(sys.argv[2]), Path(sys.argv[3])
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    write_data = torch_ckpt.HuggingFaceStorageWriter.write_data

    def killed(self: Any, *arguments: Any) -> Any:
        if rank == 1 and str(self.path).endswith("checkpoint-6/optimizer_0"):
            os.kill(os.getpid(), signal.SIGKILL)
        return write_data(self, *arguments)

    with torch_ckpt.patch_torch(file_system=True):
        if what == "killed":
            with mock.patch.object(torch_ckpt.HuggingFaceStorageWriter, "write_data", killed):
                run_trainer(path, 1)
        resumes = what == "resumed"
        trained = run_trainer(path, 2 if resumes else 1, resume=resumes)
    result.with_suffix(f".{rank}").write_bytes(pickle.dumps(trained))


try:
    main()
except BaseException as error:
    print(f"{type(error).__name__}: {error}", flush=True)
    os._exit(1)
sys.stdout.flush()
os._exit(0)  # without finalization, see ranks/run.py
