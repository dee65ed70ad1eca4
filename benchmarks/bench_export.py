"""Rows: from the tensors of several ranks to a durable Hugging Face directory."""

from __future__ import annotations

from pathlib import Path

from benchmarks import files, ranks, rivals, states
from benchmarks.contender import Contender, Context, Row, row
from benchmarks.export_rank import DTYPE, EXPORTS, OURS, STOCK_DIRECTLY, on_own_nodes, shapes_of
from benchmarks.program import Timing


def export(
    context: Context, contender: str, state: str, dim: int, world: int, path: Path, bytes_: int
) -> Timing:
    """Starts the ranks and waits for their figures.

    Raises:
        ranks.RankError: one of them failed.
    """
    words = [contender, "--state", state, "--dim", str(dim), "--scale", str(context.scale)]
    words += ["--path", str(path), "--program", str(context.program.path)]
    answer = ranks.run_ranks("benchmarks.export_rank", [words] * world)[0]
    assert answer is not None  # rank 0 speaks for all
    return Timing(answer["seconds"], answer["cpu"], bytes_, answer["extra_memory"])


def why_not(contender: str) -> str:
    """Why a contender cannot run; empty if it can."""
    if contender.startswith("ours"):
        return rivals.why_not_ours("save")
    return rivals.why_not_torch_checkpointing() if contender.startswith("torch_") else ""


def export_row(context: Context, state: str, what: str, dim: int, world: int) -> Row:
    """Every way to export ``state``, cut along ``dim``, from ``world`` ranks."""
    shapes = shapes_of(state, context.scale, world)
    size = states.total_bytes(shapes, DTYPE)
    names = states.sample_names(shapes)
    sample = {
        name: tensor.clone()
        for name, tensor in states.random_tensors(shapes, DTYPE)
        if name in names
    }
    directory = context.directory / "export"
    path = directory / "final"

    def add(name: str, cut: int = dim, title: str = "") -> Contender:
        ours = name.startswith("ours")

        def check() -> None:
            if EXPORTS[name].__name__ != "without_export":  # those are no whole tensors
                states.check_equal(sample, rivals.read_safetensors(path, sample))

        return Contender(
            name=title or name,
            role="ours" if ours else "rival",
            before=directory.mkdir,
            run=lambda: export(context, name, state, cut, world, path, size),
            check=check,
            after=lambda: files.remove(directory),
            skip=why_not(name),
        )

    return Row(
        title=f"Export {what} from {world} rank{'s' if world > 1 else ''}, durable",
        bytes=size,
        tensors=len(shapes),
        contenders=[
            *(
                add(name)
                for name in EXPORTS
                # Without save_distributed stock's ranks would write one file over the other; where
                # ranks are matters to columns alone.
                if (name != STOCK_DIRECTLY or world == 1) and (dim or not on_own_nodes(name))
            ),
            # What sharding by columns costs: the same tensors, sharded by rows.
            *([add(OURS, 0, f"{OURS}, sharded by rows instead")] if dim else []),
            rivals.write_limit(context, rivals.FRESH, "direct", size),
        ],
        limit=rivals.FRESH,
    )


@row("export_llama_1")
def export_llama_1(context: Context) -> Row:
    """One rank has it all."""
    return export_row(context, "llama", "Llama 1B", 0, 1)


@row("export_llama_4")
def export_llama_4(context: Context) -> Row:
    """Row shards of 4 ranks."""
    return export_row(context, "llama", "Llama 1B, Shard(0),", 0, 4)


@row("export_many_2")
def export_many_2(context: Context) -> Row:
    """18,867 tensors, row shards of 2 ranks."""
    return export_row(context, "experts", "mixture of experts, Shard(0),", 0, 2)


def _columns(context: Context, run: int) -> Row:
    return export_row(context, str(run), f"16 matrices, Shard(1), runs of {run} B,", 1, 2)


@row("export_columns_256")
def export_columns_256(context: Context) -> Row:
    """Column shards with runs of 256 B."""
    return _columns(context, 256)


@row("export_columns_4096")
def export_columns_4096(context: Context) -> Row:
    """Column shards with runs of 4 KiB."""
    return _columns(context, 4096)
