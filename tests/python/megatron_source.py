"""Megatron Core of another release than the one that is installed, where MEGATRON_SOURCE names the
folder that its wheel was unpacked into. Its packages' own modules, which want a GPU's libraries, are
not run."""

from __future__ import annotations

import importlib
import os
import sys
from pathlib import Path
from types import ModuleType


def use() -> None:
    """Before anything imports Megatron."""
    source = os.environ.get("MEGATRON_SOURCE", "")
    above: ModuleType | None = None
    for name in ("megatron", "megatron.core") if source else ():
        module = ModuleType(name)
        module.__path__ = [str(Path(source, *name.split(".")))]
        sys.modules[name] = module
        if above is not None:
            above.core = module  # type: ignore[attr-defined]
        above = module
    if source:
        importlib.import_module("megatron.core.parallel_state")  # or utils imports itself
        if Path(source, "megatron", "core", "safe_globals.py").exists():  # since 0.14
            importlib.import_module("megatron.core.safe_globals").register_safe_globals()
