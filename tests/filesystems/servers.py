"""The file systems that two nodes share: a server on a node of its own, clients through FUSE."""

from __future__ import annotations

import errno
import pathlib
import time

from .mounts import FileSystem, Site, mount_loop
from .nodes import Node, NodeError

SERVE_SECONDS = 30


def wait_until(node: Node, command: str) -> None:
    """Until a command succeeds on the node."""
    until = time.monotonic() + SERVE_SECONDS
    while True:
        try:
            node.sh(command, limit=10)
            return
        except NodeError:
            if time.monotonic() > until:
                raise
            time.sleep(0.1)


def is_mounted(node: Node, where: pathlib.Path) -> None:
    wait_until(node, f"mountpoint -q {where} && stat {where} >/dev/null")


class GlusterFs(FileSystem):
    name = "glusterfs"
    nodes = 2
    packages = ("glusterfs-server", "glusterfs-client", "xfsprogs")
    servers = ("glusterfsd",)

    def start(self, site: Site) -> None:
        server, bricks = site.server, site.folder / "bricks"
        for state in ("/var/lib/glusterd", "/var/log/glusterfs", "/run"):
            server.sh(f"mkdir -p {state} && mount -t tmpfs -o mode=755 tmpfs {state}")
        mount_loop(server, site.folder, "mkfs.xfs -q", bricks)
        server.sh(f"mkdir -p /run/gluster {bricks}/v && glusterd --log-level WARNING")
        gluster = "gluster --mode=script volume"
        wait_until(server, f"{gluster} info")
        server.sh(f"{gluster} create v {server.address}:{bricks}/v force && {gluster} start v")

    def mount(self, site: Site, node: Node) -> None:
        node.sh("mkdir -p /var/log/glusterfs && mount -t tmpfs tmpfs /var/log/glusterfs")
        node.sh(f"mkdir -p {site.mount}")
        wait_until(node, f"mount -t glusterfs {site.server.address}:/v {site.mount}")
        is_mounted(node, site.mount)

    def restart(self, site: Site) -> None:
        site.server.sh("gluster --mode=script volume start v force")

    def version(self, site: Site) -> str:
        return site.server.sh("glusterd --version | head -n 1").strip()


class SshFs(FileSystem):
    name = "sshfs"
    nodes = 2
    packages = ("openssh-server", "openssh-client", "sshfs", "e2fsprogs")
    servers = ("sshd",)
    full = errno.EIO  # its protocol has no other word

    def start(self, site: Site) -> None:
        server, home = site.server, site.folder / "ssh"
        home.mkdir()
        mount_loop(server, site.folder, "mkfs.ext4 -q", site.folder / "served")
        server.sh("mount -t tmpfs -o mode=755 tmpfs /run && mkdir /run/sshd")
        for key in ("host", "client"):
            server.sh(f"ssh-keygen -q -t ed25519 -N '' -f {home}/{key}")
        (home / "sshd_config").write_text(
            f"ListenAddress {server.address}\nHostKey {home}/host\n"
            f"AuthorizedKeysFile {home}/client.pub\nStrictModes no\nUsePAM no\n"
            f"PermitRootLogin yes\nPidFile none\nSubsystem sftp internal-sftp\n"
        )
        self.restart(site)

    def restart(self, site: Site) -> None:
        home = site.folder / "ssh"
        site.server.sh(f"/usr/sbin/sshd -f {home}/sshd_config -E {home}/sshd.log")

    def mount(self, site: Site, node: Node) -> None:
        options = ",".join(
            (
                f"IdentityFile={site.folder}/ssh/client",
                "StrictHostKeyChecking=no,UserKnownHostsFile=/dev/null",
                "reconnect,ServerAliveInterval=2,ServerAliveCountMax=3",
            )
        )
        node.sh(f"mkdir -p {site.mount}")
        source = f"root@{site.server.address}:{site.folder}/served"
        wait_until(node, f"sshfs -o {options} {source} {site.mount}")
        is_mounted(node, site.mount)

    def version(self, site: Site) -> str:
        return site.nodes[0].sh("sshfs --version 2>&1 | grep -i ^sshfs").strip()


class MooseFs(FileSystem):
    name = "moosefs"
    nodes = 2
    packages = ("moosefs-master", "moosefs-chunkserver", "moosefs-client", "xfsprogs")
    servers = ("mfschunkserver", "mfsmaster")

    def start(self, site: Site) -> None:
        server, home = site.server, site.folder / "moosefs"
        for part in ("master", "chunks"):
            (home / part).mkdir(parents=True)
        # It is slow to give back the room of what is removed.
        mount_loop(server, site.folder, "mkfs.xfs -q", home / "disk", size="8G")
        server.sh(f"cp /var/lib/mfs/metadata.mfs.empty {home}/master/metadata.mfs")
        run_as = "WORKING_USER = root\nWORKING_GROUP = root\nNICE_LEVEL = 0\n"
        for name, text in {
            "exports.cfg": "* / rw,alldirs,maproot=0\n",
            "disks.cfg": f"{home}/disk\n",
            # What is removed gives its room back within seconds, not minutes.
            "master.cfg": f"{run_as}DATA_PATH = {home}/master\nCHUNKS_LOOP_MIN_TIME = 5\n"
            "CHUNKS_SOFT_DEL_LIMIT = 1000\nCHUNKS_HARD_DEL_LIMIT = 2000\n"
            f"EXPORTS_FILENAME = {home}/exports.cfg\n",
            "chunks.cfg": f"{run_as}DATA_PATH = {home}/chunks\n"
            f"HDD_CONF_FILENAME = {home}/disks.cfg\nMASTER_HOST = {server.address}\n"
            "HDD_LEAVE_SPACE_DEFAULT = 64MiB\n",
        }.items():
            (home / name).write_text(text)
        self.restart(site)

    def restart(self, site: Site) -> None:
        home = site.folder / "moosefs"
        # A master that was killed reads its change log (-a).
        site.server.sh(f"pgrep -x mfsmaster || mfsmaster -a -c {home}/master.cfg start")
        site.server.sh(f"pgrep -x mfschunkserver || mfschunkserver -c {home}/chunks.cfg start")

    def mount(self, site: Site, node: Node) -> None:
        node.sh(f"mkdir -p {site.mount}")
        options = "mfserroronnospace,mfsioretries=10"
        wait_until(node, f"mfsmount -H {site.server.address} -o {options} {site.mount}")
        is_mounted(node, site.mount)
        # The master hears of the disk some time after the servers have started.
        wait_until(node, f"test $(df --output=avail {site.mount} | tail -n 1) -gt 0")
        # Else what is removed takes its room for a day.
        node.sh(f"mfssettrashtime 0 {site.mount}")

    def version(self, site: Site) -> str:
        return site.server.sh("mfsmaster -v 2>&1 | head -n 1").strip()


class Rclone(FileSystem):
    """A mounted object store as most are: files are written from begin to end, or not at all."""

    name = "rclone"
    packages = ("rclone", "fuse3")
    refused = True

    def mount(self, site: Site, node: Node) -> None:
        store = site.folder / "store"
        node.sh(f"mkdir -p {site.mount} {store}")
        # What it shows of directories may be five minutes old if nothing else is said.
        options = "--vfs-cache-mode off --dir-cache-time 1s --daemon"
        options += " --config /dev/null --cache-dir /tmp/rclone"
        node.sh(f"rclone mount {options} {store} {site.mount}")
        is_mounted(node, site.mount)

    def version(self, site: Site) -> str:
        return site.nodes[0].sh("rclone version | head -n 1").strip()


SHARED: tuple[FileSystem, ...] = (GlusterFs(), SshFs(), MooseFs())
OTHERS: tuple[FileSystem, ...] = (Rclone(),)
