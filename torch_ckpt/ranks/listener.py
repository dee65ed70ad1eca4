"""Where a rank waits for others: at the address that Gloo would take; and who they say they are."""

from __future__ import annotations

import contextlib
import fcntl
import hmac
import os
import socket
import struct
from collections.abc import Collection, Iterator
from typing import NamedTuple

_SIOCGIFADDR = 0x8915
_STRANGER_S = 5.0  # that who connects has to say who it is
_TOKEN_BYTES = 16
_RANK = struct.Struct("<I")


class Address(NamedTuple):
    """Where a rank listens, and the word that those say who are told to come."""

    host: str
    port: int
    token: str

    @staticmethod
    def of(heard: socket.socket) -> Address:
        host, port = heard.getsockname()[:2]
        return Address(host, port, os.urandom(_TOKEN_BYTES).hex())

    def connect(self, rank: int, timeout: float) -> socket.socket:
        """As `rank`. Raises OSError."""
        made = socket.create_connection((self.host, self.port), timeout)
        try:
            made.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            made.sendall(bytes.fromhex(self.token) + _RANK.pack(rank))
        except BaseException:
            made.close()
            raise
        return made

    def accept(
        self, heard: socket.socket, ranks: Collection[int]
    ) -> tuple[int, socket.socket] | None:
        """Who comes next to `heard`, which listens here, if it is one of `ranks`."""
        connection, _ = heard.accept()
        try:
            connection.settimeout(_STRANGER_S)
            said = exactly(connection, _TOKEN_BYTES + _RANK.size)
            (rank,) = _RANK.unpack(said[_TOKEN_BYTES:])
            if hmac.compare_digest(said[:_TOKEN_BYTES].hex(), self.token) and rank in ranks:
                connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                return rank, connection
        except OSError:
            pass
        connection.close()
        return None


def exactly(connection: socket.socket, length: int) -> bytes:
    """Raises OSError; ConnectionError where the connection is closed before."""
    got = bytearray(length)
    view = memoryview(got)
    while view:
        count = connection.recv_into(view)
        if count == 0:
            raise ConnectionError("it has closed its connection")
        view = view[count:]
    return bytes(got)


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
