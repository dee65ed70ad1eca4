"""How many files a load and a diff of 64 shards open, however many waves they read in."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import opening
import pytest
from launch import warm

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from benchmarks import environment, opens  # noqa: E402
from benchmarks.shards import write_shards  # noqa: E402
from benchmarks.simulated import Box, Part, save_as_ranks  # noqa: E402

SHARDS = opening.SHARDS
# Of each checkpoint of ours: the directory, a place of a save in it, two files called .metadata,
# the manifest and the catalog.
OF_OURS = 6
# Of each: which descriptors are left, asked of /proc/self/fd.
OF_LIMIT = 2


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two checkpoints of ours that are equal, and stock's shards of the same; each tensor is in
    all files."""
    here = tmp_path_factory.mktemp("saved")
    state = {f"t{i}": opening.whole(i) for i in range(opening.TENSORS)}

    def part(rank: int) -> Part:
        return {
            name: Box(tensor[rank : rank + 1], (rank, 0), tuple(tensor.shape))
            for name, tensor in state.items()
        }

    for name in ("a", "b"):
        save_as_ranks(here / name, SHARDS, part)
    write_shards(state, here / "stock", SHARDS, 0)
    return here


def ends(what: str, paths: tuple[Path, ...], nth: int, output: Path) -> int | None:
    """The status of a process that is killed when the engine opens its n-th file."""
    script = ["opening.py", what, *map(str, paths)]
    faults = {"TORCH_CKPT_FAULTS": f"openat:{nth}:kill"}
    return warm().wait(warm().start(script, faults, output), 120)


@pytest.mark.usefixtures("fault_points")
@pytest.mark.parametrize(
    ("what", "names", "most"),
    [
        ("load", ["a"], SHARDS + OF_OURS + OF_LIMIT),
        ("diff", ["a", "b"], 2 * (SHARDS + OF_OURS + OF_LIMIT)),
    ],
)
def test_each_shard_is_opened_once(
    saved: Path, tmp_path: Path, what: str, names: list[str], most: int
) -> None:
    paths = tuple(saved / name for name in names)
    assert ends(what, paths, most, tmp_path / "killed") == -9  # so it opens as many
    assert ends(what, paths, most + 1, tmp_path / "lives") == 0


@pytest.mark.skipif(bool(opens.why_not()), reason=opens.why_not())
@pytest.mark.parametrize(
    ("what", "names", "most"),
    [
        ("load", ["a"], SHARDS + OF_OURS),
        ("diff", ["a", "b"], 2 * (SHARDS + OF_OURS)),
        # For its header and for its data, as docs/design.md says; beside them the directory is
        # listed, and files of ours are looked for, there and in the directory above, when it is
        # opened and when all has been read.
        ("load", ["stock"], 2 * SHARDS + 16),
    ],
)
def test_what_is_opened_in_a_checkpoint(
    saved: Path, what: str, names: list[str], most: int
) -> None:
    words = [sys.executable, str(Path(opening.__file__)), what]
    words += [str(saved / name) for name in names]
    env = {**os.environ, "PYTHONPATH": str(environment.REPOSITORY)}
    assert opens.count(words, saved, env) <= most
