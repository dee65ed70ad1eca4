"""How the operators behave towards Python, torch.compile and TorchScript.

Each data op runs exactly once per call in every mode: it is never dropped as
dead code, never repeated, and never runs while a graph is traced.
"""

from __future__ import annotations

import io
import json
import sys
import threading
import time
import warnings
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch._subclasses.fake_tensor import FakeTensorMode

import torch_ckpt
import torch_ckpt.native.operators

OPS = torch.ops.dcp_ext
BACKENDS = ("eager", "aot_eager", "inductor")
NAMES = ("save", "write", "read", "stage", "crc32c")


def as_plan(plan: dict[str, object]) -> torch.Tensor:
    return torch.frombuffer(bytearray(json.dumps(plan).encode()), dtype=torch.uint8)


def new_report() -> torch.Tensor:
    return torch.zeros(4, dtype=torch.int64)


def new_offsets() -> torch.Tensor:
    """Of one tensor."""
    return torch.full((1,), -1, dtype=torch.int64)


def new_region() -> torch.Tensor:
    """Room for one tensor of 1000 float32."""
    return torch.zeros(4000, dtype=torch.uint8)


def write_plan(staging: Path, **more: object) -> torch.Tensor:
    """A plan that writes one float32 tensor `x` into one file."""
    file = {
        "name": "model.safetensors",
        "role": "data",
        "names": ["x"],
        "dtypes": ["F32"],
        "first_source": 0,
        "offsets": [None],
        "global_shapes": [None],
    }
    return as_plan({"staging": str(staging), "files": [file], **more})


def read_plan(directory: Path) -> torch.Tensor:
    return as_plan({"path": str(directory), "names": ["x"], "offsets": [None]})


@pytest.fixture
def staging(tmp_path: Path) -> Path:
    folder = tmp_path / "staging"
    folder.mkdir()
    return folder


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    """A directory as other tools write it, holding x = 0, 1, 2, ..."""
    folder = tmp_path / "checkpoint"
    folder.mkdir()
    save_file({"x": torch.arange(1000.0)}, folder / "model.safetensors")
    return folder


def call_count(name: str, function: Callable[[], object]) -> int:
    """How often the dispatcher runs the op while `function` runs."""
    with torch.autograd.profiler.profile() as profile:
        function()
    return sum(event.count for event in profile.key_averages() if event.key == f"dcp_ext::{name}")


def arguments(name: str, staging: Path, checkpoint: Path) -> tuple[object, ...]:
    if name == "save":
        return [torch.arange(1000.0)], torch_ckpt.plan(staging / "c", ["x"]), new_report()
    if name == "write":
        return [torch.arange(1000.0)], write_plan(staging), new_report()
    if name == "read":
        return [torch.zeros(1000)], read_plan(checkpoint), new_report()
    if name == "stage":
        plan = as_plan({"names": "x"})
        return [torch.arange(1000.0)], plan, new_offsets(), new_report(), new_region()
    return torch.arange(1000.0), new_report()


# --- eager ------------------------------------------------------------------


def test_write_in_eager_mode(staging: Path) -> None:
    x, report = torch.arange(12.0).reshape(3, 4), new_report()
    OPS.write([x.t()], write_plan(staging), report)
    (file,) = staging.iterdir()
    assert torch.equal(load_file(file)["x"], x.t())
    assert report[0] == 1 and report[1] == file.stat().st_size


def test_names_and_a_dtype_as_text(staging: Path) -> None:
    plan = json.loads(bytes(write_plan(staging).tolist()))
    plan["files"][0] |= {"names": "x\ny", "dtypes": "F32", "offsets": None, "global_shapes": None}
    OPS.write([torch.arange(3.0), torch.arange(5.0)], as_plan(plan), new_report())
    (file,) = staging.iterdir()
    assert {name: len(value) for name, value in load_file(file).items()} == {"x": 3, "y": 5}
    target = torch.zeros(5)
    source = staging.parent / "source"
    source.mkdir()
    save_file({"x\ny": torch.arange(5.0)}, source / "model.safetensors")
    names = torch_ckpt.native.core.names_text(["x\ny"])
    OPS.read([target], as_plan({"path": str(source), "names": names}), new_report())
    assert torch.equal(target, torch.arange(5.0))


def test_read_in_eager_mode(checkpoint: Path) -> None:
    target, report = torch.zeros(1000), new_report()
    OPS.read([target], read_plan(checkpoint), report)
    assert torch.equal(target, torch.arange(1000.0))
    assert report.tolist()[:2] == [1, 4000]


def test_a_read_casts_to_the_dtype_of_the_target(checkpoint: Path) -> None:
    target = torch.zeros(1000, dtype=torch.bfloat16)
    OPS.read([target], read_plan(checkpoint), new_report())
    assert torch.equal(target, torch.arange(1000.0).bfloat16())
    # Never the bits of one dtype as those of another.
    for dtype in (torch.int32, torch.uint8, torch.complex64, torch.complex128):
        target = torch.zeros(1000, dtype=dtype)
        with pytest.raises(RuntimeError, match="tensor 'x': (cannot be cast|the target has a dty)"):
            OPS.read([target], read_plan(checkpoint), new_report())
        assert not target.any()


def test_crc32c_is_castagnolis() -> None:
    # The check value of CRC-32C: the digest of the digits 1 to 9.
    data, report = torch.tensor(list(b"123456789"), dtype=torch.uint8), new_report()
    OPS.crc32c(data, report)
    assert report.tolist()[:2] == [1, 0xE3069283]


def test_digests_are_of_the_elements_in_their_order() -> None:
    letters = torch.tensor(list(b"123456789"), dtype=torch.uint8)
    wide = torch.arange(20_000, dtype=torch.int16).reshape(4, 5000)
    freed = torch.ones(4)
    freed.untyped_storage().resize_(0)
    tensors = [letters, wide.t(), wide.t().contiguous(), torch.ones(3, 0), freed, letters[::2]]
    first, *others = torch_ckpt.native.operators.digests(tensors)
    assert first == 0xE3069283
    assert others[0] == others[1] > 0 and others[2:4] == [0, -1]
    assert others[4] == torch_ckpt.native.operators.crc32c(letters[::2].contiguous())
    assert torch_ckpt.native.operators.digests([]) == []
    for numbers in (torch.zeros(1, dtype=torch.int64), torch.zeros(2), torch.zeros(4).long()[::2]):
        with pytest.raises((RuntimeError, ValueError), match="one for each tensor"):
            OPS.digests([letters, letters], numbers)


def test_write_of_no_tensor_reaches_the_kernel(staging: Path) -> None:
    # An empty list has no device; the report's decides.
    report = new_report()
    OPS.write([], as_plan({"staging": str(staging), "files": []}), report)
    assert report.tolist() == [1, 0, 0, 0]


@pytest.mark.parametrize("report", [torch.zeros(1, dtype=torch.int64), torch.zeros(4)])
def test_a_wrong_report_is_refused(report: torch.Tensor) -> None:
    with pytest.raises((RuntimeError, ValueError), match="report"):
        OPS.crc32c(torch.zeros(3), report)


def test_a_plan_that_is_no_json_is_refused() -> None:
    for plan in (b"", b"{", b"[]", b"\xff\xfe", b"[" * 100_000):
        blob = torch.tensor(list(plan), dtype=torch.uint8)
        for op in (OPS.write, OPS.read):
            report = new_report()
            with pytest.raises((RuntimeError, ValueError)):
                op([torch.zeros(3)], blob, report)
            assert report[0] == 0


@pytest.mark.parametrize(
    "file",
    [
        {"first_source": 1},
        {"first_source": -1},
        {"first_source": None},
        {"first_source": 2**63 - 1},
        {"names": ["x", "y"]},
        {"names": ["x", "y"], "dtypes": ["F32", "F32"]},
        {"names": [7]},
        {"names": 7},
        {"names": "x\ny"},
        {"names": {}, "dtypes": {}},
        {"dtypes": [None]},
        {"dtypes": ["F31"]},
        {"dtypes": "F31"},
        {"dtypes": 7},
        {"role": "objects"},
        {"role": "objects", "source_count": 2},
        {"role": "objects", "source_count": -1},
    ],
    ids=str,
)
def test_a_file_that_does_not_fit_the_tensors_is_refused(
    staging: Path, file: dict[str, object]
) -> None:
    plan = json.loads(bytes(write_plan(staging).tolist()))
    plan["files"][0].update(file)
    report = new_report()
    with pytest.raises((RuntimeError, ValueError)):
        OPS.write([torch.zeros(3)], as_plan(plan), report)
    assert report[0] == 0 and not list(staging.iterdir())


def test_errors_name_the_directory(tmp_path: Path) -> None:
    missing = tmp_path / "not there"
    with pytest.raises(RuntimeError, match="not there"):
        OPS.read([torch.zeros(3)], read_plan(missing), new_report())


# --- the GIL ----------------------------------------------------------------


@pytest.mark.parametrize("name", ["write", "read"])
def test_the_gil_is_released_while_an_op_blocks(
    name: str, staging: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    x, plan, report = torch.zeros(50_000_000), write_plan(staging), new_report()
    if name == "read":
        path = tmp_path_factory.mktemp("gil") / "c"
        torch_ckpt.save({"x": x}, checkpoint_id=path, no_dist=True)
        plan = read_plan(path)
    ticks: list[float] = []
    stop = threading.Event()

    def tick() -> None:
        while not stop.is_set():
            ticks.append(time.perf_counter())
            time.sleep(0.0005)

    thread = threading.Thread(target=tick)
    thread.start()
    try:
        begin = time.perf_counter()
        getattr(OPS, name)([x], plan, report)
        end = time.perf_counter()
    finally:
        stop.set()
        thread.join()
    # With the GIL held no tick at all could fall into the middle of the call.
    margin = (end - begin) / 4
    assert any(begin + margin < tick < end - margin for tick in ticks), f"{end - begin:.3f} s"


# --- torch.compile ----------------------------------------------------------


@pytest.mark.parametrize("name", NAMES)
def test_opcheck(name: str, staging: Path, checkpoint: Path) -> None:
    torch.library.opcheck(getattr(OPS, name).default, arguments(name, staging, checkpoint))


@pytest.mark.parametrize("name", NAMES)
def test_fake_tensors_never_reach_a_kernel(name: str, tmp_path: Path) -> None:
    missing = tmp_path / "missing"
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        real = arguments(name, missing, missing)
        fake = [
            [mode.from_tensor(t) for t in item]
            if isinstance(item, list)
            else mode.from_tensor(item)
            for item in real
        ]
        getattr(OPS, name)(*fake)  # the kernel would fail: the folder is missing
    assert not missing.exists()


@pytest.mark.parametrize("backend", BACKENDS)
def test_compiled_write_runs_exactly_once(backend: str, staging: Path) -> None:
    plan = write_plan(staging)

    @torch.compile(fullgraph=True, backend=backend)
    def step(x: torch.Tensor, report: torch.Tensor) -> torch.Tensor:
        torch.ops.dcp_ext.write([x * 2], plan, report)
        return x + 1

    x = torch.arange(1000.0)
    for calls in range(1, 4):  # the first one traces and compiles
        report = new_report()
        assert torch.equal(step(x, report), x + 1)
        assert report[0] == 1
        assert len(list(staging.iterdir())) == calls
    assert all(torch.equal(load_file(file)["x"], x * 2) for file in staging.iterdir())
    assert call_count("write", lambda: step(x, new_report())) == 1


@pytest.mark.parametrize("backend", BACKENDS)
def test_compiled_read_runs_exactly_once(backend: str, checkpoint: Path) -> None:
    plan = read_plan(checkpoint)

    @torch.compile(fullgraph=True, backend=backend)
    def step(target: torch.Tensor, report: torch.Tensor) -> torch.Tensor:
        torch.ops.dcp_ext.read([target], plan, report)
        return target + 1

    for _ in range(2):
        target, report = torch.zeros(1000), new_report()
        assert torch.equal(step(target, report), torch.arange(1000.0) + 1)
        assert torch.equal(target, torch.arange(1000.0))
        assert report[0] == 1
    assert call_count("read", lambda: step(torch.zeros(1000), new_report())) == 1


@pytest.mark.parametrize("backend", BACKENDS)
def test_compiled_stage_runs_exactly_once(backend: str) -> None:
    plan = as_plan({"names": "x"})

    @torch.compile(fullgraph=True, backend=backend)
    def step(
        x: torch.Tensor, offsets: torch.Tensor, report: torch.Tensor, region: torch.Tensor
    ) -> torch.Tensor:
        torch.ops.dcp_ext.stage([x * 2], plan, offsets, report, region)
        return x + 1

    x = torch.arange(1000.0)
    for _ in range(2):
        offsets, report, region = new_offsets(), new_report(), new_region()
        assert torch.equal(step(x, offsets, report, region), x + 1)
        assert offsets.tolist() == [0]
        assert report.tolist() == [1, 4000, 4000, 0]
        assert torch.equal(region.view(torch.float32), x * 2)
    more = new_offsets(), new_report(), new_region()
    assert call_count("stage", lambda: step(x, *more)) == 1


def test_views_lie_in_the_region() -> None:
    region = torch.arange(100, dtype=torch.uint8)
    like = [torch.zeros(2, 3, dtype=torch.int16), torch.zeros(()), torch.zeros(0, 4)]
    offsets = torch.tensor([2, 20, 8])
    views = OPS.views(region, like, offsets)
    assert [view.data_ptr() - region.data_ptr() for view in views[:2]] == [2, 20]
    assert [(v.shape, v.dtype) for v in views] == [(t.shape, t.dtype) for t in like]
    assert torch.equal(views[0], region[2:14].view(torch.int16).view(2, 3))
    torch.library.opcheck(OPS.views.default, (region, like, offsets), test_utils="test_schema")
    for wrong in ([-4, 0, 0], [90, 0, 0], [0, 98, 0], [1, 0, 0], [1 << 62, 0, 0], [0, 0]):
        with pytest.raises((RuntimeError, ValueError)):
            OPS.views(region, like, torch.tensor(wrong))


@pytest.mark.parametrize("plan", [{}, {"names": "x\ny"}, {"names": 3}])
def test_a_plan_of_stage_that_does_not_fit_is_refused(plan: dict[str, object]) -> None:
    report = new_report()
    with pytest.raises((RuntimeError, ValueError)):
        OPS.stage([torch.zeros(3)], as_plan(plan), new_offsets(), report, new_region())
    assert report[0] == 0
    for offsets in (torch.zeros(2, dtype=torch.int64), torch.zeros(1), torch.zeros(1, 1)):
        with pytest.raises((RuntimeError, ValueError), match="offsets"):
            OPS.stage([torch.zeros(3)], as_plan({"names": "x"}), offsets, report, new_region())


@pytest.mark.parametrize("backend", BACKENDS)
def test_compiled_crc32c_runs_exactly_once(backend: str) -> None:
    @torch.compile(fullgraph=True, backend=backend)
    def step(data: torch.Tensor, report: torch.Tensor) -> None:
        torch.ops.dcp_ext.crc32c(data, report)

    data, report, expected = torch.arange(1000.0), new_report(), new_report()
    OPS.crc32c(data, expected)
    step(data, report)
    assert torch.equal(report, expected)
    assert call_count("crc32c", lambda: step(data, new_report())) == 1


@pytest.mark.parametrize("backend", BACKENDS)
def test_an_error_passes_through_a_graph_unchanged(backend: str, tmp_path: Path) -> None:
    plan = read_plan(tmp_path / "not there")

    @torch.compile(fullgraph=True, backend=backend)
    def step(target: torch.Tensor, report: torch.Tensor) -> None:
        torch.ops.dcp_ext.read([target], plan, report)

    with pytest.raises(RuntimeError) as eager:
        OPS.read([torch.zeros(3)], plan, new_report())
    with pytest.raises(RuntimeError) as compiled:
        step(torch.zeros(3), new_report())
    assert str(compiled.value) == str(eager.value)


# --- TorchScript ------------------------------------------------------------


def copy(
    x: torch.Tensor, target: torch.Tensor, write: torch.Tensor, read: torch.Tensor
) -> torch.Tensor:
    # TorchScript drops an op whose results nobody uses: the reports are read.
    report = torch.zeros(4, dtype=torch.int64)
    torch.ops.dcp_ext.write([x], write, report)
    assert int(report[0].item()) == 1
    report = torch.zeros(4, dtype=torch.int64)
    torch.ops.dcp_ext.read([target], read, report)
    assert int(report[0].item()) == 1
    return target


@pytest.mark.skipif(sys.version_info >= (3, 14), reason="torch supports TorchScript up to 3.13")
def test_a_script_survives_save_and_load(staging: Path, checkpoint: Path) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch.jit is deprecated
        buffer = io.BytesIO()
        torch.jit.save(torch.jit.script(copy), buffer)
        buffer.seek(0)
        script = torch.jit.load(buffer)
    x = torch.randn(1000)
    for calls in (1, 2, 3):  # the profiling executor optimizes after the first
        target = script(x, torch.zeros(1000), write_plan(staging), read_plan(checkpoint))
        assert torch.equal(target, torch.arange(1000.0))
        assert len(list(staging.iterdir())) == calls
    assert torch.equal(load_file(next(staging.iterdir()))["x"], x)


def test_the_operators_come_with_the_package() -> None:
    assert OPS.version() == torch_ckpt.__version__
