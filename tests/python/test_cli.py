"""The torch-ckpt command: reports, exit statuses, errors in one line."""

from __future__ import annotations

import contextlib
import fcntl
import importlib
import json
import os
import re
import shutil
import struct
import subprocess
import sys
import termios
import threading
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner, Result
from safetensors.torch import load_file, save_file
from test_checkpoint import flip

import torch_ckpt
from torch_ckpt.cli import cli
from torch_ckpt.cli.output import error_line, fields_of, format_bytes

SHARD = "shard-00001-model-00001-of-00001.safetensors"
STATE = {"w": torch.arange(3000.0).reshape(60, 50), "b": torch.ones(5), "step": 3}


@pytest.fixture(scope="session")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("saved") / "c"
    torch_ckpt.save(STATE, checkpoint_id=path)
    return path


@pytest.fixture
def path(saved: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(saved, tmp_path / "c"))


def run(*arguments: object) -> Result:
    return CliRunner().invoke(cli, [str(argument) for argument in arguments])


def test_inspect(path: Path) -> None:
    done = run("inspect", path)
    assert done.exit_code == 0, done.stderr
    for word in (SHARD, "2 tensors", "1 other leaf", "F32", "written by torch_ckpt"):
        assert word in done.stdout
    assert "[60, 50]" not in done.stdout
    done = run("inspect", "--tensors", path)
    lines = [" ".join(line.split()) for line in done.stdout.splitlines()]
    assert "w F32 [60, 50] 1 box 11.7 KiB" in lines
    assert "step object in objects-00001.json 3" in lines


def test_inspect_json(path: Path) -> None:
    fields = json.loads(run("inspect", "--json", path).stdout)
    assert fields["tensor_count"] == 2
    assert fields["tensor_bytes"] == 60 * 50 * 4 + 5 * 4
    assert "tensors" not in fields
    fields = json.loads(run("inspect", "--json", "--tensors", path).stdout)
    assert {tensor["name"]: tensor["shape"] for tensor in fields["tensors"]} == {
        "w": [60, 50],
        "b": [5],
    }


def test_verify(path: Path) -> None:
    done = run("verify", path)
    assert done.exit_code == 0 and "all digests match" in done.stdout
    assert run("verify", "--quiet", path).output == ""
    assert json.loads(run("verify", "--json", path).stdout)["files"] == 3


def test_a_corrupt_file_is_named_in_one_line(path: Path) -> None:
    flip(path / SHARD, -1)
    done = run("verify", path)
    assert done.exit_code == 1
    assert done.stdout == ""
    (line,) = done.stderr.splitlines()
    assert line.startswith(f"torch-ckpt: corrupt: {path / SHARD}: ")
    assert "CRC-32C" in line and line.endswith(
        "(restore the file from a copy, or use another checkpoint)"
    )
    done = run("verify", "--json", path)
    assert done.exit_code == 1
    error = json.loads(done.stdout)["error"]
    assert (error["kind"], error["file"]) == ("corrupt", str(path / SHARD))


def test_incomplete_is_3(path: Path, tmp_path: Path) -> None:
    (path / SHARD).unlink()
    for command in ("inspect", "verify"):
        done = run(command, path)
        assert done.exit_code == 3 and SHARD in done.stderr
    assert run("inspect", tmp_path / "absent").exit_code == 3
    assert run("consolidate", path, tmp_path / "out").exit_code == 3
    assert not (tmp_path / "out").exists()


def test_a_hole_is_3_and_names_the_tensor(tmp_path: Path) -> None:
    sharding = json.dumps({"w": {"saved_offsets": [4]}})
    metadata = {"DCP_VERSION": "1.0", "DCP_SHARDING_INFO": sharding}
    save_file(
        {"w": torch.zeros(4)},
        tmp_path / "shard-00002-model-00001-of-00001.safetensors",
        metadata=metadata,
    )
    done = run("inspect", tmp_path)
    assert done.exit_code == 3
    assert "tensor 'w'" in done.stderr


def test_quiet_still_says_errors(path: Path) -> None:
    flip(path / SHARD, -1)
    assert "corrupt" in run("verify", "--quiet", path).stderr


def test_recover(path: Path) -> None:
    assert "nothing to do" in run("recover", path).stdout
    (path / ".torch_ckpt-stage").mkdir()
    assert json.loads(run("recover", "--json", path).stdout)["recovered"] is True
    assert not (path / ".torch_ckpt-stage").exists()


def test_consolidate(path: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    done = run("consolidate", path, out)
    assert done.exit_code == 0, done.stderr
    loaded = load_file(out / "model-00001-of-00001.safetensors")
    assert torch.equal(loaded["w"], STATE["w"]) and torch.equal(loaded["b"], STATE["b"])
    assert run("verify", out).exit_code == 0


def test_consolidate_by_mapping(path: Path, tmp_path: Path) -> None:
    mapping = tmp_path / "mapping.json"
    mapping.write_text('{"w": 2}')
    out = tmp_path / "out"
    done = run("consolidate", path, out, "--mapping", mapping, "--overwrite")
    assert done.exit_code == 3 and "tensor 'b'" in done.stderr and not out.exists()
    done = run(
        "consolidate", path, out, "--mapping", mapping, "--no-strict", "--no-verify", "--overwrite"
    )
    assert done.exit_code == 0, done.stderr
    assert list(load_file(out / "model-00002-of-00002.safetensors")) == ["w"]


@pytest.mark.parametrize(
    ("names", "expected"),
    [
        (
            ("model-00002-of-00002.safetensors", "model-00001-of-00002.safetensors"),
            {"w": 2, "b": 1},
        ),
        (("b.safetensors", "a.safetensors"), {"w": 2, "b": 1}),
        (("model.safetensors", "model.safetensors"), {"w": 1, "b": 1}),
    ],
)
def test_consolidate_by_index(
    path: Path, tmp_path: Path, names: tuple[str, str], expected: dict[str, int]
) -> None:
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(
        json.dumps({"metadata": {}, "weight_map": dict(zip("wb", names, strict=True))})
    )
    out = tmp_path / "out"
    for source in (index, tmp_path):  # the file, or its directory
        done = run("consolidate", path, out, "--index", source, "--overwrite")
        assert done.exit_code == 0, done.stderr
    written = json.loads((out / "model.safetensors.index.json").read_text())["weight_map"]
    assert {name: int(file.split("-")[1]) for name, file in written.items()} == expected


def test_wrong_usage_is_2(path: Path, tmp_path: Path) -> None:
    bad = tmp_path / "bad.json"
    for text in ("{", "[]", '{"w": "1"}', '{"w": true}'):
        bad.write_text(text)
        assert run("consolidate", path, tmp_path / "out", "--mapping", bad).exit_code == 2
        assert run("consolidate", path, tmp_path / "out", "--index", bad).exit_code == 2
    bad.write_text('{"w": 0, "b": 1}')
    assert run("consolidate", path, tmp_path / "out", "--mapping", bad).exit_code == 2
    both = ("--mapping", bad, "--index", bad)
    assert run("consolidate", path, tmp_path / "out", *both).exit_code == 2
    assert run("consolidate", path).exit_code == 2
    assert run("nonsense").exit_code == 2
    assert run("verify", path, "--threads", "0").exit_code == 2


def test_a_failed_system_call_is_1(path: Path) -> None:
    target = path / SHARD / "out"  # below a file
    done = run("consolidate", path, target)
    assert done.exit_code == 1
    (line,) = done.stderr.splitlines()
    assert line.startswith("torch-ckpt: io: ") and SHARD in line


def test_error_lines_hold_every_name_in_one_line() -> None:
    error = torch_ckpt.CorruptError("broken\nbadly", file="/a\tb", tensor="x.y", rank=3)
    fields, status = fields_of(error)
    assert status == 1
    assert error_line(fields).startswith("corrupt: rank 3: /a?b: tensor 'x.y': broken?badly (")
    for kind, status in ((torch_ckpt.IncompleteError, 3), (torch_ckpt.InvalidArgumentError, 2)):
        assert fields_of(kind("x"))[1] == status
    for other in (OSError(28, "No space left on device", "/f"), MemoryError(), ImportError("gone")):
        fields, status = fields_of(other)
        assert status == 1 and fields["message"] and fields["next"]


def test_sizes_in_words() -> None:
    sizes = (0, 1023, 1024, 1536, 5 << 30)
    assert [format_bytes(size) for size in sizes] == [
        "0 B",
        "1023 B",
        "1.0 KiB",
        "1.5 KiB",
        "5.0 GiB",
    ]


def imported(*words: str | Path) -> set[str]:
    """The modules that a process of Python asks for, from its start to its end."""
    done = subprocess.run(
        [sys.executable, "-X", "importtime", *map(str, words)],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        check=True,
        timeout=120,
    )
    return set(re.findall(r"^import time: .* ([\w.]+)$", done.stderr, re.MULTILINE))


# What makes a command start in a tenth of a second and not in two.
LATE = {
    *("torch", "numpy", "safetensors", "rich", "tqdm", "matplotlib", "importlib.metadata"),
    *("xml", "http", "email", "ssl", "urllib.request", "asyncio", "multiprocessing"),
}


def test_starts_without_torch_and_without_bars(path: Path, tmp_path: Path) -> None:
    plain = imported("-c", "pass")
    helps = imported("-m", "torch_ckpt", "--help") - plain
    assert {"click", "torch_ckpt.cli", "torch_ckpt.cli.leaves"} <= helps
    assert not helps & LATE
    for words in (("inspect", path), ("verify", path), ("consolidate", path, tmp_path / "out")):
        found = imported("-m", "torch_ckpt", *words) - plain
        assert "torch_ckpt.cli" in found
        assert not found & {*LATE, "torch_ckpt.cli.convert"}, words


def test_an_import_beside_torch_brings_little() -> None:
    beside = imported("-c", "import torch, torch_ckpt") - imported("-c", "import torch")
    own = {name for name in beside if name.split(".")[0] == "torch_ckpt"}
    assert own <= {
        *("torch_ckpt", "torch_ckpt.errors", "torch_ckpt.options", "torch_ckpt.native"),
        *(f"torch_ckpt.native.{name}" for name in ("core", "jobs", "operators", "progress")),
    }
    # Nor torch.distributed.checkpoint, which is slow to import.
    others = {name.split(".")[0] for name in beside - own}
    assert others <= set(sys.stdlib_module_names) and not (beside & LATE), beside


def test_as_a_module(path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "torch_ckpt", "inspect", str(path)],
        capture_output=True,
        text=True,
        check=True,
    )
    assert SHARD in done.stdout and done.stderr == ""


def on_a_terminal(
    words: list[str], environment: dict[str, str]
) -> tuple[subprocess.CompletedProcess[str], str]:
    """A command whose standard error is a terminal of 80 columns, and what it drew there."""
    master, slave = os.openpty()
    fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("4H", 24, 80, 0, 0))
    drawn: list[bytes] = []

    def read() -> None:
        with contextlib.suppress(OSError):  # EIO: nobody has the other end open any more
            while piece := os.read(master, 65536):
                drawn.append(piece)

    reader = threading.Thread(target=read)
    reader.start()
    try:
        done = subprocess.run(
            words,
            stdout=subprocess.PIPE,
            stderr=slave,
            text=True,
            check=True,
            env={**os.environ, **environment},
        )
    finally:
        os.close(slave)
        reader.join()
        os.close(master)
    return done, b"".join(drawn).decode(errors="replace")


@pytest.mark.parametrize(
    ("bars", "command", "label"),
    [
        *((bars, "verify", "verifying") for bars in ("rich", "tqdm", "none")),
        ("rich", "diff", "comparing"),
        ("rich", "show", "reading"),
    ],
)
def test_progress_is_drawn_on_a_terminal_only(
    path: Path, bars: str, command: str, label: str
) -> None:
    hidden = {"rich": (), "tqdm": ("rich",), "none": ("rich", "tqdm")}[bars]
    code = (
        f"import sys\nfor name in {hidden!r}: sys.modules[name] = None\n"
        "from torch_ckpt.cli import main\nmain()"
    )
    more = {"verify": (), "diff": (str(path),), "show": ("w",)}[command]
    done, drawn = on_a_terminal(
        [sys.executable, "-c", code, command, str(path), *more], {"TERM": "xterm"}
    )
    assert done.stdout and "\x1b" not in done.stdout
    assert (label in drawn) == (bars != "none")


def test_more_is_drawn_than_a_terminal_keeps() -> None:
    """Somebody reads what is drawn while the command runs: else it waits for ever."""
    code = "import sys; sys.stderr.write('x' * (1 << 20)); print('done')"
    done, drawn = on_a_terminal([sys.executable, "-c", code], {})
    assert done.stdout == "done\n" and drawn == "x" * (1 << 20)


def test_what_torch_prints_on_stdout_is_no_part_of_the_report(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    command = importlib.import_module("torch_ckpt.cli.consolidate")
    monkeypatch.setattr(command, "world_size", lambda: 2)
    monkeypatch.setattr("torch.distributed.init_process_group", lambda _: os.write(1, b"Gloo\n"))
    monkeypatch.setattr("torch.distributed.destroy_process_group", lambda: None)
    monkeypatch.setattr("torch_ckpt.ranks.Ranks.of", lambda *_, **__: None)
    monkeypatch.setattr(
        "torch_ckpt.export.consolidate.merge_on_every_rank", lambda *_: {"files": 1}
    )
    assert command._merge(pytest.fail, None) == {"files": 1}
    os.write(1, b"report\n")
    assert capfd.readouterr() == ("report\n", "Gloo\n")


def test_under_torchrun_all_ranks_merge(path: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    launch = [
        *(sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2"),
        *("--rdzv-backend", "c10d", "--rdzv-endpoint", "127.0.0.1:0", "--local-addr", "127.0.0.1"),
        *("-m", "torch_ckpt", "consolidate", "--json"),
    ]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [*launch, str(path), str(out)], capture_output=True, text=True, env=environment, check=False
    )
    assert done.returncode == 0, done.stderr
    (line,) = done.stdout.splitlines()  # one report, not one a rank
    assert json.loads(line)["files"] == 2
    loaded = load_file(out / "model-00001-of-00001.safetensors")
    assert torch.equal(loaded["w"], STATE["w"])
    assert run("verify", out).exit_code == 0


def test_mappings_that_are_none(path: Path, tmp_path: Path) -> None:
    mapping = tmp_path / "mapping.json"
    for text in ("[" * 200_000, '{"w": 1, "w": 2, "b": 1}', '{"w": true}', "[]"):
        mapping.write_text(text)
        done = run("consolidate", path, tmp_path / "out", "--mapping", mapping, "--overwrite")
        assert done.exit_code == 2 and str(mapping) in done.stderr, (text[:40], done.output)
    done = run("consolidate", path, tmp_path / "out", "--index", tmp_path, "--overwrite")
    assert done.exit_code == 2 and "index.json" in done.stderr
    assert not (tmp_path / "out").exists()


def test_an_empty_mapping_names_no_tensor(path: Path, tmp_path: Path) -> None:
    mapping = tmp_path / "mapping.json"
    mapping.write_text("{}")
    for options in ([], ["--no-strict"]):
        done = run(
            "consolidate", path, tmp_path / "out", "--mapping", mapping, "--overwrite", *options
        )
        assert done.exit_code == 3, done.output
    assert not (tmp_path / "out").exists()


def test_a_world_that_is_not_there(
    path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("MASTER_ADDR", "MASTER_PORT", "RANK"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("WORLD_SIZE", "2")
    done = run("consolidate", path, tmp_path / "out", "--json")
    assert done.exit_code == 2 and "torchrun" in done.stderr
    assert json.loads(done.stdout)["error"]["kind"] == "invalid argument"


def test_names_command_no_terminal(tmp_path: Path) -> None:
    state = {"a\x1b[2Jb\nc": torch.ones(1), "o\x1b]0;x\x07": 5}
    torch_ckpt.save(state, checkpoint_id=tmp_path / "c", no_dist=True)
    done = run("inspect", "--tensors", tmp_path / "c")
    assert done.exit_code == 0 and "a?[2Jb?c" in done.stdout and "o?]0;x?" in done.stdout
    assert "\x1b" not in done.stdout and "\x07" not in done.stdout
