"""The states that are saved and loaded: shapes of real models, filled with random bytes."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping

import torch

State = dict[str, torch.Tensor]
Shapes = dict[str, tuple[int, ...]]

SAMPLE_SIZE = 20


def llama_1b(scale: float) -> Shapes:
    """Llama-3.2-1B: 146 tensors, 2.47 GB in bfloat16. ``scale`` shortens the first dimension."""
    return _llama(scale, layers=16, width=2048, heads=512, inner=8192)


def llama_8b(scale: float) -> Shapes:
    """Llama-3.1-8B: 291 tensors, 16.1 GB in bfloat16. ``scale`` shortens the first dimension."""
    shapes = _llama(scale, layers=32, width=4096, heads=1024, inner=14336)
    # The smaller ones have theirs in common with the embedding.
    return {**shapes, "lm_head.weight": shapes["model.embed_tokens.weight"]}


def _llama(scale: float, *, layers: int, width: int, heads: int, inner: int) -> Shapes:
    shapes: Shapes = {"model.embed_tokens.weight": (128256, width)}
    for i in range(layers):
        layer = f"model.layers.{i}"
        shapes[f"{layer}.self_attn.q_proj.weight"] = (width, width)
        shapes[f"{layer}.self_attn.k_proj.weight"] = (heads, width)
        shapes[f"{layer}.self_attn.v_proj.weight"] = (heads, width)
        shapes[f"{layer}.self_attn.o_proj.weight"] = (width, width)
        shapes[f"{layer}.mlp.gate_proj.weight"] = (inner, width)
        shapes[f"{layer}.mlp.up_proj.weight"] = (inner, width)
        shapes[f"{layer}.mlp.down_proj.weight"] = (width, inner)
        shapes[f"{layer}.input_layernorm.weight"] = (width,)
        shapes[f"{layer}.post_attention_layernorm.weight"] = (width,)
    shapes["model.norm.weight"] = (width,)
    return {name: (scaled(shape[0], scale), *shape[1:]) for name, shape in shapes.items()}


def mixture_of_experts(scale: float) -> Shapes:
    """Qwen3-30B-A3B at an eighth of its widths: 18,867 tensors, 0.96 GB in bfloat16.

    ``scale`` takes away layers.
    """
    width, inner, experts, head = 256, 96, 128, 16
    shapes: Shapes = {"model.embed_tokens.weight": (18992, width)}
    for i in range(max(1, round(48 * scale))):
        layer = f"model.layers.{i}"
        shapes[f"{layer}.self_attn.q_proj.weight"] = (32 * head, width)
        shapes[f"{layer}.self_attn.k_proj.weight"] = (4 * head, width)
        shapes[f"{layer}.self_attn.v_proj.weight"] = (4 * head, width)
        shapes[f"{layer}.self_attn.o_proj.weight"] = (width, 32 * head)
        shapes[f"{layer}.self_attn.q_norm.weight"] = (head,)
        shapes[f"{layer}.self_attn.k_norm.weight"] = (head,)
        shapes[f"{layer}.input_layernorm.weight"] = (width,)
        shapes[f"{layer}.post_attention_layernorm.weight"] = (width,)
        shapes[f"{layer}.mlp.gate.weight"] = (experts, width)
        for j in range(experts):
            expert = f"{layer}.mlp.experts.{j}"
            shapes[f"{expert}.gate_proj.weight"] = (inner, width)
            shapes[f"{expert}.up_proj.weight"] = (inner, width)
            shapes[f"{expert}.down_proj.weight"] = (width, inner)
    shapes["model.norm.weight"] = (width,)
    shapes["lm_head.weight"] = (18992, width)
    return shapes


def small_tensors(scale: float) -> Shapes:
    """20,000 tensors of 16 KiB in float32, named for 1,000 inner dicts of 20 each: see nested.

    ``scale`` takes away tensors.
    """
    return {f"model.layer_{i // 20}.weight_{i % 20}": (4096,) for i in range(scaled(20_000, scale))}


def nested(flat: State) -> dict[str, dict[str, State]]:
    """Tensors of three names joined by dots, in dicts of three levels."""
    levels: dict[str, dict[str, State]] = {}
    for name, tensor in flat.items():
        model, layer, weight = name.split(".")
        levels.setdefault(model, {}).setdefault(layer, {})[weight] = tensor
    return levels


def lora_1b(scale: float) -> Shapes:
    """Adapters of rank 16 for every projection of Llama-3.2-1B: 224 tensors, 22.5 MB in bfloat16.

    ``scale`` takes away layers.
    """
    width, heads, inner, rank = 2048, 512, 8192, 16
    projections = {
        "self_attn.q_proj": (width, width),
        "self_attn.k_proj": (width, heads),
        "self_attn.v_proj": (width, heads),
        "self_attn.o_proj": (width, width),
        "mlp.gate_proj": (width, inner),
        "mlp.up_proj": (width, inner),
        "mlp.down_proj": (inner, width),
    }
    shapes: Shapes = {}
    for i in range(max(1, round(16 * scale))):
        for name, (into, out_of) in projections.items():
            projection = f"base_model.model.model.layers.{i}.{name}"
            shapes[f"{projection}.lora_A.weight"] = (rank, into)
            shapes[f"{projection}.lora_B.weight"] = (out_of, rank)
    return shapes


def scaled(count: int, scale: float, unit: int = 8) -> int:
    """``count * scale``, at least one ``unit`` and a multiple of it; exact at scale 1."""
    if scale == 1.0:
        return count
    return max(unit, round(count * scale / unit) * unit)


def random_state(shapes: Mapping[str, tuple[int, ...]], dtype: torch.dtype) -> State:
    """Contiguous tensors of random bytes, each with a storage of its own."""
    return dict(random_tensors(shapes, dtype))


def random_tensors(
    shapes: Mapping[str, tuple[int, ...]], dtype: torch.dtype
) -> Iterator[tuple[str, torch.Tensor]]:
    """The same one after the other, for who needs only parts of them."""
    generator = torch.Generator().manual_seed(0)
    for name, shape in shapes.items():
        size = math.prod(shape) * dtype.itemsize
        words = torch.empty((size + 7) // 8, dtype=torch.int64)
        words.random_(-(2**63), None, generator=generator)
        yield name, words.view(torch.uint8)[:size].view(dtype).view(shape)


def empty_like(shapes: Mapping[str, tuple[int, ...]], dtype: torch.dtype) -> State:
    """Zeroed tensors to load into; zeroing has touched their memory."""
    return {name: torch.zeros(shape, dtype=dtype) for name, shape in shapes.items()}


def clear(state: Mapping[str, torch.Tensor]) -> None:
    """Zeroes the tensors, so that a load that does nothing is found out."""
    for tensor in state.values():
        tensor.zero_()


def total_bytes(shapes: Mapping[str, tuple[int, ...]], dtype: torch.dtype) -> int:
    """The bytes of all tensors together."""
    return sum(math.prod(shape) for shape in shapes.values()) * dtype.itemsize


def sample_names(names: Iterable[str]) -> list[str]:
    """Up to 20 names, evenly spread, the first and the last among them."""
    ordered = list(names)
    count = min(SAMPLE_SIZE, len(ordered))
    last = len(ordered) - 1
    return [ordered[i * last // max(1, count - 1)] for i in range(count)]


def sample(state: Mapping[str, torch.Tensor]) -> State:
    """Copies of the tensors that round 1 compares."""
    return {name: state[name].clone() for name in sample_names(state)}


def check_equal(expected: Mapping[str, torch.Tensor], found: Mapping[str, torch.Tensor]) -> None:
    """Compares dtype, shape and every byte of the tensors named in ``expected``.

    Raises:
        ValueError: a tensor is missing or differs.
    """
    for name, wanted in expected.items():
        if name not in found:
            raise ValueError(f"{name} is missing")
        got = found[name]
        if got.dtype != wanted.dtype or got.shape != wanted.shape:
            raise ValueError(
                f"{name} is {got.dtype} {tuple(got.shape)}, "
                f"not {wanted.dtype} {tuple(wanted.shape)}"
            )
        # As bytes: random bfloat16 holds NaNs, which are not equal to themselves.
        if not torch.equal(_bytes(got), _bytes(wanted)):
            raise ValueError(f"{name} has other bytes than were saved")


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().contiguous().view(-1).view(torch.uint8)
