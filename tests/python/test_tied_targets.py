"""Targets that are one memory: filled once, with the values of the last name, whatever is stored."""

from __future__ import annotations

import json
import subprocess
import sys
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from one_memory import APART, OVERLAPS, random_views
from safetensors.torch import save_file
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard

import torch_ckpt
from torch_ckpt.dcp.read import read_tensors
from torch_ckpt.dcp.read.targets import find_tied
from torch_ckpt.errors import InvalidArgumentError

State = dict[str, torch.Tensor]


def of_hf(state: State, path: Path) -> None:
    path.mkdir()
    save_file(state, path / "model.safetensors")


FORMATS: dict[str, Callable[[State, Path], Any]] = {
    "ours": torch_ckpt.save,
    "final": lambda state, path: torch_ckpt.save(state, path, layout="final"),
    "hf": of_hf,
    "dcp": lambda state, path: dcp.save(
        state, storage_writer=dcp.FileSystemWriter(path), no_dist=True
    ),
    "torch": torch.save,
}

# Loads the paths that it is told into two names of one memory, and says what is there, and what
# warnings there were.
CHILD = """
import json, sys, warnings
import torch, torch_ckpt
from torch import nn
out = {}
for path, count, pairs in json.loads(sys.argv[1]):
    targets = [torch.full((count,), 5.0) for _ in range(pairs)]
    state = {f"{n}{i}": w for i, w in enumerate(targets) for n in "ab"}
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        torch_ckpt.load(state, path)
    said = [str(w.message) for w in caught if "one memory" in str(w.message)]
    out[path] = [sorted({float(v) for w in targets for v in w.aminmax()}), said]
print(json.dumps(out))
"""


def in_a_fresh_process(loads: list[tuple[str, int, int]]) -> dict[str, Any]:
    done = subprocess.run(
        [sys.executable, "-c", CHILD, json.dumps(loads)],
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout)
    return found


@pytest.mark.parametrize("kind", FORMATS)
def test_the_last_name_is_loaded_in_fresh_processes(tmp_path: Path, kind: str) -> None:
    loads: list[tuple[str, int, int]] = []
    for mib, pairs in ((0.25, 12), (4, 3), (32, 1)):
        count = int(mib * (1 << 18))
        for other in (1.0, 2.0) if mib < 32 else (2.0,):
            state = {
                f"{name}{i}": torch.full((count,), value)
                for i in range(pairs)
                for name, value in (("a", 1.0), ("b", other))
            }
            path = tmp_path / f"{mib}-{other}"
            FORMATS[kind](state, path)
            loads.append((str(path), count, pairs))
    for path, (values, said) in in_a_fresh_process(loads).items():
        if path.endswith("1.0"):
            assert (set(values), said) == ({1.0}, []), path
            continue
        assert set(values) == {2.0}, path
        assert len(said) == 1 and said[0].startswith("'a0' has the values of 'b0'"), path
        assert ("and 7 more" in said[0]) == ("0.25" in path)


def loaded(state: State, path: Path) -> list[str]:
    """What a load warns of."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        torch_ckpt.load(dict(state), path)
    return [str(each.message) for each in caught]


def test_names_that_are_one_in_the_checkpoint_are_not_read_twice(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    w = torch.randn(64, 3)
    torch_ckpt.save({"a": w, "b": w}, tmp_path / "c", layout="final")
    reads: list[int] = []
    read = torch_ckpt.native.operators.read

    def spy(into: list[torch.Tensor], *rest: Any) -> dict[str, Any]:
        done = read(into, *rest)
        if "met" not in done:  # else it has read nothing
            reads.append(len(into))
        return done

    monkeypatch.setattr(torch_ckpt.native.operators, "read", spy)
    target = torch.zeros(64, 3)
    assert loaded({"a": target, "b": target}, tmp_path / "c") == []
    assert torch.equal(target, w) and reads == [1]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64, torch.complex128])
@pytest.mark.parametrize("other", [0.0, 1.0])
def test_casts_and_strides(tmp_path: Path, dtype: torch.dtype, other: float) -> None:
    """In place, through host memory, and with not a number, which is not equal to itself."""
    one = torch.randn(40, 50)
    one[0, 0] = float("nan")
    stored = {"a": one, "b": one + other, "c": one.clone()}
    torch_ckpt.save(stored, tmp_path / "c")
    for target in (torch.zeros(40, 50, dtype=dtype), torch.zeros(50, 80, dtype=dtype).t()[::2]):
        said = loaded({"a": target, "b": target, "c": target[:]}, tmp_path / "c")
        said = [text for text in said if "one memory" in text]
        assert torch.equal(target.nan_to_num(), one.to(dtype).nan_to_num())
        assert len(said) == (other != 0)
        assert all("'b' has the values of 'c'" in text and "'a'" not in text for text in said)


def test_one_memory_in_two_shapes(tmp_path: Path) -> None:
    w = torch.randn(6, 4)
    torch_ckpt.save({"w": w, "flat": w.view(24), "turned": w.t()}, tmp_path / "same")
    into = torch.zeros(6, 4)
    views = {"w": into, "flat": into.view(24), "turned": into.t()}
    assert loaded(views, tmp_path / "same") == []
    assert torch.equal(into, w)
    torch_ckpt.save({"w": w, "flat": w.view(24) + 1, "turned": w.t() + 2}, tmp_path / "other")
    (said,) = loaded(views, tmp_path / "other")
    assert "'w' has the values of 'turned'; 'flat' has the values of 'turned'" in said
    assert torch.equal(into, w + 2)


@pytest.mark.parametrize("kind", OVERLAPS)
@pytest.mark.parametrize("swapped", [False, True])
def test_a_part_in_common_is_an_error_before_anything_is_read(
    tmp_path: Path, kind: str, swapped: bool
) -> None:
    targets = OVERLAPS[kind](torch.zeros(8, 8))
    stored = {
        name: torch.ones(value.shape, dtype=value.dtype)
        for name, value in zip("ab", targets, strict=True)
    }
    torch_ckpt.save(stored, tmp_path / "c")
    state = dict(zip("ba" if swapped else "ab", targets, strict=True))
    torch_ckpt.save(dict(zip(state, stored.values(), strict=True)), tmp_path / "c")
    first, second = state
    with pytest.raises(
        InvalidArgumentError,
        match=rf"rank 0: tensor '{second}': its target shares a part of its memory with that of "
        f"'{first}'",
    ):
        torch_ckpt.load(state, tmp_path / "c")
    assert not any(value.any() for value in targets)


@pytest.mark.parametrize("kind", APART)
def test_neighbours_in_one_memory_are_loaded(tmp_path: Path, kind: str) -> None:
    targets = {f"t{i}": value for i, value in enumerate(APART[kind](torch.zeros(8, 8)))}
    stored = {name: torch.randn(value.shape) for name, value in targets.items()}
    torch_ckpt.save(stored, tmp_path / "c")
    assert loaded(targets, tmp_path / "c") == []
    for name, value in targets.items():
        assert torch.equal(value, stored[name]), name


@pytest.mark.usefixtures("group")
def test_tied_dtensors(tmp_path: Path) -> None:
    mesh = init_device_mesh("cpu", (1,))
    torch_ckpt.save({"a": torch.ones(4, 6), "b": torch.full((4, 6), 2.0)}, tmp_path / "c")
    local = torch.zeros(4, 6)
    tied = {name: DTensor.from_local(local, mesh, [Shard(0)]) for name in "ab"}
    (said,) = loaded(tied, tmp_path / "c")
    assert "'a' has the values of 'b'" in said and bool((local == 2).all())


def test_found_against_brute_force() -> None:
    """Views of one memory, of all kinds: each byte of each is marked, one after another."""
    generator = torch.Generator().manual_seed(1)
    apart = 0
    for _ in range(3000):
        base = torch.zeros(128, dtype=torch.int16)
        views = random_views(base, generator)
        marks = []
        for view in views:
            mark = torch.zeros_like(base)
            mark.as_strided(view.shape, view.stride(), view.storage_offset()).fill_(1)
            marks.append(mark.bool())
        clash = any(
            bool((a & b).any()) and not torch.equal(a, b)
            for i, a in enumerate(marks)
            for b in marks[:i]
        )
        try:
            tied = find_tied([str(i) for i in range(len(views))], views)
        except InvalidArgumentError:
            assert clash, [(v.shape, v.stride(), v.storage_offset()) for v in views]
            continue
        assert not clash, [(v.shape, v.stride(), v.storage_offset()) for v in views]
        same = {
            i for i, a in enumerate(marks) for j, b in enumerate(marks) if i != j and a.equal(b)
        }
        assert {i for group in tied for i in group} <= same
        apart += not same
    assert apart > 200


def test_a_load_looks_at_no_pair_where_no_spans_meet(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The operator, which has all addresses, tells; of columns of a matrix it cannot."""
    stored = {str(i): torch.randn(5) for i in range(20)}
    torch_ckpt.save(stored, tmp_path / "c")
    looks: list[int] = []

    def spy(names: list[str], targets: list[torch.Tensor]) -> list[list[int]]:
        looks.append(len(targets))
        return find_tied(names, targets)

    monkeypatch.setattr(read_tensors, "find_tied", spy)
    rows, columns = torch.zeros(20, 5), torch.zeros(5, 20)
    for targets, wanted in ((list(rows), []), (list(columns.t()), [20])):
        state = dict(zip(stored, targets, strict=True))
        torch_ckpt.load(state, tmp_path / "c")
        assert all(torch.equal(state[name], stored[name]) for name in stored)
        assert looks == wanted


def test_the_look_is_cheap() -> None:
    """About a microsecond a tensor; ten are given, for a machine that is busy."""
    targets = [torch.zeros(4) for _ in range(20_000)]
    names = [str(i) for i in range(len(targets))]
    began = time.process_time()
    assert find_tied(names, targets) == []
    assert time.process_time() - began < 20_000 * 10e-6
    # Columns of one matrix are not compared each with each.
    matrix = torch.zeros(4, 20_000)
    began = time.process_time()
    assert find_tied(names, list(matrix.t())) == []
    assert time.process_time() - began < 20_000 * 100e-6
