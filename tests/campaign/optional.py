"""python -m tests.campaign.optional GROUP: the tests of packages that CI does not install, in an
environment of its own. That has these packages alone, without what they ask for: all else, torch
first, is found where this interpreter has it."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from tests.torches.environments import NotHad, install, said

REPOSITORY = Path(__file__).resolve().parents[2]


@dataclass(frozen=True)
class Group:
    """Packages that are tested together. tests: their files, which skip what is not installed;
    so all of `modules` must be."""

    name: str
    modules: tuple[str, ...]
    tests: tuple[str, ...]

    @property
    def requirements(self) -> Path:
        return REPOSITORY / "tests" / f"requirements-{self.name}.txt"

    def packages(self) -> list[str]:
        """As they are pinned, "torchao==0.18.0", without what they import."""
        first, _, _ = self.requirements.read_text().partition("\n\n")
        return re.findall(r"^[\w-]+==\S+$", first, re.MULTILINE)


GROUPS = {
    group.name: group
    for group in (
        Group(
            "optional",
            ("optimum.quanto", "torchao"),
            ("tests/python/test_optional_packages.py",),
        ),
        Group("frameworks", ("torchtitan",), ("tests/python/test_torchtitan.py",)),
    )
}


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


def main(name: str) -> int:
    group = GROUPS[name]
    sites = dict.fromkeys(sysconfig.get_path(kind) for kind in ("purelib", "platlib"))
    inside = beside(REPOSITORY / "build" / name, list(sites))
    ask = f"import {', '.join(group.modules)}, torch; print(torch.__version__)"
    try:
        install(inside, "--no-deps", "-r", str(group.requirements))
        torch = said(inside, ask).strip().rpartition("\n")[2]
        here = said(Path(sys.executable), "import torch; print(torch.__version__)").strip()
    except NotHad as error:
        print(error)
        return 1
    if torch != here:
        print(f"the packages brought torch {torch}, beside {here}")
        return 1
    words = [inside, "-m", "pytest", "-q", "-rP", *group.tests]
    return subprocess.run(words, cwd=REPOSITORY, check=False).returncode


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
