"""Row: whole tensors of stock DCP, loaded by two ranks that each want half of the rows."""

from __future__ import annotations

from benchmarks import files, ranks, rivals, row_save, states
from benchmarks.contender import Contender, Context, Figure, Role, Row, row
from benchmarks.export_rank import DTYPE
from benchmarks.program import Timing

WORLD = 2
FIGURES = (
    Figure("read_of_needed", "bytes read of those needed", worst=True, compared=True),
    Figure("seconds", "s", worst=True, compared=True),
)


@row("reshard_distcp", memory=("as-is",))
def reshard_distcp(context: Context) -> Row:
    """Through dcp.load with either reader, from the page cache."""
    shapes = states.llama_1b(context.scale)
    path = context.directory / "distcp"
    # The very tensors that the ranks make for themselves.
    state = dict(states.random_tensors(shapes, DTYPE))
    row_save.save_with_file_system(state, path, 1)
    del state
    size = states.total_bytes(shapes, DTYPE)
    right: list[bool] = []

    def load(contender: str) -> Timing:
        words = [contender, "--scale", str(context.scale), "--source", str(path)]
        answer = ranks.run_ranks("benchmarks.reshard_rank", [words] * WORLD)[0]
        assert answer is not None  # rank 0 speaks for all
        right[:] = [answer["right"]]
        figures = {
            "read_of_needed": answer["read"] / answer["needed"],
            "seconds": answer["seconds"],
        }
        return Timing(answer["seconds"], answer["cpu"], size, figures=figures)

    def check() -> None:
        if right != [True]:
            raise ValueError("the ranks have other bytes than were saved")

    def add(name: str, role: Role, contender: str) -> Contender:
        return Contender(
            name=name,
            role=role,
            before=lambda: files.bring_into_memory(files.files_in(path)),
            run=lambda: load(contender),
            check=check,
            skip=rivals.why_not_ours("CheckpointReader") if role == "ours" else "",
        )

    return Row(
        title="Load whole tensors of stock DCP into the row shards of 2 ranks, warm",
        bytes=size,
        tensors=len(shapes),
        contenders=[
            add("DCP FileSystemReader", "rival", "stock"),
            add("ours, CheckpointReader", "ours", "ours"),
        ],
        limit="",
        figures=FIGURES,
        close=lambda: files.empty(context.directory),
    )
