"""python -m tests.campaign.optional: the tests of tensors of packages that CI does not install, in an
environment of its own. That has these packages alone, without what they ask for: all else, torch
first, is found where this interpreter has it."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Sequence
from pathlib import Path

from tests.torches.environments import NotHad, install, said

REPOSITORY = Path(__file__).resolve().parents[2]
REQUIREMENTS = REPOSITORY / "tests" / "requirements-optional.txt"
FOLDER = REPOSITORY / "build" / "optional"
TESTS = "tests/python/test_optional_packages.py"
# What a package would do to the tests by not being there: skip them.
ASK = "import optimum.quanto, torch, torchao; print(torch.__version__)"


def packages() -> list[str]:
    """As they are pinned: "torchao==0.18.0"."""
    return re.findall(r"^[\w-]+==\S+$", REQUIREMENTS.read_text(), re.MULTILINE)


def beside(folder: Path, sites: Sequence[str]) -> Path:
    """An interpreter in an environment that is made anew in `folder`, and has all that `sites` have,
    editable installs too."""
    shutil.rmtree(folder, ignore_errors=True)
    words = [sys.executable, "-m", "venv", "--without-pip", str(folder)]
    subprocess.run(words, check=True, stdout=subprocess.DEVNULL)
    inside = folder / "bin" / "python"
    own = Path(said(inside, "import sysconfig; print(sysconfig.get_path('purelib'))").strip())
    lines = [f"import site; site.addsitedir({site!r})\n" for site in sites]
    (own / "beside.pth").write_text("".join(lines))
    return inside


def main() -> int:
    sites = dict.fromkeys(sysconfig.get_path(name) for name in ("purelib", "platlib"))
    inside = beside(FOLDER, list(sites))
    try:
        install(inside, "--no-deps", "-r", str(REQUIREMENTS))
        torch = said(inside, ASK).strip()
        here = said(Path(sys.executable), "import torch; print(torch.__version__)").strip()
    except NotHad as error:
        print(error)
        return 1
    if torch != here:
        print(f"the packages brought torch {torch}, beside {here}")
        return 1
    words = [inside, "-m", "pytest", "-q", "-rP", TESTS]
    return subprocess.run(words, cwd=REPOSITORY, check=False).returncode


if __name__ == "__main__":
    sys.exit(main())
