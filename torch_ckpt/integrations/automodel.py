"""NeMo AutoModel's Checkpointer on this engine: one call, or one word of an unchanged YAML.

    torch_ckpt.integrations.automodel.install()

    recipe: torch_ckpt.integrations.automodel.TrainFinetuneRecipeForNextTokenPrediction

What a step is, and when it is saved, stays AutoModel's code (0.7.0): layout, addons, adapters,
configuration, lifecycle. How it is written and read, exported and published is ours: see
`Checkpointer` and `Lifecycle`.
"""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Mapping
from typing import Any

import torch.distributed as dist
from nemo_automodel.components.checkpoint import addons, checkpointing

from torch_ckpt.integrations import automodel_base as base
from torch_ckpt.integrations.automodel_checkpointer import GROUP, Checkpointer
from torch_ckpt.integrations.automodel_export import export
from torch_ckpt.integrations.automodel_states import load_torch_ckpt
from torch_ckpt.patching.groups import is_wanted
from torch_ckpt.patching.rebind import Patch, Replacement, Table
from torch_ckpt.patching.stand_in import StandIn
from torch_ckpt.ranks import Ranks

__all__ = ["Checkpointer", "install"]


# Where AutoModel waits in a barrier for a rank that has failed, its Checkpointer now hears of it.


def _group_barrier(process_group: dist.ProcessGroup | None) -> None:
    Ranks.of(process_group).decide("files beside the model", lambda: None)


def _ensure_dirs(*dirs: str | None, process_group: dist.ProcessGroup | None = None) -> None:
    Ranks.of(process_group).each("directories", lambda: checkpointing._create_dirs(*dirs))


def _ensure_shared_dirs(*dirs: str | None, process_group: dist.ProcessGroup | None = None) -> None:
    Ranks.of(process_group).decide("directories", lambda: checkpointing._create_dirs(*dirs))


def consolidate_safetensors_files_on_every_rank(
    input_dir: str,
    output_dir: str,
    fqn_to_index_mapping: Mapping[str, int],
    num_threads: int = 1,
    process_group: dist.ProcessGroup | None = None,
    use_staging: bool = False,
    staging_dir: str | None = None,
    cast_dtype: Any = None,
    fqn_to_dtype_mapping: Mapping[str, str] | None = None,
) -> None:
    """As AutoModel's. Files are staged where they will stand, whatever `use_staging` says."""
    config = base.loading.get()
    export(
        Ranks.of(process_group),
        input_dir,
        output_dir,
        fqn_to_index_mapping,
        fqn_to_dtype_mapping,
        cast=cast_dtype,
        threads=num_threads,
        diffusers=config is not None and config.diffusers_compatible,
    )


_FUNCTIONS: dict[str, Any] = {
    "_ensure_dirs": _ensure_dirs,
    "_ensure_shared_dirs": _ensure_shared_dirs,
    "consolidate_safetensors_files_on_every_rank": consolidate_safetensors_files_on_every_rank,
    "load_torch_ckpt": load_torch_ckpt,
    "_should_dequantize_base_checkpoint": base.should_dequantize,
    "_is_bin_checkpoint": base.is_bin_checkpoint,
    "_load_hf_bin_checkpoint": base.load_bin,
    "_load_hf_safetensors_checkpoint": base.load_safetensors,
    "_load_full_state_dict_into_model": base.load_whole,
    "_convert_checkpoint_with_transformers": base.convert_with_transformers,
}
_TABLE = Table(
    "torch_ckpt.integrations.automodel.install",
    "nemo_automodel",
    [
        Replacement(
            checkpointing.Checkpointer,
            StandIn.of(checkpointing.Checkpointer, Checkpointer, GROUP),
            GROUP,
        ),
        Replacement(addons._group_barrier, _group_barrier, GROUP),
        *(
            Replacement(getattr(checkpointing, name), ours, GROUP)
            for name, ours in _FUNCTIONS.items()
        ),
    ],
)


def install() -> Patch:
    """Let AutoModel's recipes, as they are, save and load with torch_ckpt. Call it on every rank,
    before the recipe makes its checkpointer.

    At once, and until `undo()` or the end of a `with` block, AutoModel's Checkpointer is ours in
    every module of this process, and so are the functions that it calls to read base models, to
    merge shards and to wait for other ranks. Checkpointers that are there already stay what they
    are. Calls nest: names are AutoModel's again when the last of them is undone. `torch-ckpt run`
    calls this for a program that imports AutoModel.
    """
    return Patch(_TABLE, [GROUP])


_kept: list[Patch] = []  # of recipes that were asked for here


def __getattr__(name: str) -> Any:
    """AutoModel's recipe of this name, after `install`, which then stays: so that a YAML can name
    it. Raises AttributeError where there is none."""
    if name.startswith("_"):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from nemo_automodel.cli.utils import _discover_recipe_classes

    recipes = _discover_recipe_classes()
    if name not in recipes:
        raise AttributeError(
            f"module {__name__!r} has no attribute {name!r}; as recipes of AutoModel it has "
            f"{', '.join(sorted(recipes))}"
        )
    if not is_wanted(GROUP):
        _kept.append(install())
    module, _, recipe = recipes[name].rpartition(".")
    return getattr(importlib.import_module(module), recipe)


def _main() -> None:
    """What AutoModel's launcher runs on each rank, the file of a recipe: here the YAML says which
    recipe that is, and AutoModel's command runs it."""
    # The directory of this file has modules that are called as the frameworks are.
    here = os.path.dirname(os.path.abspath(__file__))
    sys.path[:] = [each for each in sys.path if os.path.abspath(each) != here]
    from nemo_automodel.cli.app import main

    arguments = sys.argv[1:]
    if arguments[:1] == ["-c"]:
        del arguments[0]
    sys.argv[1:] = arguments
    sys.exit(main())


if __name__ == "__main__":
    _main()
