"""From a text file to a tokenizer and to batches whose order does not depend on the world size."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

TEXT_FILE = Path(__file__).parent / "data" / "alice.txt"
_END = "<|end|>"


def build_tokenizer(vocabulary: int) -> PreTrainedTokenizerFast:
    """Trains a byte-level BPE tokenizer on the demo's text: any text survives a round trip.

    256 of the entries are the bytes and one is the end mark; what is above 257 are merged pairs.
    """
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary,
        special_tokens=[_END],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train([str(TEXT_FILE)], trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token=_END, eos_token=_END, pad_token=_END
    )


def read_tokens(tokenizer: PreTrainedTokenizerFast) -> torch.Tensor:
    """Returns the whole text as a 1-d int64 tensor of token ids."""
    text = TEXT_FILE.read_text(encoding="utf-8")
    return torch.tensor(tokenizer(text)["input_ids"], dtype=torch.int64)


class Batches:
    """Global batches of ``batch`` sequences of ``length`` + 1 tokens, in a random order.

    The text is cut into windows; each epoch visits them in a new order drawn from a generator, and
    each sequence starts at a random place in its window, drawn from another one. So a resumed run
    sees the data of an unbroken one only if the position and both generators were saved and
    restored right. They are this object's own: a run that goes on with other processes has other
    random numbers elsewhere, and the same data.

    Every rank draws the same global batch and trains on its slice of it.
    """

    def __init__(self, tokens: torch.Tensor, batch: int, length: int, seed: int) -> None:
        self._tokens = tokens
        self._batch = batch
        self._length = length
        self._windows = (tokens.numel() - length - 1) // length
        if self._windows < batch:
            raise ValueError(f"the text has only {self._windows} windows of {length} tokens")
        self._generator = torch.Generator().manual_seed(seed)
        self._places = torch.Generator().manual_seed(seed + 1)
        self._start_epoch(0)

    def _start_epoch(self, epoch: int) -> None:
        self._epoch = epoch
        self._cursor = 0
        self._generator_at_epoch = self._generator.get_state()
        self._order = torch.randperm(self._windows, generator=self._generator)

    def next(self) -> torch.Tensor:
        """Returns the next global batch, int64 of shape (batch, length + 1)."""
        if self._cursor + self._batch > self._windows:
            self._start_epoch(self._epoch + 1)
        windows = self._order[self._cursor : self._cursor + self._batch]
        self._cursor += self._batch
        places = torch.randint(self._length, (self._batch,), generator=self._places)
        starts = windows * self._length + places
        return self._tokens[starts[:, None] + torch.arange(self._length + 1)]

    def state_dict(self) -> dict[str, Any]:
        return {
            "epoch": self._epoch,
            "cursor": self._cursor,
            "generator": self._generator_at_epoch.clone(),
            "places": self._places.get_state(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._generator.set_state(state["generator"])
        self._places.set_state(state["places"])
        self._start_epoch(state["epoch"])
        self._cursor = state["cursor"]


def digest(batch: torch.Tensor) -> str:
    """A short name of a batch's content, to compare the data two runs have seen."""
    return hashlib.sha256(batch.numpy().tobytes()).hexdigest()[:16]
