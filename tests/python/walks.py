"""Which functions of torch_ckpt a call goes through."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import torch_ckpt

PACKAGE = f"{Path(torch_ckpt.__file__).parent}/"


@dataclass
class Walk:
    """functions: of torch_ckpt, in the order of their first calls. depth: most of them in each
    other, on one thread."""

    functions: dict[CodeType, None] = field(default_factory=dict)
    depth: int = 0

    def files(self) -> set[str]:
        """Of the functions, paths below torch_ckpt."""
        return {code.co_filename.removeprefix(PACKAGE) for code in self.functions}

    def counts(self) -> list[int]:
        """Files, functions, depth, and how often the next function was in another file."""
        files = [code.co_filename for code in self.functions]
        changes = sum(a != b for a, b in zip(files, files[1:], strict=False))
        return [len(set(files)), len(files), self.depth, changes]


def walk(call: Callable[[], Any]) -> Walk:
    seen = Walk()

    def look(frame: FrameType, event: str, _: Any) -> None:
        if event != "call" or not frame.f_code.co_filename.startswith(PACKAGE):
            return
        seen.functions[frame.f_code] = None
        depth, at = 0, frame
        while at is not None:
            depth += at.f_code.co_filename.startswith(PACKAGE)
            at = at.f_back
        seen.depth = max(seen.depth, depth)

    threading.setprofile(look)
    sys.setprofile(look)
    try:
        call()
    finally:
        sys.setprofile(None)
        threading.setprofile(None)
    return seen
