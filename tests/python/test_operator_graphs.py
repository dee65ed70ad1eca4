"""What compilers, torch.export and TorchScript keep of the operators, as docs/operators.md says."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import torch_ckpt

BACKENDS = ("eager", "aot_eager", "inductor")
scripted = pytest.mark.skipif(
    sys.version_info >= (3, 14), reason="torch supports TorchScript up to 3.13"
)


def new_report() -> torch.Tensor:
    return torch.zeros(4, dtype=torch.int64)


# --- torch.compile and torch.export ---------------------------------------------


class Saves(torch.nn.Module):
    """Saves with a report of its own, or the one that it is given."""

    def __init__(self, path: Path, report: str) -> None:
        super().__init__()
        self.register_buffer("plan", torch_ckpt.plan(path, ["x"]))
        self.report = report

    def forward(self, x: torch.Tensor, given: torch.Tensor) -> tuple[torch.Tensor, ...]:
        report = given if self.report == "input" else torch.zeros(4, dtype=torch.int64)
        torch.ops.dcp_ext.save([x * 2], self.plan, report)
        if self.report == "returned":
            return x + 1, report
        if self.report == "read":
            return (x + report[0],)
        return (x + 1,)


def test_save_breaks_the_graph(tmp_path: Path) -> None:
    """Nothing of it is traced: two graphs, of what is before it and after."""
    graphs = []

    def backend(module: torch.fx.GraphModule, _: Any) -> Any:
        graphs.append(module)
        return module.forward

    def step(x: torch.Tensor) -> torch.Tensor:
        y = x + 1
        torch_ckpt.save({"w": y}, tmp_path / "c")
        return y * 2

    torch._dynamo.reset()
    assert torch.compile(step, backend=backend)(torch.ones(2)).tolist() == [4, 4]
    assert len(graphs) == 2
    assert torch_ckpt.load(path=tmp_path / "c")["w"].tolist() == [2, 2]


KEPT = ("input", "returned", "read")


@pytest.mark.parametrize("report", KEPT)
@pytest.mark.parametrize("backend", BACKENDS)
def test_a_compiled_save_is_kept(tmp_path: Path, backend: str, report: str) -> None:
    torch._dynamo.reset()
    step = torch.compile(Saves(tmp_path / "c", report), fullgraph=True, backend=backend)
    step(torch.arange(3.0), new_report())
    assert torch.equal(torch_ckpt.load(path=tmp_path / "c")["x"], torch.arange(3.0) * 2)


@pytest.mark.parametrize("report", KEPT)
def test_a_save_is_kept_in_core_aten_ir(tmp_path: Path, report: str) -> None:
    module = Saves(tmp_path / "c", report)
    program = torch.export.export(module, (torch.ones(3), new_report())).run_decompositions()
    program.module()(torch.arange(3.0), new_report())
    assert torch.equal(torch_ckpt.load(path=tmp_path / "c")["x"], torch.arange(3.0) * 2)


@pytest.mark.parametrize("backend", BACKENDS[1:])
def test_a_report_of_the_graph_that_nobody_reads_goes_with_its_save(
    tmp_path: Path, backend: str
) -> None:
    """A limit of torch: should this fail, docs/operators.md can promise more."""
    torch._dynamo.reset()
    step = torch.compile(Saves(tmp_path / "c", "unread"), fullgraph=True, backend=backend)
    step(torch.arange(3.0), new_report())
    assert not list(tmp_path.iterdir())


# --- TorchScript ----------------------------------------------------------------


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*torch.jit.*")  # deprecated
        yield


@pytest.fixture
def weights(tmp_path: Path) -> str:
    torch_ckpt.save({"w": torch.full((3,), 5.0)}, tmp_path / "w", no_dist=True)
    return str(tmp_path / "w")


def script(of: Callable[..., Any]) -> Any:
    return torch.jit.script(of)


def load_into(target: torch.Tensor, path: str) -> None:
    report = torch.zeros(4, dtype=torch.int64)
    torch.ops.dcp_ext.read([target], torch.ops.dcp_ext.plan(path, ["w"]), report)
    assert int(report[0]) == 1


def reads_nothing_of_the_report(path: str) -> torch.Tensor:
    target = torch.zeros(3)
    report = torch.zeros(4, dtype=torch.int64)
    torch.ops.dcp_ext.read([target], torch.ops.dcp_ext.plan(path, ["w"]), report)
    return target


def computes_before_and_after(path: str) -> tuple[torch.Tensor, torch.Tensor]:
    target = torch.zeros(3)
    before = target * 2
    report = torch.zeros(4, dtype=torch.int64)
    torch.ops.dcp_ext.read([target], torch.ops.dcp_ext.plan(path, ["w"]), report)
    assert int(report[0]) == 1
    return target, target * 2 - before


class Loads(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.w = torch.nn.Parameter(torch.zeros(3))
        self.register_buffer("k", torch.zeros(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.w + self.k

    @torch.jit.export
    def load(self, path: str) -> None:
        plan = torch.ops.dcp_ext.plan(path, ["w", "w"])
        report = torch.zeros(4, dtype=torch.int64)
        with torch.no_grad():
            torch.ops.dcp_ext.read([self.w, self.k], plan, report)
        assert int(report[0]) == 1


@scripted
def test_a_script_loads_into_arguments_parameters_and_buffers(weights: str) -> None:
    load, module = script(load_into), script(Loads())
    for _ in range(3):  # the profiling executor optimizes after the first
        target = torch.zeros(3)
        load(target, weights)
        assert target.tolist() == [5.0] * 3
        with torch.no_grad():
            module.w.zero_(), module.k.zero_()
        assert module(torch.ones(3)).tolist() == [0.0] * 3
        module.load(weights)
        assert module(torch.ones(3)).tolist() == [10.0] * 3


@scripted
def test_a_script_does_not_see_what_read_writes(weights: str) -> None:
    """Limits of TorchScript: should this fail, docs/operators.md can promise more."""
    returns, computes = script(reads_nothing_of_the_report), script(computes_before_and_after)
    for _ in range(3):
        assert not returns(weights).any()  # dropped, though its target is returned
        target, difference = computes(weights)
        assert target.tolist() == [5.0] * 3 and not difference.any()  # computed once


class Describes(torch.nn.Module):
    def __init__(self, plan: torch.Tensor) -> None:
        super().__init__()
        self.register_buffer("plan", plan)

    def forward(self) -> list[str]:
        names, _, _ = torch.ops.dcp_ext.describe(self.plan)
        return names  # type: ignore[no-any-return]


@scripted
def test_freezing_describes_once(weights: str) -> None:
    module = script(Describes(torch_ckpt.plan(weights)).eval())
    frozen = torch.jit.freeze(module)
    torch_ckpt.save({"other": torch.ones(1)}, weights, no_dist=True)
    assert (module(), frozen()) == (["other"], ["w"])
