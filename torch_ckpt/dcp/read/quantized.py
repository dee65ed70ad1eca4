"""QuantizedHuggingFaceStorageReader: codes and scales under stock's names, as numbers."""

from __future__ import annotations

import dataclasses
import os

import torch
from torch.distributed.checkpoint.metadata import Metadata, TensorProperties, TensorStorageMetadata

from torch_ckpt.checkpoint.quantization import (
    ACTIVATIONS,
    all_scale_names,
    quantization_of,
    with_numbers,
)
from torch_ckpt.dcp.plan.load_planner import StoredMetadata
from torch_ckpt.dcp.read.reader import HuggingFaceStorageReader
from torch_ckpt.errors import InvalidArgumentError
from torch_ckpt.native.opened import OpenedCheckpoint

_USUAL = 128


class QuantizedHuggingFaceStorageReader(HuggingFaceStorageReader):
    """A StorageReader of bases whose weights are codes and scales (float8, MXFP4), which are read
    as the numbers that they are, rounded once, to the dtype of the target.

    As torch.distributed.checkpoint.quantized_hf_storage.QuantizedHuggingFaceStorageReader, with its
    names: scales stay tensors of their own, and `x_blocks` of MXFP4 is called so, and has the shape
    of the numbers, 32 for each of `x_scales`. Everything that `torch_ckpt.load_model` reads as
    numbers is read, in any number of files, with an index or without.

    path, thread_count: as CheckpointReader's.
    target_dtype: the dtype that the numbers are said to have, for planners that make targets.
    block_size: rows and columns of float8 codes that have a scale in common; what the configuration
        says counts where this is 128.

    Raises what `torch_ckpt.load_model` does for codes that are not made numbers, and
    InvalidArgumentError for a `block_size` that is neither 128 nor what the configuration says.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        thread_count: int = 1,
        target_dtype: torch.dtype = torch.float32,
        block_size: int = _USUAL,
    ) -> None:
        super().__init__(path, thread_count)
        self.target_dtype = target_dtype
        self.block_size = block_size

    def _look(self) -> OpenedCheckpoint:
        opened = super()._look()
        said = quantization_of(opened.path)
        blocks: tuple[int, int] | None = (self.block_size, self.block_size)
        if said is not None and said.blocks is not None and said.blocks != blocks:
            if self.block_size != _USUAL:
                raise InvalidArgumentError(
                    f"block_size={self.block_size}, and config.json says blocks of {said.blocks}",
                    file=opened.path,
                )
            blocks = said.blocks
        return with_numbers(opened, blocks=blocks, keeps_scales=True, keeps_names=True)

    def read_metadata(self) -> Metadata:
        """As CheckpointReader's, with numbers of `target_dtype`."""
        metadata = super().read_metadata()
        assert isinstance(metadata, StoredMetadata)
        metadata.numbers = {}  # here codes are called what they are stored as
        properties = TensorProperties(dtype=self.target_dtype)
        state = metadata.state_dict_metadata
        for name in self._list().scaled:
            found = state.get(name)
            if isinstance(found, TensorStorageMetadata):
                state[name] = dataclasses.replace(found, properties=properties)
        scales = {scale for name in self._list().scaled for scale in all_scale_names(name)}
        metadata.used_by_others = frozenset(
            name for name in state if name in scales or ACTIVATIONS.search(name)
        )
        return metadata
