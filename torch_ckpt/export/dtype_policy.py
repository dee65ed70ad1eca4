"""In which dtype the tensors of an export are stored. Nothing here needs torch."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Mapping
from typing import Any

from torch_ckpt.checkpoint.checkpoint import Checkpoint
from torch_ckpt.errors import InvalidArgumentError

# What people call those of core.CASTABLE, torch's name first; after "torch." is taken away and in
# lower case.
_NAMES = {
    "F64": ("float64", "f64", "fp64", "double"),
    "F32": ("float32", "f32", "fp32", "float"),
    "F16": ("float16", "f16", "fp16", "half"),
    "BF16": ("bfloat16", "bf16"),
    "F8_E4M3": ("float8_e4m3fn", "f8_e4m3", "fp8_e4m3"),
    "F8_E5M2": ("float8_e5m2", "f8_e5m2", "fp8_e5m2"),
}
_BY_NAME = {name: dtype for dtype, names in _NAMES.items() for name in names}
# Those that a dtype for all is for; the others (8 bits and less, integers, ...) mean what they mean
# together with scales, or nothing else at all.
_ORDINARY = frozenset(("F64", "F32", "F16", "BF16"))


class DtypePolicy:
    """dtype: None keeps every dtype. A dtype (torch's, or its name as "bf16" or "BF16"): floats of
        16, 32 and 64 bits are stored as that. A dict of fqn to dtype, or a checkpoint directory
        whose dtypes are taken: the tensors that it names are stored so; others keep theirs.
    keep_fp32: regular expressions; floats of 16, 32 and 64 bits whose name one of them finds are
        stored in float32 whatever `dtype` says.

    Values become those of `tensor.to(dtype)`. A finite value that would round to more than the
    largest of the dtype, or an infinity where it has none (float8_e4m3fn), fails the save or
    consolidation with an InvalidArgumentError that names the tensor.

    Raises InvalidArgumentError for what is none of these.
    """

    def __init__(self, dtype: Any = None, keep_fp32: Iterable[str] = ()) -> None:
        self._for_all: str | None = None
        self._of_directory: str | None = None  # what all floats of a reference directory are
        self._by_name: dict[str, str] = {}
        if isinstance(dtype, Mapping):
            self._by_name = {str(fqn): _dtype_name(value, str(fqn)) for fqn, value in dtype.items()}
        elif (
            _named(dtype) is None and isinstance(dtype, str | os.PathLike) and os.path.isdir(dtype)
        ):
            self._by_name = Checkpoint(dtype).dtypes()
            floats = [name for name in _NAMES if name in _ORDINARY & {*self._by_name.values()}]
            self._of_directory = floats[0] if len(floats) == 1 else None
        elif dtype is not None:
            self._for_all = _dtype_name(dtype)
        if isinstance(keep_fp32, str):
            raise InvalidArgumentError("keep_fp32 is a list of regular expressions")
        try:
            self._keep = [re.compile(pattern) for pattern in keep_fp32]
        except re.error as error:
            raise InvalidArgumentError(f"keep_fp32: {error}") from error

    def __bool__(self) -> bool:
        """Whether it can change any dtype."""
        return bool(self._for_all or self._by_name or self._keep)

    @property
    def torch_name(self) -> str | None:
        """What torch calls the one dtype of all ordinary floats; None where there is none."""
        one = self._for_all or self._of_directory
        return None if one is None else _NAMES[one][0]

    def stored(self, fqn: str, dtype: str) -> str:
        """The dtype, as safetensors calls it, that a tensor of `dtype` is stored in. Raises
        InvalidArgumentError where the policy names one that `dtype` is not cast to."""
        ordinary = dtype in _ORDINARY
        if ordinary and any(pattern.search(fqn) for pattern in self._keep):
            return "F32"
        if self._for_all is not None:
            return self._for_all if ordinary else dtype
        wanted = self._by_name.get(fqn, dtype)
        if wanted != dtype and not (ordinary and wanted in _NAMES):
            raise InvalidArgumentError(
                f"is {dtype}, which is not cast to {wanted}; only floats of 16, 32 and 64 bits are "
                "cast, to floats",
                tensor=fqn,
            )
        return wanted

    def makes_numbers(self, fqn: str) -> bool:
        """Whether a tensor that is stored as codes and scales is to be floats of 16 bits or more:
        where one dtype is for all, or this name has one."""
        return (self._for_all or self._by_name.get(fqn)) in _ORDINARY

    def check_tied(self, alias: str, fqn: str, dtype: str) -> None:
        """Raise InvalidArgumentError where something is said of `alias` that does not hold for
        `fqn`, under which it is stored."""
        named = alias in self._by_name or any(pattern.search(alias) for pattern in self._keep)
        if not named or self.stored(alias, dtype) == self.stored(fqn, dtype):
            return
        raise InvalidArgumentError(
            f"is to be stored as {self.stored(alias, dtype)}, but is tied to '{fqn}', which is to "
            f"be stored as {self.stored(fqn, dtype)}: say the same of both names",
            tensor=alias,
        )

    def stored_dtypes(self, fqns: list[str], dtypes: list[str]) -> list[str] | None:
        """`stored` of each; None where none can change."""
        if not self:
            return None
        return [self.stored(*pair) for pair in zip(fqns, dtypes, strict=True)]


def _named(dtype: Any) -> str | None:
    return _BY_NAME.get(str(dtype).removeprefix("torch.").lower())


def _dtype_name(dtype: Any, fqn: str | None = None) -> str:
    name = _named(dtype)
    if name is None:
        raise InvalidArgumentError(
            f"dtype={dtype!r} is no float dtype that tensors are cast to, and no directory",
            tensor=fqn,
        )
    return name
