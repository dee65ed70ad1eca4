"""Calls CMake and packs what it made; all build knowledge is in CMakeLists.txt.

Environment: TORCH_CKPT_CMAKE_ARGS (more arguments for CMake, split as a shell
would), TORCH_CKPT_BUILD_DIR (build tree), TORCH_CKPT_TORCH (torch's folder).
"""

import os
import shlex
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

import setuptools

# Looked at first: an older one has no `bdist_wheel`, and does not know the licence's form.
SETUPTOOLS = 77
if int(setuptools.__version__.split(".")[0]) < SETUPTOOLS:
    raise SystemExit(
        f"torch_ckpt needs setuptools >= {SETUPTOOLS} to build, and this one is "
        f"{setuptools.__version__}. Type: pip install 'setuptools>={SETUPTOOLS}'"
    )

from setuptools import Extension, setup  # noqa: E402
from setuptools.command.bdist_wheel import bdist_wheel  # noqa: E402
from setuptools.command.build_ext import build_ext  # noqa: E402
from setuptools.command.build_py import build_py  # noqa: E402

ROOT = Path(__file__).resolve().parent


def tool(name: str, package: str) -> str:
    """The path of a build tool; pip does not put a venv's scripts on PATH."""
    found = shutil.which(name) or shutil.which(name, path=sysconfig.get_path("scripts"))
    if found is None:
        raise SystemExit(f"torch_ckpt needs {name} to build. Type: pip install {package}")
    return found


def check_needs() -> None:
    """Stops with one line of advice if there is no compiler or no torch to build against."""
    if not ("CXX" in os.environ or any(map(shutil.which, ("c++", "g++", "clang++")))):
        raise SystemExit(
            "torch_ckpt needs a C++20 compiler (g++ >= 11) and found none. "
            "Type: apt-get install g++ (or set CXX)"
        )
    headers = [sys.executable, str(ROOT / "cmake/find_headers.py"), "torch"]
    found = subprocess.run(headers, capture_output=True, text=True)
    if found.returncode != 0:
        raise SystemExit(found.stderr.strip())


class CleanBuildPy(build_py):
    """Starts from an empty folder: setuptools would ship modules that are gone."""

    def run(self) -> None:
        if not self.editable_mode:
            shutil.rmtree(self.build_lib, ignore_errors=True)
        super().run()


class CMakeBuild(build_ext):
    """Builds both shared libraries with one CMake run."""

    def run(self) -> None:
        check_needs()
        # setuptools makes editable builds in temporary folders; a fixed tree
        # keeps `cmake --build build/dev` incremental.
        editable = self.editable_mode
        tree = Path(
            os.environ.get("TORCH_CKPT_BUILD_DIR")
            or (ROOT / "build/dev" if editable else self.build_temp)
        )
        out = ROOT / "torch_ckpt" if editable else Path(self.build_lib).resolve() / "torch_ckpt"
        cmake = tool("cmake", "cmake")
        configure = [cmake, "-S", str(ROOT), "-B", str(tree), "-G", "Ninja"]
        # Named on every run: a kept tree remembers the ninja and the Python of
        # an isolated environment that is gone.
        configure += [f"-DCMAKE_MAKE_PROGRAM={tool('ninja', 'ninja')}"]
        configure += [f"-DPython_EXECUTABLE={sys.executable}"]
        configure += [f"-DCMAKE_LIBRARY_OUTPUT_DIRECTORY={out}"]
        configure += [f"-DTORCH_CKPT_FAULTS={'ON' if editable else 'OFF'}"]
        if not editable:  # three quarters of what would be installed are for debuggers
            configure += ["-DCMAKE_CXX_FLAGS_RELWITHDEBINFO=-O2 -DNDEBUG"]
            configure += ["-DCMAKE_SHARED_LINKER_FLAGS_RELWITHDEBINFO=-s"]
        configure += shlex.split(os.environ.get("TORCH_CKPT_CMAKE_ARGS", ""))
        jobs = os.environ.get("MAX_JOBS") or str(len(os.sched_getaffinity(0)))
        for command in (configure, [cmake, "--build", str(tree), "--parallel", jobs]):
            if subprocess.run(command).returncode != 0:
                raise SystemExit("torch_ckpt: the native build failed; the reason is printed above")

    def get_ext_filename(self, fullname: str) -> str:
        # No Python version in the name: the libraries hold no Python symbol.
        return fullname.replace(".", "/") + ".so"


class PlatformWheel(bdist_wheel):
    """One wheel for every Python >= 3.10: tag py310-none-<platform>."""

    def run(self) -> None:
        # Here too, or the line would stand below those of every file that is copied.
        check_needs()
        super().run()

    def get_tag(self) -> tuple[str, str, str]:
        return "py310", "none", super().get_tag()[2]


setup(
    ext_modules=[
        Extension("torch_ckpt.libtorch_ckpt_core", []),
        Extension("torch_ckpt.libtorch_ckpt_ext", []),
    ],
    cmdclass={
        "build_py": CleanBuildPy,
        "build_ext": CMakeBuild,
        "bdist_wheel": PlatformWheel,
    },
)
