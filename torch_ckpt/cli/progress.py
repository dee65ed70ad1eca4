"""A progress bar by rich or tqdm, whichever the extra `cli` has brought."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator

from torch_ckpt.native.progress import Progress


@contextlib.contextmanager
def progress_bar(label: str) -> Iterator[Progress | None]:
    """A callback that draws on stderr; None where that is no terminal, or neither is installed."""
    if not sys.stderr.isatty():
        yield None
        return
    # Imported late: each takes longer than a small command does.
    try:
        from rich.console import Console
        from rich.progress import BarColumn, DownloadColumn, TransferSpeedColumn
        from rich.progress import Progress as Bar
    except ImportError:
        with _tqdm_bar(label) as progress:
            yield progress
        return
    columns = ("{task.description}", BarColumn(), DownloadColumn(), TransferSpeedColumn())
    with Bar(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(label, total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total or None)


@contextlib.contextmanager
def _tqdm_bar(label: str) -> Iterator[Progress | None]:
    try:
        from tqdm import tqdm
    except ImportError:
        yield None
        return
    with tqdm(desc=label, unit="B", unit_scale=True, file=sys.stderr, leave=False) as bar:

        def show(done: int, total: int) -> None:
            bar.total = total or None
            bar.update(done - bar.n)

        yield show
