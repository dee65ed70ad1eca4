"""The groups of stock's names, and which of them the patches want that are active."""

from __future__ import annotations

HF, FILE_SYSTEM, DEFAULT_STORAGE = "hf", "file_system", "default_storage"

wanted: dict[object, tuple[str, ...]] = {}  # by active patch


def is_wanted(group: str) -> bool:
    """Whether a patch is active that wants it. Stand-ins ask when they are called: a program may
    keep one, as a default argument or in a registry, for longer than the patch."""
    return any(group in groups for groups in list(wanted.values()))
