"""python -m tests.campaign.megatron [VERSION ...]: the tests that meet Megatron Core, on other releases
than the one that is installed. Their wheels are for other Pythons, so the source is unpacked and
imported."""

from __future__ import annotations

import os
import subprocess
import sys
import zipfile
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[2]
VERSIONS = {"0.13.1": "3.11", "0.14.0": "3.12", "0.15.3": "3.12", "0.19.2": "3.12"}  # and Pythons
FOLDER = REPOSITORY / "build" / "megatron"
FILES = ("megatron_differential", "megatron", "patch_megatron", "dist_checkpointing")


def source_of(version: str) -> Path:
    """The folder with that release."""
    folder = FOLDER / version
    if not folder.exists():
        words = ["download", "-q", "--no-deps", "--only-binary=:all:"]
        words += ["--python-version", VERSIONS[version], "-d", str(FOLDER)]
        words += [f"megatron-core=={version}"]
        subprocess.run([sys.executable, "-m", "pip", *words], check=True)
        (wheel,) = FOLDER.glob(f"megatron_core-{version}-*.whl")
        with zipfile.ZipFile(wheel) as packed:
            packed.extractall(folder)
        wheel.unlink()
    return folder


def main() -> int:
    files = [f"tests/python/test_{name}.py" for name in FILES]
    status = 0
    for version in sys.argv[1:] or VERSIONS:
        source = source_of(version)
        print(f"== megatron-core {version}", flush=True)
        done = subprocess.run(
            [sys.executable, "-m", "pytest", "-q", "-rP", *files],
            cwd=REPOSITORY,
            env={**os.environ, "MEGATRON_SOURCE": str(source)},
            check=False,
        )
        status = status or done.returncode
    return status


if __name__ == "__main__":
    sys.exit(main())
