"""torch.ops.dcp_ext as users call it: plans of plain arguments, and no other call of torch_ckpt."""

from __future__ import annotations

import subprocess
import sys
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file, save_file
from wrong_plans import REFUSED

import torch_ckpt
import torch_ckpt.native.operators
from torch_ckpt.native.dtypes import DTYPE_NAMES

OPS = torch.ops.dcp_ext
BACKENDS = ("eager", "aot_eager", "inductor")


def new_report() -> torch.Tensor:
    return torch.zeros(4, dtype=torch.int64)


def save(path: Path, tensors: dict[str, torch.Tensor], **keys: Any) -> list[int]:
    report = new_report()
    OPS.save(list(tensors.values()), torch_ckpt.plan(path, list(tensors), **keys), report)
    return report.tolist()


def read(path: Path, targets: dict[str, torch.Tensor], **keys: Any) -> list[int]:
    report = new_report()
    OPS.read(list(targets.values()), torch_ckpt.plan(path, list(targets), **keys), report)
    return report.tolist()


# --- the library --------------------------------------------------------------


def run(code: str) -> str:
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_the_operators_are_there_after_an_import_beside_torch() -> None:
    run("import torch, torch_ckpt; torch.ops.dcp_ext.save")
    run("import torch, torch_ckpt.errors; torch.ops.dcp_ext.save")


def test_without_torch_none_is_imported() -> None:
    run("import sys, torch_ckpt; torch_ckpt.library_path(); assert 'torch' not in sys.modules")


def test_no_import_brings_the_compiler_that_torch_leaves_out() -> None:
    """It takes a third as long as torch itself."""
    run(
        "import sys, tempfile, torch, torch.distributed.checkpoint\n"
        "if 'torch._dynamo' in sys.modules: sys.exit(print('torch imports it'))\n"
        "import torch_ckpt\n"
        "for name in torch_ckpt.__all__: getattr(torch_ckpt, name)\n"
        "path = tempfile.mkdtemp()\n"
        "torch_ckpt.save({'w': torch.ones(2)}, path)\n"
        "torch_ckpt.load(path=path)\n"
        "assert 'torch._dynamo' not in sys.modules\n"
        "assert 'torch._dynamo' not in sys.modules"
    )


def test_where_torch_comes_later_the_library_is_loaded() -> None:
    run(
        "import torch_ckpt, torch\n"
        "assert not hasattr(torch.ops.dcp_ext, 'save')\n"
        "torch.ops.load_library(torch_ckpt.library_path())\n"
        "torch.ops.dcp_ext.save\n"
        "torch_ckpt.plan('c')\n"  # and once only
        "torch.ops.load_library(torch_ckpt.library_path())"
    )


def test_the_library_needs_nothing_of_the_package() -> None:
    path = torch_ckpt.library_path()
    code = (
        f"import sys, torch; torch.ops.load_library({path!r}); print(torch.ops.dcp_ext.version())"
    )
    assert run(f"{code}\nassert 'torch_ckpt' not in sys.modules").strip() == torch_ckpt.__version__


def test_a_forked_child_is_refused(tmp_path: Path) -> None:
    code = f"""
import os, torch, torch_ckpt
plan, report = torch_ckpt.plan({str(tmp_path / "c")!r}, ["x"]), torch.zeros(4, dtype=torch.int64)
torch.ops.dcp_ext.stage([], torch_ckpt.plan(), report[:0], report, torch.zeros(0, dtype=torch.uint8))
if os.fork() == 0:
    for op in ("save", "read"):
        try:
            getattr(torch.ops.dcp_ext, op)([torch.ones(1)], plan, report)
        except RuntimeError as error:
            print(error, flush=True)
    os._exit(0)
os.wait()
"""
    assert run(code).count("spawn") == 2 and not list(tmp_path.iterdir())


# --- plans ----------------------------------------------------------------------


def test_plans_of_plain_arguments(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    plan = torch_ckpt.plan("c", ["a", "b"], workers=2)
    assert plan.dtype == torch.uint8
    said = bytes(plan.tolist()).decode()
    assert said == f'{{"path": "{tmp_path}/c", "names": "a\\nb", "workers": 2}}'
    assert bytes(torch_ckpt.plan().tolist()) == b"{}"
    with pytest.raises(torch_ckpt.InvalidArgumentError, match="URL"):
        torch_ckpt.plan("s3://bucket/c")
    for names in ("xy", ["x", 1]):
        with pytest.raises(torch_ckpt.InvalidArgumentError, match="names is a list of names"):
            torch_ckpt.plan("c", names)  # type: ignore[arg-type]
    with pytest.raises(torch_ckpt.InvalidArgumentError, match="cannot be JSON"):
        torch_ckpt.plan("c", sync=torch.ones(1))


def test_the_operator_plan_says_the_same_in_any_language() -> None:
    plan = OPS.plan('a"\\\n/ü', ["x\ny", "\0"], '{"workers": 2}')
    assert bytes(plan.tolist()).decode() == (
        '{"names":["x\\ny","\\u0000"],"path":"a\\"\\\\\\n/ü","workers":2}'
    )
    assert bytes(OPS.plan("", []).tolist()) == b"{}"
    for more in ("", "[]", "{", "3"):
        with pytest.raises(REFUSED, match="'more' is not a JSON object"):
            OPS.plan("c", [], more)
    with pytest.raises(REFUSED, match="UTF-8"):
        OPS.plan(b"\xff", [])


def test_the_operator_plan_leaks_no_text() -> None:
    code = """
import resource, torch, torch_ckpt
def grown(calls):
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    for _ in range(calls):
        torch.ops.dcp_ext.plan("x" * 200_000, ["y" * 200_000])
    return (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024
grown(20)
print(grown(300))  # 120 MB pass
"""
    assert float(run(code)) < 30


WRONG: list[tuple[str, dict[str, Any], str]] = [
    ("read", {"offset": [[0]]}, "the plan of read has no 'offset'; it has .*'offsets'"),
    ("read", {"path": 3}, "'path' is not a string"),
    ("read", {"path": "s3://bucket/c"}, "'path' is a URL, s3://bucket/c"),
    ("save", {"path": "s3://bucket/c"}, "'path' is a URL"),
    ("describe", {"path": "hf://bert/base"}, "'path' is a URL"),
    ("read", {"path": None}, "'path' is missing; it is a string"),
    ("read", {"format": 1}, "'format' is not a string"),
    ("read", {"names": None}, "'names' has 0 names for 1 tensors"),
    ("read", {"names": ["x", "x"]}, "'names' has 2 names for 1 tensors"),
    ("read", {"names": [1]}, "'names' is not a list of names"),
    ("read", {"offsets": [[1.5]]}, "'offsets', entry 0: a shape holds integers only"),
    ("read", {"offsets": [[998]]}, "tensor 'x': box .* is not inside the stored shape"),
    ("read", {"verify": 1}, "'verify' is not true or false"),
    ("read", {"workers": "2"}, "'workers' is not an integer"),
    ("read", {"files": {"0": 1}}, "'files' has names of files"),
    ("read", {"shared": [7]}, "'shared' lists items of the plan"),
    ("save", {"names": "x\ny"}, "'names' has 2 names for 1 tensors"),
    ("save", {"path": None}, "'path' is missing"),
    ("save", {"overwrite": "no"}, "'overwrite' is not true or false"),
    ("save", {"max_shard_size": "5GB"}, "'max_shard_size' is not an integer"),
    ("save", {"max_shard_size": -1}, "'max_shard_size' is negative"),
    ("save", {"verify": True}, "the plan of save has no 'verify'"),
    ("describe", {"names": "x"}, "the plan of describe has no 'names'"),
    ("describe", {"path": []}, "'path' is not a string"),
    ("stage", {"path": "c"}, "the plan of stage has no 'path'"),
    ("stage", {"names": 3}, "'names' is not a list of names"),
]


@pytest.mark.parametrize(("op", "wrong", "message"), WRONG, ids=str)
def test_errors_of_plans_say_which_key(
    tmp_path: Path, op: str, wrong: dict[str, Any], message: str
) -> None:
    save(tmp_path / "c", {"x": torch.arange(1000.0)})
    plan: dict[str, Any] = {} if op == "stage" else {"path": str(tmp_path / "c")}
    if op != "describe":
        plan["names"] = ["x"]
    blob = torch_ckpt.native.operators.plan_tensor({**plan, **wrong})
    x, report = torch.zeros(3), new_report()
    with pytest.raises((ValueError, RuntimeError), match=message):
        if op == "describe":
            OPS.describe(blob)
        elif op == "stage":
            region = torch.zeros(100, dtype=torch.uint8)
            OPS.stage([x], blob, torch.zeros(1, dtype=torch.int64), report, region)
        else:
            getattr(OPS, op)([x], blob, report)
    assert report.tolist() == [0, 0, 0, 0] and not x.any()
    assert torch_ckpt.Checkpoint(tmp_path / "c").verify()


# --- save, describe, read -------------------------------------------------------


def test_a_checkpoint_of_every_dtype(tmp_path: Path) -> None:
    state = {}
    for dtype, name in DTYPE_NAMES.items():
        data = torch.randint(0, 2, (3, 64), dtype=torch.uint8)
        state[name.lower()] = data.view(dtype)
    state["scalar"] = torch.tensor(2.5)
    state["empty"] = torch.zeros(0, 5)
    state["transposed"] = torch.arange(12.0).reshape(3, 4).t()
    report = save(tmp_path / "c", state)
    data_bytes = sum(tensor.nbytes for tensor in state.values())
    assert report[:2] == [1, data_bytes] and report[2] > data_bytes
    names, dtypes, shapes = OPS.describe(torch_ckpt.plan(tmp_path / "c"))
    assert dict(zip(names, dtypes, strict=True)) == {
        name: DTYPE_NAMES[tensor.dtype] for name, tensor in state.items()
    }
    described = dict(zip(names, shapes, strict=True))
    for name, tensor in state.items():
        # Headers count each of the two elements that are in a byte.
        packed = [3, 2 * 64] if name == "f4" else list(tensor.shape)
        assert described[name] == packed, name
    targets = {name: torch.empty_like(tensor) for name, tensor in state.items()}
    assert read(tmp_path / "c", targets)[:2] == [1, data_bytes]
    for name, tensor in state.items():
        if tensor.dtype.itemsize == 1:
            assert torch.equal(targets[name].view(torch.uint8), tensor.view(torch.uint8)), name
        else:
            assert torch.equal(targets[name], tensor), name
    # And as everybody reads it.
    assert torch.equal(load_file(tmp_path / "c/model.safetensors")["bf16"], state["bf16"])
    assert torch.equal(torch_ckpt.load(path=tmp_path / "c")["scalar"], state["scalar"])


def test_dtypes_that_no_file_holds(tmp_path: Path) -> None:
    for dtype in (torch.complex128, torch.complex32):
        with pytest.raises(RuntimeError, match="tensor 'z': safetensors cannot hold its dtype"):
            save(tmp_path / "c", {"x": torch.ones(1), "z": torch.zeros(3, dtype=dtype)})
    with pytest.raises(RuntimeError, match="packed elements need a dimension"):
        packed = torch.zeros(1, dtype=torch.uint8).view(torch.float4_e2m1fn_x2)
        save(tmp_path / "c", {"z": packed[0]})
    assert not list(tmp_path.iterdir())


def test_files_by_size(tmp_path: Path) -> None:
    state = {f"t{i}": torch.full((1000,), float(i)) for i in range(5)}
    assert save(tmp_path / "c", state, max_shard_size=8000)[0] == 1
    files = sorted(path.name for path in (tmp_path / "c").glob("model*"))
    assert files == [
        *(f"model-0000{i}-of-00003.safetensors" for i in (1, 2, 3)),
        "model.safetensors.index.json",
    ]
    targets = {name: torch.zeros(1000) for name in state}
    read(tmp_path / "c", targets)
    assert all(torch.equal(targets[name], state[name]) for name in state)


def test_a_save_replaces_what_was_there_unless_told_not_to(tmp_path: Path) -> None:
    save(tmp_path / "c", {"x": torch.ones(3), "old": torch.ones(3)})
    with pytest.raises(RuntimeError, match=r"/c: .*holds a checkpoint"):
        save(tmp_path / "c", {"x": torch.zeros(3)}, overwrite=False)
    assert OPS.describe(torch_ckpt.plan(tmp_path / "c"))[0] == ["old", "x"]
    save(tmp_path / "c", {"x": torch.zeros(3)}, sync=False, direct_io=False, workers=1)
    assert OPS.describe(torch_ckpt.plan(tmp_path / "c"))[0] == ["x"]
    with pytest.raises(REFUSED, match="tensor 'x': is there twice"):
        OPS.save([torch.ones(1)] * 2, torch_ckpt.plan(tmp_path / "c", ["x", "x"]), new_report())
    assert [path.name for path in tmp_path.iterdir()] == ["c"]


def test_boxes_into_tensors(tmp_path: Path) -> None:
    x = torch.arange(60.0).reshape(6, 10)
    save(tmp_path / "c", {"x": x})
    corner, column = torch.zeros(2, 3, dtype=torch.bfloat16), torch.zeros(6, 4)[:, 1:2]
    plan = torch_ckpt.plan(tmp_path / "c", ["x", "x"], offsets=[[4, 7], [0, 9]])
    OPS.read([corner, column], plan, new_report())
    assert torch.equal(corner, x[4:, 7:].bfloat16()) and torch.equal(column, x[:, 9:])


def test_tensors_that_do_not_do_are_named(tmp_path: Path) -> None:
    path = tmp_path / "c"
    save(path, {"x": torch.arange(4.0)})
    expanded, deep = torch.zeros(1).expand(4), torch.ones([1] * 9)
    with pytest.raises(REFUSED, match="tensor 'x': the target is expanded"):
        read(path, {"x": expanded})
    assert not expanded.any()
    for call in (save, read):
        with pytest.raises(RuntimeError, match="tensor 'deep': a tensor has 9 dimensions"):
            call(path, {"x": torch.zeros(4), "deep": deep})
    plan = torch_ckpt.plan(path, ["x"])
    for report in (torch.zeros(4, dtype=torch.float64), torch.zeros(3, dtype=torch.int64)):
        with pytest.raises(REFUSED, match="the report is not a dense int64 tensor"):
            OPS.save([torch.zeros(4)], plan, report)
    for wrong in (plan.view(torch.int8), plan.long(), plan[::2]):
        with pytest.raises(REFUSED, match="the plan is not a dense uint8 tensor"):
            OPS.save([torch.zeros(4)], wrong, new_report())
    target = torch.empty(4)
    read(path, {"x": target})
    assert torch.equal(target, torch.arange(4.0))


FORMATS = ("torch_ckpt", "hf", "dcp", "torch", "safetensors")


def make(format: str, state: dict[str, torch.Tensor], path: Path) -> Path:
    """A checkpoint of `state`, as others make it."""
    if format == "torch_ckpt":
        torch_ckpt.save(dict(state), path, no_dist=True)
    elif format == "hf":
        path.mkdir()
        save_file(state, path / "model.safetensors")
    elif format == "dcp":
        dcp.save(dict(state), checkpoint_id=path, no_dist=True)
    elif format == "torch":
        torch.save({**state, "epoch": 3}, path)
    else:
        save_file(state, path)
    return path


@pytest.mark.parametrize("format", FORMATS)
def test_any_format_is_described_and_read(tmp_path: Path, format: str) -> None:
    state = {"a": torch.randn(5, 3), "b.c": torch.arange(7)}
    path = make(format, state, tmp_path / f"source.{format}")
    names, dtypes, shapes = OPS.describe(torch_ckpt.plan(path))
    assert sorted(zip(names, dtypes, shapes, strict=True)) == [
        ("a", "F32", [5, 3]),
        ("b.c", "I64", [7]),
    ]
    targets = {name: torch.zeros_like(tensor) for name, tensor in state.items()}
    read(path, targets)
    assert all(torch.equal(targets[name], state[name]) for name in state)


def test_errors_name_file_and_tensor(tmp_path: Path) -> None:
    save(tmp_path / "c", {"x": torch.arange(100_000.0)})
    with pytest.raises(RuntimeError, match=r"/c: tensor 'y': is not in the checkpoint"):
        read(tmp_path / "c", {"y": torch.zeros(3)})
    with (tmp_path / "c/model.safetensors").open("r+b") as file:
        file.seek(200_000)
        file.write(b"\xff\xff")
    with pytest.raises(RuntimeError, match=r"/c/model.safetensors: .*"):
        read(tmp_path / "c", {"x": torch.zeros(100_000)})
    read(tmp_path / "c", {"x": torch.zeros(100_000)}, verify=False)
    for plan in (torch_ckpt.plan(tmp_path / "none"), torch_ckpt.plan(tmp_path / "c", format="dcp")):
        with pytest.raises(RuntimeError, match=str(tmp_path)):
            OPS.describe(plan)


# --- stage and views -------------------------------------------------------------


def test_staged_tensors_are_saved_from_where_they_are(tmp_path: Path) -> None:
    base = torch.arange(5000.0)
    state = [base, base[1000:2000], torch.arange(12).reshape(3, 4).t(), torch.ones(7).bool()]
    names = ["base", "rows", "transposed", "flags"]
    region = torch.zeros(sum(t.nbytes + 16 for t in state), dtype=torch.uint8)
    offsets, report = torch.zeros(4, dtype=torch.int64), new_report()
    OPS.stage(state, torch_ckpt.plan(names=names, workers=2), offsets, report, region)
    copies = OPS.views(region, state, offsets)
    kept = [t.clone() for t in state]
    base.zero_()  # training goes on
    assert all(torch.equal(copy, was) for copy, was in zip(copies, kept, strict=True))
    assert report[0] == 1 and report[1] < sum(t.nbytes for t in state)  # rows are part of base
    assert all(region.data_ptr() <= c.data_ptr() < region.data_ptr() + len(region) for c in copies)
    save(tmp_path / "c", dict(zip(names, copies, strict=True)))
    targets = {name: torch.zeros_like(copy) for name, copy in zip(names, copies, strict=True)}
    read(tmp_path / "c", targets)
    assert all(torch.equal(targets[n], was) for n, was in zip(names, kept, strict=True))


def test_a_region_that_does_not_fit_is_refused() -> None:
    x, offsets, plan = (
        torch.ones(1000),
        torch.zeros(1, dtype=torch.int64),
        torch_ckpt.plan(names=["x"]),
    )
    room = torch.zeros(5000, dtype=torch.uint8)
    held = bytearray(5000)
    off = (1 - torch.frombuffer(held, dtype=torch.uint8).data_ptr()) % 64
    for region, message in [
        (room[:3999], "the region has 3999 bytes, the tensors take 4000"),
        (
            torch.frombuffer(held, dtype=torch.uint8, offset=off),
            "the region does not begin at a multiple of 64",
        ),
        (room[::2], "the region is not a dense uint8 tensor"),
        (torch.zeros(5000), "the region is not a dense uint8 tensor"),
        (None, "stage needs a region"),
    ]:
        with pytest.raises(REFUSED, match=message):
            OPS.stage([x], plan, offsets, new_report(), region)
    assert not room.any()


# --- compilers ------------------------------------------------------------------


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_compiled_save_commits_exactly_once(tmp_path: Path, backend: str) -> None:
    """A second run, while tracing or later, would be refused: there is a checkpoint already."""
    plans = [torch_ckpt.plan(tmp_path / f"c{i}", ["x"], overwrite=False) for i in range(3)]

    @torch.compile(fullgraph=True, backend=backend)
    def step(x: torch.Tensor, plan: torch.Tensor, report: torch.Tensor) -> torch.Tensor:
        torch.ops.dcp_ext.save([x * 2], plan, report)
        return x + 1

    x = torch.arange(1000.0)
    for number, plan in enumerate(plans):
        report = new_report()
        assert torch.equal(step(x, plan, report), x + 1)
        assert report[0] == 1
        assert sorted(path.name for path in tmp_path.iterdir()) == [
            f"c{i}" for i in range(number + 1)
        ]
        saved = load_file(tmp_path / f"c{number}/model.safetensors")["x"]
        assert torch.equal(saved, x * 2)
    with pytest.raises(RuntimeError, match="holds a checkpoint"):
        step(x, plans[0], new_report())


def test_an_exported_program_saves_exactly_once(tmp_path: Path) -> None:
    plan = torch_ckpt.plan(tmp_path / "c", ["x"], overwrite=False)

    class Saves(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("plan", plan)

        def forward(self, x: torch.Tensor, report: torch.Tensor) -> torch.Tensor:
            torch.ops.dcp_ext.save([x * 2], self.plan, report)
            return x + 1

    x, report = torch.arange(1000.0), new_report()
    program = torch.export.export(Saves(), (x, report))
    assert not (tmp_path / "c").exists()  # not while it was traced
    torch.export.save(program, tmp_path / "saves.pt2")
    module = torch.export.load(tmp_path / "saves.pt2").module()
    assert torch.equal(module(x, report), x + 1)
    assert report[0] == 1
    assert torch.equal(load_file(tmp_path / "c/model.safetensors")["x"], x * 2)


def test_an_exported_program_reads_and_stages(tmp_path: Path) -> None:
    save(tmp_path / "c", {"x": torch.arange(1000.0)})

    class Reads(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("read_plan", torch_ckpt.plan(tmp_path / "c", ["x"]))
            self.register_buffer("stage_plan", torch_ckpt.plan(names=["x"]))

        def forward(
            self,
            target: torch.Tensor,
            report: torch.Tensor,
            offsets: torch.Tensor,
            region: torch.Tensor,
        ) -> torch.Tensor:
            torch.ops.dcp_ext.read([target], self.read_plan, report)
            torch.ops.dcp_ext.stage([target + 1], self.stage_plan, offsets, report, region)
            return target * 2

    def arguments() -> tuple[torch.Tensor, ...]:
        offsets = torch.zeros(1, dtype=torch.int64)
        return torch.zeros(1000), new_report(), offsets, torch.zeros(4000, dtype=torch.uint8)

    module = torch.export.export(Reads(), arguments()).module()
    target, report, offsets, region = arguments()
    assert torch.equal(module(target, report, offsets, region), torch.arange(1000.0) * 2)
    assert torch.equal(target, torch.arange(1000.0))
    assert torch.equal(region.view(torch.float32), target + 1)
    assert report.tolist() == [1, 4000, 4000, 0]


def test_opcheck_of_the_operators_that_only_look(tmp_path: Path) -> None:
    save(tmp_path / "c", {"x": torch.ones(3)})
    # They make text and lists, which no graph holds.
    checks = ("test_schema", "test_autograd_registration")
    plan = torch_ckpt.plan(tmp_path / "c")
    torch.library.opcheck(OPS.describe.default, (plan,), test_utils=checks)
    torch.library.opcheck(OPS.plan.default, ("c", ["x"]), test_utils=checks)


# --- TorchScript ----------------------------------------------------------------


class LoadsItself(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(16, 4)
        self.register_buffer("count", torch.zeros((), dtype=torch.int64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x)  # type: ignore[no-any-return]

    @torch.jit.export
    def load(self, path: str, prefix: str) -> int:
        names = [prefix + name for name in ["linear.weight", "linear.bias", "count"]]
        tensors = [self.linear.weight, self.linear.bias, self.count]
        report = torch.zeros(4, dtype=torch.int64)
        with torch.no_grad():
            torch.ops.dcp_ext.read(tensors, torch.ops.dcp_ext.plan(path, names), report)
        assert int(report[0]) == 1
        return int(report[1])


@pytest.mark.skipif(sys.version_info >= (3, 14), reason="torch supports TorchScript up to 3.13")
@pytest.mark.parametrize("format", FORMATS[:4])
def test_a_script_loads_its_own_weights(tmp_path: Path, format: str) -> None:
    trained = LoadsItself()
    trained.count.fill_(41)
    state = {name: tensor.detach().clone() for name, tensor in trained.state_dict().items()}
    path = make(format, state, tmp_path / "weights")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch.jit is deprecated
        torch.jit.save(torch.jit.script(LoadsItself()), str(tmp_path / "module.pt"))
        module = torch.jit.load(str(tmp_path / "module.pt"))
    for _ in range(3):  # the profiling executor optimizes after the first
        for tensor in module.state_dict().values():
            tensor.zero_()
        assert module.load(str(path), "") == 16 * 4 * 4 + 4 * 4 + 8
        assert all(torch.equal(t, state[name]) for name, t in module.state_dict().items())
    x = torch.randn(3, 16)
    assert torch.equal(module(x), trained(x))
    with pytest.raises(RuntimeError, match="tensor 'no.linear.weight': is not in the checkpoint"):
        module.load(str(path), "no.")


def saves_and_describes(x: torch.Tensor, path: str) -> tuple[list[str], list[str], list[list[int]]]:
    report = torch.zeros(4, dtype=torch.int64)
    plan = torch.ops.dcp_ext.plan(path, ["x"], '{"overwrite": false}')
    torch.ops.dcp_ext.save([x * 2], plan, report)
    assert int(report[0]) == 1  # without this TorchScript would drop the save
    none: list[str] = []
    names, dtypes, shapes = torch.ops.dcp_ext.describe(torch.ops.dcp_ext.plan(path, none))
    return names, dtypes, shapes


@pytest.mark.skipif(sys.version_info >= (3, 14), reason="torch supports TorchScript up to 3.13")
def test_a_script_saves_exactly_once_and_describes(tmp_path: Path) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        script = torch.jit.script(saves_and_describes)
    x = torch.arange(6.0).reshape(2, 3)
    for number in range(3):
        found = script(x, str(tmp_path / f"c{number}"))
        assert found == (["x"], ["F32"], [[2, 3]])
        saved = load_file(tmp_path / f"c{number}/model.safetensors")
        assert torch.equal(saved["x"], x * 2)
