"""The TCP connections under gRPC: what the kernel counted on each of them, and how to end one.

gRPC does not report how long its messages are under HTTP/2 and TLS, and does not expose its sockets. On Linux they can
be found among this process' open files, and each knows its peer and how many bytes went either way (TCP_INFO); on other
systems nothing is counted. What is counted are the bytes of the TCP streams, without the headers of TCP and IP.
"""

from __future__ import annotations

import contextlib
import ctypes
import ipaddress
import os
import socket
import stat
import struct
import sys
from dataclasses import dataclass
from functools import cache
from typing import NamedTuple
from urllib.parse import unquote

_FILES = "/proc/self/fd"
_COUNTS = struct.Struct("=QQ")  # tcpi_bytes_acked and tcpi_bytes_received of struct tcp_info, one after the other
_COUNTS_AT = 120

Peer = tuple[str, int]


class ByteCounts(NamedTuple):
    """What came in and went out on a connection."""

    received: int
    sent: int


NOTHING = ByteCounts(0, 0)


@dataclass
class _TcpConnection:
    file: int
    inode: int
    """Tells the socket from another that got the same file number later."""
    counted: ByteCounts = NOTHING


class Sockets:
    """The TCP connections of this process, by who is at the other end."""

    def __init__(self) -> None:
        self._connections: dict[Peer, _TcpConnection] = {}

    def news(self, peer: str) -> ByteCounts | None:
        """Return what a connection has received and sent since the last call; None: not known.

        Args:
            peer: As gRPC names it: "ipv4:127.0.0.1:4321".
        """
        connection = self._find(peer)
        counts = _counts(connection.file) if connection is not None else None
        if connection is None or counts is None:
            return None
        before, connection.counted = connection.counted, counts
        return ByteCounts(counts.received - before.received, counts.sent - before.sent)

    def hang_up(self, peer: str) -> None:
        """End a connection, whatever is going on over it; gRPC can only end its calls."""
        connection = self._find(peer)
        if connection is None:
            return
        # A copy, which stays the same socket while gRPC's threads close files and open others. An error: it has ended.
        with contextlib.suppress(OSError), socket.socket(fileno=os.dup(connection.file)) as copy:
            if _inode(copy.fileno()) == connection.inode:
                copy.shutdown(socket.SHUT_RDWR)

    def _find(self, peer: str) -> _TcpConnection | None:
        name = parse_peer(peer)
        if name is None or not sys.platform.startswith("linux"):
            return None
        connection = self._connections.get(name)
        if connection is None or _inode(connection.file) != connection.inode:
            self._refresh()
            connection = self._connections.get(name)
        return connection

    def _refresh(self) -> None:
        """Find the connections that were opened since the last call, and forget those that have ended."""
        here = {peer: c for peer, c in self._connections.items() if _inode(c.file) == c.inode}
        known = {connection.inode for connection in here.values()}
        for file in _open_files():
            inode = _inode(file)
            if inode is not None and inode not in known and (peer := _peer_of(file)) is not None:
                here[peer] = _TcpConnection(file, inode)
        self._connections = here


def parse_peer(text: str) -> Peer | None:
    """Return address and port of a peer as gRPC names it; None if it is not a TCP connection."""
    kind, _, rest = unquote(text).partition(":")
    host, _, port = rest.rpartition(":")
    if kind not in ("ipv4", "ipv6") or not port.isdecimal():
        return None
    return _plain(host.strip("[]")), int(port)


def _plain(host: str) -> str:
    """Return the one way in which we write an address; IPv4 may come mapped into IPv6."""
    try:
        address = ipaddress.ip_address(host.partition("%")[0])
    except ValueError:
        return host
    mapped = address.ipv4_mapped if isinstance(address, ipaddress.IPv6Address) else None
    return str(mapped or address)


def _open_files() -> list[int]:
    try:
        return [int(name) for name in os.listdir(_FILES)]
    except OSError:
        return []


def _inode(file: int) -> int | None:
    """Return the inode of a socket; None if it is not a socket, or closed by now."""
    try:
        status = os.fstat(file)
    except OSError:
        return None
    return status.st_ino if stat.S_ISSOCK(status.st_mode) else None


def _peer_of(file: int) -> Peer | None:
    """Return who is at the other end of a TCP connection."""
    try:
        this = socket.socket(fileno=file)
    except OSError:
        return None
    try:
        if this.family not in (socket.AF_INET, socket.AF_INET6):
            return None
        name = this.getpeername()
        return _plain(str(name[0])), int(name[1])
    except OSError:  # it listens, or has ended
        return None
    finally:
        this.detach()  # the file is not ours to close


@cache
def _library() -> ctypes.CDLL:
    return ctypes.CDLL(None)


def _counts(file: int) -> ByteCounts | None:
    """Return what a connection has received, and sent and been acknowledged."""
    buffer = ctypes.create_string_buffer(_COUNTS_AT + _COUNTS.size)
    size = ctypes.c_uint32(len(buffer))
    # Not by a socket object: making one asks the kernel five questions, and dropping one closes the file.
    answer = _library().getsockopt(file, socket.IPPROTO_TCP, socket.TCP_INFO, buffer, ctypes.byref(size))
    if answer != 0 or size.value < len(buffer):  # gone, or an old kernel
        return None
    acknowledged, received = _COUNTS.unpack_from(buffer.raw, _COUNTS_AT)
    return ByteCounts(received, acknowledged)
