"""python -m tests.campaign.megatron: the tests that meet Megatron Core, on another release than the
one that is installed. Its wheel is for other Pythons, so its source is unpacked and imported."""

from __future__ import annotations

import os
import subprocess
import sys
import zipfile
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[2]
VERSION = "0.19.2"
FOLDER = REPOSITORY / "build" / "megatron" / VERSION
FILES = ("megatron_differential", "megatron", "patch_megatron", "dist_checkpointing")


def main() -> int:
    if not FOLDER.exists():
        words = ["download", "-q", "--no-deps", "--only-binary=:all:", "--python-version", "3.12"]
        words += ["-d", str(FOLDER.parent), f"megatron-core=={VERSION}"]
        subprocess.run([sys.executable, "-m", "pip", *words], check=True)
        (wheel,) = FOLDER.parent.glob(f"megatron_core-{VERSION}-*.whl")
        with zipfile.ZipFile(wheel) as packed:
            packed.extractall(FOLDER)
        wheel.unlink()
    files = [f"tests/python/test_{name}.py" for name in FILES]
    return subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-rP", *files],
        cwd=REPOSITORY,
        env={**os.environ, "MEGATRON_SOURCE": str(FOLDER)},
        check=False,
    ).returncode


if __name__ == "__main__":
    sys.exit(main())
