"""Consolidation by all ranks together."""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any

import torch.distributed as dist

from torch_ckpt.export.extras import ExtraFiles
from torch_ckpt.export.merge import (
    OUTPUT_FIELDS,
    MergeOptions,
    MergeRequest,
    consolidate_safetensors_files,
    make_merge,
    merge,
    tell_of_merge,
)
from torch_ckpt.native import core
from torch_ckpt.native.jobs import Job, in_thread
from torch_ckpt.native.progress import Progress
from torch_ckpt.native.sessions import end_session, warn_of
from torch_ckpt.ranks import Ranks

if TYPE_CHECKING:
    from typing_extensions import Unpack  # typing has it from Python 3.11 on

__all__ = [
    "consolidate_safetensors_files",
    "consolidate_safetensors_files_on_every_rank",
    "merge_on_every_rank",
]


def consolidate_safetensors_files_on_every_rank(
    input_dir: str | os.PathLike[str],
    output_dir: str | os.PathLike[str],
    fqn_to_index_mapping: Mapping[str, int] | str | os.PathLike[str] | None = None,
    num_threads: int = 1,
    process_group: dist.ProcessGroup | None = None,
    *,
    progress: Progress | None = None,
    background: bool = False,
    timeout: float | None = None,
    **options: Unpack[MergeOptions],
) -> MergeFuture | None:
    """`consolidate_safetensors_files` by all ranks of `process_group` together: a collective call.

    Work is divided by bytes, so one output file is written by all ranks. Every rank must see both
    directories. What decides over the output is as the group's rank 0 says. An error on one
    rank is raised on all, and leaves no output. `progress` is called on rank 0, on another thread,
    with the bytes of all ranks.

    The ranks talk through connections of their own, made once for each process group and timeout,
    so that a long merge meets no timeout of training, nor any collective. A rank that is gone is
    noticed when its connection closes, or after `timeout` seconds (None: 600, or the process
    group's own timeout where that is longer): a CheckpointError, which names it where the store of
    the process group still answers. background: returns a future at once,
    and the work goes on beside training, in a thread; it is done before the interpreter ends.
    The future's `cancel()`, on any rank, ends it on all: they raise CancelledError, and no output
    is left.
    """

    def make() -> tuple[MergeRequest, ExtraFiles]:
        return make_merge(input_dir, output_dir, fqn_to_index_mapping, num_threads, **options)

    future = MergeFuture()
    cancel = future._wanted if background else None
    # In the background each has connections of its own: several may go on at the same time.
    if background:
        ranks = Ranks.connect(process_group, timeout=timeout)
    else:
        ranks = Ranks.of(process_group, "consolidation", timeout=timeout)

    def work() -> None:
        if ranks.size == 1:
            merge(*make(), progress, cancel)
        else:
            merge_on_every_rank(make, ranks, progress, cancel)

    if not background:
        work()
        return None
    in_thread(work, "torch_ckpt-consolidate", future)
    return future


class MergeFuture(Future[None]):
    """A consolidation in the background."""

    def __init__(self) -> None:
        super().__init__()
        self._wanted = threading.Event()

    def cancel(self) -> bool:
        """Ask the consolidation to stop, on all ranks. Returns whether it was still running;
        `result()` then raises CancelledError, unless everything was written already."""
        self._wanted.set()
        return not self.done()


def merge_on_every_rank(
    make: Callable[[], tuple[MergeRequest, ExtraFiles]],
    ranks: Ranks,
    progress: Progress | None = None,
    cancel: threading.Event | None = None,
) -> dict[str, Any]:
    """What `merge` does, by all `ranks`, with its result on each. `progress` is that of rank 0, and
    counts all ranks' bytes. `cancel`, set on any rank before the commit, ends all.

    The coordinator begins, every rank writes a share of the bytes, the coordinator commits.
    `make` gives this rank's `merge_request` and extras; what decides over the output is rank 0's,
    so that all have one plan.
    """
    made: list[tuple[MergeRequest, ExtraFiles]] = []

    def own() -> dict[str, Any] | None:
        made.append(make())
        return dict(made[0][0]) if ranks.rank == 0 else None

    first_request = ranks.together("consolidation", own)[0]
    assert first_request is not None
    request, extras = made[0]
    if request["left_out"] != first_request["left_out"]:
        request.leave_out(first_request["left_out"])
    request.update({key: first_request[key] for key in OUTPUT_FIELDS})
    sessions: list[int] = []
    commit: dict[str, Any] = {}
    context = contextlib.ExitStack()

    def begin() -> Any:
        commit["extras"] = context.enter_context(extras)  # before the work: they may be refused
        answer = core.call({"op": "merge_begin", **request, "extras": commit["extras"]})
        sessions.append(answer["session"])
        warn_of(answer)
        return answer

    try:
        begun = ranks.decide("beginning of a consolidation", begin)
        share = {**request, "share": ranks.rank, "shares": ranks.size}
        share.update({key: begun[key] for key in ("staging", "ids", "input_identity")})

        def write() -> Any:
            with Job() as job:
                whole = {"op": "merge_share", "job": job.id, **share}
                return job.run(lambda: core.call(whole))

        def finish(shares: list[Any]) -> dict[str, Any]:
            commit.update(request, shares=[answer["written"] for answer in shares])
            commit.update(
                {key: begun[key] for key in ("ids", "input_identity", "in_place", "session")}
            )
            committed: dict[str, Any] = core.call({"op": "merge_commit", **commit})
            return committed

        told = progress if ranks.rank == 0 else None
        result = ranks.gather("consolidation", write, finish, progress=told, cancel=cancel)
    except BaseException:
        for session in sessions:
            end_session("save", session)
        raise
    finally:
        context.close()
    if ranks.rank == 0:
        tell_of_merge(request, result)
    return result
