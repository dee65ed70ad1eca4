"""Planners: who writes or reads what, in stock's items.

SavePlanner and LoadPlanner are the stock planners, exact about boxes, keys and containers. Beyond
stock: a DTensor is planned as its true boxes; keys that are not str, empty containers and types of
mappings survive; values of single ranks can be kept (PerRank); leaves that differ between ranks are
named. Planning pauses the garbage collector, which otherwise walks all that is being built over and
over.

    set_up_planner      planning/flatten.py   {fqn: leaf}, and what the names do not say
    create_local_plan   items.py              items per leaf; planning/boxes.py for DTensors
                        planning/digests.py   what ranks compare
    create_global_plan  global_plan.py        who writes what, metadata, proof of coverage
"""
