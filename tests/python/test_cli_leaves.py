"""torch-ckpt ls, show and diff: single leaves of checkpoints of any format."""

from __future__ import annotations

import json
import math
import subprocess
import sys
import types
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner, Result
from foreign_samples import DTYPES, SAVERS, of_ours, of_torch

import torch_ckpt
from torch_ckpt.cli import cli


def run(*arguments: Any) -> Result:
    return CliRunner().invoke(cli, [str(each) for each in arguments])


def fields(*arguments: Any) -> Any:
    return json.loads(run(*arguments, "--json").stdout)


def state() -> dict[str, Any]:
    generator = torch.Generator().manual_seed(1)
    layers = {f"layers.{n}.w": torch.randn(4, n + 1, generator=generator) for n in range(12)}
    return {**layers, "half": torch.randn(9, generator=generator).bfloat16(), "step": 7}


@pytest.mark.parametrize("saver", SAVERS)
def test_ls(tmp_path: Path, saver: Any) -> None:
    path = saver(tmp_path / "c", state())
    lines = run("ls", path).stdout.splitlines()
    names = [line.split()[0] for line in lines]
    assert names == ["half", *(f"layers.{n}.w" for n in range(12)), "step"]
    assert lines[3].split() == ["layers.2.w", "F32", "[4,", "3]", "48", "B"]
    assert lines[-1].split() == ["step", "object", "7"]
    assert len({len(line) for line in lines[:-1]}) == 1  # sizes stand on the right
    leaves = fields("ls", path, "layers.1*", "--sort", "size")["leaves"]
    assert [leaf["name"] for leaf in leaves] == [f"layers.{n}.w" for n in (11, 10, 1)]
    assert leaves[0]["bytes"] == 192 and leaves[0]["shape"] == [4, 12]
    assert run("ls", path, "nothing*").stdout.strip() == ""


@pytest.mark.parametrize("saver", SAVERS)
def test_show(tmp_path: Path, saver: Any) -> None:
    value = torch.tensor([[1.0, -2.0], [math.nan, math.inf]])
    path = saver(tmp_path / "c", {"w": value, "leaf": {"a": (1, 2)}})
    shown = fields("show", path, "w")
    assert (shown["min"], shown["max"], shown["mean"]) == (-2.0, 1.0, -0.5)
    assert (shown["nan"], shown["inf"]) == (1, 1)
    assert shown["shape"] == [2, 2] and shown["dtype"] == "float32"
    text = run("show", path, "w").stdout
    assert "w  float32[2, 2]  16 B" in text and "-2." in text
    leaf = "leaf.a"
    assert fields("show", path, leaf) == {"name": leaf, "type": "tuple", "value": "(1, 2)"}
    done = run("show", path, "gone")
    assert done.exit_code == 3 and "'gone'" in done.stderr


def test_show_has_dots_where_values_are_left_out(tmp_path: Path) -> None:
    values = {
        "all": torch.arange(6),
        "line": torch.arange(8),
        "rows": torch.arange(14.0).view(7, 2),
        "wide": torch.arange(14).view(2, 7) > 6,
        "deep": torch.arange(8, dtype=torch.int32).view(2, 2, 2),
        "one": torch.arange(2).view(1, 2, 1),
        "none": torch.empty(0, 9),
        "scalar": torch.tensor(3),
        "complex": torch.zeros(7, dtype=torch.complex64),
    }
    path = of_ours(tmp_path / "c", values)
    shown = {name: fields("show", path, name)["first"] for name in values}
    assert shown["all"] == "tensor([0, 1, 2, 3, 4, 5])"
    assert shown["line"] == "tensor([0, 1, 2, 3, 4, 5, ...])"
    assert run("show", path, "line").stdout.endswith("4, 5, ...])\n")
    rows = shown["rows"].split("\n")
    assert len(rows) == 7 and rows[-1] == "        ...])" and rows[-2].strip() == "[10., 11.],"
    assert (
        shown["wide"].split("\n")[0] == "tensor([[False, False, False, False, False, False, ...],"
    )
    assert shown["deep"].endswith("[2, 3]],\n\n        ...], dtype=torch.int32)")
    assert shown["one"] == str(values["one"])
    assert shown["scalar"] == "tensor(3)" and "..." not in shown["none"]
    assert shown["complex"].endswith(", ...])")


@pytest.mark.parametrize("dtype", [*DTYPES, torch.uint16, torch.uint32, torch.int64])
def test_statistics_of_every_dtype(tmp_path: Path, dtype: torch.dtype) -> None:
    torch.save(
        {"x": torch.arange(6).remainder(2).to(dtype), "e": torch.empty(0, dtype=dtype)},
        tmp_path / "a.pt",
    )
    checkpoint = torch_ckpt.open(tmp_path / "a.pt")
    found = checkpoint["x"].statistics()
    if not dtype.is_complex:
        assert (found["min"], found["max"], found["mean"]) == (0, 1, 0.5)
    assert found["nan"] == (0 if dtype.is_floating_point or dtype.is_complex else None)
    assert checkpoint["e"].statistics()["mean"] is None


@pytest.mark.parametrize("left", SAVERS)
@pytest.mark.parametrize("right", SAVERS)
def test_diff_over_formats(tmp_path: Path, left: Any, right: Any) -> None:
    a = left(tmp_path / "a", state())
    assert run("diff", a, right(tmp_path / "same", state())).exit_code == 0
    what = state()
    what["layers.3.w"][1, 2] += 0.5
    what["half"] = what["half"].float()
    what["layers.4.w"] = torch.zeros(2)
    what["step"] = 8
    what["new"] = 1
    del what["layers.0.w"]
    b = right(tmp_path / "b", what)
    done = run("diff", a, b, "--json")
    assert done.exit_code == 4
    answer = json.loads(done.stdout)
    told = {each["name"]: (each["in"], each["what"]) for each in answer["different"]}
    assert told == {
        "half": ("both", "BF16 and F32"),
        "layers.0.w": ("a", "only in A"),
        "layers.3.w": ("both", "1 of 16 values differs, by 0.5 at most"),
        "layers.4.w": ("both", "shapes [4, 5] and [2]"),
        "new": ("b", "only in B"),
        "step": ("both", "7 and 8"),
    }
    assert answer["same"] == 9
    assert "layers.3.w  1 of 16 values differs" in run("diff", a, b).stdout
    assert "layers.3.w" not in run("diff", a, b, "--names-only").stdout
    assert "layers.3.w" not in run("diff", a, b, "--atol", "0.6").stdout


def test_diff_is_bit_by_bit_without_tolerances(tmp_path: Path) -> None:
    nan, zero = torch.tensor([math.nan, 1.0]), torch.tensor([0.0, 1.0])
    a = of_torch(tmp_path / "a.pt", {"nan": nan, "zero": zero})
    assert run("diff", a, of_torch(tmp_path / "b.pt", {"nan": nan, "zero": zero})).exit_code == 0
    b = of_torch(tmp_path / "c.pt", {"nan": nan.abs() * -1, "zero": -zero.abs()})
    told = {each["name"]: each["what"] for each in fields("diff", a, b)["different"]}
    assert told["zero"] == "2 of 2 values differ, by 2 at most"
    minus = of_torch(tmp_path / "d.pt", {"nan": nan, "zero": torch.tensor([-0.0, 1.0])})
    told = {each["name"]: each["what"] for each in fields("diff", a, minus)["different"]}
    assert told == {"zero": "1 of 2 values differs, in their bits only"}
    assert run("diff", a, minus, "--atol", "1e-9").exit_code == 0
    other = of_torch(tmp_path / "e.pt", {"nan": torch.ones(2), "zero": zero})
    told = {each["name"]: each["what"] for each in fields("diff", a, other)["different"]}
    assert told == {"nan": "1 of 2 values differs, by nan at most"}


def test_commands_start_without_torch(tmp_path: Path) -> None:
    path = of_torch(tmp_path / "a.pt", {"w": torch.ones(2), "n": 1, "o": {"x": (1, 2.5)}})
    other = of_ours(tmp_path / "b", {"w": torch.ones(2), "n": 2, "o": {"x": (1, 2.5)}})
    for words in (["ls", path], ["diff", path, other], ["inspect", path]):
        program = (
            "import sys\nfrom torch_ckpt.cli import cli\n"
            "try:\n"
            f"    cli({[str(word) for word in words]}, standalone_mode=False)\n"
            "except SystemExit as left:\n"
            "    assert left.code == 4\n"
            "assert 'torch' not in sys.modules\n"
        )
        done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
    assert "torch, written by torch.save" in done.stdout
    assert fields("inspect", path)["format"] == "torch"
    assert run("diff", path, other).stdout == "n  1 and 2\n2 leaves are the same, 1 differ\n"


@pytest.mark.parametrize(
    ("left", "right", "atol", "said"),
    [
        (torch.tensor([2**60]), torch.tensor([2**60 + 100]), 1, "by 100 at most"),
        (torch.tensor([2**60]), torch.tensor([2**60 + 100]), 200, None),
        (torch.tensor([2**63 - 1]), torch.tensor([2**63 - 2]), 0, "by 1 at most"),
        (torch.tensor([-(2**63)]), torch.tensor([2**63 - 1]), 1e9, "by 1.84467e+19 at most"),
        (torch.tensor([-(2**63)]), torch.tensor([2**63 - 1]), 2e19, None),
        (torch.ones(2), torch.ones(2, dtype=torch.complex64) * 1j, 0, "F32 and C64; 2"),
        (torch.tensor([3]), torch.tensor([3.5]), 0.1, "I64 and F32; 1 of 1 value"),
    ],
)
def test_diff_of_numbers(tmp_path: Path, left: Any, right: Any, atol: Any, said: Any) -> None:
    a = of_torch(tmp_path / "a.pt", {"x": left})
    b = of_torch(tmp_path / "b.pt", {"x": right})
    found = fields("diff", a, b, "--atol", str(atol))["different"]
    assert (said is None) == (not found)
    assert said is None or said in found[0]["what"]


def test_diff_of_unsigned_numbers(tmp_path: Path) -> None:
    a = of_torch(tmp_path / "a.pt", {"x": torch.tensor([2**63 + 10], dtype=torch.uint64)})
    b = of_torch(tmp_path / "b.pt", {"x": torch.tensor([2**63], dtype=torch.uint64)})
    assert fields("diff", a, b, "--rtol", "1e-12")["different"] == []  # of 2^63, and not of 0
    assert "by 10 at most" in fields("diff", a, b, "--atol", "9")["different"][0]["what"]


def test_statistics_of_very_large_numbers(tmp_path: Path) -> None:
    large = torch.full((40,), 1e308, dtype=torch.float64)
    largest = torch.full((40,), torch.finfo(torch.float64).max, dtype=torch.float64)
    unsigned = torch.tensor([2**53 + 1, 2**64 - 1, 3], dtype=torch.uint64)
    path = of_torch(
        tmp_path / "a.pt",
        {
            "x": large,
            "y": torch.cat([large, -large]),
            "z": largest,
            "u": unsigned,
            "v": unsigned[:1],
        },
    )
    found = fields("show", path, "x")
    assert found["mean"] == pytest.approx(1e308)
    assert fields("show", path, "y")["mean"] == pytest.approx(0.0, abs=1e293)
    done = run("show", path, "z", "--json")
    assert "Infinity" not in done.stdout and json.loads(done.stdout)["max"] == largest[0].item()
    found = fields("show", path, "u")
    assert (found["min"], found["max"]) == (3, 2**64 - 1)
    assert fields("show", path, "v")["min"] == 2**53 + 1


def test_objects_do_not_command_a_terminal_and_are_cut(tmp_path: Path) -> None:
    value = types.SimpleNamespace(**{"a\x1b[2Jb\nc": 1})
    path = of_ours(tmp_path / "a", {"x": value, "long": "y" * 100_000, "w": torch.ones(1)})
    done = run("show", path, "x")
    assert done.exit_code == 0 and "\x1b" not in done.stdout and "?[2Jb" in done.stdout
    assert len(done.stdout.splitlines()) == 3
    assert len(run("show", path, "long").stdout) < 30_000
    assert len(fields("show", path, "long")["value"]) == 100_002


def test_diff_of_packed_numbers_and_wrong_tolerances(tmp_path: Path) -> None:
    packed = torch.arange(4, dtype=torch.uint8).view(torch.float4_e2m1fn_x2)
    a = of_torch(tmp_path / "a.pt", {"x": packed})
    b = of_torch(tmp_path / "b.pt", {"x": torch.arange(4, dtype=torch.uint8)})
    for pair in ((a, b), (b, a)):
        (found,) = fields("diff", *pair, "--atol", "1")["different"]
        assert "F4" in found["what"]
    for wrong in ("-1", "nan"):
        assert run("diff", a, a, "--atol", wrong).exit_code == 2
