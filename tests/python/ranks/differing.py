"""Values that differ between ranks: named, or kept by rank."""

from __future__ import annotations

import logging
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from ranks.run import Context, cases, everywhere

import torch_ckpt
from torch_ckpt import HuggingFaceStorageWriter

CASES, case = cases()


class Warnings(logging.Handler):
    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.texts: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.texts.append(record.getMessage())

    def __enter__(self) -> Warnings:
        logging.getLogger("torch_ckpt").addHandler(self)
        return self

    def __exit__(self, *ignored: Any) -> None:
        logging.getLogger("torch_ckpt").removeHandler(self)


@case
def a_leaf_that_differs_between_ranks_is_named(context: Context) -> None:
    own = {"position": context.rank, "queue": (torch.ones(2 + context.rank),)}
    source = {"w": torch.ones(2), "loader": own, "same": 5, "alike": [1]}
    for kind in (torch_ckpt.SavePlanner, dcp.DefaultSavePlanner):
        path = context.folder / kind.__module__
        with Warnings() as log:
            dcp.save(
                source,
                storage_writer=HuggingFaceStorageWriter(path, save_distributed=True),
                planner=kind(),
            )
        texts = everywhere(log.texts)[0]
        for name in ("loader.position", "loader.queue"):
            assert any(name in text for text in texts), (kind, texts)
        assert not any("same" in text for text in texts), texts


@case
def a_plain_tensor_that_differs_between_ranks_is_named(context: Context) -> None:
    """One rank's is saved, and no other rank could load it. Stock says nothing."""
    for field, source in {
        "shape": {"x": torch.ones(2 + context.rank), "w": torch.ones(2)},
        "dtype": {"x": torch.ones(2, dtype=[torch.half, torch.float][context.rank > 0])},
    }.items():
        path = context.folder / field
        try:
            torch_ckpt.save(source, checkpoint_id=path)
        except torch_ckpt.InvalidArgumentError as error:
            assert error.tensor == "x" and "ranks 0 and 1 disagree" in str(error), error
        else:
            raise AssertionError("it was saved")
        assert not path.exists()
        with Warnings() as log:
            dcp.save(source, storage_writer=HuggingFaceStorageWriter(path, save_distributed=True))
        texts = everywhere(log.texts)[0]
        assert sum("x: this value differs between ranks 0 and 1" in t for t in texts) == 1, texts
        assert len(texts) == 1, texts


@case
def plain_tensors_whose_values_differ_are_named(context: Context) -> None:
    """In one warning, and all that is kept of them is of one rank. Of large ones no word."""
    own = {f"bn{i}": torch.full((3, 2 + i), float(context.rank)).t() for i in range(12)}
    own["rng"] = torch.full((64 << 10,), context.rank, dtype=torch.uint8)
    source = {
        **own,
        "steps": 3 - context.rank,
        "alike": torch.ones(5),
        "large": torch.full(((64 << 10) + 1,), context.rank, dtype=torch.uint8),
        "own": torch_ckpt.PerRank(torch.tensor(context.rank)),
    }
    calls = {
        "save": lambda path: torch_ckpt.save(source, path),
        "final": lambda path: torch_ckpt.save(source, path, layout="final"),
        "async": lambda path: torch_ckpt.async_save(source, path).result(),
        "bare": lambda path: dcp.save(
            source, storage_writer=HuggingFaceStorageWriter(path), planner=torch_ckpt.SavePlanner()
        ),
        "stock": lambda path: dcp.save(
            {name: value for name, value in source.items() if name != "own"},
            storage_writer=HuggingFaceStorageWriter(path, save_distributed=True),
        ),
    }
    for name, call in calls.items():
        with Warnings() as log:
            call(context.folder / name)
        (text,) = everywhere(log.texts)[0]
        assert text.startswith("14 values differ between ranks"), (name, text)
        assert "(ranks 0 and 1)" in text and ", and 4 more" in text, (name, text)
        for word in ("alike", "large", "own"):
            assert f"{word} (" not in text, (name, text)
        if name != "stock":  # whose planner spreads them
            loaded = torch_ckpt.load(path=context.folder / name)
            assert all(not loaded[key].any() for key in own), name
    with Warnings() as log:
        torch_ckpt.save({"rng": own["rng"], "alike": torch.ones(5)}, context.folder / "one")
    (text,) = everywhere(log.texts)[0]
    assert text.startswith("rng: this value differs between ranks 0 and 1; the lowest rank's is")


@case
def per_rank_values_come_back(context: Context) -> None:
    source = {"rng": torch_ckpt.PerRank({"seed": context.rank}), "w": torch.ones(2)}
    torch_ckpt.save(source, checkpoint_id=context.folder / "c")
    target = {"rng": torch_ckpt.PerRank(), "w": torch.zeros(2)}
    torch_ckpt.load(target, checkpoint_id=context.folder / "c")
    assert target["rng"].value == {"seed": context.rank}
