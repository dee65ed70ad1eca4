"""Arguments of torch.ops.dcp_ext that look right and are not: each is refused, by its name."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from one_memory import APART, OVERLAPS, random_views
from safetensors.torch import save_file
from wrong_plans import REFUSED

import torch_ckpt
import torch_ckpt.native.operators
from torch_ckpt.dcp.read.targets import find_tied

OPS = torch.ops.dcp_ext


def new_report() -> torch.Tensor:
    return torch.zeros(4, dtype=torch.int64)


@pytest.fixture
def c(tmp_path: Path) -> Path:
    x = torch.arange(1000.0)
    state = {"x": x, "square": x[:900].reshape(30, 30)}
    OPS.save(list(state.values()), torch_ckpt.plan(tmp_path / "c", list(state)), new_report())
    return tmp_path / "c"


# --- paths and names ------------------------------------------------------------


@pytest.mark.parametrize("name", ["m.pt", "m.safetensors", "./m.pt", "sub/../m.pt"])
def test_a_file_beside_the_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "sub").mkdir()
    state = {"x": torch.arange(3.0)}
    (save_file if name.endswith("safetensors") else torch.save)(state, name)
    plan = OPS.plan(name, ["x"])
    assert OPS.describe(OPS.plan(name, [])) == (["x"], ["F32"], [[3]])
    target = torch.zeros(3)
    OPS.read([target], plan, new_report())
    assert torch.equal(target, state["x"])
    with pytest.raises(RuntimeError, match=r"^none.pt: there is no such file or directory"):
        OPS.describe(OPS.plan("none.pt", []))


def test_an_empty_path_is_no_directory() -> None:
    with pytest.raises(torch_ckpt.InvalidArgumentError, match="path is empty"):
        torch_ckpt.plan("", ["x"])


def test_names_of_any_iterable() -> None:
    assert torch.equal(torch_ckpt.plan("c", (n for n in "xy")), torch_ckpt.plan("c", ["x", "y"]))
    with pytest.raises(torch_ckpt.InvalidArgumentError, match="names is a list of names"):
        torch_ckpt.plan("c", iter(["x", 1]))  # type: ignore[list-item]


@pytest.mark.parametrize("name", ["__metadata__", "a\0b"])
def test_a_save_that_is_refused_leaves_no_directories(tmp_path: Path, name: str) -> None:
    plan = torch_ckpt.plan(tmp_path / "new/parent/c", [name])
    with pytest.raises(REFUSED, match="/new/parent/c: tensor name"):
        OPS.save([torch.ones(1)], plan, new_report())
    assert not list(tmp_path.iterdir())


# --- plans ----------------------------------------------------------------------


def test_json_that_is_nested_too_deep() -> None:
    """Writing it would overflow the stack, so it runs in a child."""
    code = """
import torch, torch_ckpt
O = torch.ops.dcp_ext
for text in ("[" * 200_000, '{"offsets":' + "[" * 200_000 + "]" * 200_000 + "}", '{"a":' * 65):
    for call in (
        lambda: O.plan("c", [], text),
        lambda: O.describe(torch.tensor(list(text.encode()), dtype=torch.uint8)),
    ):
        try:
            call()
        except (ValueError, RuntimeError) as error:
            assert "is nested deeper than 64 levels" in str(error), error
            print("refused")
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("refused") == 6
    brackets = "[" * 200 + '\\"'  # in a name they are text
    OPS.plan("c", [brackets], f'{{"format": "{brackets}"}}')


DEFAULTS: dict[str, dict[str, Any]] = {
    "save": dict.fromkeys(
        ["overwrite", "max_shard_size", "workers", "sync", "direct_io", "job"], None
    ),
    "read": dict.fromkeys(
        [
            *("checkpoint", "format", "offsets", "files", "shared"),
            *("workers", "verify", "direct_io", "job"),
        ],
        None,
    ),
    "describe": dict.fromkeys(["checkpoint", "format"], None),
    "stage": dict.fromkeys(["workers", "patience_ms", "shared", "job"], None),
}


@pytest.mark.parametrize("op", DEFAULTS)
def test_null_is_the_default_of_every_key(c: Path, op: str) -> None:
    path = {} if op == "stage" else {"path": str(c)}
    names = {} if op == "describe" else {"names": ["x"]}
    plan = torch_ckpt.native.operators.plan_tensor({**path, **names, **DEFAULTS[op]})
    x, report = torch.zeros(1000), new_report()
    if op == "describe":
        assert OPS.describe(plan)[0] == ["square", "x"]
        return
    if op == "stage":
        region = torch.zeros(5000, dtype=torch.uint8)
        OPS.stage([x], plan, torch.zeros(1, dtype=torch.int64), report, region)
    else:
        getattr(OPS, op)([x], plan, report)
    assert report[0] == 1


WRONG: list[tuple[str, dict[str, Any], str]] = [
    *(
        (op, {"workers": workers}, f"'workers' is {workers}, and not from 1 to 256")
        for op in ("save", "read", "stage")
        for workers in (0, -1, 257)
    ),
    ("save", {"workers": 2**63}, "'workers' is too large"),
    ("save", {"max_shard_size": 2**64 - 1}, "'max_shard_size' is too large"),
    ("read", {"offsets": [[0], [0]]}, "'offsets' has 2 entries for 1 tensors"),
    ("read", {"offsets": []}, "'offsets' has 0 entries for 1 tensors"),
    ("read", {"checkpoint": 1}, "'checkpoint' and 'path' are not given together"),
    ("stage", {"job": None, "region": None}, "stage needs a region"),
    ("stage", {"job": 0, "region": None}, "stage needs a region"),
]


@pytest.mark.parametrize(("op", "wrong", "message"), WRONG, ids=str)
def test_values_that_no_key_has(c: Path, op: str, wrong: dict[str, Any], message: str) -> None:
    wrong = dict(wrong)
    region = wrong.pop("region", torch.zeros(100, dtype=torch.uint8))
    plan: dict[str, Any] = {"names": ["x"]} | ({} if op == "stage" else {"path": str(c)})
    blob = torch_ckpt.native.operators.plan_tensor({**plan, **wrong})
    more = [torch.zeros(1, dtype=torch.int64)] if op == "stage" else []
    last = [region] if op == "stage" else []
    report = new_report()
    with pytest.raises(REFUSED, match=message):
        getattr(OPS, op)([torch.zeros(3)], blob, *more, report, *last)
    assert not report.any()


# --- overwrite ------------------------------------------------------------------


@pytest.mark.parametrize("format", ["dcp", "pytorch_model.bin", "pytorch_model-00001-of-00002.bin"])
def test_checkpoints_of_others_are_not_overwritten_unless_asked(
    tmp_path: Path, format: str
) -> None:
    path, state = tmp_path / "c", {"x": torch.arange(3.0)}
    if format == "dcp":
        dcp.save(dict(state), checkpoint_id=path, no_dist=True)
    else:
        path.mkdir()
        torch.save(state, path / format)
    before = {file.name: file.read_bytes() for file in path.iterdir()}
    plan = torch_ckpt.plan(path, ["x"], overwrite=False)
    with pytest.raises(RuntimeError, match=r"/c: holds a checkpoint"):
        OPS.save([torch.zeros(3)], plan, new_report())
    with pytest.raises(torch_ckpt.ConflictError, match="holds a checkpoint"):
        torch_ckpt.save({"x": torch.zeros(3)}, path, overwrite=False, no_dist=True)
    shutil.rmtree(path / ".torch_ckpt-stage", ignore_errors=True)
    assert {file.name: file.read_bytes() for file in path.iterdir()} == before


def test_files_that_are_no_checkpoint_do_not_hinder_a_save(tmp_path: Path) -> None:
    (tmp_path / "c").mkdir()
    (tmp_path / "c/training_args.bin").write_bytes(b"x")
    plan = torch_ckpt.plan(tmp_path / "c", ["x"], overwrite=False)
    OPS.save([torch.zeros(3)], plan, new_report())
    assert (tmp_path / "c/training_args.bin").exists()


# --- memory ---------------------------------------------------------------------


def test_targets_that_overlap_themselves_or_each_other(c: Path) -> None:
    memory = torch.zeros(1000)

    def refused(message: str, *targets: torch.Tensor) -> None:
        names = ["square" if target.dim() == 2 else "x" for target in targets]
        with pytest.raises(REFUSED, match=message):
            OPS.read(list(targets), torch_ckpt.plan(c, names), new_report())
        assert not memory.any()

    itself = "/c: tensor 'square': the target is expanded or overlaps itself"
    refused(itself, memory.as_strided((3, 4), (1, 1)))
    refused(itself, memory.as_strided((3, 4), (3, 1)))
    refused(itself, memory[:4].expand(3, 4))
    each_other = "/c: tensor '(x|square)': the target shares memory with that of '(x|square)'"
    refused(each_other, memory, memory)
    refused(each_other, memory[:10], memory[9:20])
    refused(each_other, memory[:900].reshape(30, 30).t(), memory[899:])
    square = memory[:900].reshape(30, 30)
    refused(each_other, square[:, 3:5], square[:, 3:5])
    refused(each_other, square, square[2:4, 2:4])
    with pytest.raises(REFUSED, match='\'meeting\' is "return" or "allow"'):
        OPS.read([memory], torch_ckpt.plan(c, ["x"], meeting="ask"), new_report())


# As "turned", but of the very same elements, in another order.
CLASHES = {**OVERLAPS, "the same, turned": lambda w: (w[:, :3], w[:, :3].t())}


@pytest.mark.parametrize("kind", CLASHES)
@pytest.mark.parametrize("swapped", [False, True])
def test_targets_that_share_memory_are_refused(tmp_path: Path, kind: str, swapped: bool) -> None:
    targets = list(CLASHES[kind](torch.zeros(8, 8)))[:: -1 if swapped else 1]
    plan = plan_of_ones(tmp_path / "c", targets)
    with pytest.raises(REFUSED, match="tensor 't1': the target shares memory with that of 't0'"):
        OPS.read(targets, plan, new_report())
    assert not any(target.any() for target in targets)


@pytest.mark.parametrize("kind", APART)
@pytest.mark.parametrize("swapped", [False, True])
def test_targets_apart_in_one_memory_are_filled(tmp_path: Path, kind: str, swapped: bool) -> None:
    targets = APART[kind](torch.zeros(8, 8))[:: -1 if swapped else 1]
    OPS.read(targets, plan_of_ones(tmp_path / "c", targets), new_report())
    assert all(bool((target == 1).all()) for target in targets)


def plan_of_ones(path: Path, targets: list[torch.Tensor]) -> torch.Tensor:
    """To read a checkpoint of ones into these: "t0", "t1" and so on."""
    stored = {f"t{i}": torch.ones(t.shape, dtype=t.dtype) for i, t in enumerate(targets)}
    torch_ckpt.save(stored, path, no_dist=True)
    return torch_ckpt.plan(path, list(stored))


def test_overlaps_are_those_that_loads_find(tmp_path: Path) -> None:
    """Views of one memory, of all kinds: the operator refuses what a load takes for tied or for
    an overlap, and nothing else."""
    generator = torch.Generator().manual_seed(2)
    refused = 0
    for _ in range(300):
        views = random_views(torch.zeros(128), generator)
        if len(views) < 2:
            continue
        names = [f"t{i}" for i in range(len(views))]
        try:
            apart = not find_tied(names, views)
        except torch_ckpt.InvalidArgumentError:
            apart = False
        try:
            OPS.read(views, plan_of_ones(tmp_path / "c", views), new_report())
        except REFUSED as error:
            assert not apart and "shares memory" in str(error), error
            refused += 1
        else:
            assert apart, [(v.shape, v.stride(), v.storage_offset()) for v in views]
    assert 30 < refused < 270


def test_targets_apart_in_one_memory(c: Path) -> None:
    memory = torch.zeros(900)
    square, stored = memory.reshape(30, 30), torch.arange(900.0).reshape(30, 30)
    halves = [square[:, :15], square[:, 15:]]
    plan = torch_ckpt.plan(c, ["square"] * 2, offsets=[[0, 0], [0, 15]])
    OPS.read(halves, plan, new_report())
    assert torch.equal(square, stored)
    square.zero_()
    rows = [square[15:], square[:15], memory[:0], memory[4:4]]
    names, offsets = ["square", "square", "x", "x"], [[15, 0], [0, 0], None, None]
    OPS.read(rows, torch_ckpt.plan(c, names, offsets=offsets), new_report())
    assert torch.equal(square, stored)


def test_tensors_in_the_region_that_they_are_copied_to() -> None:
    region = torch.zeros(5000, dtype=torch.uint8)
    inside = region[1024:1424].view(torch.float32)
    offsets, plan = torch.zeros(2, dtype=torch.int64), torch_ckpt.plan(names=["a", "b"])
    for tensor in (inside, inside[::7]):
        with pytest.raises(REFUSED, match="tensor 'b': is in the region already"):
            OPS.stage([torch.ones(3), tensor], plan, offsets, new_report(), region)
    assert not region.any()


def test_a_region_that_is_not_the_beginning_of_its_storage() -> None:
    memory, x = torch.zeros(8192, dtype=torch.uint8), torch.ones(100)
    offsets = torch.zeros(1, dtype=torch.int64)
    begin = -memory.data_ptr() % 64 + 64
    region = memory[begin:]
    with pytest.raises(REFUSED, match="the region is not the beginning of its storage"):
        OPS.stage([x], torch_ckpt.plan(names=["x"]), offsets, new_report(), region)
    with pytest.raises(REFUSED, match="the region is not the beginning of its storage"):
        OPS.views(region, [x], offsets)
    assert not memory.any()


def test_a_view_that_does_not_fit_is_named_by_its_number() -> None:
    region, like = torch.zeros(1000, dtype=torch.uint8), [torch.ones(100)] * 2
    for offset in (601, 604, -4):
        message = f"tensor 1 of 400 bytes does not fit at offset {offset} of the region"
        with pytest.raises(REFUSED, match=message):
            OPS.views(region, like, torch.tensor([0, offset]))


def test_copies_of_parameters_need_no_grad_or_detached_ones() -> None:
    weight, region = torch.nn.Parameter(torch.ones(3)), torch.zeros(100, dtype=torch.uint8)
    offsets = torch.zeros(1, dtype=torch.int64)
    OPS.stage([weight], torch_ckpt.plan(names=["w"]), offsets, new_report(), region)
    with torch.no_grad():
        (quiet,) = OPS.views(region, [weight], offsets)
    (detached,) = OPS.views(region, [weight.detach()], offsets)
    assert not quiet.requires_grad and not detached.requires_grad
    assert quiet.tolist() == [1.0, 1.0, 1.0]


@pytest.mark.parametrize(
    "empty",
    [torch.zeros(0), torch.zeros(3, 0), torch.zeros(0, 5), torch.zeros(2, 0, 3)],
    ids=lambda tensor: str(tuple(tensor.shape)),
)
def test_the_digest_of_an_empty_tensor(empty: torch.Tensor) -> None:
    report = new_report()
    OPS.crc32c(empty, report)
    assert report.tolist() == [1, 0, 0, 0]


# --- errors ---------------------------------------------------------------------


def test_errors_name_what_is_wrong(c: Path) -> None:
    deep, region = torch.ones([1] * 9), torch.zeros(100, dtype=torch.uint8)
    offsets = torch.zeros(2, dtype=torch.int64)
    plan = torch_ckpt.plan(names=["a", "deep"])
    with pytest.raises(RuntimeError, match="tensor 'deep': a tensor has 9 dimensions"):
        OPS.stage([torch.ones(1), deep], plan, offsets, new_report(), region)
    with pytest.raises(REFUSED, match="'names' has 2 names for 1 tensors"):
        OPS.stage([deep], plan, offsets, new_report(), region)
    plan = torch_ckpt.plan(c, ["z"])
    with pytest.raises(RuntimeError, match="/c: tensor 'z': safetensors cannot hold its dtype"):
        OPS.save([torch.zeros(3, dtype=torch.complex128)], plan, new_report())
    with pytest.raises(RuntimeError, match="/c: tensor 'z': a tensor has 9 dimensions"):
        OPS.read([deep], plan, new_report())


@pytest.mark.parametrize("op", ["save", "read", "stage"])
def test_other_layouts_and_devices_are_not_implemented(c: Path, op: str) -> None:
    plan = torch_ckpt.plan(names=["x"]) if op == "stage" else torch_ckpt.plan(c, ["x"])
    more = [torch.zeros(1, dtype=torch.int64)] if op == "stage" else []
    last = [torch.zeros(100, dtype=torch.uint8)] if op == "stage" else []
    for tensor in (torch.zeros(3).to_sparse(), torch.zeros(3, device="meta")):
        with pytest.raises(NotImplementedError, match=f"dcp_ext::{op}"):
            getattr(OPS, op)([tensor], plan, *more, new_report(), *last)


def test_another_copy_of_the_library_is_named(tmp_path: Path) -> None:
    ours = Path(torch_ckpt.library_path())
    for file in ours.parent.glob("libtorch_ckpt_*.so"):
        shutil.copy(file, tmp_path)
    code = f"""
import torch
torch.ops.load_library({str(tmp_path / ours.name)!r})
try:
    import torch_ckpt
except ImportError as error:
    print(error)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert str(tmp_path / ours.name) in done.stdout and str(ours) in done.stdout
