"""Names that no leaf of the user's may have."""

from torch_ckpt.native.core import STRUCTURE

STRUCTURE_FQN = STRUCTURE  # the leaf that says the containers
DIGESTS_KEY = "torch_ckpt.digests"  # in planner data: what the coordinator is to compare
RAW_LEAVES = "torch_ckpt.raw_leaves"  # in an objects file: leaves that a user's planner has packed
PLAN_TOKEN = "torch_ckpt.plan"  # in planner data: which global plan a cached one belongs to
TIES_KEY = "torch_ckpt.ties"  # in planner data: aliases, and the names that they are stored under
MAPPING_KEY = "torch_ckpt.mapping"  # in planner data: what a rank says of a tensor_mapping
RESERVED = frozenset((STRUCTURE_FQN, DIGESTS_KEY, RAW_LEAVES, PLAN_TOKEN, TIES_KEY, MAPPING_KEY))
