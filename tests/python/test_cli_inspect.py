"""torch-ckpt inspect: checkpoints, files of them, trees of names, directories of steps."""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
from collections import namedtuple
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner, Result
from foreign_samples import SAVERS, of_dcp, of_ours, of_torch
from hypothesis import given, settings
from hypothesis import strategies as st
from launch import PACKAGE
from sample_states import stock_rows, stock_shard

import torch_ckpt
from torch_ckpt.checkpoint.names import step_in
from torch_ckpt.cli import cli
from torch_ckpt.cli.leaves import value_text
from torch_ckpt.cli.text import columns, natural
from torch_ckpt.errors import IncompleteError
from torch_ckpt.native.opened import ListedFile, OpenedCheckpoint
from torch_ckpt.native.sessions import SaveSession

SHARD = "shard-00001-model-00001-of-00001.safetensors"
Pair = namedtuple("Pair", "a b")
PLAIN = type(None) | bool | int | float | list | Pair


def run(*arguments: Any) -> Result:
    return CliRunner().invoke(cli, [str(each) for each in arguments])


def fields(*arguments: Any) -> Any:
    done = run(*arguments, "--json")
    assert done.exit_code == 0, done.output
    return json.loads(done.stdout)


def words(result: Result) -> list[str]:
    """The lines of a report, each with single spaces."""
    assert result.exit_code == 0, result.output
    return [" ".join(line.split()) for line in result.stdout.splitlines()]


def nested(layers: int = 12) -> dict[str, Any]:
    model = {
        "layers": [{"wk": torch.ones(4, 4), "wq": torch.ones(4, 4)} for _ in range(layers)],
        "norm": torch.ones(6, dtype=torch.bfloat16),
    }
    return {"model": model, "opt": {"lr": 1e-3, "betas": (0.9, 0.99)}, "step": 7}


@pytest.mark.parametrize("saver", SAVERS)
def test_step_and_bytes_by_dtype(tmp_path: Path, saver: Any) -> None:
    found = fields("inspect", saver(tmp_path / "c", nested()))
    assert found["step"] == 7  # of the leaf
    assert found["dtypes"] == {
        "F32": {"tensors": 24, "bytes": 24 * 64},
        "BF16": {"tensors": 1, "bytes": 12},
    }
    assert (found["tensor_count"], found["tensor_bytes"]) == (25, 24 * 64 + 12)
    assert found["object_count"] == 3
    named = fields("inspect", saver(tmp_path / "checkpoint-0012", nested()))
    assert named["step"] == 12
    assert "25 tensors, 1.5 KiB: F32 1.5 KiB, BF16 12 B" in words(run("inspect", tmp_path / "c"))


def test_tied_tensors_count_once(tmp_path: Path) -> None:
    tensor = torch.ones(100)
    path = of_torch(tmp_path / "a.pt", {"a": tensor, "b": tensor})
    found = fields("inspect", path)
    assert (found["tensor_count"], found["tensor_bytes"]) == (2, 400)
    assert words(run("inspect", path, "--tree"))[-1] == "b F32 [100] is a"


@pytest.mark.parametrize(
    ("name", "step"),
    [
        *(("step-7", 7), ("step-007", 7), ("iter_0001000", 1000), ("checkpoint-500", 500)),
        *(("global_step12", 12), ("epoch=3-step=40.ckpt", 40), ("model_step_3.pt", 3)),
        *(("step", None), ("footstep-3", None), ("step-3-old", None), ("layer-3", None)),
    ],
)
def test_steps_in_names(name: str, step: int | None) -> None:
    assert step_in(name) == step


@pytest.mark.parametrize("saver", SAVERS)
def test_tree(tmp_path: Path, saver: Any) -> None:
    what = nested()
    what["model"]["layers"][11]["wq"] = torch.ones(2, 2)
    path = saver(tmp_path / "c", what)
    lines = words(run("inspect", path, "--tree"))
    assert lines[lines.index("model 25 tensors 1.5 KiB") :] == [
        "model 25 tensors 1.5 KiB",
        "layers 24 tensors 1.5 KiB",
        "0 to 10 11 x 2 tensors 1.4 KiB",
        "wk F32 [4, 4] 64 B",
        "wq F32 [4, 4] 64 B",
        "11 2 tensors 80 B",
        "wk F32 [4, 4] 64 B",
        "wq F32 [2, 2] 16 B",
        "norm BF16 [6] 12 B",
        "opt 2 other leaves",
        "betas object (0.9, 0.99)",
        "lr object 0.001",
        "step object 7",
    ]
    flat = words(run("inspect", path, "--tree", "--depth", "1"))
    assert flat[-3:] == ["model 25 tensors 1.5 KiB", "opt 2 other leaves", "step object 7"]
    leaves = fields("inspect", path, "--tree")["leaves"]
    assert [each["name"] for each in leaves[:3]] == [
        f"model.layers.{n}" for n in ("0.wk", "0.wq", "1.wk")
    ]


def test_tree_of_names_that_make_trouble(tmp_path: Path) -> None:
    names = ("a", "a.b", ".", "x..y", "01", "1", "2")
    odd = {name: torch.full((1,), number) for number, name in enumerate(names)}
    path = of_torch(tmp_path / "a.pt", odd)
    lines = words(run("inspect", path, "--tree"))
    assert "a 2 tensors 16 B" in lines and "(itself) I64 [1] 8 B" in lines
    assert "x..y I64 [1] 8 B" in lines and "1 to 2 I64 2 x [1] 16 B" in lines
    assert words(run("inspect", of_torch(tmp_path / "b.pt", {}), "--tree"))[-1].startswith("b.pt ")


@pytest.mark.parametrize(
    "value",
    [
        *(
            None,
            True,
            3,
            -(2**70),
            1.5,
            float("inf"),
            "text",
            "\udc80",
            [1, [2]],
            {"a": 1, "b": {}},
        ),
        *((), (1,), (1, "x"), {1: 2}, {3}, Pair(1, None), range(3), 1 + 2j, b"abc", 2**63),
        *(torch.Size([1, 2]), torch.float32, torch.device("cpu"), (torch.ones(2, 3), 1)),
    ],
)
@pytest.mark.parametrize("saver", [of_ours, of_torch])
def test_values_of_leaves(tmp_path: Path, saver: Any, value: Any) -> None:
    path = saver(tmp_path / "c", {"leaf": [value], "w": torch.ones(1)})
    leaves = fields("ls", path)["leaves"]
    name = next(each["name"] for each in leaves if each["name"].startswith("leaf"))
    shown = run("show", path, name)
    told = next(each["value"] for each in leaves if each["name"] == name)
    if shown.exit_code == 0 and isinstance(value, PLAIN):
        assert repr(torch_ckpt.open(path).objects[name]) == told
    assert told and "malformed" not in told and "\n" not in told


def test_values_are_cut_and_printable() -> None:
    assert (
        value_text(list(range(1000))).endswith("...") and len(value_text(list(range(1000)))) == 60
    )
    assert len(value_text({"k" * 500: "v" * 500})) == 60
    assert value_text("\x1b[2J\n") == "'\\x1b[2J\\n'"
    for malformed in (
        {"$": "tuple", "v": 3},
        {"$": "complex", "v": [1]},
        {"$": "namedtuple"},
        {"$": "record", "c": "m:C", "v": 1},
        {"$": 7},
    ):
        assert "\n" not in value_text(malformed)  # and no error


TAGS = (
    *("int", "float", "str", "complex", "bytes", "tuple", "set", "deque", "namedtuple", "dict"),
    *("odict", "counter", "defaultdict", "range", "size", "datetime", "path", "fraction", "dtype"),
    *(
        "tensor",
        "ndarray",
        "npscalar",
        "namespace",
        "enum",
        "record",
        "pickle",
        "device",
        "strange",
    ),
)
PLAIN_JSON = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=9)
JSON = st.recursive(
    PLAIN_JSON,
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.text(max_size=2), inner, max_size=3)
        | st.fixed_dictionaries(
            {"$": st.sampled_from(TAGS) | inner},
            optional={key: inner for key in "vctsfpm"},
        )
    ),
)


@settings(max_examples=500)
@given(value=JSON)
def test_values_of_any_json_are_one_short_line(value: Any) -> None:
    told = value_text(value)
    assert len(told) <= 60 and told.isprintable()


def test_a_namespace_shows_what_is_in_it(tmp_path: Path) -> None:
    path = of_ours(tmp_path / "c", {"args": argparse.Namespace(lr=0.1, name="x")})
    (leaf,) = fields("ls", path)["leaves"]
    assert leaf["value"] == "Namespace(lr=0.1, name='x')"


def test_a_value_that_cannot_be_read(tmp_path: Path) -> None:
    path = of_torch(tmp_path / "a.pt", {"w": torch.ones(1), "odd": Pair(1, 2), "n": 5})
    told = {each["name"]: each["value"] for each in fields("ls", path)["leaves"]}
    assert told["n"] == "5"
    assert told["odd"].startswith("(the pickle names test_cli_inspect.Pair")


def test_damaged_objects_are_no_values(tmp_path: Path) -> None:
    path = of_ours(tmp_path / "c", nested())
    file = path / "objects-00001.json"
    file.write_bytes(file.read_bytes().replace(b'"step":7', b'"step":8'))
    done = run("ls", path, "step")
    assert done.exit_code == 0 and "CRC-32C" in done.stdout
    assert fields("inspect", path)["step"] is None


@pytest.mark.usefixtures("fault_points")
def test_values_of_a_commit_that_was_interrupted(tmp_path: Path) -> None:
    path = of_ours(tmp_path / "c", {"step": 1, "w": torch.ones(1)})
    other = of_ours(tmp_path / "other", {"step": 2, "w": torch.ones(1)})
    program = (
        "import sys; from torch_ckpt.export.merge import consolidate_safetensors_files as merge; "
        "merge(sys.argv[1], sys.argv[2], overwrite=True)"
    )
    done = subprocess.run(
        [sys.executable, "-c", program, str(other), str(path)],
        # The third rename is the commit point.
        env={**os.environ, "PYTHONPATH": str(PACKAGE), "TORCH_CKPT_FAULTS": "renameat:4:kill"},
        check=False,
    )
    assert done.returncode == -signal.SIGKILL
    assert (path / ".torch_ckpt-stage/committed/commit.json").exists()
    assert fields("inspect", path)["step"] == 2


def test_balance_over_ranks_and_files(tmp_path: Path) -> None:
    stock_shard(tmp_path / "c", 0, {"w": (torch.ones(30, 100), [0, 0])})
    stock_shard(tmp_path / "c", 1, {"w": (torch.ones(10, 100), [30, 0])})
    sizes = [file.stat().st_size for file in sorted((tmp_path / "c").iterdir())]
    balance = fields("inspect", tmp_path / "c")["balance"]
    assert (balance["of"], balance["count"]) == ("rank", 2)
    assert (balance["min"], balance["max"]) == (min(sizes), max(sizes))
    assert balance["ratio"] == round(2 * max(sizes) / sum(sizes), 3)
    assert any("2 ranks with" in line for line in words(run("inspect", tmp_path / "c")))
    torch_ckpt.consolidate_safetensors_files(tmp_path / "c", tmp_path / "out", {"w": 1})
    assert fields("inspect", tmp_path / "out")["balance"] is None


def test_a_shard_by_itself(tmp_path: Path) -> None:
    files = stock_rows(tmp_path / "c", torch.ones(7, 3), 2)
    lines = words(run("inspect", files[1]))
    assert lines[0].endswith(": data, 200 B, rank 1") or "rank 1" in lines[0]
    assert "w F32 [3, 3] from [4, 0] of [7, 3] 36 B" in lines
    (box,) = fields("inspect", files[0])["boxes"]
    assert box["offsets"] == [0, 0] and box["shape"] == [4, 3] and box["bytes"] == 48
    files[0].rename(tmp_path / files[0].name)
    alone = run("inspect", files[1])
    assert alone.exit_code == 3 and "'w'" in alone.stderr


def test_a_distcp_file_by_itself(tmp_path: Path) -> None:
    path = of_dcp(tmp_path / "c", nested())
    found = fields("inspect", path / "__0_0.distcp")
    assert len(found["boxes"]) == 25 and found["rank"] == 0
    assert found["objects"] == ["opt.lr", "opt.betas", "step"] or len(found["objects"]) == 3
    lines = words(run("inspect", path / "__0_0.distcp"))
    assert "model.norm BF16 [6] whole 12 B" in lines
    (path / ".metadata").unlink()
    done = run("inspect", path / "__0_0.distcp")
    assert done.exit_code == 3
    (line,) = done.stderr.splitlines()
    assert "without the others" in line


def test_an_objects_file_by_itself(tmp_path: Path) -> None:
    path = of_ours(tmp_path / "c", nested())
    assert set(fields("inspect", path / "objects-00001.json")["objects"]) == {
        "opt.betas",
        "opt.lr",
        "step",
    }


def killed_save(path: Path) -> None:
    """What a save that is killed leaves of a checkpoint at `path`."""
    program = (
        "import os, sys\nfrom torch_ckpt.native.sessions import SaveSession\n"
        "session = SaveSession(sys.argv[1], overwrite=True)\n"
        "open(os.path.join(session.staging, 'x'), 'wb').write(b'x' * 5000)\n"
        "os.kill(os.getpid(), 9)\n"
    )
    environment = {**os.environ, "PYTHONPATH": str(PACKAGE)}
    done = subprocess.run([sys.executable, "-c", program, str(path)], env=environment)
    assert done.returncode == -signal.SIGKILL


def test_a_directory_of_steps(tmp_path: Path) -> None:
    root = tmp_path / "run"
    with torch_ckpt.CheckpointDirectory(root) as directory:
        for step in (2, 10):
            directory.save(nested(), step)
    of_dcp(root / "checkpoint-3", nested())
    of_torch(root / "step-5.pt", nested())
    of_ours(root / "best", nested())
    (root / "notes").mkdir()
    of_ours(root / "step-11", nested())
    (root / "step-11" / SHARD).unlink()
    (root / "iter_0000012").mkdir()
    of_dcp(root / "global_step12", nested())
    (root / "global_step12" / ".metadata").unlink()
    (root / "checkpoint-12").mkdir()
    (root / "checkpoint-12" / "mp_rank_00_model_states.pt").touch()
    killed_save(root / "step-13")
    live = SaveSession(str(root / "step-14"), overwrite=True)
    try:
        steps = fields("inspect", root)["steps"]
        lines = words(run("inspect", root))
    finally:
        live.end()
    assert [(each["name"], each["state"], each["format"]) for each in steps] == [
        ("step-2", "whole", "torch_ckpt"),
        ("checkpoint-3", "whole", "dcp"),
        ("step-5.pt", "whole", "torch"),
        ("step-10", "whole", "torch_ckpt"),
        ("step-11", "incomplete", "torch_ckpt"),
        ("checkpoint-12", "unreadable", None),
        ("global_step12", "incomplete", None),
        ("iter_0000012", "incomplete", None),
        ("step-13", "abandoned", None),
        ("step-14", "being written", None),
        ("best", "whole", "torch_ckpt"),
    ]
    assert [each["step"] for each in steps] == [2, 3, 5, 10, 11, 12, 12, 12, 13, 14, None]
    assert SHARD in steps[4]["error"] and steps[8]["bytes"] >= 5000
    assert all(each["bytes"] is not None and each["modified"] for each in steps)
    said = "5 whole, 3 incomplete, 1 unreadable, 1 abandoned, 1 being written"
    assert lines[0] == f"{root}: 11 checkpoints, {said}"


def test_a_step_that_is_damaged_does_not_hide_the_others(tmp_path: Path) -> None:
    for step in (1, 2):
        of_ours(tmp_path / f"step-{step}", nested())
    manifest = tmp_path / "step-1" / "torch_ckpt.json"
    manifest.write_bytes(manifest.read_bytes()[:-5])
    states = [each["state"] for each in fields("inspect", tmp_path)["steps"]]
    assert states == ["unreadable", "whole"]


def test_a_step_with_another_shard_is_not_whole(tmp_path: Path) -> None:
    path = of_ours(tmp_path / "step-1", nested())
    of_ours(tmp_path / "step-2", nested())
    (path / SHARD).write_bytes(bytes((path / SHARD).stat().st_size))
    assert run("inspect", path).exit_code == 1
    states = [each["state"] for each in fields("inspect", tmp_path)["steps"]]
    assert states == ["unreadable", "whole"]


def test_awkward_children_do_not_hide_the_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    of_ours(tmp_path / "step-2", nested())
    (tmp_path / "step-1").symlink_to("step-1")
    (tmp_path / "loop").symlink_to("loop")
    (tmp_path / "step-3").mkdir()
    (tmp_path / "step-4").mkdir()
    os.utime(tmp_path / "step-4", (0, 2**50))
    listdir = os.listdir

    def refused(path: str) -> list[str]:
        if path == str(tmp_path / "step-3"):
            raise PermissionError(13, "Permission denied", path)
        return listdir(path)

    monkeypatch.setattr(os, "listdir", refused)
    if (tmp_path / "step-4").stat().st_mtime < 2**50:  # some file systems have no such time
        monkeypatch.setattr("torch_ckpt.cli.steps._measured", lambda *_: (0, 2.0**60))
    steps = fields("inspect", tmp_path)["steps"]
    states = {each["name"]: each["state"] for each in steps}
    assert states == {"step-2": "whole", "step-3": "unreadable", "step-4": "incomplete"}
    lines = words(run("inspect", tmp_path))
    assert any(line.startswith("step-4 incomplete") and " ? " in line for line in lines)


def test_a_rank_by_name_takes_no_memory(tmp_path: Path) -> None:
    from torch_ckpt.cli.inspect import _balance

    files = [
        ListedFile(name=f"__{rank}_0.distcp", role="data", bytes=8)
        for rank in (0, 30_000_000_000_000)
    ]
    balance = _balance(None, files)
    assert balance is not None and balance["count"] == 30_000_000_000_001
    assert (balance["min"], balance["max"]) == (0, 8)


def test_names_of_any_length_and_depth(tmp_path: Path) -> None:
    digits, dots = "9" * 5000, "a" + ".b" * 5000
    state = {digits: torch.ones(1), "10": torch.ones(1), dots: torch.ones(2), dots + "c": 1}
    path = tmp_path / "a.pt"
    torch.save(state, path)
    for arguments in (("ls",), ("inspect", "--tree"), ("inspect", "--tensors"), ("inspect",)):
        done = run(*arguments, path)
        assert done.exit_code == 0, done.output[-300:]
    assert run("diff", path, path).exit_code == 0
    names = [each["name"] for each in fields("ls", path)["leaves"]]
    assert names == [dots, dots + "c", "10", digits]


def test_a_checkpoint_that_holds_others(tmp_path: Path) -> None:
    torch_ckpt.save({"w": torch.ones(3)}, tmp_path / "out", layout="final", no_dist=True)
    of_ours(tmp_path / "out" / "checkpoint-1", nested())
    assert fields("inspect", tmp_path / "out")["tensor_count"] == 1
    (step,) = fields("inspect", "--steps", tmp_path / "out")["steps"]
    assert step["step"] == 1
    none = run("inspect", "--steps", tmp_path / "out" / "checkpoint-1")
    assert none.exit_code == 3 and "holds no checkpoints" in none.stderr


def test_without_tensors_objects_are_described(tmp_path: Path) -> None:
    state = {
        "a": torch.ones(2),
        "b": torch.ones(2),
        "c": torch.ones(3, dtype=torch.int8),
        "step": 7,
    }
    opened = OpenedCheckpoint(str(of_ours(tmp_path / "c", state)))
    whole, objects = opened.listing(), opened.listing(tensors=False)
    assert "step" in objects.names and not {"a", "b", "c"} & {*objects.names}
    assert objects.names == whole.objects() == objects.objects()
    assert len(objects.type_of) == len(objects.paths) == len(objects.names)
    for listing in (whole, objects):
        assert listing.tensor_count == 3
        assert listing.dtypes == {
            "F32": {"tensors": 2, "bytes": 16},
            "I8": {"tensors": 1, "bytes": 3},
        }
        assert listing.holders == [0] * len(objects.names)


def test_files_of_others_are_looked_at_when_opened(tmp_path: Path) -> None:
    of_ours(tmp_path / "ours", {"a": torch.ones(2)})
    stock_rows(tmp_path / "stock", torch.ones(4, 1), 4)
    opened = {name: OpenedCheckpoint(str(tmp_path / name)) for name in ("ours", "stock")}
    for file in tmp_path.glob("*/*.safetensors"):
        file.unlink()

    def check(name: str) -> None:
        opened[name].listing(tensors=False, check_files=True)

    check("stock")
    with pytest.raises(IncompleteError, match="is missing"):
        check("ours")
    with pytest.raises(IncompleteError):
        OpenedCheckpoint(str(tmp_path / "stock"))


def test_a_directory_of_neither_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "notes").mkdir()
    for path in (tmp_path, tmp_path / "gone"):
        done = run("inspect", path)
        assert done.exit_code == 3 and len(done.stderr.splitlines()) == 1


def test_a_list_is_cut_in_text_only(tmp_path: Path) -> None:
    files = stock_rows(tmp_path / "c", torch.ones(40, 1), 40)
    text = words(run("inspect", tmp_path / "c"))
    assert "and 16 more; --json lists all" in text
    assert len(fields("inspect", tmp_path / "c")["files"]) == len(files)


def test_colour_is_for_terminals(tmp_path: Path) -> None:
    path = of_ours(tmp_path / "c", nested())

    def drawn(**environment: str) -> str:
        master, slave = os.openpty()
        try:
            subprocess.run(
                [sys.executable, "-m", "torch_ckpt", "ls", str(path)],
                stdout=slave,
                check=True,
                env={**os.environ, "PYTHONPATH": str(PACKAGE), "TERM": "xterm", **environment},
            )
            return os.read(master, 65536).decode()
        finally:
            os.close(master)
            os.close(slave)

    assert "\x1b[1m" in drawn()
    assert "\x1b" not in drawn(NO_COLOR="1")
    assert "\x1b" not in run("ls", path).stdout


def test_columns() -> None:
    rows = [
        ("a", "F32", "[1]", "4 B"),
        ("long", "object", "a value that is long", ""),
        ("b", "", "", "12 B"),
    ]
    assert columns(rows, right={3}) == [
        "a     F32     [1]   4 B",
        "long  object  a value that is long",
        "b                  12 B",
    ]
    assert columns([]) == []


def test_natural_order_of_zeros() -> None:
    names = ["l.7", "l.08", "l.009", "l.10", "l.x"]
    assert sorted(reversed(names), key=natural) == names


def test_natural_order() -> None:
    names = ["b", "a.10", "a.9", "a.9.z", "", "10", "9"]
    assert sorted(names, key=natural) == ["", "a.9", "a.9.z", "a.10", "b", "9", "10"]


def test_plain_inspect_makes_no_object_of_a_tensor(tmp_path: Path, monkeypatch: Any) -> None:
    path = of_ours(tmp_path / "c", nested())
    monkeypatch.setattr("torch_ckpt.checkpoint.description.TensorInfo", pytest.fail)
    monkeypatch.setattr("torch_ckpt.cli.inspect.leaves_of", pytest.fail)
    assert run("inspect", path).exit_code == 0
    assert run("inspect", path, "--tensors").exit_code != 0
