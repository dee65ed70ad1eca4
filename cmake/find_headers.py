"""Print where the headers of torch or nlohmann_json are. Called by CMake.

Usage: find_headers.py torch | find_headers.py nlohmann_json

torch is looked up without importing it, in this order: $TORCH_CKPT_TORCH (the
`torch` package folder), the running interpreter's path, the interpreter's own
site-packages (pip's build isolation hides them from sys.path but sysconfig
still names them), and $VIRTUAL_ENV (what `uv pip` targets). It must be at least
the version that pyproject.toml asks for. Exit code 1 with one line of advice on
stderr when nothing fits.
"""

from __future__ import annotations

import importlib.util
import os
import re
import sys
import sysconfig
from collections.abc import Iterator
from pathlib import Path


def package_folders(name: str) -> Iterator[Path]:
    """Every folder where the Python package `name` may be, best first."""
    spec = importlib.util.find_spec(name)
    if spec is not None:
        yield from (Path(p) for p in spec.submodule_search_locations or [])
    for key in ("purelib", "platlib"):
        yield Path(sysconfig.get_path(key)) / name
    if "VIRTUAL_ENV" in os.environ:
        yield from Path(os.environ["VIRTUAL_ENV"]).glob(f"lib/python3*/site-packages/{name}")


def version_of(torch: Path) -> tuple[int, int]:
    """Major and minor version of the torch in this folder; (0, 0) if unknown."""
    file = torch / "version.py"
    text = file.read_text(encoding="utf-8") if file.is_file() else ""
    match = re.search(r"__version__\s*=\s*['\"](\d+)\.(\d+)", text)
    return (int(match[1]), int(match[2])) if match else (0, 0)


def torch_floor() -> tuple[int, int]:
    """The oldest torch that pyproject.toml accepts."""
    project = Path(__file__).resolve().parent.parent / "pyproject.toml"
    match = re.search(r'"torch>=(\d+)\.(\d+)"', project.read_text(encoding="utf-8"))
    if match is None:
        raise SystemExit(f"{project} names no oldest torch")
    return int(match[1]), int(match[2])


def find_torch() -> Path:
    """The include folder of a torch that is at least the floor, or SystemExit."""
    floor = torch_floor()
    named = os.environ.get("TORCH_CKPT_TORCH")
    too_old = ""
    for folder in [Path(named)] if named else package_folders("torch"):
        if not (folder / "include/torch/csrc/stable/library.h").is_file():
            if (folder / "version.py").is_file():
                too_old = f"; the one in {folder} is too old"
            continue
        if version_of(folder) >= floor:
            return folder / "include"
        too_old = f"; the one in {folder} is too old"
    wanted = f"{floor[0]}.{floor[1]}"
    raise SystemExit(
        f"torch_ckpt is built against an installed torch >= {wanted}, and none was found"
        f"{too_old}. Type: pip install 'torch>={wanted}' (a CPU or a CUDA build), or set "
        "TORCH_CKPT_TORCH to the folder of an installed torch package."
    )


def find_nlohmann_json() -> Path:
    """The folder that holds nlohmann/json.hpp, or SystemExit."""
    system = [Path("/usr/include"), Path("/usr/local/include")]
    folders = [folder / "include" for folder in package_folders("nlohmann_json")] + system
    for folder in folders:
        if (folder / "nlohmann/json.hpp").is_file():
            return folder
    raise SystemExit(
        "torch_ckpt needs the headers of nlohmann_json. Type: pip install nlohmann-json==3.12.0"
    )


if __name__ == "__main__":
    print(find_torch() if sys.argv[1] == "torch" else find_nlohmann_json())
