"""Bases whose weights are codes and scales: what their configuration says, and which tensors become
numbers. Nothing here needs torch."""

from __future__ import annotations

import json
import logging
import math
import os
import re
from collections.abc import Callable, Collection, Mapping
from typing import Any, NamedTuple

from torch_ckpt.errors import IncompleteError, UnsupportedError
from torch_ckpt.native.opened import Dequantized, OpenedCheckpoint, ScaledPair, StoredType

# The second is what compressed-tensors wrote first.
QUANTIZATION_KEYS = ("quantization_config", "compression_config")
# Models of several parts have a configuration for each.
CONFIGS_OF_PARTS = (
    *("text_config", "language_config", "llm_config", "thinker_config"),
    *("vision_config", "audio_config", "encoder", "decoder"),
)

logger = logging.getLogger(__name__)

# What may be codes, of methods that are read and of others.
CODES = ("F8_E4M3", "F8_E5M2", "F8_E4M3FNUZ", "F8_E5M2FNUZ", "F4", "U8", "I8")
INTEGERS = ("U8", "I8", "I16", "U16", "I32", "U32", "I64", "U64")
_MOST_SHOWN = 5
_BYTES_OF_SCALE = 16  # of MXFP4
_FLOAT8 = ("fp8", "fbgemm_fp8", "finegrained_fp8")
_BLOCKS = ("mxfp4", "mxfp8")
# What compressed-tensors calls its formats whose codes are float8.
_COMPRESSED = ("float-quantized", "naive-quantized", "mxfp8-quantized")
# Of activations, caches and outputs: parts of the quantization, and not of a model of floats.
ACTIVATIONS = re.compile(
    r"(?:^|[._])(?:input|activation|output|k|v|q|prob)_scale(?:_inv)?$|\.activation_scale_ub$"
)
# Beside codes: they are no number times a scale.
_OTHERS = re.compile(r"_zero_point$|_global_scale$|\.weight_scale_2$|\.qzeros$|\.quant_state\.")


def scale_names(codes: str) -> list[str]:
    """What the scales of `codes` may be called, as csrc/engine/open/scaled.cc pairs them."""
    names = [f"{codes}_scale_inv", f"{codes}_scale"]
    module, dot, last = codes.rpartition(".")
    if last == "weight":
        names += [f"{module}{dot}scale", f"{module}{dot}qscale_weight"]
    return names


def all_scale_names(codes: str) -> list[str]:
    """`scale_names`, and of MXFP4's `x_blocks` `x_scales`."""
    module = codes.removesuffix("_blocks")
    return scale_names(codes) + ([f"{module}_scales"] if module != codes else [])


def shapes_of_bytes(types: Mapping[str, StoredType]) -> dict[str, tuple[int, ...]]:
    """The shapes of the numbers that MXFP4 is, which is stored as `x_blocks` and `x_scales`: by
    `x`, where nothing else has that name."""
    shapes = {}
    for codes, kind in types.items():
        name = codes.removesuffix("_blocks")
        if name == codes or name in types or kind.dtype != "U8" or f"{name}_scales" not in types:
            continue
        if kind.shape is not None and len(kind.shape) > 1 and kind.shape[-1] == _BYTES_OF_SCALE:
            *rows, groups, of_group = kind.shape
            shapes[name] = (*rows, groups * 2 * of_group)
    return shapes


class Quantization(NamedTuple):
    """What a configuration says.

    method: as it calls it. blocks: rows and columns of codes that share a scale, where it says so.
    plain: the modules that are left as they are: names, or expressions after "re:".
    refused: why its codes are not made numbers; None where they are.
    """

    method: str
    blocks: tuple[int, int] | None
    plain: tuple[str, ...]
    refused: str | None = None

    def is_plain(self, tensor: str) -> bool:
        """Whether it leaves the module of a tensor as it is."""
        module = tensor.rpartition(".")[0]
        return any(
            re.match(each[3:], module) is not None
            if each.startswith("re:")
            else each in (tensor, module) or f".{each}." in f".{module}."
            for each in self.plain
        )


def config_at(path: str) -> Any:
    """What config.json beside the weights at `path` holds; None where it is none of a model, or
    there is no path."""
    if not path:
        return None
    directory = path if os.path.isdir(path) else os.path.dirname(path)
    try:
        with open(os.path.join(directory, "config.json"), encoding="utf-8") as text:
            return json.load(text)
    except FileNotFoundError:
        return None
    except (ValueError, RecursionError):
        return None


def quantization_of(path: str) -> Quantization | None:
    """What the configuration beside the weights at `path` says; None where it says nothing."""
    said = _said(config_at(path))
    return None if said is None else _parsed(said)


def _said(config: Any) -> Mapping[str, Any] | None:
    if not isinstance(config, dict):
        return None
    for part in (config, *(config.get(key) for key in CONFIGS_OF_PARTS)):
        if isinstance(part, dict):
            for key in QUANTIZATION_KEYS:
                if isinstance(part.get(key), dict):
                    found: dict[str, Any] = part[key]
                    return found
    return None


def _parsed(said: Mapping[str, Any]) -> Quantization:
    method = str(said.get("quant_method") or "a method without a name").lower()
    plain: list[Any] = []
    for key in ("modules_to_not_convert", "ignore", "ignored_layers", "exclude_modules"):
        given = said.get(key)
        plain += given if isinstance(given, list) else []
    names = tuple(str(each) for each in plain)
    if method in _FLOAT8:
        blocks = said.get("weight_block_size")
        return Quantization(method, _blocks_of(blocks), names, _refused(method, blocks))
    if method in _BLOCKS:
        return Quantization(method, None, names)
    if method == "modelopt" and str(said.get("quant_algo", "")).upper() in ("FP8", "MXFP8"):
        return Quantization(method, None, names)
    if method == "compressed-tensors":
        return _compressed(said, method, names)
    words = [str(said[key]) for key in ("quant_algo", "format", "bits") if said.get(key)]
    return Quantization(method, None, names, f"{method} {' '.join(words)}".strip())


def _blocks_of(given: Any) -> tuple[int, int] | None:
    known = isinstance(given, list) and len(given) == 2
    if known and all(type(each) is int and each > 0 for each in given):
        return given[0], given[1]
    return None


def _refused(method: str, blocks: Any) -> str | None:
    if blocks is None or _blocks_of(blocks) is not None:
        return None
    return f"{method} with blocks of {blocks!r}"


def _compressed(said: Mapping[str, Any], method: str, plain: tuple[str, ...]) -> Quantization:
    """Of compressed-tensors, whose weights are to be float8 without zero points."""
    groups = said.get("config_groups")
    known: set[tuple[int, int] | None] = set()
    refused: str | None = None
    for group in groups.values() if isinstance(groups, dict) else ():
        weights = group.get("weights") if isinstance(group, dict) else None
        if not isinstance(weights, dict):
            continue
        form = group.get("format") or said.get("format")
        kind = weights.get("type"), weights.get("num_bits"), weights.get("symmetric", True)
        blocks = weights.get("block_structure")
        if kind != ("float", 8, True) or form not in (*_COMPRESSED, None):
            zeros = "" if kind[2] else " with zero points"
            refused = f"{method} {form}, {kind[1]} bits of {kind[0]}{zeros}"
        refused = refused or _refused(method, blocks)
        known.add(_blocks_of(blocks))
    known -= {None}
    return Quantization(method, known.pop() if len(known) == 1 else None, plain, refused)


def codes_left(opened: OpenedCheckpoint) -> dict[str, str]:
    """The tensors of a checkpoint that are codes and not made numbers, and their scales."""
    types = opened.listing().tensors()
    return {
        name: scale
        for name, kind in types.items()
        if kind.dtype in CODES
        for scale in all_scale_names(name)
        if scale in types
    }


def check_method(opened: OpenedCheckpoint, wanted: Mapping[str, StoredType]) -> None:
    """Raises UnsupportedError for one of `wanted`, tensors of which floats are to be made, where
    the configuration says that it is codes of a method whose codes are not made numbers."""
    said = quantization_of(opened.path)
    if said is None or said.refused is None:
        return
    for name, kind in wanted.items():
        if not said.is_plain(name):
            raise UnsupportedError(
                f"is stored as {kind.dtype}, by {said.refused} as config.json says: such codes are "
                "not made numbers",
                file=opened.path,
                tensor=name,
            )


def with_numbers(
    opened: OpenedCheckpoint,
    wanted: Callable[[ScaledPair], bool] | None = None,
    *,
    needed: Callable[[ScaledPair], bool] | None = None,
    kept: Collection[str] = (),
    blocks: tuple[int, int] | None = None,
    keeps_scales: bool = False,
    keeps_names: bool = False,
) -> OpenedCheckpoint:
    """`opened` with numbers in place of codes and scales, of those pairs that are `wanted`; itself
    where there are none. Scales of activations, which are one number each, are left out, but for
    those `kept`.

    needed: of which it is an error that scales do not fit; None: those that are wanted.
    blocks: rows and columns of codes that have a scale in common; None: what the configuration
        says. Raises UnsupportedError for codes whose scales do not fit, or for what is more than a
        number times a scale, IncompleteError for codes or scales that lack the other, naming them.
    """
    said = quantization_of(opened.path)
    if blocks is None and said is not None:
        blocks = said.blocks
    options: dict[str, Any] = {
        "blocks": blocks,
        "keeps_scales": keeps_scales,
        "keeps_names": keeps_names,
    }
    found = opened.dequantized(**options)
    for codes, scales, reason in found.misfits:
        name = codes if keeps_names else codes.removesuffix("_blocks")
        is_needed = needed or wanted
        if is_needed is None or is_needed(ScaledPair(name, codes, scales)):
            raise UnsupportedError(reason, file=opened.path, tensor=codes)
    if said is not None:
        _check_whole(opened, said, found, needed or wanted)
    pairs = [pair for pair in found.pairs if wanted is None or wanted(pair)]
    if not pairs:
        return opened
    if said is not None and said.refused is not None:
        raise UnsupportedError(
            f"is stored as codes, by {said.refused} as config.json says, which are not made "
            "numbers: float8 with scales and MXFP4 are",
            file=opened.path,
            tensor=pairs[0].codes,
        )
    if len(pairs) < len(found.pairs):
        found = opened.dequantized(only=[pair.codes for pair in pairs], **options)
    stored = found.opened.listing().tensors()
    _check_alone(opened, pairs, stored)
    if keeps_scales:
        return found.opened
    left_out = [
        name
        for name, kind in stored.items()
        # One number, or it is something else of the model's.
        if ACTIVATIONS.search(name) and name not in kept and math.prod(kind.shape or ()) == 1
    ]
    if left_out:
        shown = ", ".join(left_out[:_MOST_SHOWN])
        logger.info(
            "%s: left out are %d scales of activations, as %s", opened.path, len(left_out), shown
        )
    return found.opened.without(left_out) if left_out else found.opened


def _check_whole(
    opened: OpenedCheckpoint,
    said: Quantization,
    found: Dequantized,
    wanted: Callable[[ScaledPair], bool] | None,
) -> None:
    """Raises IncompleteError for what lacks its other half."""
    for name in found.unscaled:
        pair = ScaledPair(name.removesuffix("_blocks"), name, "")
        if said.is_plain(name) or not (wanted is None or wanted(pair)):
            continue
        raise IncompleteError(
            f"is stored as codes, by {said.method} as config.json says, and has no scales",
            file=opened.path,
            tensor=name,
        )
    for name in found.orphans:
        if ACTIVATIONS.search(name):
            continue
        of = re.sub(r"(_scale_inv|_scales)$", "", name)
        if wanted is None or wanted(ScaledPair(of, of, name)):
            raise IncompleteError(
                f"scales codes, by {said.method} as config.json says, that are not there",
                file=opened.path,
                tensor=name,
            )


def _check_alone(
    opened: OpenedCheckpoint, pairs: Collection[ScaledPair], names: Collection[str]
) -> None:
    """Raises UnsupportedError where something else belongs to the codes of `pairs`."""
    modules = {pair.codes.rpartition(".")[0] for pair in pairs}
    for name in names:
        if _OTHERS.search(name) and name.rpartition(".")[0] in modules:
            raise UnsupportedError(
                "belongs to codes that are more than a number times a scale, which are not made "
                "numbers",
                file=opened.path,
                tensor=name,
            )
