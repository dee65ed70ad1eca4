"""Where a rank waits for those below it: at the address that Gloo would take."""

from __future__ import annotations

import contextlib
import fcntl
import os
import socket
import struct
from collections.abc import Iterator

_SIOCGIFADDR = 0x8915


def listener() -> socket.socket:
    """A socket that listens on the interface that GLOO_SOCKET_IFNAME names, the first that has an
    address; without one at the address of this host's name; where that is none of this host, on
    the loopback. Raises OSError."""
    given = os.environ.get("GLOO_SOCKET_IFNAME", "")
    hosts = _of_interfaces(given) if given else _of_host()
    for host in hosts:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        with contextlib.ExitStack() as stack, contextlib.suppress(OSError):
            made = stack.enter_context(socket.socket(family, socket.SOCK_STREAM))
            made.bind((host, 0))
            made.listen()
            stack.pop_all()
            return made
    raise OSError(f"GLOO_SOCKET_IFNAME is {given}: no address of these can be listened on")


def _of_host() -> Iterator[str]:
    with contextlib.suppress(OSError):  # a name that nobody knows
        for *_, address in socket.getaddrinfo(socket.gethostname(), None, type=socket.SOCK_STREAM):
            yield str(address[0])
    yield "127.0.0.1"
    yield "::1"


def _of_interfaces(names: str) -> Iterator[str]:
    for name in names.split(","):
        request = struct.pack("256s", os.fsencode(name.strip())[:15])
        with contextlib.suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_:
            yield socket.inet_ntoa(fcntl.ioctl(any_.fileno(), _SIOCGIFADDR, request)[20:24])
        with contextlib.suppress(OSError), open("/proc/net/if_inet6", encoding="ascii") as table:
            for line in table:
                digits, _, _, scope, _, of = line.split()
                if of == name.strip() and scope in ("00", "10"):  # global, loopback
                    yield socket.inet_ntop(socket.AF_INET6, bytes.fromhex(digits))
