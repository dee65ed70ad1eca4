"""The local file systems, each made anew on a loop device and mounted on a node.

There is no tear-down: mounts belong to the node's namespace and end with it, and a loop device is
told to go with its mount."""

from __future__ import annotations

import dataclasses
import errno
import pathlib
import shlex
from collections.abc import Sequence

from .nodes import Node

VOLUME = "2G"


@dataclasses.dataclass
class Site:
    """Where a file system is tried: `mount` is its path on every node."""

    folder: pathlib.Path
    mount: pathlib.Path
    server: Node
    nodes: Sequence[Node]


def mount_loop(
    node: Node,
    folder: pathlib.Path,
    mkfs: str,
    where: pathlib.Path,
    sector: int = 512,
    size: str = VOLUME,
) -> None:
    """Make a file system in a new image and mount it; `sector` is the device's block size."""
    where.mkdir(parents=True, exist_ok=True)
    image = folder / f"{where.name}.img"
    node.sh(f"rm -f {image} && truncate -s {size} {image}")
    device = node.sh(f"losetup --find --show --sector-size {sector} {image}").strip()
    try:
        node.sh(f"{mkfs} {device}")
        node.sh(f"mount {device} {where}")
    finally:
        node.sh(f"losetup --detach {device}; rm {image}")  # both live on as long as the mount


class FileSystem:
    """One that `nodes` nodes share."""

    name = ""
    nodes = 1
    packages: tuple[str, ...] = ()
    # Processes of the server, by name, that may stall or die while clients go on.
    servers: tuple[str, ...] = ()
    full = errno.ENOSPC  # what a write to a full one says
    refused = False  # whether a save must be refused, with a clear error

    def start(self, site: Site) -> None:
        """Make and serve it, before any node mounts it."""

    def mount(self, site: Site, node: Node) -> None:
        raise NotImplementedError

    def restart(self, site: Site) -> None:
        """Start the server's processes anew, after they were killed."""

    def version(self, site: Site) -> str:
        raise NotImplementedError


class Local(FileSystem):
    def __init__(self, name: str, mkfs: str, package: str, sector: int = 512) -> None:
        self.name, self._mkfs, self._sector = name, mkfs, sector
        self.packages = (package,)

    def mount(self, site: Site, node: Node) -> None:
        mount_loop(node, site.folder, self._mkfs, site.mount, self._sector)

    def version(self, site: Site) -> str:
        tool = shlex.split(self._mkfs)[0]
        return site.nodes[0].sh(f"{tool} -V 2>&1 | head -n 1").strip()


class Tmpfs(FileSystem):
    name = "tmpfs"

    def mount(self, site: Site, node: Node) -> None:
        node.sh(f"mkdir -p {site.mount} && mount -t tmpfs -o size={VOLUME} tmpfs {site.mount}")

    def version(self, site: Site) -> str:
        return "the kernel's"


class Overlay(Local):
    """As containers see their root: changes over a layer that is never written."""

    def __init__(self) -> None:
        super().__init__("overlay", "mkfs.ext4 -q", "e2fsprogs")

    def mount(self, site: Site, node: Node) -> None:
        below = site.folder / "layers"
        mount_loop(node, site.folder, self._mkfs, below)
        node.sh(f"mkdir -p {below}/lower {below}/upper {below}/work {site.mount}")
        layers = f"lowerdir={below}/lower,upperdir={below}/upper,workdir={below}/work"
        node.sh(f"mount -t overlay -o {layers} overlay {site.mount}")

    def version(self, site: Site) -> str:
        return "the kernel's, on ext4"


LOCAL: tuple[FileSystem, ...] = (
    Local("ext4", "mkfs.ext4 -q", "e2fsprogs"),
    Local("xfs", "mkfs.xfs -q", "xfsprogs"),
    Local("xfs-4k", "mkfs.xfs -q -s size=4096", "xfsprogs", 4096),
    Local("xfs-16k", "mkfs.xfs -q -s size=16384 -b size=16384", "xfsprogs", 16384),
    Local("btrfs", "mkfs.btrfs -q", "btrfs-progs"),
    Tmpfs(),
    Overlay(),
)
