"""Strategies: how Megatron's programs want to save and load. They are options, and do no I/O.

Those of Megatron's own are taken as well, known by their names and read by their fields.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch.distributed as dist

_WRITTEN = ("torch_dist", "torch_ckpt")  # the first is what programs name, and mean ours
_READ = (*_WRITTEN, "zarr")
_ALGORITHMS = ("broadcast", "gather_rounds", "gather_object")


class _Options:
    can_handle_sharded_objects = True


class TorchDistSaveShardedStrategy(_Options):
    """How a save is made. Each rank writes its main replicas, into a file of its own.

    keep_only_main_replica: False lets all ranks that have a part share in writing it.
    cached_metadata: ranks tell each other digests of what they have, and all of it only where it is
        not what it was in the last save with this strategy. The attribute is
        `use_cached_ckpt_structure`.
    backend, version, thread_count, separation_hint, cpu_shm_mode: do nothing, and so does the
        attribute `cached_global_metadata`: there are always as many threads as it takes, and
        `remove_sharded_tensors` needs no files that are apart.
    """

    def __init__(
        self,
        backend: str = "torch_dist",
        version: int = 1,
        keep_only_main_replica: bool = True,
        thread_count: int = 1,
        cached_metadata: bool = False,
        separation_hint: str | None = None,
        cpu_shm_mode: bool = False,
    ) -> None:
        self.backend = backend
        self.version = version
        self.keep_only_main_replica = keep_only_main_replica
        self.thread_count = thread_count
        self.use_cached_ckpt_structure = cached_metadata
        self.separation_hint = separation_hint
        self.cpu_shm_mode = cpu_shm_mode
        self.cached_global_metadata: Any = None


class TorchDistLoadShardedStrategy(_Options):
    """How a load is made.

    cache_metadata, stream_ckpt_dequant, checkpoint_name: do nothing. A checkpoint is looked at anew
        each time, and what its directory holds says how it is read.
    """

    def __init__(
        self,
        cache_metadata: bool = False,
        stream_ckpt_dequant: bool = True,
        checkpoint_name: str | None = None,
    ) -> None:
        self.cache_metadata = cache_metadata
        self.stream_ckpt_dequant = stream_ckpt_dequant
        self.checkpoint_name = checkpoint_name


class FullyParallelSaveStrategyWrapper(_Options):
    """All ranks of a group that have a part share in writing it, large ones in rows: so that none
    has much more to write than another.

    strategy: what it wraps.
    parallelization_group: the group, of which the main replica is one; all ranks if None.
    do_cache_distribution: as `cached_metadata` of TorchDistSaveShardedStrategy.
    backend, version, pg_cache_path, pg_cache_create, validate_access_integrity: do nothing.
    """

    def __init__(
        self,
        strategy: Any,
        parallelization_group: dist.ProcessGroup | None = None,
        do_cache_distribution: bool = False,
        backend: str = "torch_dist",
        version: int = 1,
        validate_access_integrity: bool = True,
        pg_cache_path: str | None = None,
        pg_cache_create: bool = False,
    ) -> None:
        self.base_strategy = strategy
        self.parallelization_group = parallelization_group
        self.do_cache_distribution = do_cache_distribution
        self.backend = backend
        self.version = version
        self.validate_access_integrity = validate_access_integrity
        self.pg_cache_path = pg_cache_path
        self.pg_cache_create = pg_cache_create


class FullyParallelLoadStrategyWrapper(_Options):
    """What ranks of several nodes ask for is read by one of them, and sent to the others. On one
    node all read it, from the page cache.

    strategy: what it wraps.
    parallelization_group: the ranks that share; all if None.
    do_cache_distribution: ranks tell each other digests of what they ask for, and all of it only
        where it is not what it was in the last load with this strategy.
    exchange_algo: one of Megatron's words, which does nothing.
    per_rank_object_load, pg_cache_path, pg_cache_create: do nothing.

    Raises NotImplementedError for another `exchange_algo`.
    """

    def __init__(
        self,
        strategy: Any,
        parallelization_group: dist.ProcessGroup | None = None,
        do_cache_distribution: bool = False,
        exchange_algo: str = "broadcast",
        per_rank_object_load: bool = False,
        pg_cache_path: str | None = None,
        pg_cache_create: bool = False,
    ) -> None:
        _check_exchange_algo(exchange_algo)
        self.base_strategy = strategy
        self.parallelization_group = parallelization_group
        self.do_cache_distribution = do_cache_distribution
        self.exchange_algo = exchange_algo
        self.per_rank_object_load = per_rank_object_load
        self.pg_cache_path = pg_cache_path
        self.pg_cache_create = pg_cache_create


def _check_exchange_algo(exchange_algo: str) -> None:
    if exchange_algo not in _ALGORITHMS:
        raise NotImplementedError(
            f"exchange_algo is one of {', '.join(_ALGORITHMS)}, not {exchange_algo!r}"
        )


class Sharing(NamedTuple):
    """shares: whether ranks share in writing what several have, or in reading what several nodes
    ask for, within `group`, which is all ranks if None. memory: the strategy with which they keep
    what they agreed on, None for none."""

    shares: bool = False
    group: dist.ProcessGroup | None = None
    memory: Any = None


def sharing_of(strategy: Any) -> Sharing:
    """What `strategy` of a save says. Raises TypeError for what is none, ValueError for a backend
    that is not written."""
    if _is_default(strategy, _WRITTEN):
        return Sharing()
    if _is(strategy, "FullyParallelSaveStrategyWrapper"):
        base = sharing_of(strategy.base_strategy)
        caches = getattr(strategy, "do_cache_distribution", False) or base.memory is not None
        return Sharing(True, strategy.parallelization_group, strategy if caches else None)
    if _is(strategy, "TorchDistSaveShardedStrategy"):
        caches = getattr(strategy, "use_cached_ckpt_structure", False)
        shares = not getattr(strategy, "keep_only_main_replica", True)
        return Sharing(shares, None, strategy if caches else None)
    raise TypeError(f"a {type(strategy).__qualname__} is no strategy of a save")


def sharing_of_load(strategy: Any) -> Sharing:
    """As `sharing_of`, of a load. The directory says how it is read, whichever backend is named.
    Raises NotImplementedError for an exchange_algo that is none of Megatron's."""
    if _is_default(strategy, _READ):
        return Sharing()
    if _is(strategy, "FullyParallelLoadStrategyWrapper"):
        _check_exchange_algo(strategy.exchange_algo)
        sharing_of_load(strategy.base_strategy)
        caches = getattr(strategy, "do_cache_distribution", False)
        return Sharing(True, strategy.parallelization_group, strategy if caches else None)
    if _is(strategy, "TorchDistLoadShardedStrategy"):
        return Sharing()
    raise TypeError(f"a {type(strategy).__qualname__} is no strategy of a load")


def _is_default(strategy: Any, backends: tuple[str, ...]) -> bool:
    if strategy is None:
        return True
    if not isinstance(strategy, tuple):
        return False
    if len(strategy) != 2 or strategy[0] not in backends or strategy[1] != 1:
        words = ", ".join(repr((backend, 1)) for backend in backends)
        raise ValueError(f"{strategy!r} is none of {words}")
    return True


_MODULES = (
    "torch_ckpt.megatron.strategies",
    "megatron.core.dist_checkpointing.strategies.torch",
    "megatron.core.dist_checkpointing.strategies.fully_parallel",
)


def _is(strategy: Any, name: str) -> bool:
    """Whether it is of a class of that name, of ours or Megatron's, or of one below it."""
    return any(
        base.__qualname__ == name and base.__module__ in _MODULES for base in type(strategy).__mro__
    )
