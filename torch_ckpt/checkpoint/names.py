"""The names on disk by which Python finds things, each once. What stands in these files is in
docs/format.md; the core's own names are in csrc/format/names.h."""

from __future__ import annotations

import re

# In a checkpoint of ours.
MANIFEST = "torch_ckpt.json"
PART_MANIFEST = re.compile(r"torch_ckpt-[0-9]{5,}-of-[0-9]{5,}\.json")  # of a rank by itself
# The files of a rank, to be formatted with its number and, of a shard, those of the file and of all
# files; each counts from 1.
SHARD, _OBJECTS = "shard-", "objects-"
SHARD_STEM = SHARD + "{:05}-model"
SHARD_FILE = SHARD_STEM + "-{:05}-of-{:05}.safetensors"
OBJECT_FILE = _OBJECTS + "{:05}.json"
SIDE_FILE = _OBJECTS + "{:05}.bin"  # what would be long in that
# Files of ours that mean nothing without a manifest: RankOfFile in csrc/format/names.cc.
ONLY_OURS = re.compile(
    rf"torch_ckpt(-\d+-of-\d+)?\.catalog|{_OBJECTS}\d+\.json|{SHARD}.*\.safetensors"
)
SHARDED = "sharded"  # the directory in which stock's enable_consolidation puts the shards
STAGE = ".torch_ckpt-stage"  # how all begins in which saves stage, below or beside the target
SAVE_ID = "save_id"  # in there: which save it is that stages
JOURNAL = f"{STAGE}/committed/commit.json"
JOURNAL_NAME = JOURNAL.rpartition("/")[2]
_BESIDE = re.compile(rf"\.(.+){re.escape(STAGE)}")

# In a directory of checkpoints.
CHILD = re.compile(r"step-([0-9]+)")
LATEST, BEST = "LATEST", "BEST"
NEW = ".torch_ckpt-new-"  # behind the name of a file: what is written to take its place
NEW_POINTERS = tuple(f".{name}{NEW}" for name in (LATEST, BEST))  # how the next ones' begin
_REMOVED = ".torch_ckpt-removed-"
REMOVED = re.compile(rf"\.{CHILD.pattern}{re.escape(_REMOVED)}[0-9a-f]+")

# Of others.
INDEX = "model.safetensors.index.json"
METADATA = ".metadata"  # of stock DCP
RANK_METADATA = re.compile(r"__[0-9]+\.metadata")  # of its saves without collectives
DISTCP = ".distcp"
# Of Megatron Core: objects are lists of one under their unique keys, and so is what belongs to no
# key, rank 0's common state, and what says of a checkpoint what it holds.
MEGATRON_CONFIG = "metadata.json"
MEGATRON_INTEGRITY = "integrity.json"
MEGATRON_COMMON = "common_state/shard_0_1"
MEGATRON_CONTENT = "content_metadata/shard_0_1"
MEGATRON_COMMON_FILE = "common.pt"
MEGATRON_LEAVES = "common_state.json"  # ours: see megatron_form.py
MEGATRON_OBJECT = "/shard_"  # within the name of every object
# step-7 of ours, checkpoint-7 of Trainer, iter_0000007 of Megatron, global_step7 of DeepSpeed,
# epoch=1-step=7.ckpt of Lightning.
_STEP = re.compile(
    r"(?:.*[^a-z])?(?:step|iter|iteration|checkpoint|ckpt|epoch)[-_=]?([0-9]+)(\.[a-z]+)?",
    re.IGNORECASE,
)
# What shows that a directory holds a checkpoint of somebody's, or the beginning of one.
MARK = re.compile(
    rf"torch_ckpt[-.].*|{re.escape(STAGE)}.*|\.metadata|pytorch_model.*\.bin.*"
    r"|.*\.(safetensors|distcp)"
)
TORCH_FILES = (".pt", ".pth", ".ckpt", ".bin")  # as people call files of torch.save
_OF_RANK = re.compile(
    rf"(?:{SHARD}|{_OBJECTS})(\d{{5}})[-.]|__(\d{{1,18}})_\d+{re.escape(DISTCP)}$"
)


def child_of(step: int) -> str:
    """What the checkpoint of a step is called."""
    return f"step-{step}"


def staged_beside(name: str) -> str:
    """Where a save stages into what is called `name` and is not there yet."""
    return f".{name}{STAGE}"


def target_of(staged: str) -> str | None:
    """What is staged in a directory called `staged`; None where that is no name of one."""
    match = _BESIDE.fullmatch(staged)
    return None if match is None else match[1]


def removed(name: str, number: str) -> str:
    """What a checkpoint is called while it is deleted; `number` is in hexadecimal digits."""
    return f".{name}{_REMOVED}{number}"


def step_in(name: str) -> int | None:
    """The step that the name of a directory or a file says."""
    match = _STEP.fullmatch(name)
    return None if match is None else int(match[1])


def rank_of(name: str) -> int | None:
    """The rank that wrote a file, by its name or path; None for one that is not named after one."""
    match = _OF_RANK.match(name.rpartition("/")[2])
    if match is None:
        return None
    # Ours and stock's shards count from 1, .distcp files from 0.
    return int(match[1]) - 1 if match[1] else int(match[2])
