"""All integrations, each as soon as a program imports its framework."""

from __future__ import annotations

import importlib
import importlib.util

from torch_ckpt.patching.on_import import when_imported

# By package: the module whose classes have stand-ins, and the one of ours that installs them.
_INTEGRATIONS = {
    "torchtitan": ("torchtitan.components.checkpointer.dcp", "torchtitan"),
    "nemo_automodel": ("nemo_automodel.components.checkpoint.checkpointing", "automodel"),
}


def install_when_imported() -> list[str]:
    """Have the `install` of each integration called when its framework is imported. Returns the
    packages that are there. Imports none of them."""
    found = [package for package in _INTEGRATIONS if importlib.util.find_spec(package)]
    for package in found:
        theirs, ours = _INTEGRATIONS[package]

        def install(ours: str = ours) -> None:
            importlib.import_module(f"torch_ckpt.integrations.{ours}").install()

        when_imported(theirs, install)
    return found
