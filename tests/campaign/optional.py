"""python -m tests.campaign.optional GROUP [--install]: the tests of packages that CI does not
install, in an environment of its own; with --install that environment alone, if it is not there.
It has these packages alone, without what they ask for: all else, torch first, is found where this
interpreter has it."""

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

    @property
    def folder(self) -> Path:
        return REPOSITORY / "build" / self.name

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
        Group(
            "frameworks",
            ("torchtitan", "nemo_automodel"),
            ("tests/python/test_torchtitan.py", "tests/python/test_automodel.py"),
        ),
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


def make(group: Group) -> Path:
    """The interpreter of the group's environment, which is made anew.

    Raises:
        NotHad: the packages cannot be had, or brought another torch.
    """
    sites = dict.fromkeys(sysconfig.get_path(kind) for kind in ("purelib", "platlib"))
    inside = beside(group.folder, list(sites))
    ask = f"import {', '.join(group.modules)}, torch; print(torch.__version__)"
    install(inside, "--no-deps", "-r", str(group.requirements))
    torch = said(inside, ask).strip().rpartition("\n")[2]
    here = said(Path(sys.executable), "import torch; print(torch.__version__)").strip()
    if torch != here:
        raise NotHad(f"the packages brought torch {torch}, beside {here}")
    return inside


def main(name: str, *options: str) -> int:
    group = GROUPS[name]
    if options and (group.folder / "bin" / "python").exists():
        return 0
    try:
        inside = make(group)
    except NotHad as error:
        print(error)
        return 1
    if options:
        return 0
    words = [inside, "-m", "pytest", "-q", "-rP", *group.tests]
    return subprocess.run(words, cwd=REPOSITORY, check=False).returncode


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
