"""Row: what the machine can do, with nobody else in the round."""

from __future__ import annotations

from benchmarks import files, rivals
from benchmarks.contender import Contender, Context, Row, row

SIZE = 2 << 30


@row("limits")
def limits(context: Context) -> Row:
    """2 GiB through memory and onto and from the disk."""
    program = context.program
    size = max(8 << 20, int(SIZE * context.scale) >> 20 << 20)
    read = context.directory / "limit-read"

    def memory(name: str, *words: str | int) -> Contender:
        return rivals.limit(name, lambda: program.time(*words))

    program.time("write", read, size, "buffered")
    return Row(
        title="The machine's limits",
        bytes=size,
        tensors=1,
        contenders=[
            memory("memcpy, 1 thread", "memcpy", size, 1),
            memory("memcpy, 2 threads", "memcpy", size, 2),
            *(
                memory(f"gather {run} B in memory", "gather", size, run)
                for run in (256, 1024, 4096)
            ),
            memory("first touch, 4 KiB pages", "first_touch", size, 0),
            memory("first touch, huge pages", "first_touch", size, 1),
            rivals.write_limit(context, rivals.FRESH, "direct", size),
            rivals.write_limit(context, rivals.RECYCLED, "recycled", size),
            rivals.write_limit(context, "buffered write and fdatasync", "buffered", size),
            rivals.cold_read_limit(context, [read]),
            rivals.warm_read_limit(context, 1, [read]),
            rivals.warm_read_limit(context, 2, [read]),
        ],
        limit="",
        close=lambda: files.remove(read),
    )
