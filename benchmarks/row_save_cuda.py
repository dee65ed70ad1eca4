"""Row: durable saves of tensors on a CUDA device by one process."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from benchmarks import rivals, states
from benchmarks.contender import Contender, Context, Row, row
from benchmarks.row_save import (
    read_file_system,
    save_with_file_system,
    save_with_our_save,
    save_with_our_writer,
    save_with_stock_hf,
    saver,
)

NO_DEVICE = "no CUDA device"


# As it is: machines with such devices have so much memory that touching it takes longer than saves.
@row("save_cuda", ("as-is",))
def save_cuda(context: Context) -> Row:
    """The weights of a 1B Llama in bfloat16, on the first CUDA device."""
    shapes = states.llama_1b(context.scale)
    size = states.total_bytes(shapes, torch.bfloat16)
    skip = "" if torch.cuda.is_available() else NO_DEVICE
    state: states.State = {}
    sample: states.State = {}
    if not skip:
        on_host = states.random_state(shapes, torch.bfloat16)
        sample = states.sample(on_host)
        state = {name: tensor.to("cuda") for name, tensor in on_host.items()}
        del on_host
        torch.cuda.synchronize()

    def read_hf(path: Path) -> states.State:
        return rivals.read_safetensors(path, sample)

    def add(name: str, save_to: Callable[[states.State, Path], None], **options: Any) -> Contender:
        options = {"role": "rival", "read": read_hf, "planner": rivals.STOCK_PLANNER, **options}
        options["skip"] = skip or options.get("skip", "")
        return saver(
            context, name, save_to=lambda path: save_to(state, path), sample=sample, **options
        )

    return Row(
        title="Durable save from CUDA tensors, Llama 1B bfloat16, fresh files",
        bytes=size,
        tensors=len(shapes),
        contenders=[
            add("DCP HF writer", save_with_stock_hf),
            *(
                add(
                    f"DCP FileSystemWriter, {threads} thread{'s' if threads > 1 else ''}",
                    lambda held, path, threads=threads: save_with_file_system(held, path, threads),
                    read=lambda path: read_file_system(path, sample),
                )
                for threads in (2, 1)
            ),
            add(
                "ours, writer for dcp.save",
                save_with_our_writer,
                role="ours",
                skip=rivals.why_not_ours("HuggingFaceStorageWriter"),
            ),
            add(
                "ours, save",
                save_with_our_save,
                role="ours",
                planner=rivals.OUR_PLANNER,
                skip=rivals.why_not_ours("save"),
            ),
            rivals.write_limit(context, rivals.FRESH, "direct", size),
            rivals.write_limit(context, "buffered write and fdatasync", "buffered", size),
        ],
        limit=rivals.FRESH,
    )
