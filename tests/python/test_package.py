"""The wheel and the source package: what is in them, and that they install.

The slow tests build as users do, into a fresh environment, from the source
package: in pip's build isolation, where torch is found by its headers only; and
without isolation, again and again. Only the optimizer is left out, as it takes
minutes; ./dev builds with it, and installs editable.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import sysconfig
import tarfile
import zipfile
from collections.abc import Sequence
from pathlib import Path

import pytest

import torch_ckpt
from torch_ckpt.tensor_mapping.mapping import table_names

ROOT = Path(__file__).resolve().parents[2]
PYPROJECT = (ROOT / "pyproject.toml").read_text(encoding="utf-8")


def run(
    command: Sequence[str | Path], cwd: Path = ROOT, **environment: str
) -> subprocess.CompletedProcess[str]:
    """Runs a command to its end; fails the test with all its output."""
    unwanted = ("PYTHONPATH", "TORCH_CKPT_CMAKE_ARGS", "TORCH_CKPT_BUILD_DIR", "LD_PRELOAD")
    env = {key: value for key, value in os.environ.items() if key not in unwanted}
    done = subprocess.run(
        [str(part) for part in command],
        cwd=cwd,
        env={**env, **environment},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, f"{command}\n{done.stdout[-4000:]}\n{done.stderr[-4000:]}"
    return done


@pytest.fixture(scope="module")
def sdist(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The source package, made from this tree."""
    out = tmp_path_factory.mktemp("sdist")
    # Metadata goes to the temporary folder, so that the tree stays as it is.
    run([sys.executable, "setup.py", "-q", "egg_info", "--egg-base", out, "sdist", "-d", out])
    return next(out.glob("*.tar.gz"))


def modules() -> set[str]:
    """Every Python file of the package, as a wheel names it."""
    return {path.relative_to(ROOT).as_posix() for path in (ROOT / "torch_ckpt").rglob("*.py")}


def test_version_is_the_one_of_pyproject() -> None:
    match = re.search(r'^version = "(.*)"$', PYPROJECT, re.MULTILINE)
    assert match is not None and match[1] == torch_ckpt.__version__


def test_dependencies_are_few_and_never_pull_a_torch_into_the_build() -> None:
    requires = re.search(r"^requires = \[(.*)\]$", PYPROJECT, re.MULTILINE)
    assert requires is not None and "torch" not in requires[1]
    needed = re.search(r"^dependencies = \[(.*)\]$", PYPROJECT, re.MULTILINE)
    assert needed is not None and needed[1] == '"torch>=2.10", "click>=8.1"'


def test_every_folder_with_modules_is_a_package() -> None:
    folders = {path.parent for path in (ROOT / "torch_ckpt").rglob("*.py")}
    assert [str(folder) for folder in folders if not (folder / "__init__.py").is_file()] == []


def test_sdist_holds_all_that_a_build_needs(sdist: Path) -> None:
    with tarfile.open(sdist) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    for folder in ("csrc", "cmake", "tests/cpp"):
        files = {p for p in (ROOT / folder).rglob("*") if p.is_file() and p.suffix != ".pyc"}
        assert {path.relative_to(ROOT).as_posix() for path in files} - names == set()
    assert {"CMakeLists.txt", "setup.py", "pyproject.toml", "LICENSE", "README.md"} <= names
    assert modules() <= names
    assert [name for name in names if name.endswith((".so", ".pyc", ".o"))] == []


def fresh_environment(folder: Path) -> Path:
    """A virtual environment that sees the torch of this one, and no torch_ckpt.

    A link makes torch's headers findable where pip installs to; a .pth line
    makes its dependencies importable without running this environment's own
    .pth files, which would bring the editable torch_ckpt along.
    """
    run([sys.executable, "-m", "venv", folder])
    site = next(folder.glob("lib/python3*/site-packages"))
    here = Path(sysconfig.get_path("purelib"))
    (site / "torch").symlink_to(here / "torch")
    (site / "dependencies.pth").write_text(f"{here}\n", encoding="utf-8")
    return folder / "bin/python"


@pytest.fixture(scope="module")
def source(sdist: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The source package, unpacked."""
    folder = tmp_path_factory.mktemp("source")
    run(["tar", "-xzf", sdist, "-C", folder])
    return next(folder.iterdir())


def quickly(source: Path) -> dict[str, str]:
    """An environment to build in: not optimized, in few pieces; and ccache, where there is one,
    reuses objects although the folder is new each time."""
    return {
        "TORCH_CKPT_CMAKE_ARGS": "-DCMAKE_BUILD_TYPE=None -DTORCH_CKPT_UNITY=ON",
        "CCACHE_BASEDIR": str(source),
        "CCACHE_NOHASHDIR": "1",
    }


def wheel_of(source: Path, folder: Path) -> Path:
    """What pip builds in isolation, as users do."""
    python = fresh_environment(folder / "builder")
    wheel = [python, "-m", "pip", "wheel", "-q", "--no-deps", "-w", folder / "wheels", source]
    run(wheel, cwd=folder, **quickly(source))
    (built,) = (folder / "wheels").iterdir()
    return built


@pytest.mark.slow
def test_installs_of_the_sdist(source: Path, tmp_path: Path) -> None:
    wheel = wheel_of(source, tmp_path)
    platform = sysconfig.get_platform().replace("-", "_").replace(".", "_")
    assert wheel.name == f"torch_ckpt-{torch_ckpt.__version__}-py310-none-{platform}.whl"
    with zipfile.ZipFile(wheel) as archive:
        names = {name for name in archive.namelist() if ".dist-info/" not in name}
        for name in names:
            if name.endswith(".so"):
                assert b".debug_info" not in archive.read(name), f"{name} is not stripped"
    libraries = {"torch_ckpt/libtorch_ckpt_core.so", "torch_ckpt/libtorch_ckpt_ext.so"}
    tables = {f"torch_ckpt/tensor_mapping/tables/{name}.json" for name in table_names()}
    assert names == modules() | libraries | tables | {"torch_ckpt/py.typed"}

    python = fresh_environment(tmp_path / "venv")
    run([python, "-m", "pip", "install", "-q", "--no-deps", "--no-index", wheel], cwd=tmp_path)
    out = run([python, ROOT / "tests/python/round_trip.py"], cwd=tmp_path).stdout
    assert str(tmp_path / "venv") in out, "the round trip used another torch_ckpt"
    run([tmp_path / "venv/bin/torch-ckpt", "--help"], cwd=tmp_path)
    fault_tests_fail_or_say_that_they_are_skipped(python, tmp_path)


def fault_tests_fail_or_say_that_they_are_skipped(python: Path, folder: Path) -> None:
    """A wheel has no fault points. Tests that need them must not pass for want of them."""
    words = [python, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-c", ROOT / "pyproject.toml"]
    faults = ROOT / "tests/faults"
    words += [f"{faults}/test_kills.py::test_killed_at_any_call[fresh]"]
    words += [f"{faults}/test_errors.py::test_full_disk"]
    words += [f"{faults}/test_concurrency.py::test_the_second_save_loses_before_any_byte"]
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    environment.pop("TORCH_CKPT_TEST_WHEEL", None)
    done = subprocess.run(
        words, cwd=folder, env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 1 and "has no fault points" in done.stdout, done.stdout
    assert re.search(r"\b[23] passed.* 1 error", done.stdout), done.stdout
    said = run(words, cwd=folder, TORCH_CKPT_TEST_WHEEL="1").stdout
    assert re.search(r"\b[23] passed, [12] skipped", said), said


def compiled(output: str) -> list[str]:
    """The sources that a build says it compiles, in order."""
    return re.findall(r"Building CXX object \S*?/(csrc/\S+\.cc)\.o", output)


@pytest.mark.campaign
def test_installs_again_and_again(source: Path, tmp_path: Path) -> None:
    # What an isolated build leaves behind: paths of an environment that is gone. And a module that
    # is gone, too.
    if not (source / "build").is_dir():
        wheel_of(source, tmp_path)
    left = next((source / "build").glob("lib*/torch_ckpt"))
    (left / "stale.py").write_text("gone = True\n", encoding="utf-8")

    python = fresh_environment(tmp_path / "venv")
    pip = [python, "-m", "pip"]
    # What builds is then, as torch is, that of the environment which runs this test.
    run([*pip, "uninstall", "-q", "-y", "setuptools"])
    environment = {
        "PATH": f"{sysconfig.get_path('scripts')}{os.pathsep}{os.environ['PATH']}",
        **quickly(source),
    }
    # File by file, so that the names of what is compiled say which.
    environment["TORCH_CKPT_CMAKE_ARGS"] += " -DTORCH_CKPT_UNITY=OFF"
    install = [*pip, "install", "-v", "--no-deps", "--no-index", "--no-build-isolation"]

    def build() -> list[str]:
        """The sources that an install compiles; the installed package must work."""
        done = run([*install, source], cwd=tmp_path, **environment)
        said = run([python, ROOT / "tests/python/round_trip.py"], cwd=tmp_path).stdout
        assert str(tmp_path / "venv") in said, said
        return compiled(done.stdout + done.stderr)

    everything = {path.relative_to(source).as_posix() for path in source.glob("csrc/**/*.cc")}
    assert everything and set(build()) == everything
    assert list((tmp_path / "venv").rglob("stale.py")) == []
    assert build() == []
    (source / "csrc/os/lock.cc").touch()
    assert build() == ["csrc/os/lock.cc"]


def test_a_missing_torch_is_one_clear_line(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, ROOT / "cmake/find_headers.py", "torch"],
        env={"TORCH_CKPT_TORCH": str(tmp_path)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 1
    assert len(done.stderr.splitlines()) == 1
    assert "pip install 'torch>=2.10'" in done.stderr


def test_a_torch_that_is_too_old_is_named(tmp_path: Path) -> None:
    (tmp_path / "version.py").write_text("__version__ = '2.9.1'\n", encoding="utf-8")
    header = tmp_path / "include/torch/csrc/stable/library.h"
    header.parent.mkdir(parents=True)
    header.touch()
    done = subprocess.run(
        [sys.executable, ROOT / "cmake/find_headers.py", "torch"],
        env={"TORCH_CKPT_TORCH": str(tmp_path)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 1 and f"the one in {tmp_path} is too old" in done.stderr


@pytest.mark.parametrize("command", ["build_ext -b {0} -t {0}", "bdist_wheel -b {0} -d {0}"])
@pytest.mark.parametrize("what", ["compiler", "torch"])
def test_what_a_build_misses_is_one_clear_line(tmp_path: Path, command: str, what: str) -> None:
    lacking = {
        "compiler": {"PATH": str(tmp_path)},
        "torch": {"PATH": os.environ["PATH"], "TORCH_CKPT_TORCH": str(tmp_path)},
    }
    done = subprocess.run(
        [sys.executable, "setup.py", *command.format(tmp_path).split()],
        cwd=ROOT,
        env=lacking[what],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 1
    advice = {"compiler": "Type: apt-get install g++", "torch": "pip install 'torch>=2.10'"}
    assert advice[what] in done.stderr.splitlines()[-1]
    assert "Traceback" not in done.stderr
    assert "copying" not in done.stdout + done.stderr, "the line comes before all work"


def test_a_setuptools_that_is_too_old_is_one_clear_line(tmp_path: Path) -> None:
    """As in a fresh venv of Python 3.11, with --no-build-isolation."""
    package = tmp_path / "setuptools/__init__.py"
    package.parent.mkdir()
    package.write_text("__version__ = '65.5.0'\nExtension = setup = None\n", encoding="utf-8")
    done = subprocess.run(
        [sys.executable, "setup.py", "bdist_wheel"],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(tmp_path)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 1 and len(done.stderr.splitlines()) == 1
    assert "this one is 65.5.0. Type: pip install 'setuptools>=77'" in done.stderr
    assert "setuptools>=77" in PYPROJECT


def test_builds_at_the_same_time_take_turns(tmp_path: Path) -> None:
    """Two ./dev at once would spoil ninja's records of the tree: every later build begins anew."""
    dev = (ROOT / "dev").read_text(encoding="utf-8")
    alone = re.search(r"^alone\(\) \{\n.*?^\}\n", dev, re.MULTILINE | re.DOTALL)
    assert alone is not None and "alone cmake_tree" in dev and "alone python_packages" in dev
    script = alone[0] + (
        'say() { echo "$*"; }\n'
        'work() { echo "$1 begins"; sleep 0.2; echo "$1 ends"; }\n'
        "alone work one & alone work two & wait\n"
    )
    lines = run(["bash", "-euc", script], cwd=tmp_path).stdout.splitlines()
    turns = [line for line in lines if "waiting" not in line]
    assert [line.split()[0] for line in turns] in (
        ["one"] * 2 + ["two"] * 2,
        ["two"] * 2 + ["one"] * 2,
    )
    assert [line.split()[1] for line in turns] == ["begins", "ends"] * 2
