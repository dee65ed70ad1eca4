"""What a load does about keys that are asked for and not stored, or stored and not asked for."""

from __future__ import annotations

from enum import Enum


class StrictHandling(Enum):
    """Unexpected keys are asked for and not stored, as each rank sees it; missing ones are stored
    and no rank asks for them. `*_UNEXPECTED` look at the former only, `*_ALL` at both."""

    ASSUME_OK_UNEXPECTED = "assume_ok_unexpected"
    LOG_UNEXPECTED = "log_unexpected"
    LOG_ALL = "log_all"
    RAISE_UNEXPECTED = "raise_unexpected"
    RAISE_ALL = "raise_all"
    RETURN_UNEXPECTED = "return_unexpected"
    RETURN_ALL = "return_all"
    IGNORE_ALL = "ignore_all"


def parse_strict_flag(strict: str | StrictHandling) -> StrictHandling:
    """The member that `strict` is, or is the value of; one of Megatron's stands for ours. Raises
    ValueError."""
    try:
        return StrictHandling(strict.value if isinstance(strict, Enum) else strict)
    except ValueError:
        known = ", ".join(each.value for each in StrictHandling)
        raise ValueError(f"strict is one of {known}, not {strict!r}") from None
