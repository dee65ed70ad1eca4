"""Rows: copies of CUDA tensors into page-locked host memory, by the stagers of background saves."""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions

from benchmarks import rivals, states
from benchmarks.contender import Contender, Context, Row, row
from benchmarks.row_save_cuda import NO_DEVICE

LIMIT = "one copy into page-locked memory"
DTYPE = torch.bfloat16

Stage = Callable[[states.State], states.State]


# Those of torch 2.11 and 2.12 close themselves at the end of stage().
SPENT_BY_A_STAGE = torch.__version__.startswith(("2.11.", "2.12."))


def stock_stager(*, shared: bool) -> Stage:
    """Stock's, with all that makes it fast on a device; it waits for the copy."""
    options = StagingOptions(
        use_pinned_memory=True,
        use_shared_memory=shared,
        use_async_staging=False,
        use_non_blocking_copy=True,
    )
    stager = DefaultStager(options)

    def stage(state: states.State) -> states.State:
        nonlocal stager
        staged: states.State = stager.stage(state)  # type: ignore[assignment]  # is no Future
        if SPENT_BY_A_STAGE:
            stager = DefaultStager(options)
        return staged

    return stage


def our_stager() -> Stage:
    """Ours, which waits for the copy."""
    stager = rivals.ours("PinnedMemoryStager")(StagingOptions(use_async_staging=False))
    return lambda state: stager.stage(state)  # type: ignore[no-any-return]


class Staging:
    """A stager and what it has staged; the stager is made for the first run, and then kept."""

    def __init__(self, make: Callable[[], Stage], state: states.State) -> None:
        self._make = functools.cache(make)
        self._state = state
        self._staged: states.State = {}

    def run(self) -> None:
        """Until the copy is complete."""
        self._staged = self._make()(self._state)

    def check(self) -> None:
        """All bytes are those of the device."""
        names = states.sample_names(self._state)
        wanted = {name: self._state[name].cpu() for name in names}
        states.check_equal(wanted, {name: self._staged[name] for name in names})

    def forget(self) -> None:
        """Lets the copy go."""
        self._staged = {}


def stage_row(context: Context, shapes: states.Shapes, title: str) -> Row:
    """Every way to stage tensors of these shapes."""
    skip = "" if torch.cuda.is_available() else NO_DEVICE
    size = states.total_bytes(shapes, DTYPE)
    state: states.State = {}
    if not skip:
        state = {
            name: torch.randint(0, 256, (*shape, 2), dtype=torch.uint8, device="cuda")
            .view(DTYPE)
            .squeeze(-1)
            for name, shape in shapes.items()
        }

    def add(name: str, role: str, make: Callable[[], Stage], missing: str = "") -> Contender:
        staging = Staging(make, state)
        return Contender(
            name=name,
            role=role,  # type: ignore[arg-type]
            run=staging.run,
            check=staging.check,
            after=staging.forget,
            skip=skip or missing,
        )

    @functools.cache
    def buffers() -> tuple[torch.Tensor, torch.Tensor]:
        host = torch.empty(size, dtype=torch.uint8, pin_memory=True)
        return host, torch.zeros(size, dtype=torch.uint8, device="cuda")

    def made() -> None:
        buffers()

    def one_copy() -> None:
        host, device = buffers()
        host.copy_(device, non_blocking=True)
        torch.cuda.synchronize()

    return Row(
        title=f"Stage from a CUDA device, {title}",
        bytes=size,
        tensors=len(shapes),
        contenders=[
            add("DCP DefaultStager", "rival", functools.partial(stock_stager, shared=False)),
            add("DCP DefaultStager, shared", "rival", functools.partial(stock_stager, shared=True)),
            add("ours", "ours", our_stager, rivals.why_not_ours("PinnedMemoryStager")),
            Contender(name=LIMIT, role="limit", before=made, run=one_copy, skip=skip),
        ],
        limit=LIMIT,
    )


# The stagers keep their memory, so that its state changes nothing.
@row("stage_cuda_large", ("as-is",))
def stage_cuda_large(context: Context) -> Row:
    """The weights of an 8B Llama."""
    return stage_row(context, states.llama_8b(context.scale), "Llama 8B bfloat16")


@row("stage_cuda_many", ("as-is",))
def stage_cuda_many(context: Context) -> Row:
    """Many small tensors."""
    return stage_row(
        context, states.mixture_of_experts(context.scale), "mixture of experts bfloat16"
    )
