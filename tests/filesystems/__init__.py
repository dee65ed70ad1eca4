"""`./dev filesystems`: the product on real file systems, local and shared by two nodes.

Everything runs in namespaces that end with the command: mounts, loop devices, servers, links
between the nodes. See `__main__.py`."""
