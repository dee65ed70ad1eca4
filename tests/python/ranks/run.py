"""python -m ranks.run MODULES FOLDER RESULTS: one rank of a launch of the cases of some modules.

MODULES are names with commas between them. A module's CASES are functions of a Context. Every case
starts after a barrier; what any rank raised is its result, by the name MODULE-CASE.
"""

from __future__ import annotations

import datetime
import importlib
import json
import os
import sys
import traceback
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import megatron_source
import torch
import torch.distributed as dist

megatron_source.use()
# A case that leaves ranks waiting for each other fails after this.
_TIMEOUT = datetime.timedelta(seconds=int(os.environ.get("RANKS_TIMEOUT", "20")))


@dataclass(slots=True)
class Context:
    """folder: the case's own; shared: that of all cases and launches."""

    rank: int
    world: int
    folder: Path
    shared: Path


Case = Callable[[Context], None]


def cases() -> tuple[dict[str, Case], Callable[[Case], Case]]:
    """A table of cases, and the decorator that enters one."""
    table: dict[str, Case] = {}

    def case(function: Case) -> Case:
        table[function.__name__] = function
        return function

    return table, case


def everywhere(value: Any) -> list[Any]:
    """`value` of all ranks."""
    values: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


def raised(call: Callable[[], Any], *texts: str) -> BaseException:
    """What `call` raises on this rank; it must say all `texts`, and every rank must raise."""
    error: BaseException | None = None
    try:
        call()
    except BaseException as caught:
        error = caught
    said = everywhere(None if error is None else f"{type(error).__name__}: {error}")
    assert all(said), f"did not raise on every rank: {said}"
    assert error is not None
    for text in texts:
        assert text in str(error), f"{text!r} is not in: {error}"
    return error


def stock_load_says(why: str) -> str:
    """What `dcp.load` says of a checkpoint that stock's reader refuses: before torch 2.12, no why."""
    return "metadata is None" if torch.__version__ < "2.12" else why


def main() -> int:
    modules, folder, results = sys.argv[1:]
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore")
    table: dict[str, Case] = {
        f"{module}-{name}": function
        for module in modules.split(",")
        for name, function in importlib.import_module(f"ranks.{module}").CASES.items()
    }
    dist.init_process_group("gloo", timeout=_TIMEOUT)
    outcome: dict[str, str] = {}
    only = os.environ.get("ONLY_CASE")
    for name, function in table.items():
        if only and only not in name:
            continue
        own = Path(folder) / f"{name}-{world}"
        if rank == 0:
            own.mkdir(parents=True, exist_ok=True)
        torch.manual_seed(0)
        dist.barrier()
        failure = None
        try:
            function(Context(rank, world, own, Path(folder)))
        except BaseException:
            failure = f"rank {rank}:\n{traceback.format_exc()}"
            # The other ranks may now wait until the time-out; then this is all that is left.
            Path(f"{results}.{name}.{rank}").write_text(failure)
        failures = [text for text in everywhere(failure) if text]
        outcome[name] = "\n".join(failures) or "ok"
        if rank == 0:
            Path(results).write_text(json.dumps(outcome))
    dist.barrier()
    dist.destroy_process_group()
    return 0


if __name__ == "__main__":
    status = main()
    sys.stdout.flush()
    sys.stderr.flush()
    # Without finalization: a Gloo thread of torch 2.13 that drops the last work object while the
    # interpreter goes away ends the process with "terminate called without an active exception".
    os._exit(status)
