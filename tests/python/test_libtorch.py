"""The example on libtorch: built as its README says, and run without Python."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sysconfig
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file, save_file

import torch_ckpt

pytestmark = pytest.mark.slow  # compiles against libtorch's headers
ROOT = Path(__file__).resolve().parents[2]


class Net(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc1 = torch.nn.Linear(8, 5)
        self.fc2 = torch.nn.Linear(5, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.fc2(self.fc1(x).relu())  # type: ignore[no-any-return]


@pytest.fixture(scope="module")
def halve(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The program, built."""
    cmake = shutil.which("cmake") or shutil.which("cmake", path=sysconfig.get_path("scripts"))
    if cmake is None:
        pytest.skip("no cmake")
    if not any(map(shutil.which, (os.environ.get("CXX", "c++"), "g++", "clang++"))):
        pytest.skip("no C++ compiler")
    if torch.version.cuda is not None and shutil.which("nvcc") is None:
        pytest.skip("a CUDA build of torch is linked with the CUDA toolkit, which is not here")
    tree = tmp_path_factory.mktemp("libtorch")
    for command in (
        [
            cmake,
            *("-S", str(ROOT / "examples/libtorch"), "-B", str(tree)),
            f"-DCMAKE_PREFIX_PATH={torch.utils.cmake_prefix_path}",
            f"-DTORCH_CKPT_LIBRARY={torch_ckpt.library_path()}",
        ],
        [cmake, "--build", str(tree)],
    ):
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stdout + done.stderr
    return tree / "halve"


def run(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    # Nothing of the interpreter's environment: the program finds its libraries by itself.
    return subprocess.run(arguments, capture_output=True, text=True, check=False, env={})


@pytest.mark.parametrize("format", ["torch_ckpt", "hf", "dcp", "torch"])
def test_any_directory_is_loaded_changed_and_saved(
    halve: Path, tmp_path: Path, format: str
) -> None:
    net, source, prefix = Net(), tmp_path / "source", "model."
    if format == "torch_ckpt":
        torch_ckpt.save({"model": net.state_dict(), "step": 3}, source, no_dist=True)
    elif format == "hf":
        source.mkdir()
        half = {name: tensor.bfloat16() for name, tensor in net.state_dict().items()}
        save_file(half, source / "model.safetensors")
        net.load_state_dict(half)  # what it reads, cast, is rounded
        prefix = ""
    elif format == "dcp":
        dcp.save({"model": net.state_dict(), "step": 3}, checkpoint_id=source, no_dist=True)
    else:
        torch.save({"model": net.state_dict(), "step": 3}, source)
    done = run(halve, source, tmp_path / "halved", prefix)
    assert done.returncode == 0, done.stderr
    assert f"{prefix}fc1.weight: {'BF16' if format == 'hf' else 'F32'} [5, 8]\n" in done.stdout
    said = re.search(r"^the sum of net\(1, ...\) is (.*)$", done.stdout, re.MULTILINE)
    expected = net(torch.ones(1, 8)).sum().item()
    assert said is not None and float(said[1]) == pytest.approx(expected, rel=1e-4, abs=1e-4)
    saved = load_file(tmp_path / "halved/model.safetensors")
    assert saved.keys() == net.state_dict().keys()
    assert all(torch.equal(saved[name], t * 0.5) for name, t in net.state_dict().items())
    assert torch_ckpt.Checkpoint(tmp_path / "halved").verify().files == 2


def test_errors_are_said_in_words(halve: Path, tmp_path: Path) -> None:
    done = run(halve, tmp_path / "none", tmp_path / "halved")
    assert done.returncode == 1
    assert done.stderr == f"{tmp_path}/none: there is no such file or directory\n"
    torch_ckpt.save({"x": torch.ones(3)}, tmp_path / "c", no_dist=True)
    done = run(halve, tmp_path / "c", tmp_path / "halved")
    assert done.returncode == 1 and done.stderr == "there is no fc1.weight\n"
    torch_ckpt.save({"fc1.weight": torch.ones(3)}, tmp_path / "flat", no_dist=True)
    done = run(halve, tmp_path / "flat", tmp_path / "halved")
    assert done.returncode == 1 and done.stderr == "fc1.weight is no matrix\n"
    assert not (tmp_path / "halved").exists()


def test_the_program_links_no_python(halve: Path) -> None:
    libraries = subprocess.run(["ldd", str(halve)], capture_output=True, text=True, check=True)
    assert "libtorch_ckpt_core.so" in libraries.stdout and "libpython" not in libraries.stdout
