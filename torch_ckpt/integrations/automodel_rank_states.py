"""The half of our Checkpointer for AutoModel that saves and loads what each rank has of its own."""

from __future__ import annotations

import os
from typing import Any

from nemo_automodel.components.checkpoint import checkpointing as stock

from torch_ckpt.errors import InvalidArgumentError
from torch_ckpt.integrations import automodel_states as states
from torch_ckpt.ranks import Ranks


class RankStates(stock.Checkpointer):
    """AutoModel's Checkpointer, whose states of ranks are checked, and go to other numbers of
    ranks."""

    @property
    def _ranks(self) -> Ranks:
        return Ranks.of(self.process_group)

    def save_on_global_ranks(self, state: Any, state_name: str, path: str) -> None:
        """As AutoModel's: a file of each rank."""
        self._save_state(state, state_name, path, states.GLOBAL, self._ranks.members, True)

    def save_on_dp_ranks(self, state: Any, state_name: str, path: str) -> None:
        """As AutoModel's: a file of each data-parallel rank."""
        writes = self.tp_rank == 0 and self.pp_rank == 0
        self._save_state(state, state_name, path, states.DATA, self._data_ranks(state_name), writes)

    def _save_state(
        self, state: Any, name: str, path: str, kind: str, ranks: Any, writes: bool
    ) -> None:
        def save() -> None:
            if writes:
                own = self._number(kind)
                states.write(
                    state.state_dict(),
                    states.file_of(os.path.join(path, name), name, kind, own),
                    ranks,
                )

        self._ranks.each(f"save of {name}", save)

    def _data_ranks(self, what: str) -> range:
        return self._ranks.gather(
            f"data ranks of {what}", lambda: self.dp_rank, lambda said: range(max(said) + 1)
        )

    def _number(self, kind: str) -> int:
        return self.dp_rank if kind == states.DATA else self._ranks.members[self._ranks.rank]

    def load_on_global_ranks(self, state: Any, state_name: str, path: str) -> None:
        """As AutoModel's. Where another number of ranks has saved, random states begin anew, with a
        warning; raises InvalidArgumentError for other states, IncompleteError for a file that is
        missing."""
        self._load_state(state, state_name, path, (states.GLOBAL, states.DATA), new=True)

    def load_on_dp_ranks(self, state: Any, state_name: str, path: str) -> None:
        """As AutoModel's. Raises InvalidArgumentError where another number of data-parallel ranks
        has saved, IncompleteError for a file that is missing."""
        self._load_state(state, state_name, path, (states.DATA,), new=False)

    def _load_state(
        self, state: Any, name: str, path: str, kinds: tuple[str, ...], *, new: bool
    ) -> None:
        ranks, weights_only = self._ranks, not self.config.allow_legacy_pickle_restore
        directory = os.path.join(path, name)
        here = {states.GLOBAL: list(ranks.members), states.DATA: list(self._data_ranks(name))}
        kind, saved = ranks.decide(
            # By its name: ranks that have found different steps hear so.
            f"states of {name} of {os.path.basename(path)}",
            lambda: states.find(directory, name, kinds, here[kinds[0]], weights_only=weights_only),
        )
        at, size = here[kind].index(self._number(kind)), len(here[kind])

        def load() -> None:
            alike = len(saved) == size
            file = states.file_of(directory, name, kind, saved[at if alike else 0])
            value = states.read(file, weights_only=weights_only)
            if alike:
                state.load_state_dict(value)
            elif new:
                states.begin_new_streams(value, len(saved), at, size, file)
            else:
                raise InvalidArgumentError(
                    f"was saved by {len(saved)} data-parallel ranks and is to be loaded by {size}, "
                    f"and a loader's state cannot be shared out by itself: begin it anew with "
                    f"recipe.untrack_state({name!r}) before the load",
                    file=directory,
                )

        ranks.each(f"load of {name}", load)
