"""The benchmarks at tiny sizes: every row runs, wrong bytes are found, figures add up.

No test looks at how long anything took.
"""

from __future__ import annotations

import dataclasses
import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import benchmarks.rows  # noqa: E402, F401
from benchmarks import (  # noqa: E402
    colliding,
    environment,
    opens,
    others_win,
    rivals,
    simulated,
    states,
)
from benchmarks.contender import MEMORY_OF, ROWS, Contender, Context, Row  # noqa: E402
from benchmarks.pages import PAGES, behind, path_of  # noqa: E402
from benchmarks.program import LimitsError, LimitsProgram  # noqa: E402
from benchmarks.report import (  # noqa: E402
    contender_cells,
    is_as_written,
    markdown,
    number,
    ratio_cells,
)
from benchmarks.row_processes import run_processes  # noqa: E402
from benchmarks.row_save_cuda import NO_DEVICE  # noqa: E402
from benchmarks.run_row import run_row  # noqa: E402
from benchmarks.summary import summarise  # noqa: E402

SCALE = 0.0005
ASYNC = {name for name in ROWS if name.startswith("async_")}  # test_bench_async.py runs these
REFUSED = "Invalid argument"  # what O_DIRECT gets where the file system has none


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> LimitsProgram:
    return LimitsProgram.build(tmp_path_factory.mktemp("program"))


@pytest.fixture
def context(program: LimitsProgram, tmp_path: Path) -> Context:
    work = tmp_path / "work"
    work.mkdir()
    return Context(work, SCALE, program)


def run(
    name: str, context: Context, memory: Any = "as-is", rounds: int = 1
) -> list[dict[str, Any]]:
    records: list[dict[str, Any]] = []
    run_row(name, context, memory, range(1, rounds + 1), records.append)
    return records


def failures(records: list[dict[str, Any]]) -> list[str]:
    return [
        f"{record['contender']}: {record['reason']}"
        for record in records
        if record["kind"] == "failed"
        and not (record["role"] == "limit" and REFUSED in record["reason"])
    ]


# Of a save, a consolidation, an export and a plan each; the campaign runs all.
ALWAYS = {"save_llama", "consolidate_columns_cast", "export_llama_1", "megatron_plan"}


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=[] if name in ALWAYS else [pytest.mark.campaign])
        for name in sorted(ROWS.keys() - ASYNC)
    ],
)
def test_every_row_runs_and_leaves_nothing(name: str, context: Context) -> None:
    records = run(name, context)
    assert failures(records) == []
    assert [record["kind"] for record in records].count("row") == 1
    measured = {record["contender"] for record in records if record["kind"] == "measured"}
    skipped = {record["contender"] for record in records if record["kind"] == "skipped"}
    assert not measured & skipped
    # Ours take part; only where there is no device nothing is measured.
    ours = {record["kind"] for record in records if record.get("role") == "ours"}
    without_device = {record.get("reason") for record in records} == {None, NO_DEVICE}
    assert ours == {"measured"} or name == "limits" or without_device
    assert list(context.directory.iterdir()) == []


def fake_row(context: Context, contenders: list[Contender], monkeypatch: Any, **more: Any) -> None:
    made = Row(title="fake", bytes=1000, tensors=10, contenders=contenders, limit="disk", **more)
    monkeypatch.setitem(ROWS, "fake", lambda _: made)


def test_a_contender_with_wrong_bytes_fails(context: Context, monkeypatch: Any) -> None:
    right = {"a": torch.arange(4, dtype=torch.float32)}
    wrong = {"a": right["a"].clone()}
    wrong["a"][3] += 1
    removed = []
    contender = Contender(
        name="liar",
        role="rival",
        run=lambda: None,
        check=lambda: states.check_equal(right, wrong),
        after=lambda: removed.append(True),
    )
    fake_row(context, [contender], monkeypatch)
    records = run("fake", context, rounds=3)
    assert failures(records) == ["liar: ValueError: a has other bytes than were saved"]
    assert removed == [True]  # left out of the later rounds
    assert summarise(records)[0].failures == 1


def test_check_equal_compares_bytes_and_names_the_tensor() -> None:
    nan = torch.tensor([float("nan")])
    states.check_equal({"a": nan}, {"a": nan.clone()})
    zero = {"a": torch.tensor([0.0])}
    for found, message in (
        ({}, "a is missing"),
        ({"a": torch.zeros(1, dtype=torch.int32)}, "not torch.float32"),
        ({"a": torch.tensor([-0.0])}, "a has other bytes"),
    ):
        with pytest.raises(ValueError, match=message):
            states.check_equal(zero, found)


def test_each_round_starts_with_another_contender(context: Context, monkeypatch: Any) -> None:
    order: list[str] = []
    contenders = [
        Contender(name=name, role="rival", run=lambda name=name: order.append(name))
        for name in "abc"
    ]
    fake_row(context, contenders, monkeypatch)
    run("fake", context, rounds=3)
    assert "".join(order) == "abcbcacab"


def keeper(size: int) -> Callable[[], None]:
    """What takes so much memory when it is called first, and keeps it."""
    kept: list[bytearray] = []

    def keep() -> None:
        if not kept:
            kept.append(bytearray(size))
            kept[0][::4096] = b"x" * (size // 4096)

    return keep


def test_memory_held_by_ours_counts_in_every_round(context: Context, monkeypatch: Any) -> None:
    size = 64 << 20
    keep = keeper(size)

    def borrow() -> None:
        held = bytearray(size)
        held[::4096] = b"x" * (size // 4096)
        time.sleep(0.05)  # ten samples long

    fake_row(
        context,
        [
            Contender(name="keeps", role="ours", run=keep),
            Contender(name="borrows", role="rival", run=borrow),
            Contender(name="idle", role="rival", run=lambda: None),
        ],
        monkeypatch,
    )
    records = [record for record in run("fake", context, rounds=2) if record["kind"] == "measured"]
    extra = {(r["contender"], r["round"]): r["extra_memory"] for r in records}
    for key in (("keeps", 1), ("keeps", 2), ("borrows", 1), ("borrows", 2)):
        assert size * 0.9 < extra[key] < size * 1.5, key
    assert extra["idle", 1] < size * 0.5 and extra["idle", 2] < size * 0.5


def test_memory_that_a_rival_keeps_is_not_ours(context: Context, monkeypatch: Any) -> None:
    size = 64 << 20
    keep = keeper(size)

    fake_row(
        context,
        [
            Contender(name="idle", role="ours", run=lambda: None),
            Contender(name="keeps", role="rival", run=keep),
        ],
        monkeypatch,
    )
    records = [record for record in run("fake", context, rounds=2) if record["kind"] == "measured"]
    extra = {(r["contender"], r["round"]): r["extra_memory"] for r in records}
    assert extra["idle", 1] < size * 0.5 and extra["idle", 2] < size * 0.5
    assert size * 0.9 < extra["keeps", 1]


def record(contender: str, role: str, round_: int, seconds: float) -> dict[str, Any]:
    return {
        "kind": "measured",
        "row": "fake",
        "memory": "as-is",
        "contender": contender,
        "role": role,
        "planner": "stock",
        "nesting": "flat",
        "round": round_,
        "seconds": seconds,
        "bytes": 1_000_000_000,
        "cpu_seconds": 0.5,
        "machine_cpu_seconds": 0.75,
        "extra_memory": round_,
        "figures": {},
    }


def example(per_tensor: bool) -> list[dict[str, Any]]:
    row = {
        "kind": "row",
        "row": "fake",
        "memory": "as-is",
        "title": "fake",
        "bytes": 1_000_000_000,
        "tensors": 1000,
        "limit": "disk",
        "per_tensor": per_tensor,
        "figures": [],
    }
    seconds = {"slow": ("rival", 4.0, 8.0, 5.0), "ours": ("ours", 2.0, 1.0, 1.0)}
    seconds["disk"] = ("limit", 1.0, 0.5, 0.5)
    measured = [
        record(name, str(role), i + 1, float(taken))
        for name, (role, *values) in seconds.items()
        for i, taken in enumerate(values)
    ]
    return [row, *measured]


def test_summary_pairs_rounds() -> None:
    (row,) = summarise(example(per_tensor=False))
    slow, ours, disk = row.contenders
    assert dataclasses.astuple(slow.speed) == (0.2, 0.125, 0.25)
    assert dataclasses.astuple(ours.of_limit) == (0.5, 0.5, 0.5)
    assert disk.of_limit is None
    assert ours.cpu == 0.5 and ours.machine_cpu == 0.75 and ours.extra_memory == 3
    (ratio,) = row.ratios
    assert (ratio.ours, ratio.rival) == ("ours", "slow")
    assert dataclasses.astuple(ratio.times) == (5.0, 2.0, 2.0)


def test_summary_per_tensor_subtracts_the_limit_of_the_same_round() -> None:
    records = example(per_tensor=True)
    for limit, speed in (("disk", (500.0, 1000.0, 1000.0)), ("", (1000.0, 2000.0, 2000.0))):
        records[0]["limit"] = limit
        (row,) = summarise(records)
        ours = next(contender for contender in row.contenders if contender.role == "ours")
        assert dataclasses.astuple(ours.speed) == speed
        assert bool(ours.of_limit) == bool(limit) and ours.cpu == 500.0


def test_report_shows_every_contender_and_every_reason() -> None:
    skipped = {**record("absent", "ours", 1, 1.0), "kind": "skipped", "reason": "not here"}
    rows = summarise([*example(per_tensor=False), skipped])
    cells = contender_cells(rows[0])
    assert [line[0] for line in cells.lines] == ["slow", "ours", "limit: disk"]
    assert all(len(line) == len(cells.head) for line in cells.lines)
    assert ratio_cells(rows[0]).lines == [["slow", "5.00x (2.00x)"]]
    text = markdown("fakes", {"CPU": "a|b"}, 3, "./dev bench", rows)
    assert "| slow | stock | flat | 0.20 | 0.12 | 0.25 |" in text
    assert "| CPU | a\\|b |" in text and "- absent skipped: not here" in text


@pytest.mark.parametrize(
    ("value", "text"),
    [(123.4, "123"), (12.34, "12.3"), (1.234, "1.23"), (0.0123, "0.012"), (-4.56, "-4.56")],
)
def test_number(value: float, text: str) -> None:
    assert number(value) == text


def test_states_have_the_sizes_they_claim() -> None:
    llama = states.llama_1b(1.0)
    assert len(llama) == 146
    assert states.total_bytes(llama, torch.bfloat16) == 2_471_628_800
    experts = states.mixture_of_experts(1.0)
    assert len(experts) == 18_867
    assert round(states.total_bytes(experts, torch.bfloat16) / 1e9, 2) == 0.96
    assert states.sample_names("abc") == ["a", "b", "c"]
    lora = states.lora_1b(1.0)
    assert len(lora) == 224
    assert round(states.total_bytes(lora, torch.bfloat16) / 1e6, 1) == 22.5
    names = states.sample_names([str(i) for i in range(1000)])
    assert len(set(names)) == 20 and {"0", "999"} <= set(names)


def test_limits_program_says_what_is_wrong(program: LimitsProgram, tmp_path: Path) -> None:
    with pytest.raises(LimitsError, match="unknown command nonsense"):
        program.time("nonsense")
    with pytest.raises(LimitsError, match="No such file"):
        program.time("read_warm", 1, tmp_path / "absent")
    with pytest.raises(LimitsError, match="too few arguments"):
        program.time("memcpy")


def test_no_compiler_is_one_clear_line(tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setenv("CXX", "no-such-compiler")
    with pytest.raises(LimitsError, match="need the C.. compiler no-such-compiler"):
        LimitsProgram.build(tmp_path)


@pytest.mark.campaign
def test_command(tmp_path: Path) -> None:
    lines = tmp_path / "lines.jsonl"
    command = [sys.executable, "-m", "benchmarks", "load_plan", "--scale", str(SCALE)]
    command += ["--rounds", "1", "--memory", "touched", "--directory", str(tmp_path), "--busy"]
    done = subprocess.run(
        [*command, "--jsonl", str(lines)],
        cwd=environment.REPOSITORY,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    assert "DCP HF reader" in done.stdout
    kinds = [json.loads(line)["kind"] for line in lines.read_text().splitlines()]
    assert kinds[:2] == ["environment", "row"] and "measured" in kinds
    assert list(tmp_path.iterdir()) == [lines]


def test_an_earlier_commit_takes_turns(context: Context, program: LimitsProgram) -> None:
    """Of two processes, one begins each round; here both are of this tree."""
    words = ["load_plan", "--memory", "as-is", "--rounds", "3", "--scale", str(SCALE)]
    words += ["--program", str(program.path)]
    records = run_processes(words, context.directory, environment.REPOSITORY)
    assert failures(records) == []
    (row,) = summarise(records)
    roles = {contender.name: contender.role for contender in row.contenders}
    earlier = [name for name in roles if name.endswith(f", at {environment.REPOSITORY.name}")]
    # In place of the others.
    assert earlier and earlier == [name for name, role in roles.items() if role == "rival"]
    assert {name.rpartition(", at ")[0] for name in earlier} == {
        name for name, role in roles.items() if role == "ours"
    }
    counts = {record["contender"]: record.get("round") for record in records if "round" in record}
    assert set(counts.values()) == {3}


def test_what_runs_write_is_no_difference(monkeypatch: Any, tmp_path: Path) -> None:
    def git(*words: str) -> None:
        who = ["-c", "user.name=a", "-c", "user.email=a@b"]
        subprocess.run(["git", *who, *words], cwd=tmp_path, check=True)

    monkeypatch.setattr(environment, "REPOSITORY", tmp_path)
    pages = [tmp_path / name.replace("*", "save") for name in environment.PAGES]
    (tmp_path / "docs").mkdir()
    for file in (*pages, tmp_path / "engine.cc"):
        file.write_text("one")
    git("init", "-q", ".")
    git("add", ".")
    git("commit", "-q", "-m", "one")
    for page in pages:
        page.write_text("two")
    at = environment.commit()
    assert at.isalnum()
    (tmp_path / "engine.cc").write_text("two")
    assert environment.commit() == f"{at}+"


def test_an_unknown_commit_is_refused(capsys: Any) -> None:
    from benchmarks import __main__ as command

    words = ["limits", "--scale", "0.001", "--busy", "--before", "no-such-commit"]
    assert command.main(words) == 2
    assert "no-such-commit" in capsys.readouterr().err


def test_a_busy_machine_is_waited_for_and_refused(monkeypatch: Any, capsys: Any) -> None:
    from benchmarks import __main__ as command

    loads = iter([2.0, 0.6, 0.5])
    monkeypatch.setattr(environment.os, "getloadavg", lambda: (next(loads), 0.0, 0.0))
    assert environment.wait_until_idle(60, look=0)
    monkeypatch.setattr(environment.os, "getloadavg", lambda: (0.51, 0.0, 0.0))
    monkeypatch.setattr(command, "PATIENCE_SECONDS", 0)
    assert command.main(["no_such_row"]) == 2
    assert command.main(["limits", "--scale", "0.001"]) == 2
    assert "load average stays above 0.5" in capsys.readouterr().err
    for more in (
        ["--busy"],
        ["--scale", "0.001"],
        ["--memory", "as-is"],
        ["--rounds", "4"],
        ["limits"],
    ):
        assert command.main(["--page", "save", *more]) == 2
        assert "a page is all of its rows" in capsys.readouterr().err


def test_every_row_is_on_one_page() -> None:
    for name in ROWS:
        on = [page for page in PAGES.values() if name.startswith(page.rows)]
        assert len(on) == 1, name
    text = (environment.REPOSITORY / "docs" / "benchmarks.md").read_text()
    for name, page in PAGES.items():
        there = path_of(name).exists()
        shown = f"[`{name}`]({path_of(name).name})" if there else f"`{name}`, not measured yet"
        assert f"| {shown} | {page.title} | `{' '.join(page.rows)}` |" in text


def test_a_page_is_of_a_commit(monkeypatch: Any, capsys: Any) -> None:
    from benchmarks import __main__ as command

    for commit in ("abc1234+", "unknown+"):
        monkeypatch.setattr(environment, "commit", lambda commit=commit: commit)
        assert command.main(["--page", "save"]) == 2
        assert "a page is of a commit" in capsys.readouterr().err


def test_pages_are_of_commits() -> None:
    of = {
        name: re.findall(r"^\| torch_ckpt \| .*commit (\w+\+?) \|$", path.read_text(), re.MULTILINE)
        for name in PAGES
        if (path := path_of(name)).exists()
    }
    assert [name for name, commits in of.items() if not commits[0].isalnum()] == []


def test_a_page_of_an_older_engine_is_seen(tmp_path: Path) -> None:
    def git(*words: str) -> str:
        who = ("-c", "user.name=t", "-c", "user.email=t")
        done = subprocess.run(
            ["git", *who, *words], cwd=tmp_path, capture_output=True, text=True, check=True
        )
        return done.stdout.strip()

    def committed(name: str) -> str:
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("")
        git("add", ".")
        git("commit", "-qm", name)
        return git("rev-parse", "--short", "HEAD")

    git("init", "-q")
    first, second = committed("csrc/a.cc"), committed("torch_ckpt/b.py")
    committed("docs/page.md")

    def why(commit: str) -> str:
        return behind(f"| Python | 3.11 |\n| torch_ckpt | 0.1.0, commit {commit} |\n", tmp_path)

    assert why(second) == ""
    assert why(first) == f"is of commit {first}: 1 have changed the engine since"
    assert "differs from commit" in why(f"{second}+")
    assert "not known here" in why("abcdef12")
    assert behind("| torch | 2.13 |\n", tmp_path) == "names no commit"


def test_a_row_is_measured_in_the_states_that_change_it() -> None:
    assert MEMORY_OF["open_files"] == ("as-is",)
    assert MEMORY_OF["save_llama"] == MEMORY_OF["export_llama_1"] == ("as-is", "touched")
    assert MEMORY_OF["async_first"] == ("as-is", "touched")


def test_a_page_that_was_edited_is_seen(context: Context, monkeypatch: Any) -> None:
    fake_row(context, [], monkeypatch)
    rows = summarise(run("fake", context))
    page = markdown(
        "fakes", {"torch_ckpt": "1, commit abc", "CPU": "fast", "date": "today"}, 1, "", rows
    )
    assert "memory as-is. 1, commit abc, fast, today" in page
    assert is_as_written(page)
    assert not is_as_written(page.replace("fast", "fastest"))
    for path in (environment.REPOSITORY / "docs").glob("benchmark_results*.md"):
        text = path.read_text()
        assert is_as_written(text), f"{path.name} was edited by hand"


def test_where_others_win_is_what_the_pages_say() -> None:
    assert others_win.written() == others_win.table(), "call benchmarks.others_win.write"
    text = """
## r, memory as-is

| times faster than, median (worst) | ours, a | ours, b |
| --- | --- | --- |
| x | 0.90x (0.80x) | 1.20x (0.90x) |
| y | 0.70x (0.60x) | - |

## r, memory touched

| blocking: times less than, median (worst) | ours, a |
| --- | --- |
| y | 0.50x (0.40x) |
"""
    found = {(job.figure, job.ours): states for job, states in others_win.of_page(text).items()}
    assert found == {("", "ours, a"): [(0.7, "y")], ("blocking", "ours, a"): [(0.5, "y")]}


def test_names_that_collide() -> None:
    names = colliding.names(6)
    assert len(set(names)) == 64 and {len(name) for name in names} == {96}
    # What std::hash of libstdc++ says.
    assert {colliding.murmur(name.encode()) for name in names} == {0x32243F5B6512080F}


@pytest.mark.skipif(bool(opens.why_not()), reason=opens.why_not())
def test_opens_are_counted_between_the_marks(tmp_path: Path) -> None:
    here, other = tmp_path / "here", tmp_path / "other"
    code = f"""
import os, threading
from benchmarks import opens
os.mkdir({str(here)!r}); os.mkdir({str(other)!r})
open({str(here)!r} + "/before", "w").close()
opens.mark(opens.BEGIN)
directory = os.open({str(here)!r}, os.O_RDONLY)
def work():
    os.close(os.open("before", os.O_RDONLY, dir_fd=directory))
    open({str(other)!r} + "/a", "w").close()
    try: open({str(here)!r} + "/missing")
    except OSError: pass
thread = threading.Thread(target=work); thread.start(); thread.join()
if os.fork() == 0: open({str(here)!r} + "/before"); os._exit(0)
os.wait()
opens.mark(opens.END)
open({str(here)!r} + "/before")
"""
    environment_ = {**os.environ, "PYTHONPATH": str(environment.REPOSITORY)}
    assert opens.count([sys.executable, "-c", code], here, environment_) == 4
    with pytest.raises(opens.StraceError, match="status 3"):
        opens.count([sys.executable, "-c", "raise SystemExit(3)"], here, environment_)
    with pytest.raises(opens.StraceError, match="no marks"):
        opens.count([sys.executable, "-c", ""], here, environment_)


def test_many_ranks_are_played_by_one_process(tmp_path: Path) -> None:
    def part(rank: int) -> simulated.Part:
        return {"w": simulated.Box(torch.full((2, 3), float(rank)), (2 * rank, 0), (8, 3))}

    simulated.save_as_ranks(tmp_path / "c", 4, part)
    target = {"w": torch.zeros(8, 3)}
    rivals.ours("load")(target, checkpoint_id=tmp_path / "c", no_dist=True)
    assert torch.equal(target["w"], torch.arange(4.0).repeat_interleave(2)[:, None].expand(8, 3))
