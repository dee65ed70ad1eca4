"""Tensors of one memory: pairs that overlap, sets that do not, and random ones."""

from __future__ import annotations

from collections.abc import Callable

import torch

# Of a float32 matrix of 8 by 8. No two views are of the same elements.
OVERLAPS: dict[str, Callable[[torch.Tensor], tuple[torch.Tensor, torch.Tensor]]] = {
    "shifted": lambda w: (w[:4], w[1:5]),
    "a row of it": lambda w: (w, w[3]),
    "rows and a column": lambda w: (w[:4], w[:, 2]),
    "columns": lambda w: (w[:, :4], w[:, 3:6]),
    "a block of columns": lambda w: (w[:, :4], w[5:6, 3:5]),
    "steps": lambda w: (w[:, ::2], w[:, ::4]),
    "turned": lambda w: (w[:4, :3], w[:3, :4].t()),
    "other dtype": lambda w: (w[:4], w.view(torch.int16)[3:, 5:7]),
}
APART: dict[str, Callable[[torch.Tensor], list[torch.Tensor]]] = {
    "rows": lambda w: list(w),
    "columns": lambda w: list(w.t()),
    "two columns": lambda w: [w[:, :3], w[:, 3:6]],
    "column blocks": lambda w: [w[:, :3], w[:, 3:4], w[:, 4:]],
    "blocks": lambda w: [w[:3, :2], w[:3, 2:], w[3:, :5], w[3:, 5:]],
    "blocks side by side": lambda w: [w[:3, 2:], w[1:, :2]],
    "steps": lambda w: [w[:, ::2], w[:, 1::2]],
    "steps of rows": lambda w: [w[::2], w[1::2, ::3], w[1::2, 1::3]],
    "a diagonal and what is above": lambda w: [w.diagonal(), w.diagonal(1), w[5:, 0]],
    "real and imaginary": lambda w: [
        torch.view_as_complex(w.view(8, 4, 2)).real,
        torch.view_as_complex(w.view(8, 4, 2)).imag,
    ],
    "nothing": lambda w: [w[:0], w[4:4], w],
}


def random_views(base: torch.Tensor, generator: torch.Generator) -> list[torch.Tensor]:
    """Up to three strided views of `base`, which has 128 elements; none overlaps itself."""

    def number(low: int, high: int) -> int:
        return int(torch.randint(low, high, (1,), generator=generator))

    views = []
    for _ in range(number(2, 4)):
        sizes = [number(1, 5) for _ in range(number(1, 4))]
        steps, least = [0] * len(sizes), 1
        for d in torch.randperm(len(sizes), generator=generator).tolist():
            steps[d] = least * number(1, 3)
            least = steps[d] * sizes[d]
        room = 127 - sum((n - 1) * s for n, s in zip(sizes, steps, strict=True))
        if room >= 0:
            views.append(base.as_strided(sizes, steps, number(0, room + 1)))
    return views
