"""save, load and async_save: a whole call by all its ranks, over any planner and storage; and
what is read of an opened checkpoint, by one."""
