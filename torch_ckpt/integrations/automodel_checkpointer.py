"""AutoModel's Checkpointer on this engine."""

from __future__ import annotations

import contextlib
import copy
import hashlib
import json
import os
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import Future, wait
from functools import partial
from typing import Any, TypeVar

from nemo_automodel.components.checkpoint import checkpointing as stock
from nemo_automodel.components.checkpoint.utils import estimate_tensor_bytes, is_cloud_path
from torch import nn
from torch.distributed.checkpoint.staging import StagingOptions

from torch_ckpt.calls import api
from torch_ckpt.calls.async_save import async_save
from torch_ckpt.dcp.read.reader import CheckpointReader
from torch_ckpt.dcp.stager import PinnedMemoryStager
from torch_ckpt.dcp.write.writer import HuggingFaceStorageWriter
from torch_ckpt.errors import (
    InvalidArgumentError,
    MissingKeyError,
    UnsupportedError,
)
from torch_ckpt.integrations.automodel_base import (
    Reader,
    base_of,
    load_mapped,
    loading,
    loading_from,
)
from torch_ckpt.integrations.automodel_export import Division, export, one_division
from torch_ckpt.integrations.automodel_lifecycle import Lifecycle, error_of
from torch_ckpt.integrations.automodel_rank_states import RankStates
from torch_ckpt.native.jobs import in_thread
from torch_ckpt.patching.groups import is_wanted
from torch_ckpt.ranks import Ranks

GROUP = "automodel"  # of the patch that `install` makes

T = TypeVar("T")


class _Writer(HuggingFaceStorageWriter):
    """Shards, and when they are committed what the coordinator makes of them."""

    def __init__(self, path: str, after: Callable[[], None] | None = None) -> None:
        # Over all of an interrupted save of AutoModel: its `.metadata` would name an old state.
        super().__init__(path, layout="sharded", overwrite="all")
        self._after = after

    def finish(self, metadata: Any, results: Any) -> None:
        super().finish(metadata, results)
        if self._after is not None:
            self._after()


class Checkpointer(RankStates):
    """AutoModel's Checkpointer, with saves, loads, exports and async of torch_ckpt.

    Its layout, addons, adapters, configuration and rules for steps are AutoModel's (0.7.0,
    components/checkpoint), with these differences:

    - A step appears when all of it is there, an async one as well: see Lifecycle.
    - `model/` is shards that AutoModel reads without us, of either `model_save_format`. `optim/`
      and what `save_distributed_state` saves are of our format, which it does not read. Steps that
      AutoModel saved are read.
    - `model/consolidated` is divided once for all ranks, and all of them write each of its files;
      with `single_rank_consolidation` rank 0 does. A name that no file has is in no index.
      `staging_dir` is not needed: files are staged where they will stand. `diffusers_compatible`
      gives the files, too, the names that diffusers gives them.
    - A file, a shard or a tensor that is missing is an error, in steps and in base models; so are
      bytes of a step that are not those that were saved.
    - A base of experts one by one, of which each rank of AutoModel's makes the whole model anew, is
      read into the model's own memory, where torch_ckpt has a table for it.
    - A base of float8 codes is read as numbers, into destinations of floats: no rank's rows cut a
      scale. Other codes AutoModel makes numbers of.
    - With more or fewer ranks than saved, random states begin anew, with a warning; a loader is an
      error that says how to leave it out.
    - An optimizer that steps while its state or the model is still being copied waits for that.
    - An error of one rank is raised on all, and names it.

    Made by `install()`, whose names in AutoModel's modules it needs. Raises UnsupportedError for
    a directory that is a URL (msc://), CheckpointError kinds and OSError.
    """

    def __init__(
        self,
        config: Any,
        dp_rank: int,
        tp_rank: int,
        pp_rank: int,
        moe_mesh: Any = None,
        process_group: Any = None,
        pp_group: Any = None,
    ) -> None:
        if not is_wanted(GROUP):
            raise InvalidArgumentError("call torch_ckpt.integrations.automodel.install() first")
        _refuse_url(config.checkpoint_dir)
        quiet = copy.copy(config)  # for which AutoModel makes no stagers and groups of its own
        quiet.is_async, quiet.single_rank_consolidation = False, True
        super().__init__(quiet, dp_rank, tp_rank, pp_rank, moe_mesh, process_group, pp_group)
        self.config = config
        self.lifecycle = Lifecycle(config, process_group, self._saves)
        self._stager: PinnedMemoryStager | None = None
        if config.is_async:
            # Beside the training, until the optimizer steps.
            self._stager = PinnedMemoryStager(StagingOptions(False, False, True, False))
        self._export: Future[None] | None = None  # of an async save
        self._waits: weakref.WeakSet[Any] = weakref.WeakSet()  # optimizers, for the copy
        self._told = False  # whether the step that is being saved has failed already

    @contextlib.contextmanager
    def _as_one(self, what: str) -> Iterator[None]:
        """A call of all ranks: what fails on one of them, at whichever line, fails on all."""
        token = loading.set(self.config)
        try:
            with self._ranks.as_one(what):
                yield
        finally:
            loading.reset(token)

    # --- models and optimizers ------------------------------------------------

    # Each of these four is AutoModel's, as one call.

    def save_model(self, *arguments: Any, **keywords: Any) -> None:
        """As AutoModel's."""
        with self._of_the_step(), self._as_one("save of the model"):
            super().save_model(*arguments, **keywords)

    def save_optimizer(self, optimizer: Any, *arguments: Any, **keywords: Any) -> None:
        """As AutoModel's."""
        with self._of_the_step(), self._as_one("save of the optimizer"):
            super().save_optimizer(optimizer, *arguments, **keywords)
        if self.config.is_async:
            for each in optimizer if isinstance(optimizer, list) else [optimizer]:
                self._wait_before_steps(each)

    @contextlib.contextmanager
    def _of_the_step(self) -> Iterator[None]:
        """What fails here has failed the step: who waits for the rest of it does not hear again."""
        try:
            yield
        except Exception:
            self._told = True
            raise

    def load_model(
        self,
        model: Any,
        model_path: str,
        is_init_step: bool = False,
        use_checkpoint_id: bool = True,
        key_mapping: Any = None,
        **keywords: Any,
    ) -> None:
        """As AutoModel's."""
        parts = [model] if isinstance(model, nn.Module) else list(model)
        if is_init_step and load_mapped(
            parts, model_path, key_mapping, self.config, self.process_group
        ):
            return
        token = loading_from.set(base_of(parts, model_path))
        try:
            with self._as_one("load of a model"):
                super().load_model(
                    model, model_path, is_init_step, use_checkpoint_id, key_mapping, **keywords
                )
        finally:
            loading_from.reset(token)

    def load_optimizer(self, *arguments: Any, **keywords: Any) -> None:
        """As AutoModel's."""
        with self._as_one("load of the optimizer"):
            super().load_optimizer(*arguments, **keywords)

    def _do_save(self, state_dict: Any, path: str, storage_writer: Any = None) -> Any:
        is_model = stock._is_model_checkpoint_path(path)
        if self.config.is_peft and is_model:

            def save_adapter() -> None:  # of which rank 0 has all: AutoModel has gathered it
                api.save(
                    state_dict, path, no_dist=True, layout="final", naming="peft", overwrite="all"
                )

            self._ranks.decide("adapter", save_adapter)
            return None
        saving: dict[str, Any] = {
            "storage_writer": storage_writer or _Writer(path),
            "process_group": self.process_group,
        }
        if not self.config.is_async:
            api.save(state_dict, path, **saving)
            return None
        saved = async_save(state_dict, path, async_stager=self._stager, on_busy="overlap", **saving)
        context = self._model_ctx if is_model else self._optim_ctx
        context.future, context.staging_active = saved, True
        return saved

    def _do_load(
        self, state_dict: Any, path: str, storage_reader: Any = None, is_init_step: bool = False
    ) -> Any:
        if self.config.is_peft and stock._is_model_checkpoint_path(path) and not is_init_step:
            return self._ranks.each("adapter", lambda: _adapter(state_dict, path))
        reader = storage_reader or CheckpointReader(_refuse_url(path))
        return api.load(state_dict, path, storage_reader=reader, process_group=self.process_group)

    def _get_storage_reader(
        self,
        model_path: str,
        key_mapping: Any,
        is_init_step: bool = False,
        is_safetensors: bool | None = None,
    ) -> Reader:
        return Reader(_refuse_url(model_path), key_mapping)

    # --- final files ----------------------------------------------------------

    def _get_storage_writer(
        self,
        consolidated_output_path: str | None,
        fqn_to_index_mapping: dict[str, int] | None,
        fqn_to_dtype_mapping: dict[str, str] | None,
        model_path: str,
        consolidation_handled_externally: bool = False,
    ) -> _Writer:
        if consolidated_output_path is None or consolidation_handled_externally:
            return _Writer(model_path)
        return _Writer(
            model_path,
            partial(
                export,
                Ranks.alone(),
                model_path,
                consolidated_output_path,
                fqn_to_index_mapping,
                fqn_to_dtype_mapping,
                diffusers=self.config.diffusers_compatible,
            ),
        )

    def _schedule_deferred_consolidation(
        self,
        future: Any,
        model_dir: str,
        consolidated_dir: str,
        fqn_to_index_mapping: dict[str, int] | None,
        fqn_to_dtype_mapping: dict[str, str] | None,
        process_group: Any,
    ) -> None:
        """Export when the shards are committed, by all ranks, in the background."""
        # Made here, where all ranks make what they have in common in one order.
        ranks = Ranks.of(self.process_group, "automodel export")

        def work() -> None:
            wait([future])
            if error_of(future) is None:
                export(
                    ranks,
                    model_dir,
                    consolidated_dir,
                    fqn_to_index_mapping,
                    fqn_to_dtype_mapping,
                    diffusers=self.config.diffusers_compatible,
                )

        self._export = in_thread(work, "torch_ckpt-export")

    def _maybe_build_consolidated_index(
        self, model_state: Any, state_dict: dict[str, Any]
    ) -> dict[str, int] | None:
        """As AutoModel's, and one for all ranks."""
        mapping = super()._maybe_build_consolidated_index(model_state, state_dict)
        if mapping is None:
            return None
        config = self.config
        reference = stock._get_hf_safetensors_reference_path(
            config.model_cache_dir, config.model_repo_id
        )
        own: Division = mapping, {k: estimate_tensor_bytes(t) for k, t in state_dict.items()}
        divide = partial(one_division, by_size=reference is None)
        return self._agreed("division into files", own, divide)

    def _maybe_build_original_dtype_mapping(
        self, model_state: Any, state_dict: dict[str, Any]
    ) -> dict[str, str] | None:
        """As AutoModel's, and of all ranks' tensors."""
        own = super()._maybe_build_original_dtype_mapping(model_state, state_dict) or {}
        if not stock._should_write_hf_metadata(self.config):
            return None

        def all_of(said: list[dict[str, str]]) -> dict[str, str]:
            return {name: dtype for each in reversed(said) for name, dtype in each.items()}

        return self._agreed("dtypes of the original", own, all_of) or None

    def _agreed(self, what: str, own: Any, answer: Callable[[list[Any]], T]) -> T:
        """What `answer` makes of the `own` of all ranks, of which equal ones are said once."""
        digest = hashlib.sha256(json.dumps(own).encode()).digest()

        def first_of_each(digests: list[bytes]) -> list[int]:
            return [rank for rank, each in enumerate(digests) if digests.index(each) == rank]

        ranks = self._ranks
        speak = ranks.gather(what, lambda: digest, first_of_each)
        if len(speak) == 1:
            return answer([own])
        return ranks.gather(
            what,
            lambda: own if ranks.rank in speak else None,
            lambda said: answer([said[rank] for rank in speak]),
        )

    # --- in the background ----------------------------------------------------

    def _wait_before_steps(self, optimizer: Any) -> None:
        """Half of AutoModel's recipes do not wait for the copy before the optimizer changes what is
        being copied."""
        if optimizer in self._waits:
            return
        this = weakref.ref(self)

        def wait_for_the_copy(*_: Any) -> None:
            checkpointer = this()
            if checkpointer is not None:
                checkpointer.maybe_wait_for_staging()

        register = getattr(optimizer, "register_step_pre_hook", None)
        if register is None:
            self.maybe_wait_for_staging()
        else:
            register(wait_for_the_copy)
            self._waits.add(optimizer)

    def maybe_wait_for_staging(self) -> None:
        """Wait until the trainer may change its tensors. What the copy has failed with is raised on
        all ranks, by `async_wait`, and not here on one."""
        contexts = (self._model_ctx, self._optim_ctx)
        wait([each.future.staging_completion for each in contexts if each.staging_active])
        for context in contexts:
            context.staging_active = False

    def _saves(self) -> list[Future[Any]]:
        """What goes on in the background."""
        saves = (self._model_ctx.future, self._optim_ctx.future, self._export)
        return [save for save in saves if save is not None]

    def async_wait(self) -> None:
        """Wait until the last async save, and its export, are done. Raises its error on all ranks,
        once."""
        saves, told = self._saves(), self._told
        self._model_ctx.future = self._optim_ctx.future = self._export = None
        self._model_ctx.staging_active = self._optim_ctx.staging_active = False
        self._told = False
        if not saves:
            return
        errors = [error for save in saves if (error := save.exception()) is not None]

        def raise_the_first() -> None:
            if errors and not told:
                raise errors[0]

        self._ranks.each("end of an async save", raise_the_first)

    def close(self) -> None:
        """As AutoModel's."""
        try:
            super().close()
        finally:
            if self._stager is not None:
                self._stager.close()

    # --- states of the program's own -------------------------------------------

    def save_distributed_state(self, state: Any, state_name: str, path: str) -> None:
        """As AutoModel's; the directory is of our format."""
        directory = os.path.join(path, state_name)
        with self._as_one(f"save of {state_name}"):
            writer = _Writer(directory)
            api.save(state, directory, storage_writer=writer, process_group=self.process_group)

    def load_distributed_state(self, state: Any, state_name: str, path: str) -> None:
        """As AutoModel's; of its format and of ours."""
        with self._as_one(f"load of {state_name}"):
            api.load(state, os.path.join(path, state_name), process_group=self.process_group)


def _refuse_url(path: Any) -> str:
    if is_cloud_path(path):
        raise UnsupportedError(
            "is a URL, and torch_ckpt reads and writes file systems that are mounted; leave it "
            "to AutoModel without torch_ckpt",
            file=os.fspath(path),
        )
    return str(path)


def _adapter(state_dict: Any, path: str) -> dict[str, Any]:
    """The adapter in `path`. Raises MissingKeyError for what the model has of it and the file has
    not; only rank 0 has a `state_dict` that says it."""
    loaded: dict[str, Any] = dict(api.load(None, path, no_dist=True))
    for name in state_dict:
        if name not in loaded:
            raise MissingKeyError("the adapter has no such tensor", file=path, tensor=name)
    return loaded
