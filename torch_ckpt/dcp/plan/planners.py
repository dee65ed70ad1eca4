"""SavePlanner and LoadPlanner: the stock planners, exact about boxes, keys and containers.

Beyond stock: a DTensor is planned as its true boxes; keys that are not str, empty containers and
types of mappings survive; values of single ranks can be kept (PerRank); leaves that differ between
ranks are named. Planning pauses the garbage collector, which otherwise walks all that is being
built over and over.

    set_up_planner      flatten.py      {fqn: leaf}, and what the names do not say
    create_local_plan   items.py        items per leaf; boxes.py for DTensors
                        digests.py      what ranks compare
    create_global_plan  global_plan.py  who writes what, metadata, proof of coverage
"""

from torch_ckpt.dcp.plan.load_planner import LoadPlanner
from torch_ckpt.dcp.plan.save_planner import SavePlanner
from torch_ckpt.planning.per_rank import PerRank

__all__ = ["LoadPlanner", "PerRank", "SavePlanner"]
