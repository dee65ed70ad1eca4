"""Checks on what the runs left: losses, data order, the exported model."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import torch
from settings import Settings
from transformers import AutoModelForCausalLM, AutoTokenizer

Steps = dict[int, dict[str, Any]]


@dataclasses.dataclass(frozen=True)
class LossComparison:
    """How far the losses of two runs lie apart, over the steps of the second one."""

    first: int  # first and last step compared
    last: int
    first_difference: float  # relative
    largest_difference: float  # relative
    same_data: bool  # every batch identical
    same_rates: bool  # every learning rate identical


def compare_losses(one: Steps, other: Steps) -> LossComparison:
    """Compares ``other`` with the same steps of ``one``."""

    def difference(step: int) -> float:
        return float(abs(other[step]["loss"] - one[step]["loss"]) / abs(one[step]["loss"]))

    steps = sorted(other)
    return LossComparison(
        first=steps[0],
        last=steps[-1],
        first_difference=difference(steps[0]),
        largest_difference=max(difference(step) for step in steps),
        same_data=all(one[step]["data"] == other[step]["data"] for step in steps),
        same_rates=all(one[step]["rate"] == other[step]["rate"] for step in steps),
    )


@dataclasses.dataclass(frozen=True)
class Exported:
    """The exported model as transformers sees it."""

    tensors: int
    size: int  # bytes of all weights
    different: list[str]  # names whose bits or dtype or shape differ, or that one side lacks
    text: str


def same_bits(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether two tensors are equal bit for bit; NaN equals itself, 0.0 differs from -0.0."""
    if one.dtype != other.dtype or one.shape != other.shape:
        return False
    first, second = (t.detach().contiguous().flatten().view(torch.uint8) for t in (one, other))
    return torch.equal(first, second)


def different_names(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> list[str]:
    """Returns the names under which two state dicts do not hold the same bits."""
    both = one.keys() & other.keys()
    return sorted(
        (one.keys() ^ other.keys()) | {n for n in both if not same_bits(one[n], other[n])}
    )


def load_exported(directory: Path, reference: Path, settings: Settings, prompt: str) -> Exported:
    """Loads the export as any user would, compares its weights, and lets it write some text."""
    model = AutoModelForCausalLM.from_pretrained(directory)
    tokenizer = AutoTokenizer.from_pretrained(directory)
    weights = model.state_dict()
    expected = torch.load(reference, weights_only=True)
    torch.manual_seed(settings.seed)
    output = model.generate(
        **tokenizer(prompt, return_tensors="pt"),
        max_new_tokens=settings.generated_tokens,
        do_sample=True,
        temperature=0.7,
        pad_token_id=tokenizer.pad_token_id,
    )
    return Exported(
        tensors=len(weights),
        size=sum(t.numel() * t.element_size() for t in weights.values()),
        different=different_names(weights, expected),
        text=tokenizer.decode(output[0], skip_special_tokens=True),
    )
