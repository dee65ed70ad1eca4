"""torch-ckpt timeline: logs of real saves by several ranks, and lines that are none."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from click.testing import CliRunner, Result
from launch import run_ranks
from matplotlib import colors, image
from matplotlib.backends.backend_agg import RendererAgg

import torch_ckpt
from torch_ckpt.calls.save import SaveStats
from torch_ckpt.cli import cli
from torch_ckpt.cli.save_log import PHASES, LoggedSave, RankSave, read_logs
from torch_ckpt.cli.timeline import _LOOK
from torch_ckpt.cli.timeline_png import _COLOURS, draw

WORLD = 2


def run(*arguments: Any) -> Result:
    return CliRunner().invoke(cli, [str(each) for each in arguments])


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What ranks/pictures.py saves: log-R.jsonl of each rank, log.jsonl of all."""
    folder = tmp_path_factory.mktemp("pictures")
    outcome = run_ranks("pictures", WORLD, folder)
    assert set(outcome.values()) == {"ok"}, outcome
    return folder


def line(rank: int = 0, **fields: Any) -> dict[str, Any]:
    """A save of two ranks that began to plan after 1 s: 1 s of plan, 1 of waiting for the plans of
    others, 2 of writing, 1 of waiting for others, 1 of commit, and 1 until it was over."""
    stats = SaveStats("c", rank, 2, 1e9, waited_s=0.0, total_s=8.0)
    stats.planned_at, stats.planned_s, stats.agreed_s = 1e9 + 1, 2.0, 1.0
    stats.written_s, stats.written_bytes = 2.0, 1 << 20
    stats.committed_at, stats.committed_s = 1e9 + 6, 1.0
    return {**asdict(stats), **fields}


def write(path: Path, *lines: dict[str, Any]) -> Path:
    path.write_text("".join(json.dumps(each) + "\n" for each in lines))
    return path


def spans(each: RankSave) -> list[tuple[str, float, float]]:
    return [(span.phase, round(span.begin, 6), round(span.seconds, 6)) for span in each.spans]


# --- the log --------------------------------------------------------------------


def test_phases_of_a_line(tmp_path: Path) -> None:
    (save,) = read_logs([str(write(tmp_path / "log", line()))])
    assert spans(save.ranks[0]) == [
        ("wait", 0, 1),
        ("plan", 1, 1),
        ("wait", 2, 1),
        ("write", 3, 2),
        ("wait", 5, 1),
        ("commit", 6, 1),
        ("wait", 7, 1),
    ]
    assert list(save.missing()) == [1]


def test_a_save_in_the_background_waits_its_turn(tmp_path: Path) -> None:
    staged = line(waited_s=0.25, staged_s=0.5)
    (save,) = read_logs([str(write(tmp_path / "log", staged))])
    assert spans(save.ranks[0])[:4] == [
        ("queue", 0, 0.25),
        ("stage", 0.25, 0.5),
        ("queue", 0.75, 0.25),
        ("plan", 1, 1),
    ]


def test_what_a_foreign_writer_does_not_tell(tmp_path: Path) -> None:
    # Nor does a line of a version that had no times of beginnings.
    silent = line(planned_at=None, waited_s=1.0, staged_s=1.0)
    (save,) = read_logs([str(write(tmp_path / "log", silent))])
    assert spans(save.ranks[0]) == [("queue", 0, 1), ("stage", 1, 1), ("unknown", 2, 6)]


def test_a_clock_that_is_wrong_makes_no_gap_and_no_overlap(tmp_path: Path) -> None:
    for ahead in (-100, -2, 100):
        other = line(committed_at=1e9 + 6 + ahead)
        (save,) = read_logs([str(write(tmp_path / "log", other))])
        at = 0.0
        for span in save.ranks[0].spans:
            assert span.begin == pytest.approx(at) and span.seconds > 0
            at = span.begin + span.seconds
        assert at == pytest.approx(8)


def test_which_lines_are_of_one_save(tmp_path: Path) -> None:
    later = 1e9 + 8.5
    logs = [
        write(tmp_path / "0", line(), line(started=later), line(path="d", started=later)),
        write(tmp_path / "1", line(1), line(1, path="d", started=later + 1)),
        write(tmp_path / "2", line(1, started=later + 0.25), line(world_size=3)),
    ]
    saves = read_logs([str(log) for log in logs])
    found = [(save.path, save.world_size, sorted(save.ranks), save.started) for save in saves]
    assert found == [
        ("c", 2, [0, 1], 1e9),
        ("c", 3, [0], 1e9),
        ("c", 2, [0, 1], later),
        ("d", 2, [0, 1], later),
    ]
    # Of the save before it, which has no line of rank 1, it is not.
    alone = write(tmp_path / "3", line(), line(1, started=later))
    assert [sorted(save.ranks) for save in read_logs([str(alone)])] == [[0], [1]]


def test_many_saves_that_lack_a_rank(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    looked = 0

    class Counted(LoggedSave):
        def __getattribute__(self, name: str) -> Any:
            nonlocal looked
            looked += 1
            return super().__getattribute__(name)

    monkeypatch.setattr("torch_ckpt.cli.save_log.LoggedSave", Counted)
    lines = [line(path="c", started=1e9 + 10 * n) for n in range(400)]
    assert len(read_logs([str(write(tmp_path / "log", *lines))])) == 400
    assert looked < 50 * 400


DAMAGED = {
    "cut off": json.dumps(line())[:40],
    "no object": "[1]",
    "no text": "\udcff",
    "deep": "[" * 100_000,
    "no path": json.dumps({**line(), "path": None}),
    "path": json.dumps({**line(), "path": 7}),
    "rank": json.dumps({**line(), "rank": 2}),
    "negative": json.dumps({**line(), "written_s": -1}),
    "endless": json.dumps({**line(), "total_s": float("inf")}),
    "late": json.dumps({**line(), "started": 1e300}),
    "not a number": json.dumps({**line(), "total_s": float("nan")}),
    "many": json.dumps({**line(), "written_bytes": 10**400}),
    "digits": json.dumps({**line(), "rank": 0}).replace('"rank": 0', '"rank": ' + "9" * 5000),
    "no number": json.dumps({**line(), "started": "now"}),
    "truth": json.dumps({**line(), "world_size": True}),
    "bytes": json.dumps({**line(), "written_bytes": 1.5}),
}


@pytest.mark.parametrize("damage", DAMAGED)
def test_a_damaged_line_is_named(tmp_path: Path, damage: str) -> None:
    path = tmp_path / "log"
    text = "\n".join([json.dumps(line()), "", DAMAGED[damage], json.dumps(line(1))])
    path.write_bytes(text.encode(errors="surrogateescape"))
    done = run("timeline", path)
    assert done.exit_code == 1 and done.stdout == ""
    (said,) = done.stderr.splitlines()
    assert said.startswith(f"torch-ckpt: corrupt: {path}: line 3 is not of a save: "), said


def test_fields_of_newer_versions_do_not_matter(tmp_path: Path) -> None:
    newer = line(sent_s=[1, 2], quantum={"a": None})
    (save,) = read_logs([str(write(tmp_path / "log", newer))])
    (same,) = read_logs([str(write(tmp_path / "log", line()))])
    assert save == same


def test_logs_that_are_not_there(tmp_path: Path) -> None:
    done = run("timeline", tmp_path / "no")
    assert done.exit_code == 1 and str(tmp_path / "no") in done.stderr
    assert run("timeline", tmp_path).stderr.endswith("Is a directory (check the path)\n")
    assert run("timeline").exit_code == 2
    assert run("timeline", write(tmp_path / "empty")).stdout == "no saves\n"


# --- text -----------------------------------------------------------------------


def test_a_row_for_each_rank(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "100")
    slow = line(1, written_s=3.0, error="disk is full")
    text = run("timeline", write(tmp_path / "log", line(), slow)).stdout
    lines = text.splitlines()
    assert lines[0].startswith("c: 2 ranks, 2001-09-")
    assert lines[0].endswith(", 8 s")
    head, first, second = lines[1:4]
    assert head.split() == [
        "rank",
        "0",
        "s",
        "8",
        "s",
        "plan",
        "write",
        "commit",
        "wait",
        "written",
    ]
    assert len(head) == len(first) == len(second) <= 100
    rank, bar, *numbers = first.split()
    assert rank == "0" and numbers == ["1.000", "2.000", "1.000", "4.000", "1.0", "MiB"]
    eighth = len(bar) / 8
    for at, character in enumerate("-p-ww-c-"):
        assert bar[round((at + 0.5) * eighth)] == character, bar
    assert "failed on rank 1: disk is full" in lines
    assert "rank 1 was last to write, 1 s after the first" in lines
    assert "w write and fsync" in lines and "s copy to host memory" not in lines
    assert "\x1b" not in text


def test_short_phases_are_seen(tmp_path: Path) -> None:
    parts = {"written_s": 2e-3, "committed_at": 1e9 + 3.002, "committed_s": 1e-3, "total_s": 3.003}
    short = line(waited_s=0.0, staged_s=1e-3, **parts, planned_s=2.0, agreed_s=1.999)
    text = run("timeline", write(tmp_path / "log", short)).stdout
    bar = text.splitlines()[2].split()[1]
    assert [bar.index(each) for each in "spwc"] == sorted(bar.index(each) for each in "spwc")
    assert bar.endswith("wc") and bar[0] == "s"


def test_a_save_that_is_shorter_than_its_clock_tells(tmp_path: Path) -> None:
    short = line(started=1.7e9, total_s=1e-8, staged_s=1e-8, planned_at=None)
    log = write(tmp_path / "log", short)
    done = run("timeline", log, "--png", tmp_path / "t.png")
    assert done.exit_code == 0 and ", 0 s\n" in done.stdout, done.output
    assert image.imread(tmp_path / "t.png").size > 0


def test_ranks_without_a_line_are_named(tmp_path: Path) -> None:
    some = [line(rank, world_size=10**15) for rank in (0, 2)]
    text = run("timeline", write(tmp_path / "log", *some)).stdout
    assert "no line of 999,999,999,999,998 ranks: 1, 3, 4, 5, 6, 7, 8, 9, ...\n" in text


def test_the_last_saves_are_shown(tmp_path: Path) -> None:
    lines = [line(path=f"step-{n}", started=1e9 + 10 * n) for n in range(9)]
    log = write(tmp_path / "log", *lines)
    text = run("timeline", log).stdout
    assert "the last 5 of 9 saves" in text and "step-4" in text and "step-3" not in text
    fields = json.loads(run("timeline", log, "--last", 2, "--json").stdout)
    assert fields["count"] == 9
    assert [save["path"] for save in fields["saves"]] == ["step-7", "step-8"]
    assert run("timeline", log, "-q").output == ""


def test_what_a_log_says_moves_no_cursor(tmp_path: Path) -> None:
    log = write(tmp_path / "log", line(path="\x1b[2J", error="a\nb\x07"))
    text = run("timeline", log).stdout
    assert "\x1b" not in text and "\x07" not in text and "a?b?" in text


def test_saves_of_real_ranks(saved: Path) -> None:
    logs = [saved / f"log-{rank}.jsonl" for rank in range(WORLD)]
    fields = json.loads(run("timeline", *logs, "--json").stdout)
    names = ["sharded", "async-0", "async-1", "final"]
    assert [Path(save["path"]).name for save in fields["saves"]] == names
    for save, name in zip(fields["saves"], names, strict=True):
        assert [each["rank"] for each in save["ranks"]] == [0, 1]
        for each in save["ranks"]:
            phases = [part["phase"] for part in each["phases"]]
            known = [phase for phase in phases if phase not in ("wait", "queue")]
            stage = ["stage"] if name.startswith("async") else []
            assert known == [*stage, "plan", "write", "commit"], (name, phases)
            ends = [part["begin"] + part["seconds"] for part in each["phases"]]
            begins = [part["begin"] for part in each["phases"]]
            assert begins[1:] == pytest.approx(ends[:-1])
            assert ends[-1] <= save["seconds"] + 1e-6 and each["error"] is None
            assert each["written_bytes"] > 0
        # The ranks write at the same time, and the commit comes when all have written.
        writes, commits = (
            [part for each in save["ranks"] for part in each["phases"] if part["phase"] == phase]
            for phase in ("write", "commit")
        )
        last = max(part["begin"] + part["seconds"] for part in writes)
        assert all(part["begin"] >= last - 0.01 for part in commits)
    text = run("timeline", *logs).stdout
    assert "\n   0  " in text and "\n   1  " in text
    # One file of all ranks says the same.
    (save,) = json.loads(run("timeline", saved / "log.jsonl", "--json").stdout)["saves"]
    assert [each["rank"] for each in save["ranks"]] == [0, 1]


# --- pictures ---------------------------------------------------------------------


def colours_in(path: Path) -> set[str]:
    """Those of phases that a picture has, in more than a few pixels."""
    pixels = (image.imread(path)[:, :, :3] * 255).round().astype(int)
    found = set()
    for phase, colour in _COLOURS.items():
        wanted = numpy.array([round(each * 255) for each in colors.to_rgb(colour)])
        if (abs(pixels - wanted).max(axis=2) == 0).sum() > 50:
            found.add(phase)
    return found


def test_the_picture_of_real_saves(saved: Path, tmp_path: Path) -> None:
    logs = [saved / f"log-{rank}.jsonl" for rank in range(WORLD)]
    picture = tmp_path / "t.png"
    done = run("timeline", *logs, "--png", picture)
    assert done.exit_code == 0, done.stderr
    pixels = image.imread(picture)
    assert pixels.std() > 0.1  # it is not blank
    assert {"stage", "write", "commit", "wait"} <= colours_in(picture)
    assert "unknown" not in colours_in(picture)


@pytest.mark.parametrize("world", [1, 600])
def test_pictures_of_few_and_of_many_ranks(tmp_path: Path, world: int) -> None:
    lines = [line(rank, world_size=world) for rank in range(world)]
    saves = read_logs([str(write(tmp_path / "log", *lines))])
    (tmp_path / "t.png").write_bytes(draw(saves))
    pixels = image.imread(tmp_path / "t.png")
    assert pixels.shape[0] < 1500 and {"plan", "write", "commit"} <= colours_in(tmp_path / "t.png")
    # A quarter of the time is written, in all rows.
    rows = pixels[:, pixels.shape[1] // 2]
    green = abs(rows[:, :3] - numpy.array(colors.to_rgb(_COLOURS["write"]))).max(axis=1) < 0.02
    assert green.sum() > 15


@pytest.mark.parametrize("path", ["/scratch/$USER/$RUN", r"a\$b", "$"])
def test_what_a_log_says_is_no_formula(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, path: str
) -> None:
    drawn = []
    draw_text = RendererAgg.draw_text

    def recorded(self: Any, gc: Any, x: Any, y: Any, s: str, *rest: Any, **more: Any) -> None:
        drawn.append((s, more.get("ismath", rest[2] if len(rest) > 2 else False)))
        draw_text(self, gc, x, y, s, *rest, **more)

    monkeypatch.setattr(RendererAgg, "draw_text", recorded)
    error = r"cost is $5 \frac $"
    log, picture = write(tmp_path / "log", line(path=path, error=error)), tmp_path / "t.png"
    done = run("timeline", log, "--png", picture)
    assert done.exit_code == 0, done.output
    texts = [text for text, _ in drawn]
    assert any(text.startswith(f"{path}: 2 ranks") for text in texts)
    assert any(text.endswith(f"failed on rank 0: {error}") for text in texts)
    assert not any(formula for _, formula in drawn)


def test_too_many_saves_for_a_picture_are_refused(tmp_path: Path) -> None:
    lines = [line(path=f"step-{n}", started=1e9 + 10 * n) for n in range(60)]
    log, picture = write(tmp_path / "log", *lines), tmp_path / "t.png"
    done = run("timeline", log, "--last", 60, "--png", picture)
    assert done.exit_code == 2 and done.stdout == "" and not picture.exists()
    (said,) = done.stderr.splitlines()
    assert "60 saves" in said and "--last" in said
    assert run("timeline", log, "--last", 60).exit_code == 0
    assert run("timeline", log, "--last", 2, "--png", picture).exit_code == 0


def test_a_picture_replaces_pictures_only(tmp_path: Path) -> None:
    log = write(tmp_path / "log", line())
    before = log.read_bytes()
    for name in ("log", "png", "t.svg"):
        done = run("timeline", log, "--png", tmp_path / name)
        assert done.exit_code == 2 and "must end with .png" in done.stderr
    assert log.read_bytes() == before and [each.name for each in tmp_path.iterdir()] == ["log"]


def test_a_picture_of_nothing_and_in_no_place(tmp_path: Path) -> None:
    log = write(tmp_path / "log")
    assert run("timeline", log, "--png", tmp_path / "t.png").exit_code == 0
    assert image.imread(tmp_path / "t.png").size > 0
    done = run("timeline", log, "--png", tmp_path / "no" / "t.png")
    assert done.exit_code == 1 and "t.png" in done.stderr and done.stdout == ""


def test_without_matplotlib_and_without_torch(tmp_path: Path) -> None:
    log = write(tmp_path / "log", line())
    code = (
        "import sys\nsys.modules['matplotlib'] = None\nsys.modules['torch'] = None\n"
        "from torch_ckpt.cli import main\nmain()"
    )

    def started(*arguments: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-c", code, "timeline", str(log), *arguments]
        return subprocess.run(command, capture_output=True, text=True, check=False)

    assert started().returncode == 0
    done = started("--png", str(tmp_path / "t.png"))
    assert done.returncode == 1 and not (tmp_path / "t.png").exists()
    (said,) = done.stderr.splitlines()
    assert said.startswith("torch-ckpt: not installed: ") and "(pip install matplotlib)" in said


def test_every_phase_has_a_look() -> None:
    assert set(_COLOURS) == set(PHASES) == set(_LOOK)


# --- log_path of save -------------------------------------------------------------


def test_save_appends_to_a_log_as_async_save_does(tmp_path: Path) -> None:
    log = tmp_path / "log"
    state = {"w": torch.ones(1000)}
    saved = torch_ckpt.save(state, tmp_path / "1", log_path=log)
    torch_ckpt.async_save(state, tmp_path / "2", log_path=log).result()
    with torch_ckpt.CheckpointDirectory(tmp_path / "run") as directory:
        directory.save(state, 3, log_path=log)
    lines = [json.loads(text) for text in log.read_text().splitlines()]
    paths = [str(tmp_path / name) for name in ("1", "2", "run/step-3")]
    assert [each["path"] for each in lines] == paths
    assert lines[0] == asdict(saved.stats)
    for each in lines:
        assert each["started"] <= each["planned_at"] <= each["committed_at"]
        assert 0 <= each["agreed_s"] <= each["planned_s"]
        end = each["planned_at"] + each["planned_s"] + each["written_s"]
        assert end <= each["committed_at"] + 0.01
        assert (
            each["committed_at"] + each["committed_s"] <= each["started"] + each["total_s"] + 0.01
        )


def test_a_failed_save_is_in_the_log(tmp_path: Path) -> None:
    log = tmp_path / "log"
    with pytest.raises(torch_ckpt.CheckpointError):
        torch_ckpt.save({"leaf": object()}, tmp_path / "1", log_path=log)
    with pytest.raises(torch_ckpt.InvalidArgumentError):
        torch_ckpt.save({}, log_path=log)
    leaf, nowhere = (json.loads(text) for text in log.read_text().splitlines())
    assert "leaf" in leaf["error"] and leaf["path"] == str(tmp_path / "1")
    assert "path" in nowhere["error"] and leaf["planned_at"] is None
    text = run("timeline", log).stdout
    assert "failed on rank 0" in text and "? not told" in text


def test_a_log_that_cannot_be_written_fails_no_save(tmp_path: Path) -> None:
    with pytest.warns(RuntimeWarning, match="no line in the log"):
        torch_ckpt.save({"w": torch.ones(2)}, tmp_path / "1", log_path=tmp_path / "no" / "log")
    assert torch_ckpt.Checkpoint(tmp_path / "1").is_committed()
    with pytest.raises(TypeError):
        torch_ckpt.save({"w": torch.ones(2)}, tmp_path / "2", log_path=3)  # type: ignore[arg-type]
    assert not (tmp_path / "2").exists()
